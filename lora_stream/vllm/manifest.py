"""Would this engine load exactly these tensors? Asked before a weight moves, since vLLM finds out too late or never.

vLLM's own loaders answer: they are run on meta tensors, which have shapes and no values, and each copy they would make is
counted. A name that no loader takes, a tensor of which only a part is taken, and a module that would be filled only in part
show in the counts, whatever the model's naming and stacking rules are.
"""

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
    is_deferred_attention_layer,
)
from vllm.model_executor.model_loader.reload.meta import CopyCounter, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from lora_stream.plan import ParamMeta

# Manifests that a model has accepted, so that later syncs of the same tensors do not ask again.
_accepted: "weakref.WeakKeyDictionary[nn.Module, set[tuple[bool, tuple[ParamMeta, ...]]]]" = weakref.WeakKeyDictionary()


def check_manifest(model: nn.Module, vllm_config, metadata: Sequence[ParamMeta], *, in_place: bool = False) -> None:
    """Raise ValueError, naming the parameter, unless `model` would take all of `metadata` and nothing would be missing.

    Refused are: an unknown name, any wrong shape, a dtype other than the engine's or the parameter's own, a part of a fused
    module without its siblings, a tensor that the engine ties to another, an engine on a quantised checkpoint. The model is
    not changed.

    in_place: the weights are to be written where they are, without vLLM's reload. Then parts of a fused module may come
    alone, and refused is any parameter that the engine keeps in another form, or of which it keeps another copy.
    """
    manifest = tuple(metadata)
    if (in_place, manifest) in _accepted.get(model, ()):
        return
    _check_unquantised(vllm_config)
    names = [meta.name for meta in manifest]
    if len(set(names)) < len(names):  # two of one kind would count for a missing sibling
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)}: comes twice")
    rehearse = partial(
        _rehearse,
        model,
        dtype=vllm_config.model_config.dtype,
        takes_whole_tensors=vllm_config.parallel_config.tensor_parallel_size == 1,
        takes_parts=in_place,
    )
    try:
        copies = rehearse([manifest])
    except ValueError:
        # One call of load_weights for all is fast, but a model may read ahead in it, and then a copy is counted for the
        # wrong name: name by name decides, and says whose fault it is.
        copies = rehearse([(meta,) for meta in manifest])
    if in_place:
        _check_kept_as_loaded(model, copies)
    _accepted.setdefault(model, set()).add((in_place, manifest))


def _check_unquantised(vllm_config) -> None:
    quant_config = vllm_config.quant_config
    # Quantisation of a bfloat16 checkpoint while it loads is done again at every reload; a checkpoint that was
    # quantised beforehand holds scales that the stream has not.
    if quant_config is not None and getattr(quant_config, "is_checkpoint_fp8_serialized", True):
        raise ValueError(
            f"the engine runs a checkpoint that was quantised beforehand ({quant_config.get_name()}); it cannot take "
            "merged weights: start it on the unquantised checkpoint"
        )


class _RefusedError(Exception):
    """Passes through vLLM's loaders, in whose middle a check is made."""


@dataclass
class _Copies:
    """What the loaders would write, in elements."""

    meta: ParamMeta | None = None  # the tensor at hand
    by_name: int = 0  # of it
    touched: set[tuple[nn.Module, str]] = field(default_factory=set)  # parameters that took of it
    by_layer: dict[nn.Module, int] = field(default_factory=dict)
    names: dict[nn.Module, list[str]] = field(default_factory=dict)  # checkpoint names, in order
    by_part: dict[tuple[nn.Module, str], str] = field(default_factory=dict)  # parameter -> a checkpoint name

    def begin(self, meta: ParamMeta) -> None:
        self.meta, self.by_name = meta, 0
        self.touched.clear()

    def add(self, layer: nn.Module, part: str, count: int) -> None:
        self.by_name += count
        self.touched.add((layer, part))
        self.by_part[layer, part] = self.meta.name
        self.by_layer[layer] = self.by_layer.get(layer, 0) + count
        names = self.names.setdefault(layer, [])
        if self.meta.name not in names:
            names.append(self.meta.name)


def _rehearse(
    model: nn.Module,
    calls: Sequence[Sequence[ParamMeta]],
    *,
    dtype: torch.dtype,
    takes_whole_tensors: bool,
    takes_parts: bool,
) -> _Copies:
    """Load meta tensors by these calls of load_weights; raise ValueError for the first that goes wrong.

    dtype: in which the engine computes."""
    ties = _tied_parameters(model)
    copies = _Copies()

    def metas(call: Sequence[ParamMeta]) -> Iterator[tuple[str, torch.Tensor]]:
        for meta in call:
            copies.begin(meta)
            yield meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            _check_copies(meta, copies, ties, model, dtype, takes_whole_tensors)

    with _on_meta(model, copies, ties) as layer_sizes:
        for call in calls:
            try:
                with disable_mtp_completeness_check():  # what trains is no whole checkpoint
                    model.load_weights(metas(call))
            except _RefusedError as error:
                raise ValueError(str(error)) from None
            except Exception as error:
                meta = copies.meta
                raise ValueError(
                    f"{meta.name}: the engine cannot load it with shape {tuple(meta.shape)}: {error}"
                ) from error
        prefixes = {module: prefix for prefix, module in model.named_modules()}
        for layer, loaded in copies.by_layer.items():
            if loaded < layer_sizes[layer] and not takes_parts:
                raise ValueError(
                    f"{prefixes[layer]}: {', '.join(copies.names[layer])} fill only {loaded} of its {layer_sizes[layer]} "
                    "elements, the rest would be uninitialised memory; send all tensors of a fused module together"
                )
    return copies


def _check_kept_as_loaded(model: nn.Module, copies: _Copies) -> None:
    """Each parameter is what its checkpoint tensors are, and nothing was computed from it when it was loaded."""
    sharers: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                sharers.setdefault(id(parameter), []).append(module)
    prepared = {
        inner for module in model.modules() if is_deferred_attention_layer(module) for inner in module.modules()
    }
    for (layer, part), name in copies.by_part.items():
        live = layer._parameters.get(part)
        recorded, _ = get_layerwise_info(layer).restore_metadata
        as_loaded = recorded.get(part, live)
        where = f"{name}: cannot be written in place, the engine"
        if live is None or live.shape != as_loaded.shape or live.dtype != as_loaded.dtype:
            raise ValueError(f"{where} keeps this weight in another form ({_KEEPS_WEIGHTS}); pass in_place=False")
        for module in sharers[id(live)]:
            if module in prepared:
                raise ValueError(f"{where} prepares its attention from it when it loads; pass in_place=False")
            method = getattr(module, "quant_method", None)
            if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
                raise ValueError(f"{where} processes it after loading ({type(method).__name__}); pass in_place=False")
            # On the CPU: a function with a closure computes from a packed copy.
            if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
                raise ValueError(f"{where} computes from a packed copy ({_KEEPS_WEIGHTS}); pass in_place=False")


_KEEPS_WEIGHTS = "vLLM on the CPU packs weights for its matrix kernels, unquantised models on CUDA keep theirs"


def _check_copies(
    meta: ParamMeta,
    copies: _Copies,
    ties: dict[tuple[nn.Module, str], str],
    model: nn.Module,
    dtype: torch.dtype,
    takes_whole_tensors: bool,
) -> None:
    if not copies.touched:
        raise _RefusedError(
            f"{meta.name}: no parameter of the engine's {type(model).__name__} takes it; the engine runs another "
            "architecture, ties this tensor to one that is sent under another name, or writes it past vLLM's reload, as "
            "vLLM 0.32 does for gpt-oss"
        )
    for touched in copies.touched:
        if touched in ties:
            raise _RefusedError(
                f"{meta.name}: is tied to {ties[touched]} in the engine and would overwrite it; send that one only, or start "
                'the engine untied (hf_overrides={"tie_word_embeddings": False})'
            )
    dtypes = {{**layer._buffers, **layer._parameters}[part].dtype for layer, part in copies.touched}
    # Some parameters are float32 in every engine: a router's bias.
    if meta.dtype.is_floating_point and meta.dtype != dtype and dtypes != {meta.dtype}:
        raise _RefusedError(
            f"{meta.name}: comes as {meta.dtype}, but the engine computes in {dtype}; pass wire_dtype={dtype}"
        )
    size = torch.Size(meta.shape).numel()
    if takes_whole_tensors and copies.by_name != size:
        raise _RefusedError(
            f"{meta.name}: has shape {tuple(meta.shape)}, of which the engine would take only {copies.by_name} of "
            f"{size} elements; it runs a model of other sizes"
        )


def _tied_parameters(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Parameters that are the same object as an earlier one: {(module, parameter): the earlier one's name}."""
    first: dict[int, str] = {}
    ties = {}
    for prefix, module in model.named_modules():
        for part, parameter in module._parameters.items():
            name = f"{prefix}.{part}"
            if parameter is not None and first.setdefault(id(parameter), name) != name:
                ties[module, part] = first[id(parameter)]
    return ties


@contextmanager
def _on_meta(model: nn.Module, copies: _Copies, ties: Collection[tuple[nn.Module, str]]):
    """The model with meta tensors in checkpoint form in place of its own, their loaders counting; yields {module: how
    many elements its checkpoint tensors have}. The own tensors are only taken out of the dictionaries and put back."""
    saved = [(layer, dict(layer._parameters), dict(layer._buffers)) for layer in model.modules()]
    sizes = {}
    try:
        for layer, own_parameters, own_buffers in saved:
            parameters, buffers = get_layerwise_info(layer).restore_metadata
            size = 0
            for own, recorded, place in (
                (own_parameters, parameters, layer._parameters),
                (own_buffers, buffers, layer._buffers),
            ):
                persistent = {part for part in own if part not in layer._non_persistent_buffers_set}
                for part in [*own, *(part for part in recorded if part not in own)]:
                    # What vLLM recorded is the checkpoint form; it records no biases, which keep theirs.
                    source = recorded.get(part, own.get(part))
                    if source is None:
                        continue
                    meta = restore_layer_refs(to_meta_tensor(source), layer)
                    meta.weight_loader = _counting(_get_original_loader(meta), layer, part, copies)
                    place[part] = meta
                    if (layer, part) in ties and part not in recorded:
                        continue  # another module's, which has it loaded: a router's bias, in its experts
                    if place is layer._parameters or part in persistent:
                        size += get_tensor_load_numel(meta)
            sizes[layer] = size - _padding(layer)
        yield sizes
    finally:
        for layer, own_parameters, own_buffers in saved:
            layer._parameters.clear()
            layer._parameters.update(own_parameters)
            layer._buffers.clear()
            layer._buffers.update(own_buffers)


def _padding(layer: nn.Module) -> int:
    """Elements that no checkpoint fills: vLLM rounds vocabularies up."""
    if isinstance(layer, VocabParallelEmbedding):
        return (layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements) * layer.embedding_dim
    return 0


def _counting(loader, layer: nn.Module, part: str, copies: _Copies):
    def counting_loader(*args, **kwargs):
        with CopyCounter() as counter:
            result = loader(*args, **kwargs)
        # A loader that works on what it has copied copies again: a parameter takes no more than it has.
        parameter = kwargs.get("param", args[0] if args else None)
        count = min(counter.copied_numel, get_tensor_load_numel(parameter))
        copies.add(layer, part, count)
        return result

    return counting_loader
