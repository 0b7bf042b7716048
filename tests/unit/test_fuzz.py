"""Random module trees with random adapters, wrappers and sharings: names, values and account. Unit layer."""

import warnings

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lora_stream
from tests import oracle
from tests.models import assert_equal, assert_matches, assert_same_state, state

# Names that wrappers use as well, and a number, which decoder layers have.
NAMES = ["module", "base_layer", "_orig_mod", "proj", "attn", "0", "17", "weight_norm"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Stack(nn.Module):
    """Experts in one parameter, with a number of its own kind beside them."""

    def __init__(self, num, rows, cols):
        super().__init__()
        self.w = nn.Parameter(torch.randn(num, rows, cols))
        self.register_buffer("steps", torch.tensor([num]))


def leaf(draw):
    size = lambda: draw(st.integers(1, 9))  # noqa: E731
    kind = draw(st.sampled_from(["linear", "embedding", "conv1", "conv2", "norm", "batch norm", "stack"]))
    if kind == "linear":
        module = nn.Linear(size(), size(), bias=draw(st.booleans()))
    elif kind == "embedding":
        module = nn.Embedding(size(), size())
    elif kind == "conv1":
        module = nn.Conv1d(size(), size(), draw(st.integers(1, 3)), bias=draw(st.booleans()))
    elif kind == "conv2":
        module = nn.Conv2d(size(), size(), (draw(st.integers(1, 2)), draw(st.integers(1, 3))))
    elif kind == "norm":
        module = nn.LayerNorm(size())
    elif kind == "batch norm":
        module = nn.BatchNorm1d(size())
    else:
        module = Stack(size(), size(), size())
    return module.to(draw(st.sampled_from(DTYPES)))


def tree(draw, depth, known):
    """known: leaves that were made before, any of which may come again."""
    module = nn.Module()
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)):
        if known and draw(st.integers(0, 5)) == 0:
            child = draw(st.sampled_from(known))
        elif depth and draw(st.booleans()):
            child = tree(draw, depth - 1, known)
        else:
            child = leaf(draw)
            known.append(child)
        module.add_module(name, child)
    if draw(st.integers(0, 3)) == 0:
        module.register_parameter("own", nn.Parameter(torch.randn(3)))
    return module


def share_weights(draw, leaves):
    linears = [each for each in leaves if isinstance(each, nn.Linear)]
    for one in linears:
        alike = [each for each in linears if each is not one and each.weight.shape == one.weight.shape]
        if alike and draw(st.booleans()):
            draw(st.sampled_from(alike)).weight = one.weight


def adapt(draw, base):
    """PEFT's adapters on some leaves. None where PEFT takes none of it."""
    leaves = {
        name: m for name, m in base.named_modules() if isinstance(m, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d)
    }
    stacks = [f"{name}.w" for name, m in base.named_modules() if isinstance(m, Stack) and m.w.shape[0] > 1]
    if not leaves and not stacks:
        return None
    targets = draw(st.lists(st.sampled_from(sorted(leaves)), min_size=1, unique=True)) if leaves else []
    parameters = draw(st.lists(st.sampled_from(sorted(stacks)), unique=True)) if stacks else []
    if not targets and not parameters:
        parameters = stacks[:1]
    has_conv = any(isinstance(leaves[name], nn.Conv1d | nn.Conv2d) for name in targets)
    config = LoraConfig(
        r=draw(st.integers(1, 5)),
        lora_alpha=draw(st.integers(1, 9)),
        target_modules=targets,
        target_parameters=parameters or None,
        use_rslora=draw(st.booleans()),
        use_dora=not has_conv and not parameters and draw(st.booleans()),
    )
    others = [name for name, m in leaves.items() if name not in targets]
    injected = draw(st.booleans())
    if others and not injected and draw(st.booleans()):
        config.modules_to_save = [draw(st.sampled_from(others))]
    if injected:
        inject_adapter_in_model(config, base)
        return base
    model = get_peft_model(base, config)
    if not config.use_dora and not parameters and draw(st.booleans()):
        model.add_adapter("more", LoraConfig(r=2, lora_alpha=7, target_modules=targets))
        if draw(st.booleans()):
            model.base_model.set_adapter(["default", "more"])
    return model


def wrap(draw, model):
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            is_container = isinstance(child, nn.ModuleDict | nn.ParameterDict) or type(child) is nn.Module
            if (
                child is not None
                and not is_container
                and "Model" not in type(child).__name__
                and draw(st.integers(0, 4)) == 0
            ):
                module._modules[name] = checkpoint_wrapper(child)
    return torch.compile(model) if draw(st.booleans()) else model


@st.composite
def models(draw):
    torch.manual_seed(draw(st.integers(0, 10**6)))
    known = []
    base = tree(draw, 2, known).eval()
    share_weights(draw, known)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = adapt(draw, base)
        except (ValueError, KeyError, TypeError, AttributeError):
            model = None  # PEFT itself does not take it: two of its names clash, say
    assume(model is not None)
    for module in model.modules():
        # A name that ends like another's target may get a copy inside an adapter's layer, and a convolution DoRA: refused.
        assume(type(getattr(module, "base_layer", None)).__name__ != "ModulesToSaveWrapper")
        # PEFT may put a copy into the wrapper of a module above it, where no forward gets to: refused.
        assume(type(module).__name__ != "ModulesToSaveWrapper" or len(module._modules) == 2)
        assume(not (type(module).__name__.startswith("Conv") and getattr(module, "lora_magnitude_vector", None)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1.1)
            elif "lora_" in name or "modules_to_save" in name:
                parameter.normal_(std=0.2)
    return model, draw


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_any_tree_is_streamed_right_under_its_own_names_and_accounted_for(drawn):
    """Edge cases 8, 22, 40 to 42 and 59."""
    model, draw = drawn
    want = oracle.expected(model)
    wrapped = wrap(draw, model)
    before = state(wrapped)
    weights = lora_stream.MergedWeights(wrapped)
    assert_matches(dict(weights), want)
    live = [name for name, _ in wrapped.named_parameters(remove_duplicate=False)]
    live += [name for name, _ in wrapped.named_buffers(remove_duplicate=False)]
    assert sorted(weights.plan.account) == sorted(live)
    assert [meta.name for meta in weights.metadata()] == list(dict(weights))
    trained = dict(lora_stream.stream(wrapped, scope="trained"))
    assert_equal(trained, {name: tensor for name, tensor in weights if name in trained})
    assert trained.keys() >= {task.meta.name for task in weights.plan.tasks if task.fate == "merged" or task.trained}
    assert_same_state(before, state(wrapped))
