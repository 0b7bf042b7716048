"""Wrappers at any depth change neither names nor bits. Unit layer; DDP, which needs a process group, is in tests/dist."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lora_stream
from tests.architectures import ARCHITECTURES, build
from tests.kinds import KINDS
from tests.models import assert_equal, llama, with_lora


def compiled(model):
    return torch.compile(model)


def layer_compiled(model):
    layers = model.get_base_model().model.layers
    layers[0] = torch.compile(layers[0])
    return model


def layer_checkpointed(model):
    layers = model.get_base_model().model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    return model


def attention_checkpointed(model):
    layer = model.get_base_model().model.layers[1]
    layer.self_attn = checkpoint_wrapper(layer.self_attn)
    return model


def everything(model):
    return torch.compile(layer_checkpointed(attention_checkpointed(model)))


@pytest.mark.parametrize("wrap", [compiled, layer_compiled, layer_checkpointed, attention_checkpointed, everything])
@pytest.mark.parametrize("scope", ["all", "trained"])
def test_wrapped_model_streams_the_names_and_bits_of_the_plain_one(wrap, scope):
    """Case B20."""
    model = with_lora(llama(tied=True))
    plain = list(lora_stream.stream(model, scope=scope))
    wrapped = list(lora_stream.stream(wrap(model), scope=scope))
    assert [name for name, _ in wrapped] == [name for name, _ in plain]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(plain, wrapped, strict=True))


def test_renaming_conversions_of_transformers_are_applied():
    from transformers.core_model_loading import revert_weight_conversion

    base = build("gemma3")
    written = set(revert_weight_conversion(base, base.state_dict())) - {
        "lm_head.weight",
        "language_model.lm_head.weight",
    }
    model = with_lora(base, target_modules=r".*language_model.*q_proj")
    got = {meta.name for meta in lora_stream.MergedWeights(model).metadata()}
    assert got == written
    assert got != {name for name, _ in base.named_parameters()}


def inside_out(model):
    """Compiled as a whole, and every layer of PEFT's, what it wraps and its parts checkpoint-wrapped on their own."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is None or isinstance(child, (torch.nn.ModuleDict, torch.nn.ParameterDict)):
                continue
            if type(child).__module__.startswith("peft.tuners.lora") or name in ("base_layer", "default"):
                module._modules[name] = checkpoint_wrapper(child)
    return torch.compile(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:fan_in_fan_out is set", "ignore:MiCA")
def test_wrappers_around_every_part_of_every_kind_change_nothing(kind):
    """Case B20, edge case 41."""
    model = KINDS[kind]()
    plain = list(lora_stream.stream(model))
    wrapped = list(lora_stream.stream(inside_out(model)))
    assert [name for name, _ in wrapped] == [name for name, _ in plain]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(plain, wrapped, strict=True))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gemma3", "qwen3_vl"])
def test_wrappers_around_an_architecture_with_names_of_its_own_change_nothing(name):
    _, modules, parameters = ARCHITECTURES[name]
    model = with_lora(build(name), target_modules=modules, target_parameters=parameters, task_type=None)
    plain = dict(lora_stream.stream(model))
    assert_equal(dict(lora_stream.stream(inside_out(model))), plain)
