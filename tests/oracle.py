"""What a model's merged weights must be, in float64, from PEFT's layers and the formulas; written against the definitions, not
against the package. Sharded and wrapped models are not for this: it is asked before that."""

import sys

import torch
from peft.tuners.lora import layer as lora
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from lora_stream.reference import round_once


def effective(model: nn.Module, adapters=None) -> dict[str, torch.Tensor]:
    """Every weight and persistent buffer as the model computes with it, under the names of the model without PEFT; float64
    where it is floating. adapters: the names of those to merge; None for each layer's active ones."""
    out: dict[str, torch.Tensor] = {}
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    _walk(base, "", out, adapters)
    return out


def expected(
    model: nn.Module, dtype: torch.dtype | None = torch.bfloat16, adapters=None, ties=None
) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, rounded once: converted by transformers itself, where it would."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    live = {name: tensor.dtype for name, tensor in _live(base)}
    tensors = effective(model, adapters)
    if ties is None:
        ties = ["lm_head.weight"] if getattr(getattr(base, "config", None), "tie_word_embeddings", False) else []
    for name in ties:
        tensors.pop(name, None)
    keep = getattr(base, "_keep_in_fp32_modules_strict", None) or ()
    rounded = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            rounded[name] = tensor
            continue
        wire = live.get(name, torch.float32) if dtype is None else dtype
        is_kept = wire == torch.bfloat16 and any(f".{part}." in f".{name}." for part in keep)
        rounded[name] = round_once(tensor, torch.float32 if is_kept else wire)
    loading = sys.modules.get("transformers.core_model_loading")
    pretrained = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    if loading is None or not isinstance(base, pretrained):
        return rounded
    # Some conversions look into the model, which must be without adapters for that.
    with torch.device("meta"):
        plain = type(base)(base.config)
    return loading.revert_weight_conversion(plain, rounded)


def _live(base: nn.Module):
    for name, tensor in [*base.named_parameters(remove_duplicate=False), *base.named_buffers(remove_duplicate=False)]:
        segments = [s for s in name.split(".") if s not in ("base_layer", "token_adapter", "original_module")]
        yield ".".join(segments), tensor


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.double() if tensor.is_floating_point() else tensor


def _own(module: nn.Module, name: str, out: dict) -> None:
    prefix = f"{name}." if name else ""
    for own, tensor in module._parameters.items():
        if tensor is not None:
            out[prefix + own] = _exact(tensor)
    for own, tensor in module._buffers.items():
        if tensor is not None and own not in module._non_persistent_buffers_set:
            out[prefix + own] = _exact(tensor)


def _chosen(layer, adapters, available):
    return [a for a in (layer.active_adapters if adapters is None else adapters) if a in available]


def _walk(module: nn.Module, name: str, out: dict, adapters) -> None:
    if isinstance(module, ModulesToSaveWrapper):
        copies = _chosen(module, adapters, module.modules_to_save)
        _walk(module.modules_to_save[copies[0]] if copies else module.original_module, name, out, adapters)
    elif isinstance(module, TrainableTokensWrapper):
        layer = module.token_adapter
        _walk(layer.base_layer, name, out, adapters)
        for adapter in _chosen(module, adapters, layer.trainable_tokens_delta):
            for index, row in zip(layer.token_indices[adapter], layer.trainable_tokens_delta[adapter], strict=True):
                out[f"{name}.weight"][index] = _exact(row)
    elif isinstance(module, lora.ParamWrapper):
        _walk(module.base_layer, name, out, adapters)
        for adapter in _chosen(module, adapters, module.lora_A):
            _add_to_parameter(module, adapter, out, f"{name}.{module.parameter_name}")
    elif isinstance(module, lora.LoraLayer):
        _walk(module.base_layer, name, out, adapters)
        _add(module, name, out, adapters)
    else:
        _own(module, name, out)
        for own, child in module._modules.items():
            if child is not None:
                _walk(child, f"{name}.{own}" if name else own, out, adapters)


def _add_to_parameter(layer, adapter: str, out: dict, name: str) -> None:
    A, B = _exact(layer.lora_A[adapter].weight), _exact(layer.lora_B[adapter].weight)
    scaling, weight = layer.scaling[adapter], out[name]
    if weight.dim() == 2:
        out[name] = weight + scaling * (B @ A)
        return
    num, rank = layer.num_experts, layer.r[adapter]
    deltas = [scaling * (B[:, e::num] @ A[e * rank : (e + 1) * rank]) for e in range(num)]
    if not getattr(layer, "_did_swap_in_out_features", False):  # PEFT 0.18 never does
        deltas = [delta.T for delta in deltas]
    out[name] = weight + torch.stack(deltas)


def _add(layer, name: str, out: dict, adapters) -> None:
    is_embedding = isinstance(layer, lora.Embedding)
    As, Bs = (layer.lora_embedding_A, layer.lora_embedding_B) if is_embedding else (layer.lora_A, layer.lora_B)
    weight = total = out[f"{name}.weight"]
    for adapter in _chosen(layer, adapters, As):
        A, B = (_exact(getattr(part[adapter], "weight", part[adapter])) for part in (As, Bs))
        scaling = layer.scaling[adapter]
        delta = scaling * (B.flatten(1) @ A.flatten(1))
        if is_embedding or getattr(layer, "fan_in_fan_out", False):
            delta = delta.T
        delta = delta.reshape(weight.shape)
        if adapter in layer.lora_magnitude_vector:
            magnitude = _exact(layer.lora_magnitude_vector[adapter].weight)
            inputs = 0 if is_embedding or layer.fan_in_fan_out else 1
            norm = torch.linalg.norm(weight + delta, dim=inputs)
            total = (magnitude / norm).unsqueeze(inputs) * (weight + delta)
        else:
            total = total + delta
        bias = getattr(Bs[adapter], "bias", None)
        if bias is not None:
            out[f"{name}.bias"] = out[f"{name}.bias"] + scaling * _exact(bias)
    out[f"{name}.weight"] = total
