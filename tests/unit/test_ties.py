"""Embedding and head that are one tensor in the checkpoint: kept one where the adapters keep them so, refused or sent both
otherwise. Unit layer."""

import pytest
import torch

import lora_stream
from tests import oracle
from tests.doubles import Recorder
from tests.kinds import KINDS, TOKENS
from tests.models import assert_matches, llama, with_lora

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")

BROKEN = {
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "copy": {"modules_to_save": ["lm_head"]},
}


def broken(how, dtype=torch.float32):
    model = with_lora(llama(tied=True, dtype=dtype), **BROKEN[how])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
    return model


def streamed(model, **kwargs):
    return dict(lora_stream.stream(model, **kwargs))


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_tie_is_refused_and_sent_both_when_asked_for(how):
    """Edge case 36 and case B22: a tied engine cannot hold both; an untied one computes what the trainer does."""
    model = broken(how)
    for call in (lambda: lora_stream.stream(model), lambda: lora_stream.sync(model, Recorder())):
        with pytest.raises(ValueError, match=r"lm_head.*embed_tokens.*untie=True.*tie_word_embeddings\": False"):
            call()
    got = streamed(model, untie=True)
    assert_matches(got, oracle.expected(model, ties=()))
    plain = llama(tied=False)
    plain.load_state_dict(streamed(model, untie=True, wire_dtype=torch.float32))
    with torch.no_grad():
        torch.testing.assert_close(plain(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_the_embedding_does_not_change_where_only_the_head_is_adapted():
    """Case B22: PEFT's own merge in place changes it too."""
    model = broken("head")
    got = streamed(model, untie=True)
    base = model.get_base_model().model.embed_tokens.weight.detach().bfloat16()
    assert torch.equal(got["model.embed_tokens.weight"], base)
    assert not torch.equal(got["lm_head.weight"], base)


def test_untied_engines_get_both_also_where_the_tie_holds(caplog):
    """Edge case 35: one of the two names, the embedding's; both for an engine that has two."""
    model = with_lora(llama(tied=True))
    assert "lm_head.weight" not in streamed(model)
    assert lora_stream.MergedWeights(model).plan.account["base_model.model.lm_head.weight"] == (
        "left",
        "tied to model.embed_tokens.weight",
    )
    got = streamed(model, untie=True)
    assert torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"])
    assert got["lm_head.weight"].data_ptr() != got["model.embed_tokens.weight"].data_ptr()
    engine = Recorder()
    with caplog.at_level("INFO", "lora_stream"):
        lora_stream.sync(model, engine, untie=True)
    assert 'hf_overrides={"tie_word_embeddings": False}' in caplog.text
    assert "lm_head.weight" in engine.weights


def step(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(TOKENS).logits.float().square().mean().backward()
    optimizer.step()


def test_a_tied_pair_stays_one_over_steps_in_float32():
    """Edge case 37: two parameters, one storage."""
    model = KINDS["tied pair"]()
    step(model)
    assert_matches(streamed(model), oracle.expected(model))


def test_a_tied_pair_that_a_cast_has_parted_is_refused_once_it_differs():
    """Edge case 38: over a bfloat16 base PEFT casts the adapters to float32, each to parameters of its own."""
    model = with_lora(
        llama(tied=True, dtype=torch.bfloat16), target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True
    )
    base = model.get_base_model()
    with torch.no_grad():  # as PEFT makes them: equal
        base.lm_head.lora_A["default"].weight.copy_(base.model.embed_tokens.lora_embedding_B["default"].T)
        base.lm_head.lora_B["default"].weight.copy_(base.model.embed_tokens.lora_embedding_A["default"].T)
    assert_matches(streamed(model), oracle.expected(model))
    step(model)
    with pytest.raises(ValueError, match=r"adapters that differ.*autocast_adapter_dtype=False"):
        lora_stream.stream(model)
    assert_matches(streamed(model, untie=True), oracle.expected(model, ties=()))


@pytest.mark.parametrize("change", ["scaling", "values", "rows"])
def test_a_tie_holds_only_while_all_that_adapts_it_is_equal(change):
    model = KINDS["trainable tokens of a tied model" if change == "rows" else "tied pair"]()
    base = model.get_base_model()
    dict(lora_stream.stream(model))
    with torch.no_grad():
        if change == "scaling":
            base.lm_head.set_scale("default", 0.5)
        elif change == "values":
            head = base.lm_head.lora_A["default"]
            head.weight = torch.nn.Parameter(head.weight + 1)
        else:
            layer = base.lm_head.token_adapter
            layer.trainable_tokens_delta = torch.nn.ParameterDict(
                {"default": torch.nn.Parameter(layer.trainable_tokens_delta["default"] + 1)}
            )
    with pytest.raises(ValueError, match=r"lm_head.*tied.*adapters that differ"):
        lora_stream.stream(model)


def test_a_module_that_is_used_under_two_names_is_sent_under_both():
    """Edge case 40."""
    model = llama(tied=False)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model = with_lora(model, target_modules=["down_proj"])
    got = streamed(model)
    one, two = (got[f"model.layers.{i}.mlp.down_proj.weight"] for i in (0, 1))
    assert torch.equal(one, two)
    assert one.data_ptr() != two.data_ptr()
    assert_matches(got, oracle.expected(model))
