"""Every kind of LoRA with a merged weight: the formula, and what PEFT computes. Unit layer."""

import warnings

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification

import lora_stream
from tests import oracle
from tests.doubles import Recorder, in_pieces
from tests.kinds import KINDS, TOKENS, Convolutions, trained, two_active
from tests.models import (
    SIZES,
    assert_equal,
    assert_matches,
    assert_same_state,
    fill,
    llama,
    qwen2,
    sent,
    state,
    with_lora,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set"),
    pytest.mark.filterwarnings("ignore:MiCA"),
]


def built(kind):
    torch.manual_seed(sum(map(ord, kind)))
    return KINDS[kind]()


def streamed(model, **kwargs):
    return dict(lora_stream.stream(model, **kwargs))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_formula_and_leaves_the_model_alone(kind):
    """Edge cases 9 to 11, 13, 15, 17, 23, 26, 30, 32 to 35, 37, 39 and 43; cases B13, B16 and B17."""
    model = built(kind)
    before = state(model)
    for wire in (torch.bfloat16, torch.float32):
        assert_matches(streamed(model, wire_dtype=wire), oracle.expected(model, wire))
    assert_same_state(before, state(model))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_model_computes_what_pefts_forward_computes(kind):
    """A second opinion: PEFT's forward, which never merges."""
    model = built(kind)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    plain = type(base)(base.config) if hasattr(base, "config") else type(base)()
    missing, unexpected = plain.eval().load_state_dict(streamed(model, wire_dtype=torch.float32), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    if missing:
        plain.tie_weights()
    inputs = torch.randn(2, 3, 20) if isinstance(base, Convolutions) else TOKENS % 13
    with torch.no_grad():
        got, want = plain(inputs), model(inputs)
    got, want = getattr(got, "logits", got), getattr(want, "logits", want)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_has_one_fate_and_the_targets_are_merged(kind):
    model = built(kind)
    plan = lora_stream.MergedWeights(model).plan
    live = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert live <= plan.account.keys()
    assert all(
        plan.account[name][0] == "consumed" for name in live if "lora_" in name or "trainable_tokens_delta" in name
    )
    assert {task.fqn for task in plan.tasks} == {
        fqn for fqn, (fate, _) in plan.account.items() if fate in ("merged", "copied")
    }
    merged = set(plan.names("merged"))
    assert merged
    assert set(lora_stream.MergedWeights(model, scope="trained").plan.names("merged")) == merged
    assert {plan.account[name][1] for name in live if plan.account[name][0] == "consumed"} <= merged | {
        "lm_head.weight"  # of a tied pair
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "kind", ["dora on linear", "dora on embedding", "convolutions", "lora_bias", "trainable tokens"]
)
def test_kinds_in_every_base_and_adapter_dtype(kind, dtype):
    """Edge case 1: nine combinations, one rounding each."""
    for adapter_dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = built(kind)
        for name, parameter in model.named_parameters():
            is_adapter = "lora_" in name or "trainable_tokens" in name
            parameter.data = parameter.data.to(adapter_dtype if is_adapter else dtype)
        assert_matches(streamed(model), oracle.expected(model))


def test_pieces_of_any_size_of_a_dora_are_those_of_the_whole():
    """Its norms are over all inputs, also where a piece holds a few of them."""
    for kind in ("dora on linear", "dora on conv1d module", "dora on embedding"):
        model = built(kind)
        want = streamed(model)
        for rows in (1, 5):
            got = in_pieces(model, rows)
            assert got.keys() == want.keys()
            assert all(torch.equal(got[name], want[name]) for name in want)


def test_statistics_of_a_dora_are_of_all_that_it_changes():
    model = built("dora on linear")
    stream = lora_stream.stream(model)
    got = dict(stream)
    for name, rounding in stream.stats.rounding.items():
        base = model.get_base_model().get_submodule(name.removesuffix(".weight")).base_layer.weight.detach()
        merged, rounded_base = got[name], base.bfloat16()
        delta = oracle.effective(model)[name] - base.double()
        assert rounding.changed == base.numel()
        assert rounding.unmoved == (merged == rounded_base).sum()
        assert rounding.kept_sq == pytest.approx((merged.double() - rounded_base.double()).square().sum().item())
        assert rounding.delta_sq == pytest.approx(delta.square().sum().item(), rel=1e-4)
        assert rounding.checksum == merged.float().view(torch.int32).long().bitwise_and(2**32 - 1).sum() % 2**32


def test_a_base_that_the_initialisation_changed_is_always_sent_whether_its_adapter_is_chosen_or_not():
    """PiSSA takes a part out of the base: a receiver that holds the original has another one."""
    model = with_lora(llama(), target_modules=["v_proj"])
    model.add_adapter("other", peft_config(init_lora_weights="pissa", target_modules=["down_proj"]))
    plan = lora_stream.MergedWeights(model, scope="trained").plan
    assert "model.layers.0.mlp.down_proj.weight" in plan.names("copied")
    plain = with_lora(llama(), target_modules=["v_proj"])
    plain.add_adapter("other", peft_config(target_modules=["down_proj"]))
    plan = lora_stream.MergedWeights(plain, scope="trained").plan
    assert "model.layers.0.mlp.down_proj.weight" not in plan.names("copied")


def peft_config(**config):
    from peft import LoraConfig

    return LoraConfig(r=2, lora_alpha=3, **config)


def test_an_engine_that_holds_the_base_gets_the_whole_weight_of_a_changed_base():
    base = llama()
    engine = Recorder()
    engine.weights = {name: p.detach().bfloat16() for name, p in base.state_dict().items()}
    model = with_lora(base, init_lora_weights="pissa")
    lora_stream.sync(model, engine, base_loaded=True)
    assert_equal(engine.weights, sent(model))


def test_replicated_layers_share_a_base_and_have_their_own_deltas():
    """Edge case 39."""
    model = built("layer replication")
    got = streamed(model)
    one, two = (got[f"model.layers.{i}.self_attn.q_proj.weight"] for i in (1, 2))
    layers = model.get_base_model().model.layers
    assert len(layers) == 3
    assert layers[1].self_attn.q_proj.base_layer.weight is layers[2].self_attn.q_proj.base_layer.weight
    assert not torch.equal(one, two)


def test_adapters_that_are_not_chosen_leave_no_trace():
    """Case B16: of modules_to_save, token rows and magnitudes of another adapter nothing is sent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = with_lora(llama())
        model.add_adapter("ref", peft_config(target_modules=["q_proj"], trainable_token_indices=[5, 2]))
        model.add_adapter("dora", peft_config(target_modules=["down_proj"], use_dora=True))
        model.add_adapter("save", peft_config(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "trainable_tokens_delta", "modules_to_save")):
                parameter.normal_(std=0.2)
    for adapter in ("default", "ref", "dora", "save"):
        got = streamed(model, adapter_name=adapter)
        assert_matches(got, oracle.expected(model, adapters=[adapter]))
        assert not [name for name in got if adapter in name or "ref" in name]


def test_a_tied_pair_is_merged_once():
    """Edge case 37: PEFT's own merge adds the delta twice there."""
    model = built("tied pair")
    got = streamed(model)
    assert "lm_head.weight" not in got
    layer = model.get_base_model().model.embed_tokens
    delta = layer.scaling["default"] * (
        layer.lora_embedding_B["default"].double() @ layer.lora_embedding_A["default"].double()
    )
    want = (layer.base_layer.weight.double() + delta.T).bfloat16()
    assert (got["model.embed_tokens.weight"] != want).sum() <= 2


def test_rows_outside_a_tensors_indices_are_the_bases_own():
    """Edge case 34."""
    model = built("trainable tokens")
    got = streamed(model)["model.embed_tokens.weight"]
    layer = model.get_base_model().model.embed_tokens.token_adapter
    base = layer.base_layer.weight.detach().bfloat16()
    others = [i for i in range(61) if i not in (7, 3, 60)]
    assert torch.equal(got[others], base[others])
    for row, index in enumerate((7, 3, 60)):
        assert torch.equal(got[index], layer.trainable_tokens_delta["default"][row].detach().bfloat16())
        assert not torch.equal(got[index], base[index])


def test_a_failed_sync_puts_replaced_rows_magnitudes_and_biases_back():
    for kind in ("trainable tokens", "dora on linear", "lora_bias", "modules_to_save", "convolutions"):
        model, engine = built(kind), Recorder()
        lora_stream.sync(model, engine)
        held = {name: tensor.clone() for name, tensor in engine.weights.items()}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.mul_(1.5)
        engine.fail_at = 3
        with pytest.raises(lora_stream.SyncError, match="put back on its old weights"):
            lora_stream.sync(model, engine)
        assert all(torch.equal(engine.weights[name], held[name]) for name in held)
        lora_stream.sync(model, engine)
        assert_equal(engine.weights, sent(model))


def test_a_base_that_trains_under_its_adapter_is_put_back_too():
    """Both parts of a bias train."""
    model, engine = trained(qwen2(), target_modules=["q_proj"], lora_bias=True, bias="lora_only"), Recorder()
    lora_stream.sync(model, engine)
    held = {name: tensor.clone() for name, tensor in engine.weights.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1)
    engine.fail_at = 4
    with pytest.raises(lora_stream.SyncError, match="put back on its old weights"):
        lora_stream.sync(model, engine)
    assert all(torch.equal(engine.weights[name], held[name]) for name in held)


def test_the_original_of_a_base_that_an_initialisation_changed_is_not_claimed_to_be_put_back():
    """The engine held it, the trainer does not: what is left of the base is another weight."""
    model, engine = with_lora(llama(), init_lora_weights="pissa"), Recorder()
    engine.fail_at = 2
    with pytest.raises(lora_stream.SyncError, match="may hold a mixture"):
        lora_stream.sync(model, engine, base_loaded=True)


def test_rows_that_move_are_no_silence():
    model, engine = built("trainable tokens"), Recorder()
    lora_stream.sync(model, engine)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.mul_(2)
            elif "lora_B" in name:
                parameter.add_(1e-9)  # moved, and lost in rounding
    report = lora_stream.sync(model, engine)
    assert "model.embed_tokens.weight" in report.merged


NOT_FINITE = {
    "lora_A": ("linear", "lora_A"),
    "a magnitude": ("dora on linear", "magnitude"),
    "a row": ("trainable tokens", "trainable_tokens_delta"),
    "a bias": ("lora_bias", "lora_B.default.bias"),
    "a kernel": ("convolutions", "lora_B"),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("what", NOT_FINITE)
def test_a_delta_that_is_not_finite_is_refused_by_name_unless_asked_for(what, value):
    """Edge case 58."""
    kind, part = NOT_FINITE[what]
    model = built(kind)
    name, parameter = next((name, p) for name, p in model.named_parameters() if part in name)
    with torch.no_grad():
        parameter.view(-1)[0] = value
    layer = name.partition(".lora_")[0].partition(".trainable_tokens")[0]
    with pytest.raises(ValueError, match=rf"{layer}.*not finite"):
        streamed(model)
    got = streamed(model, check_finite=False)
    assert got.keys() == streamed(built(kind)).keys()
    assert any(not tensor.isfinite().all() for tensor in got.values())


def test_a_new_head_is_the_trained_one():
    """Case B24: a classifier, which PEFT saves whole; and no name of the language model's head."""
    config = LlamaConfig(**SIZES, num_labels=5, pad_token_id=0)
    model = with_lora(LlamaForSequenceClassification(config).eval(), task_type="SEQ_CLS")
    with torch.no_grad():
        model.get_base_model().score.modules_to_save["default"].weight.normal_()
    got = streamed(model)
    assert torch.equal(got["score.weight"], model.get_base_model().score.modules_to_save["default"].weight.bfloat16())
    assert got["score.weight"].shape == (5, 32)
    assert_matches(got, oracle.expected(model))


def test_two_doras_and_other_mixtures_are_refused():
    model = two_active(llama(), "q_proj", use_dora=True)
    with pytest.raises(ValueError, match=r"q_proj: adapters \['default', 'more-2'\].*DoRA.*adapter_name"):
        lora_stream.stream(model)
    assert_matches(streamed(model, adapter_name="more-2"), oracle.expected(model, adapters=["more-2"]))


def test_gemmas_scale_of_what_it_looks_up_is_not_in_the_weight():
    """Edge case 12."""
    from tests.architectures import build

    for config in ({"trainable_token_indices": [3]}, {"target_modules": ["embed_tokens"]}):
        base = build("gemma3_text")
        assert base.get_input_embeddings().embed_scale > 1
        model = with_lora(base, **{"target_modules": ["q_proj"], **config})
        tensors = streamed(model, untie=True)
        assert_matches(tensors, oracle.expected(model, ties=()))


def test_zero_magnitude_and_zero_rank_sides():
    """Edge case 8 and 59: one input, one output, no rows."""
    for shape in ((1, 5), (5, 1), (1, 1)):
        base = nn.Sequential(nn.Linear(*shape))
        model = mixed_like(base)
        assert_matches(streamed(model), oracle.expected(model))


def mixed_like(base):
    from peft import get_peft_model

    model = get_peft_model(base, peft_config(target_modules=["0"], use_dora=True))
    fill(model)
    return model
