"""Parameters that were replaced: a stream gives what the next forward computes with, or raises. dist layer."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import lora_stream
from tests.dist import sharded
from tests.doubles import Recorder
from tests.models import assert_equal, llama, sent, with_lora

pytestmark = pytest.mark.dist

TOKENS = torch.arange(7).unsqueeze(0)


def forward(model):
    with torch.no_grad():
        return model(TOKENS).logits


def make(layout):
    model = with_lora(llama())
    if layout == "flat":
        return sharded.flat(model, use_orig_params=True)
    if layout == "flat parameters only":
        return sharded.flat(model, use_orig_params=False, leaves=True)
    if layout != "plain":
        sharded.LAYOUTS[layout](model)
    return model


def reshard(model):
    """What is written to the copies that a root has gathered is lost when it gathers them again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def homes(model, part):
    """Modules with a parameter `weight`."""
    return [
        module
        for name, module in model.named_modules()
        if part in name and isinstance(module._parameters.get("weight"), nn.Parameter)
    ]


def put(model, part):
    """Other parameters in the place of some, half as large."""
    for module in homes(model, part):
        old = module.weight
        module.weight = nn.Parameter(old.detach() * 0.5, requires_grad=old.requires_grad)


def assign_data(model, part):
    reshard(model)
    with torch.no_grad():
        for module in homes(model, part):
            module.weight.data = module.weight.detach() * 0.5


def load(model, *, assign):
    state = {name: tensor.detach().clone() * 0.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def empty_and_load(model):
    state = {name: tensor.detach().clone() * 0.5 for name, tensor in model.state_dict().items()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]  # not all of them are in the state
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    for buffer, (_, values) in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(values)


def cast_a_part(model):
    """Of a module that is no unit of its own: FSDP2 is not asked."""
    reshard(model)
    (module,) = [each for name, each in model.named_modules() if "layers.1." in name and name.endswith(".mlp")]
    module.double()
    module.float()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


HISTORIES = {
    "a norm is put there": lambda model: put(model, "layers.0.input_layernorm"),
    "base weights are put there": lambda model: put(model, "base_layer"),
    "adapters are put there": lambda model: put(model, "lora_B"),
    "the root's are put there": lambda model: put(model, "embed_tokens"),
    "data of adapters": lambda model: assign_data(model, "lora_B"),
    "data of a norm": lambda model: assign_data(model, "post_attention_layernorm"),
    "loaded": lambda model: load(model, assign=False),
    "loaded by assignment": lambda model: load(model, assign=True),
    "made anew and loaded": empty_and_load,
    "a part was cast": cast_a_part,
}
LOADED = {name for name in HISTORIES if "loaded" in name}


def replaced(rank, layout, name, runs_before):
    model = make(layout)
    if runs_before:
        forward(model)
    engine = Recorder()
    lora_stream.sync(model, engine)
    before = sent(model)
    try:
        HISTORIES[name](model)
    except (RuntimeError, AssertionError, NotImplementedError):
        assert layout.startswith("flat")  # FSDP1 itself refuses it
        return "refused"
    try:
        streamed = dict(lora_stream.stream(model, wire_dtype=torch.float32))
        lora_stream.sync(model, engine)
    except ValueError as error:
        assert "FSDP2 does not see" in str(error) or "FSDP1 goes back to the old one" in str(error)
        return "raised"
    now = sent(model)
    assert_equal(engine.weights, now)
    reference = llama()
    reference.load_state_dict(streamed)
    torch.testing.assert_close(forward(model), forward(reference), rtol=1e-4, atol=1e-5)
    return "moved" if any(not torch.equal(before[each], now[each]) for each in now) else "as before"


@pytest.mark.parametrize("runs_before", [False, True], ids=["never run", "has run"])
@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("layout", ["plain", "by_layer", "root_only", "nested", "flat", "flat parameters only"])
def test_what_is_streamed_is_what_the_next_forward_computes_with(pool, layout, name, runs_before):
    found = set(pool.run(1 if layout == "plain" else 2, replaced, layout, name, runs_before))
    if layout == "plain":
        assert found == {"moved"}
    elif name in LOADED and not layout.startswith("flat"):
        assert found == {"moved"}
    elif layout.startswith("flat"):
        assert "raised" not in found or layout == "flat parameters only"
    else:
        assert ("raised" in found) == (runs_before and "data" not in name)
