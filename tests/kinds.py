"""Models with one kind of adapter each: every kind of LoRA that PEFT makes and that has a merged weight."""

import warnings

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import config as lora_config
from peft.tuners.lora.corda import preprocess_corda
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tests.models import fill, llama, qwen2, with_lora

TOKENS = torch.arange(11).unsqueeze(0)


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=61, bos_token_id=0, eos_token_id=1)
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


class Convolutions(nn.Module):
    """Kernels and strides of all kinds, with and without bias, and one that lies channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv1d(3, 7, 3, padding=1)
        self.pointwise = nn.Conv1d(7, 5, 1, bias=False)
        self.two = nn.Conv2d(5, 6, (3, 2), stride=2)
        self.last = nn.Conv2d(6, 7, 3, padding=1)
        self.three = nn.Conv3d(7, 4, (1, 2, 3), padding=1)
        self.last.weight.data = self.last.weight.data.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.pointwise(self.one(x))
        x = self.last(self.two(x.unflatten(-1, (4, -1))))
        return self.three(x.unsqueeze(2))


def convolutions(targets=("one", "pointwise", "two", "last", "three"), **config):
    model = get_peft_model(Convolutions().eval(), LoraConfig(r=3, lora_alpha=5, target_modules=list(targets), **config))
    fill(model)
    return model


class Mixed(nn.Module):
    """Embedding, Linear, normalisation with buffers; no transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.proj = nn.Linear(6, 7)
        self.head = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))

    def forward(self, tokens):
        return self.head(self.proj(self.embed(tokens)).flatten(0, 1))


def mixed(**config):
    model = get_peft_model(
        Mixed().eval(), LoraConfig(**{"r": 2, "lora_alpha": 3, "target_modules": ["proj"], **config})
    )
    fill(model)
    _nudge(model)
    return model


def _nudge(model: nn.Module) -> None:
    """Away from what the initialisation made: magnitudes, replaced rows, copies and whatever else trains."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter)).add_(0.01 * torch.randn_like(parameter))


def dora(base, **config):
    model = with_lora(base, r=3, lora_alpha=5, use_dora=True, **config)
    _nudge(model)
    return model


def trained(base, **config):
    """With what else trains moved."""
    model = with_lora(base, **config)
    _nudge(model)
    return model


def corda():
    """CorDA looks at activations first."""
    base = llama()
    corda_config = lora_config.CordaConfig(corda_method="kpm")
    targets = ["q_proj", "v_proj"]
    config = LoraConfig(
        r=4, lora_alpha=32, target_modules=targets, init_lora_weights="corda", corda_config=corda_config
    )
    preprocess_corda(base, config, run_model=lambda: base(TOKENS))
    return get_peft_model(base, config)


def injected():
    base = llama()
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"]), base)
    fill(base)
    return base


def two_active(base, target, **config):
    model = with_lora(base, target_modules=[target], r=3, **config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_adapter("more-2", LoraConfig(r=2, lora_alpha=7, target_modules=[target], **config))
    fill(model)
    model.base_model.set_adapter(["default", "more-2"])
    return model


def velora():
    return with_lora(
        llama(), velora_config=lora_config.VeloraConfig(num_groups=4), target_modules=["q_proj", "down_proj"]
    )


def tied_pair():
    """PEFT ties the head's pair to the embedding's, as its transpose."""
    return with_lora(llama(tied=True), target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True)


def tokens(base, indices=(7, 3, 60), **config):
    indices = indices if isinstance(indices, dict) else list(indices)
    return trained(base, trainable_token_indices=indices, **config)


def linear_with_view() -> nn.Module:
    """Base, A and B lie transposed in memory."""
    model = with_lora(llama())
    for module in model.modules():
        if hasattr(module, "lora_A") and "default" in module.lora_A:
            for parameter in (
                module.base_layer.weight,
                module.lora_A["default"].weight,
                module.lora_B["default"].weight,
            ):
                parameter.data = parameter.data.T.contiguous().T
    return model


# Name -> model. In the docstrings of the tests: which edge cases these are.
KINDS = {
    "linear": lambda: with_lora(llama()),
    "transposed in memory": linear_with_view,
    "rslora and patterns": lambda: with_lora(
        llama(), use_rslora=True, rank_pattern={"layers.0.self_attn.q_proj": 3}, alpha_pattern={"down_proj": 7}
    ),
    "rank above both sides": lambda: with_lora(llama(), r=65),
    "conv1d module": lambda: with_lora(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "embedding": lambda: with_lora(llama(), target_modules=["embed_tokens", "q_proj"]),
    "convolutions": convolutions,
    "convolutions with lora_bias": lambda: convolutions(["one", "two", "last"], lora_bias=True),
    "dora on linear": lambda: dora(llama()),
    "dora on linear with bias": lambda: dora(qwen2(), target_modules=["q_proj", "k_proj"]),
    "dora on conv1d module": lambda: dora(gpt2(), target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    "dora on embedding": lambda: dora(llama(), target_modules=["embed_tokens", "v_proj"]),
    "lora_bias": lambda: with_lora(qwen2(), target_modules=["q_proj", "v_proj"], lora_bias=True),
    "lora_bias on conv1d module": lambda: with_lora(
        gpt2(), target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True
    ),
    "two with lora_bias": lambda: two_active(qwen2(), "q_proj", lora_bias=True),
    "trained biases": lambda: trained(qwen2(), bias="all", target_modules=["q_proj"]),
    "biases of lora layers": lambda: trained(qwen2(), bias="lora_only", target_modules=["q_proj"]),
    "modules_to_save": lambda: trained(llama(), modules_to_save=["lm_head", "norm"]),
    "module to save with buffers": lambda: mixed(modules_to_save=["head"]),
    "trainable tokens": lambda: tokens(llama()),
    "trainable tokens of a tied model": lambda: tokens(llama(tied=True)),
    "trainable tokens of the head": lambda: tokens(llama(), {"lm_head": [4, 0], "embed_tokens": [9]}),
    "tied pair": tied_pair,
    "tied copy": lambda: trained(llama(tied=True), modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    "layer replication": lambda: with_lora(llama(), layer_replication=[[0, 2], [1, 2]]),
    "pissa": lambda: with_lora(llama(), init_lora_weights="pissa"),
    "olora": lambda: with_lora(llama(), init_lora_weights="olora"),
    "corda": corda,
    "mica": lambda: with_lora(llama(), init_lora_weights="mica"),
    "velora": velora,
    "two active": lambda: two_active(llama(), "q_proj"),
    "two active on an embedding": lambda: two_active(llama(), "embed_tokens"),
    "injected": injected,
    "no transformers model": mixed,
}
