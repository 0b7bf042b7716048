"""Tiny models with random weights. Sizes that divide by nothing, alpha != r, and lora_B filled: PEFT starts it at zero,
where a test passes even if nothing is merged."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import lora_stream

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
TARGETS = ["q_proj", "v_proj", "down_proj"]


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32, **sizes) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes}, tie_word_embeddings=tied)).to(dtype).eval()


def qwen2(*, tied: bool = False, dtype: torch.dtype = torch.float32, **sizes) -> Qwen2ForCausalLM:
    """Has biases on q, k and v."""
    model = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **sizes}, tie_word_embeddings=tied)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def fill(model: torch.nn.Module, std: float = 0.2) -> None:
    """New random values in every adapter tensor, A and B."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std)


def with_lora(base: torch.nn.Module, *, r: int = 4, lora_alpha: float = 32, **config) -> PeftModel:
    config = {"target_modules": TARGETS, "task_type": "CAUSAL_LM", **config}
    model = get_peft_model(base, LoraConfig(r=r, lora_alpha=lora_alpha, **config))
    fill(model)
    return model


def expected(model: PeftModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """What every tensor must be, layer by layer from the formula in float64; tied heads left out. One active adapter."""
    from peft.tuners.lora import Linear

    from lora_stream.reference import merge_cast

    base = model.get_base_model()
    out = {}
    for name, tensor in base.state_dict().items():
        if "lora_" in name:
            continue
        out[name.replace(".base_layer.", ".")] = tensor.detach().to(dtype)
    for name, module in base.named_modules():
        if type(module) is Linear:
            (adapter,) = module.active_adapters
            if adapter in module.lora_A:
                out[f"{name}.weight"] = merge_cast(
                    module.base_layer.weight,
                    module.lora_A[adapter].weight,
                    module.lora_B[adapter].weight,
                    module.scaling[adapter],
                    dtype,
                ).detach()
    if getattr(base.config, "tie_word_embeddings", False):
        del out["lm_head.weight"]
    return out


def sent(model: torch.nn.Module, **kwargs) -> dict[str, torch.Tensor]:
    """What a sync sends, which dithers where nothing else is said."""
    return dict(lora_stream.stream(model, rounding="dither", **kwargs))


STEP = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}


def assert_matches(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """`got` is `want`, which comes from float64: bit for bit, save for a rare tie that float32 decides otherwise."""
    assert got.keys() == want.keys()
    for name, exact in want.items():
        assert got[name].dtype == exact.dtype, name
        assert got[name].shape == exact.shape, name
        if not torch.equal(got[name], exact):
            assert exact.dtype == torch.float32 or (got[name] != exact).sum() <= 2 + exact.numel() // 1000, name
            torch.testing.assert_close(got[name], exact, rtol=STEP[exact.dtype], atol=1e-5)


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def state(model: torch.nn.Module) -> dict:
    """All of a live model that a stream must not change."""
    tensors = {
        name: (p.detach().clone(), p._version, p.data_ptr(), p.requires_grad, p.grad is None)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    layers = {
        name: (list(m.merged_adapters), m.disable_adapters, list(m.active_adapters), dict(m.scaling))
        for name, m in model.named_modules()
        if hasattr(m, "merged_adapters") and hasattr(m, "scaling")
    }
    modes = {name: module.training for name, module in model.named_modules()}
    return {"tensors": tensors, "layers": layers, "modes": modes}


def assert_same_state(before: dict, after: dict) -> None:
    assert before["layers"] == after["layers"]
    assert before["modes"] == after["modes"]
    assert before["tensors"].keys() == after["tensors"].keys()
    for name, (value, *rest) in before["tensors"].items():
        other, *other_rest = after["tensors"][name]
        assert rest == other_rest, name
        assert torch.equal(value, other), name


class Experts(torch.nn.Module):
    """Two stacks of expert weights and a router, as mixture-of-experts models hold them. PEFT takes the stacks for
    [experts, in, out] where `is_transposed` says so, otherwise for [experts, out, in]."""

    def __init__(self, num_experts: int, *, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.gate_up_proj = torch.nn.Parameter(torch.randn(num_experts, 7, 10))
        self.down_proj = torch.nn.Parameter(torch.randn(num_experts, 10, 5))
        self.bias = torch.nn.Parameter(torch.randn(num_experts, 3))

    def forward(self, x):
        return x


class MoE(torch.nn.Module):
    def __init__(self, num_experts: int = 5, **kwargs) -> None:
        super().__init__()
        self.router = torch.nn.Linear(6, num_experts)
        self.experts = Experts(num_experts, **kwargs)

    def forward(self, x):
        return x


def expert_lora(base: torch.nn.Module, *, r: int = 3, parameters=("gate_up_proj", "down_proj")) -> PeftModel:
    config = {"target_modules": [], "target_parameters": [f"experts.{name}" for name in parameters]}
    model = get_peft_model(base, LoraConfig(r=r, lora_alpha=r + 2, **config))
    fill(model)
    return model
