"""The brackets around loading weights into a live vLLM model, and the way back out of them.

    initialize ──► model.load_weights ──► finalize        (vLLM's layerwise reload)
        └──────────── abort, on any error ◄──┘

Between initialize and finalize the model's parameters are on the meta device: a forward pass there kills the engine, so load
always ends in one or the other.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.platforms import current_platform

from lora_stream.plan import ParamMeta


def load(
    model: nn.Module,
    model_config,
    metadata: Sequence[ParamMeta],
    weights: Iterator[tuple[str, torch.Tensor]],
    *,
    in_place: bool = False,
) -> None:
    """Load the weights, each checked against what was announced, in the brackets; in_place: where they are, without.

    Call it with vLLM's config set. After an error the modules that were complete by then hold new weights, and in place
    any part of one may.
    """
    if in_place:
        _feed(model, metadata, weights)
        return
    try:
        with _experts_packed(model):
            initialize_layerwise_reload(model)
            _feed(model, metadata, weights)
            finalize_layerwise_reload(model, model_config)
        if current_platform.is_cpu():
            _refresh_tied_heads(model)
    except BaseException:
        abort(model)
        raise


def abort(model: nn.Module) -> None:
    """Put the old tensors back into every module that is not complete. vLLM itself has no such call: it would replay
    what it has buffered at every later update, a wrong tensor included."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                _place_kernel_tensors(layer, info)
            info.reset()
    LOADING_LAYERS.clear()


def _feed(model: nn.Module, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    announced = _as_announced(metadata, weights)
    with disable_mtp_completeness_check():  # what trains is no whole checkpoint
        model.load_weights(announced)
    for name, _ in announced:
        raise RuntimeError(f"the engine's loader stopped before {name}")


def _as_announced(
    metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    announced = iter(metadata)
    for name, tensor in weights:
        expected = next(announced, None)
        got = ParamMeta(name, tensor.dtype, tuple(tensor.shape))
        if got != expected:
            raise ValueError(f"the stream yielded {got}, but {expected} was announced at this place")
        holder = [tensor]
        del tensor
        yield name, holder.pop()  # held nowhere else: dropping it is the release
    if (missing := next(announced, None)) is not None:
        raise ValueError(f"the stream ended before {missing.name}, which was announced")


@contextlib.contextmanager
def _experts_packed(model: nn.Module) -> Iterator[None]:
    """On the CPU vLLM packs experts for its kernel when it loads them first, but not when it loads them again: then the
    kernel would read weights as they are loaded for packed ones. While open, what vLLM leaves out is made up for."""
    methods = {
        method
        for module in model.modules()
        if getattr(method := getattr(module, "quant_method", None), "moe_kernel", None) is not None
    }
    patched: list[object] = []
    try:
        for method in methods if current_platform.is_cpu() else ():
            experts = method.moe_kernel.fused_experts
            packed: set[nn.Module] = set()
            experts.process_weights_after_loading = partial(_pack, experts.process_weights_after_loading, packed)
            method.process_weights_after_loading = partial(
                _process, method.process_weights_after_loading, experts.process_weights_after_loading, packed
            )
            patched += [experts, method]
        yield
    finally:
        for each in patched:
            del each.process_weights_after_loading


def _pack(pack: Callable[[nn.Module], None], packed: set[nn.Module], layer: nn.Module) -> None:
    packed.add(layer)
    pack(layer)


def _process(
    process: Callable[[nn.Module], None], pack: Callable[[nn.Module], None], packed: set[nn.Module], layer: nn.Module
) -> None:
    packed.discard(layer)
    process(layer)
    if layer not in packed:
        pack(layer)


def _refresh_tied_heads(model: nn.Module) -> None:
    """On the CPU an embedding keeps a packed copy of its weight for the logits, made when its own weight was loaded. A
    head that is tied to it has another copy, which loading the embedding alone would leave stale."""
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            owner = owners.setdefault(id(module.weight), module)
            if owner is not module:
                module.quant_method.process_weights_after_loading(module)
