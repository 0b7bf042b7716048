"""Every tensor of a base is in the merged checkpoint, or the report says why not. Unit layer."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

from lora_stream.checkpoint import export, merge
from tests.architectures import ARCHITECTURES, build
from tests.checkpoints import base_of, save_source, weights_in
from tests.kinds import gpt2
from tests.models import llama, with_lora


def more():
    """Layers for multi-token prediction, as a base's files have them: under a number of their own, or beside the decoder."""
    return {
        "model.layers.2.eh_proj.weight": torch.randn(5, 7),
        "model.layers.2.mlp.up_proj.weight": torch.randn(3, 11).bfloat16(),
        "mtp.fc.weight": torch.randn(4, 3, 2).half(),
        "mtp.norm.weight": torch.randn(9).double(),
        "mtp.steps": torch.arange(4),
        "mtp.scalar": torch.tensor(1.7),
        "mtp.empty": torch.empty(0, 3),
    }


def put(directory, tensors):
    path = directory / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


def assert_complete(out, report, base, dtype):
    """Returns what is left out."""
    written, there = weights_in(out), load_file(base / "model.safetensors")
    assert written.keys() | report.left_out.keys() >= there.keys()
    assert not written.keys() & report.left_out.keys()
    for name in report.carried:
        expected = there[name].to(dtype) if there[name].is_floating_point() else there[name]
        assert written[name].dtype == expected.dtype
        assert torch.equal(written[name], expected)
    return set(report.left_out)


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("form", ["peft", "verl", "dcp", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_the_model_class_has_no_module_for_is_carried_over(form, dtype, is_listed, tmp_path, monkeypatch, caplog):
    """Whether it lists them as ignorable or does not know them; the rest is as if they were not there."""
    if is_listed:
        monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"mtp.*", r"layers\.2\."])
    base = llama()
    base.save_pretrained(tmp_path / "base")
    source = save_source(form, with_lora(base), tmp_path / "source")
    merge(source, tmp_path / "without", base=tmp_path / "base", dtype=dtype)
    put(tmp_path / "base", added := more())
    with caplog.at_level(logging.WARNING, "lora_stream"):
        report = merge(source, tmp_path / "out", base=tmp_path / "base", dtype=dtype)
    assert set(report.carried) == set(added)
    assert "carried over" in caplog.text
    assert assert_complete(tmp_path / "out", report, tmp_path / "base", dtype) == set()
    without, found = weights_in(tmp_path / "without"), weights_in(tmp_path / "out")
    assert found.keys() == without.keys() | added.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in without.items())
    assert any(label == "carried" for label, _ in report.rows())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_whole_model_with_an_adapter_keeps_what_its_class_ignores(tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"mtp.*", r"layers\.2\."])
    source = save_source("full", with_lora(llama()), tmp_path / "source")
    put(source, {f"base_model.model.{name}": tensor for name, tensor in more().items()})
    report = merge(source, tmp_path / "out")
    assert set(report.carried) == set(more())
    assert weights_in(tmp_path / "out")["mtp.fc.weight"].dtype == torch.bfloat16


def test_names_of_old_do_not_hide_what_is_carried(tmp_path):
    """transformers alone knows which of them it has loaded."""
    torch.manual_seed(3)
    base = gpt2()
    base = base.unload() if hasattr(base, "unload") else base
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base, target_modules=["c_attn"], fan_in_fan_out=True)
    source = save_source("peft", model, tmp_path / "source")
    merge(source, tmp_path / "want", base=tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "mtp.fc.weight": torch.randn(3, 5)}
    save_file(old, path, metadata={"format": "pt"})
    report = merge(source, tmp_path / "out", base=tmp_path / "base")
    assert set(report.carried) == {"h.0.attn.bias", "mtp.fc.weight"}
    found, want = weights_in(tmp_path / "out"), weights_in(tmp_path / "want")
    assert found.keys() == want.keys() | set(report.carried)
    assert all(torch.equal(found[name], tensor) for name, tensor in want.items())
    assert torch.equal(found["h.0.attn.bias"], old["h.0.attn.bias"])
    assert torch.equal(found["mtp.fc.weight"], old["mtp.fc.weight"].bfloat16())


def test_what_is_not_written_is_named_with_its_reason(tmp_path):
    """A tied head, what the model computes, another head, what is quantised."""
    base = llama(tied=True)
    base.save_pretrained(tmp_path / "base")
    embedding = base.model.embed_tokens.weight.detach().clone()
    put(
        tmp_path / "base",
        {
            "lm_head.weight": embedding,
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "mtp.fc.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        },
    )
    report = merge(save_source("peft", with_lora(base), tmp_path / "source"), tmp_path / "out", base=tmp_path / "base")
    assert report.left_out == {
        "lm_head.weight": "tied to model.embed_tokens.weight, which is written",
        "model.layers.0.self_attn.rotary_emb.inv_freq": "the model computes it",
        "mtp.fc.weight": "quantised to torch.float8_e4m3fn, and the model has no module for it",
    }
    assert_complete(tmp_path / "out", report, tmp_path / "base", torch.bfloat16)
    assert sum(label == "left out" for label, _ in report.rows()) == 3
    json.dumps(report.to_dict())


def test_another_head_is_left_out_and_layers_that_nobody_has_are_not(tmp_path):
    """Case B24."""
    llama().save_pretrained(tmp_path / "base")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3)
    put(tmp_path / "base", {"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)})
    model = with_lora(classifier, task_type="SEQ_CLS", modules_to_save=["score"])
    source = save_source("peft", model, tmp_path / "source")
    report = merge(source, tmp_path / "out", base=tmp_path / "base")
    assert report.carried == ["model.layers.2.mlp.up_proj.weight"]
    assert assert_complete(tmp_path / "out", report, tmp_path / "base", torch.bfloat16) == {"lm_head.weight"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_every_architectures_base_arrives(architecture, tmp_path):
    _, modules, parameters = ARCHITECTURES[architecture]
    base = build(architecture)
    base.save_pretrained(tmp_path / "base")
    put(tmp_path / "base", {"mtp.layers.0.weight": torch.randn(3, 5)})
    model = with_lora(base, r=3, lora_alpha=5, target_modules=modules, target_parameters=parameters, task_type=None)
    report = merge(save_source("peft", model, tmp_path / "source"), tmp_path / "out", base=tmp_path / "base")
    assert report.carried == ["mtp.layers.0.weight"]
    assert assert_complete(tmp_path / "out", report, tmp_path / "base", torch.bfloat16) == set()


@pytest.mark.parametrize("trains", ["lora", "all"])
def test_an_export_carries_over_what_the_live_model_never_had(trains, tmp_path):
    llama(tied=True).save_pretrained(tmp_path / "base")
    put(tmp_path / "base", added := more())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = with_lora(base) if trains == "lora" else base
    report = export(model, tmp_path / "out")
    assert set(report.carried) == set(added)
    assert_complete(tmp_path / "out", report, tmp_path / "base", torch.bfloat16)
    assert report.copied + report.merged == len(weights_in(tmp_path / "out"))
    export(llama(tied=True), tmp_path / "without", base=tmp_path / "base")
    assert weights_in(tmp_path / "without").keys() == weights_in(tmp_path / "out").keys()


def test_an_export_takes_nothing_of_a_base_under_other_names(tmp_path):
    torch.manual_seed(3)
    base = gpt2()
    base = base.unload() if hasattr(base, "unload") else base
    base.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    old = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file(old, path, metadata={"format": "pt"})
    assert export(base, tmp_path / "out", base=tmp_path / "base").carried == []
    path.write_bytes(b"damaged")
    assert export(base, tmp_path / "again", base=tmp_path / "base").carried == []


# -- values --------------------------------------------------------------------------------------------------------------


def poison(model, place):
    with torch.no_grad():
        if place == "delta":
            base_of(model).model.layers[1].mlp.down_proj.lora_B["default"].weight[3, 1] = float("nan")
        elif place == "norm":
            base_of(model).model.norm.weight[5] = float("-inf")
        elif place == "overflow":
            base_of(model).model.layers[0].mlp.up_proj.weight[7, 9] = 65600.0
    return {"delta": "down_proj", "norm": "model.norm.weight", "overflow": "up_proj", "carried": "mtp.fc.weight"}[place]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("place", ["delta", "norm", "overflow", "carried"])
@pytest.mark.parametrize("how", ["merge", "merge shards", "export"])
def test_a_checkpoint_is_finite_unless_it_was_asked_for(how, place, dtype, tmp_path):
    """Case N10: merged or copied, read from a file as it lies or cast, carried over."""
    if place == "overflow" and dtype == torch.float32:
        pytest.skip("fits")
    model = with_lora(llama())
    name = poison(model, place)
    model.get_base_model().save_pretrained(tmp_path / "unmerged")  # with the adapters' layers: only its config counts
    base = llama()
    state = {each.replace(".base_layer", ""): tensor for each, tensor in base_of(model).state_dict().items()}
    base.load_state_dict({each: tensor for each, tensor in state.items() if "lora_" not in each})
    base.save_pretrained(tmp_path / "base")
    put(tmp_path / "base", {"mtp.fc.weight": torch.full((3, 4), float("nan") if place == "carried" else 1.0)})
    source = None if how == "export" else save_source({"merge": "peft"}.get(how, "verl"), model, tmp_path / "source")

    def write(out, **kwargs):
        if how == "export":
            return export(model, out, base=tmp_path / "base", dtype=dtype, **kwargs)
        return merge(source, out, base=tmp_path / "base", dtype=dtype, **kwargs)

    with pytest.raises(ValueError, match=rf"{name}.*not finite") as caught:
        write(tmp_path / "out")
    assert "check_finite=False" in str(caught.value)
    assert not (tmp_path / "out").exists()
    write(tmp_path / "out", check_finite=False)
    found = weights_in(tmp_path / "out")
    assert [each for each, tensor in found.items() if not tensor.isfinite().all()] == [
        each for each in found if name in each and not found[each].isfinite().all()
    ]
    assert any(name in each and not tensor.isfinite().all() for each, tensor in found.items())
