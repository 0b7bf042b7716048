"""Models of named sizes with random weights, as many layers of them as there is memory for."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True)
class Size:
    """As in the config.json of the published model."""

    architecture: str  # "llama" or "qwen3"
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    def shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of the linear layers of one decoder layer."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden),
            "k_proj": (key_value, self.hidden),
            "v_proj": (key_value, self.hidden),
            "o_proj": (self.hidden, query),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    def layers_for(self, num_bytes: int, element_bytes: int) -> int:
        """How many decoder layers fit beside embedding and head; at least one, at most the model's."""
        ends = self.vocab * self.hidden * (1 if self.tied else 2)
        layer = sum(rows * cols for rows, cols in self.shapes().values())
        return max(1, min(self.num_layers, (num_bytes // element_bytes - ends) // layer))


def _size(architecture, hidden, intermediate, num_layers, num_heads, num_kv_heads, head_dim, vocab, tied) -> Size:
    return Size(
        architecture=architecture,
        hidden=hidden,
        intermediate=intermediate,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        tied=tied,
    )


SIZES = {
    "tiny": _size("qwen3", 128, 208, 2, 4, 2, 32, 256, True),  # to try a command with
    "qwen3-0.6b": _size("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "llama-3-8b": _size("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "qwen3-32b": _size("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False),
    "llama-3-70b": _size("llama", 8192, 28672, 80, 64, 8, 128, 128256, False),
}


def size_named(name: str) -> Size:
    if name not in SIZES:
        raise ValueError(f"--model must be one of {list(SIZES)}, got {name!r}")
    return SIZES[name]


def make_model(size: Size, num_layers: int, dtype: torch.dtype, *, vocab: int | None = None) -> nn.Module:
    """A transformers model, its weights random but for the norms."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[size.architecture]
    config = config_class(
        vocab_size=size.vocab if vocab is None else vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        tie_word_embeddings=size.tied,
    )
    with torch.device("meta"):
        model = model_class(config).to(dtype)
    model = model.to_empty(device="cpu")
    # Buffers that are computed and not saved, and the tie.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    fill(p for name, p in model.named_parameters() if "norm" not in name)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
    return model.eval()


@torch.no_grad()
def fill(parameters: Iterable[torch.Tensor], std: float = 0.02) -> None:
    """Random values, a million of them over and over: drawing each would take longer than what is measured."""
    block = torch.randn(1 << 20) * std
    for parameter in parameters:
        flat = parameter.detach().view(-1)
        for start in range(0, flat.numel(), block.numel()):
            part = flat[start : start + block.numel()]
            part.copy_(block[: part.numel()])


def with_lora(model: nn.Module, rank: int) -> nn.Module:
    """LoRA on all linear layers, A and B filled."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS))
    step(model)
    return model


@torch.no_grad()
def step(model: nn.Module) -> None:
    """What an optimizer does between two syncs: every adapter tensor moves."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.normal_(std=0.02)
