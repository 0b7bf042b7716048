"""Which tensors of a PEFT model become what, and what is refused. Unit layer."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn

import lora_stream
from lora_stream.merged_weights import MergedWeights
from tests.models import (
    MoE,
    assert_equal,
    assert_matches,
    expected,
    expert_lora,
    fill,
    llama,
    qwen2,
    with_lora,
)


def streamed(model, **kwargs):
    return dict(lora_stream.stream(model, **kwargs))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [llama, qwen2])
def test_stream_is_the_formula_for_targets_and_the_cast_base_for_the_rest(make, base, tied):
    """Edge case 1."""
    model = with_lora(make(tied=tied, dtype=base))
    assert_matches(streamed(model), expected(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adapters_of_any_dtype_and_any_wire_dtype(dtype):
    model = with_lora(llama())
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    for wire in (torch.bfloat16, torch.float16, torch.float32):
        assert_matches(streamed(model, wire_dtype=wire), expected(model, wire))


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, {"0.self_attn.q_proj": 8.0, "1.self_attn.v_proj": 8.0}),
        ({"use_rslora": True}, {"0.self_attn.q_proj": 16.0}),
        ({"lora_alpha": 6.5}, {"0.self_attn.q_proj": 1.625}),
        ({"lora_alpha": 0}, {"0.self_attn.q_proj": 0.0}),
        (
            {"rank_pattern": {"layers.0.self_attn.q_proj": 8}, "alpha_pattern": {"q_proj": 7}},
            {"0.self_attn.q_proj": 0.875, "1.self_attn.q_proj": 1.75, "0.self_attn.v_proj": 8.0},  # case B11
        ),
    ],
)
def test_scaling_is_the_layers_own(config, scales):
    """Edge cases 3 to 5. Cases B10 and B11: rsLoRA and patterns; alpha 0 and fractions."""
    model = with_lora(llama(), **config)
    plan = lora_stream.MergedWeights(model).plan
    for layer, scale in scales.items():
        (task,) = [t for t in plan.tasks if t.meta.name == f"model.layers.{layer}.weight"]
        assert task.adapters[0].scaling == scale
    assert_matches(streamed(model), expected(model))


def test_scaling_changed_after_the_config_is_used_at_once():
    """Edge case 6."""
    model = with_lora(llama())
    weights = lora_stream.MergedWeights(model)
    first = dict(weights)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.25)
    second = dict(weights)
    assert_matches(second, expected(model))
    assert not torch.equal(
        first["model.layers.0.self_attn.q_proj.weight"], second["model.layers.0.self_attn.q_proj.weight"]
    )


def two_adapters(**ref_config):
    model = with_lora(llama())
    model.add_adapter("ref", LoraConfig(r=3, lora_alpha=5, **{"target_modules": ["q_proj"], **ref_config}))
    fill(model)
    return model


def test_only_the_chosen_adapter_is_merged():
    """Case B16."""
    model = two_adapters()
    default = streamed(model)
    assert_matches(default, expected(model))
    assert_equal(streamed(model, adapter_name="default"), default)
    by_name = streamed(model, adapter_name="ref")
    model.set_adapter("ref")
    assert_equal(streamed(model), by_name)
    assert_matches(by_name, expected(model))
    q = "model.layers.0.self_attn.q_proj.weight"
    v = "model.layers.0.self_attn.v_proj.weight"
    assert not torch.equal(by_name[q], default[q])
    assert torch.equal(by_name[v], llama_value(model, v))


def llama_value(model, name):
    module, _, own = name.rpartition(".")
    return getattr(model.get_base_model().get_submodule(module).base_layer, own).detach().to(torch.bfloat16)


def test_several_active_adapters_are_summed():
    model = two_adapters()
    model.base_model.set_adapter(["default", "ref"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.double()
    for name in ("default", "ref"):
        exact = exact + layer.scaling[name] * (layer.lora_B[name].weight.double() @ layer.lora_A[name].weight.double())
    got = streamed(model)["model.layers.0.self_attn.q_proj.weight"]
    near = lora_stream.reference.round_once(exact.detach(), torch.bfloat16)
    assert (got != near).float().mean() < 2e-3
    torch.testing.assert_close(got, near, rtol=2.0**-7, atol=1e-6)


def test_unknown_adapter_name_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"adapter_name='other'.*\['default', 'ref'\]"):
        lora_stream.stream(two_adapters(), adapter_name="other")


def test_an_adapter_name_on_a_model_without_adapters_is_refused():
    with pytest.raises(ValueError, match=r"adapter_name='policy': the model's adapters are \[\]"):
        lora_stream.stream(llama(), adapter_name="policy")


def test_modules_to_save_sends_the_trained_copy_and_never_the_original():
    """Case B17."""
    model = with_lora(llama(), modules_to_save=["lm_head", "embed_tokens"])
    base = model.get_base_model()
    with torch.no_grad():
        for wrapper in (base.lm_head, base.model.embed_tokens):
            wrapper.modules_to_save["default"].weight.add_(1.0)
        for norm in (base.model.norm, base.model.layers[1].input_layernorm):
            norm.weight.requires_grad_(True).mul_(2.0)
    got = streamed(model)
    assert len(got) == 2 * 9 + 3
    assert not [name for name in got if "modules_to_save" in name or "original" in name]
    for name, wrapper in (("lm_head", base.lm_head), ("model.embed_tokens", base.model.embed_tokens)):
        assert torch.equal(got[f"{name}.weight"], wrapper.modules_to_save["default"].weight.to(torch.bfloat16))
        assert not torch.equal(got[f"{name}.weight"], wrapper.original_module.weight.to(torch.bfloat16))
    trained = streamed(model, scope="trained")
    assert {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
    } <= trained.keys()
    assert "model.layers.0.input_layernorm.weight" not in trained
    assert_equal(trained, {name: got[name] for name in trained})


def test_trained_scope_holds_targets_with_siblings_and_leaves_the_rest():
    model = with_lora(qwen2())
    got, everything = streamed(model, scope="trained"), streamed(model)
    per_layer = ["q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"]
    wanted = {f"model.layers.{i}.self_attn.{own}" for i in range(2) for own in per_layer}
    wanted |= {f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)}
    assert got.keys() == wanted
    assert_equal(got, {name: everything[name] for name in got})


def test_names_are_those_that_save_pretrained_writes(tmp_path):
    from safetensors import safe_open

    for tied in (False, True):
        base = qwen2(tied=tied)
        base.save_pretrained(tmp_path / str(tied))
        with safe_open(tmp_path / str(tied) / "model.safetensors", "pt") as file:
            written = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        metadata = lora_stream.MergedWeights(with_lora(base)).metadata()
        assert {meta.name: meta.shape for meta in metadata} == written


def test_injected_adapters_without_a_peft_model():
    model = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"]), llama())
    fill(model)
    got = streamed(model)
    layer = model.model.layers[0].self_attn.q_proj
    want = lora_stream.reference.merge_cast(
        layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight, 8.0, torch.bfloat16
    )
    assert torch.equal(got["model.layers.0.self_attn.q_proj.weight"], want)


def test_a_plain_model_is_copied():
    model = llama(tied=True)
    got = streamed(model)
    assert_equal(got, {k: v.to(torch.bfloat16) for k, v in model.state_dict().items() if k != "lm_head.weight"})
    assert got.keys() == streamed(model, scope="trained").keys()  # all of it trains
    model.requires_grad_(False)
    assert not streamed(model, scope="trained")


class Odd(nn.Module):
    """Module names that look like prefixes, shared layers, buffers, a transposed weight."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(5, 7)
        self.base_layer = nn.Linear(7, 3, bias=False)
        self.again = self.base_layer
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.module.weight = nn.Parameter(torch.randn(5, 7).t())


def test_modules_named_like_prefixes_shared_layers_and_buffers_keep_their_names():
    model = Odd()
    got = streamed(model)
    assert_equal(
        got,
        {
            "module.weight": model.module.weight.detach().to(torch.bfloat16),
            "module.bias": model.module.bias.detach().to(torch.bfloat16),
            "base_layer.weight": model.base_layer.weight.detach().to(torch.bfloat16),
            "again.weight": model.base_layer.weight.detach().to(torch.bfloat16),
            "steps": model.steps,
            "mean": model.mean.to(torch.bfloat16),
        },
    )
    assert all(tensor.is_contiguous() for tensor in got.values())


def test_lora_on_a_transposed_weight_and_names_like_prefixes():
    model = get_peft_model(Odd(), LoraConfig(r=2, lora_alpha=3, target_modules=["module"]))
    fill(model)
    layer = model.base_model.model.module
    got = streamed(model)
    want = lora_stream.reference.merge_cast(
        layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight, 1.5, torch.bfloat16
    )
    assert torch.equal(got["module.weight"], want)
    assert "base_layer.weight" in got


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("parameters", [("gate_up_proj", "down_proj"), ("down_proj",), ("gate_up_proj",)])
def test_expert_stacks_get_each_experts_own_delta_in_their_layout(is_transposed, parameters):
    """PEFT lays A out expert by expert and B rank by rank, and wraps the module once for each parameter."""
    model = expert_lora(MoE(is_transposed=is_transposed), parameters=parameters)
    got = streamed(model)
    assert set(got) == {"router.weight", "router.bias", "experts.gate_up_proj", "experts.down_proj", "experts.bias"}
    wrappers = [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]
    assert {wrapper.parameter_name for wrapper in wrappers} == set(parameters)
    for wrapper in wrappers:
        weight = wrapper.get_base_layer().get_parameter(wrapper.parameter_name)
        A, B = wrapper.lora_A["default"].weight.double(), wrapper.lora_B["default"].weight.double()
        for e in range(5):
            delta = B[:, e::5] @ A[e * 3 : (e + 1) * 3]
            want = (weight[e].double() + 5 / 3 * (delta.T if is_transposed else delta)).to(torch.bfloat16)
            assert (got[f"experts.{wrapper.parameter_name}"][e] != want).sum() <= 1, "a tie"
    for name in {"gate_up_proj", "down_proj"} - set(parameters):
        plain = next(p for fqn, p in model.named_parameters() if fqn.endswith(f".{name}"))
        assert torch.equal(got[f"experts.{name}"], plain.to(torch.bfloat16))


def test_expert_stacks_are_what_peft_computes_with_and_their_statistics_are_of_all_experts():
    model = expert_lora(MoE())
    stream = lora_stream.stream(model, wire_dtype=torch.float32)
    got = dict(stream)
    reference = {name: tensor.float() for name, tensor in MergedWeights(copy_merged(model), wire_dtype=torch.float32)}
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-5, atol=1e-5)
        if name in stream.stats.rounding:
            rounding = stream.stats.rounding[name]
            assert rounding.changed == tensor.numel()
            assert rounding.checksum == tensor.view(torch.int32).to(torch.int64).sum().item() % 2**32


def test_several_adapters_on_expert_stacks_are_summed():
    model = expert_lora(MoE())
    one = streamed(model, wire_dtype=torch.float32)["experts.down_proj"]
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=7, target_modules=[], target_parameters=parameters)
    model.add_adapter("more", config)
    fill(model)
    base = model.base_model.model.experts.get_base_layer().down_proj.detach()
    deltas = [
        streamed(model, adapter_name=a, wire_dtype=torch.float32)["experts.down_proj"] - base
        for a in ("default", "more")
    ]
    model.base_model.set_adapter(["default", "more"])
    both = streamed(model, wire_dtype=torch.float32)["experts.down_proj"]
    torch.testing.assert_close(both, base + deltas[0] + deltas[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(one, both)


def copy_merged(model):
    """By PEFT, in float32."""
    return copy.deepcopy(model).merge_and_unload()


def test_lora_on_a_router_by_its_parameter_name():
    model = get_peft_model(MoE(), LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=["router.weight"]))
    fill(model)
    layer = model.base_model.model.router
    want = lora_stream.reference.merge_cast(
        layer.get_base_layer().weight,
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
        1.5,
        torch.bfloat16,
    )
    assert torch.equal(streamed(model)["router.weight"], want)
