"""What checkpoints make of a model's tensors: their names without wrappers, ties that are held once, tensors that are split or
turned, and what stays in float32.

Prefixes are removed by looking at module types while walking, never by searching in strings: a model may have a module
of its own called `module` or `base_layer`.
"""

import re
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_stream import shards
from lora_stream.plan import Record
from lora_stream.views import View

# (module that defines it, class, attribute that holds the wrapped module). Looked up in sys.modules: where the defining
# module was never imported, no instance can exist.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


def wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute that holds what `module` wraps without changing it; None for a module that is no wrapper."""
    for defined_in, class_name, attribute in _WRAPPERS:
        wrapper = getattr(sys.modules.get(defined_in), class_name, None)
        if wrapper is not None and isinstance(module, wrapper):
            return attribute
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """`module` without the wrappers around it."""
    while (attribute := wrapped_attribute(module)) is not None:
        module = getattr(module, attribute)
    return module


def declares(module: nn.Module) -> bool:
    """Whether a module says what its checkpoints hold: as transformers' models do."""
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if pretrained is not None and isinstance(module, pretrained):
        return True
    keys = ("all_tied_weights_keys", "_tied_weights_keys", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return any(getattr(module, key, None) for key in keys)


def declared_ties(base_model: nn.Module) -> dict[str, str]:
    """Names that the model's checkpoints leave out because another tensor holds their value: {left out: kept}.

    Read from what transformers models declare; a model that declares nothing has none, and what it happens to share is
    sent under every name.
    """
    ties = getattr(base_model, "all_tied_weights_keys", None)  # transformers 5
    if isinstance(ties, dict):
        return dict(ties)
    keys = getattr(base_model, "_tied_weights_keys", None)  # transformers 4: names only, tied to the input embedding
    config = getattr(base_model, "config", None)
    if not keys or not getattr(config, "tie_word_embeddings", False):
        return {}
    embedding = base_model.get_input_embeddings()
    kept = next((name for name, module in base_model.named_modules() if module is embedding), None)
    return dict.fromkeys(keys, f"{kept}.weight") if kept is not None else {}


def checkpoint_records(
    base_model: nn.Module, records: Sequence[Record], inner: Callable[[nn.Module], nn.Module] = unwrap
) -> list[Record]:
    """The records under the names, and in the pieces, that `base_model.save_pretrained` would write.

    inner: what a module below it is without what trainers put around it.

    transformers 5 keeps some models under other names, or in other pieces, than their checkpoints: its own reverse
    conversion, run on meta tensors, tells which. What a checkpoint splits becomes a record for each piece, with a view of the
    live tensor. Raises ValueError for a tensor that a checkpoint joins with others or stores in another order of elements.
    """
    loading = sys.modules.get("transformers.core_model_loading")  # transformers 5 has it, and only models of its own
    revert = getattr(loading, "revert_weight_conversion", None)
    modeling = sys.modules.get("transformers.modeling_utils")
    pretrained = getattr(modeling, "PreTrainedModel", None)
    if pretrained is None or not isinstance(base_model, pretrained):
        return list(records)
    if len({record.name for record in records}) < len(records):
        return list(records)  # the plan says which two
    if revert is None:
        return [replace(record, name=_name_in_transformers_4(base_model, record.name)) for record in records]
    shapes = tuple((record.name, tuple(record.tensor.shape)) for record in records)
    known_shapes, pieces = _converted.get(base_model, (None, None))
    if known_shapes != shapes:
        pieces = _revert(base_model, records, revert, inner)
        _converted[base_model] = (shapes, pieces)
    return [
        replace(record, name=name, view=view)
        for record, parts in zip(records, pieces, strict=True)
        for name, view in parts
    ]


def _name_in_transformers_4(base_model: nn.Module, name: str) -> str:
    """transformers 4 loads old names of some vision models by patterns, which it turns round when it saves: of those models
    only, and only the first that is found in a name."""
    vision_models = getattr(sys.modules["transformers.modeling_utils"], "VLMS", ())
    classes = [kind.__name__.lower() for kind in type(base_model).__mro__]
    if any(each in kind for each in vision_models for kind in classes):
        for written, live in getattr(base_model, "_checkpoint_conversion_mapping", {}).items():
            found, count = re.subn(live, re.sub(r"\(.*\)", "", written.lstrip("^")), name)
            if count:
                return found
    return name


# What checkpoints hold of a tensor: names, and views where it is split or turned.
Pieces = list[tuple[str, View | None]]

# What the conversion said of a model, which is slow to ask: {model: (names and shapes asked for, pieces of each)}.
_converted: "weakref.WeakKeyDictionary[nn.Module, tuple[tuple, list[Pieces]]]" = weakref.WeakKeyDictionary()


class _Uncopied(TorchDispatchMode):
    """Copies are not made, so that a result is still a view of what it comes from."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))


def _revert(
    base_model: nn.Module, records: Sequence[Record], revert: Callable, inner: Callable[[nn.Module], nn.Module]
) -> list[Pieces]:
    # Strides that no two dimensions share, whatever their sizes: what a view took from which is then seen in its own.
    metas = {
        record.name: torch.empty_strided(record.tensor.shape, _strides(record.tensor.shape), device="meta")
        for record in records
    }
    sources = {meta.untyped_storage()._cdata: i for i, meta in enumerate(metas.values())}
    twin = _twin(base_model, inner)
    # Some conversions look at the live shapes, under names that the adapters' layers do not have.
    twin.__dict__["get_parameter"] = metas.__getitem__
    try:
        with _Uncopied():
            written = revert(twin, dict(metas))
    except Exception as error:
        raise ValueError(
            f"the checkpoint names of {type(base_model).__name__} cannot be told: transformers' own conversion fails "
            f"({type(error).__name__}: {error})"
        ) from error
    pieces: list[Pieces] = [[] for _ in records]
    for name, tensor in written.items():
        i = sources.get(tensor.untyped_storage()._cdata)
        view = None if i is None else _view_of(tensor, records[i].tensor.shape)
        if view is None:
            raise ValueError(
                f"{name}: checkpoints of {type(base_model).__name__} hold it joined from several tensors of the model, or with "
                "its elements in another order; such tensors cannot be streamed"
            )
        is_all = view.shape == tuple(records[i].tensor.shape) and view.dims == tuple(range(len(view.ranges)))
        pieces[i].append((name, None if is_all else view))
    if lost := [record.fqn for record, parts in zip(records, pieces, strict=True) if not parts]:
        raise ValueError(f"{lost[0]}: checkpoints of {type(base_model).__name__} do not hold it; it cannot be streamed")
    return pieces


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * (size + 1))
    return strides[::-1] if len(shape) else []


def _view_of(tensor: torch.Tensor, shape: Sequence[int]) -> View | None:
    """Which part of a tensor of `shape`, that lies with _strides, another one is; None where that is no View."""
    strides, offset = _strides(shape), tensor.storage_offset()
    begins = []
    for stride in strides:
        begins.append(offset // stride)
        offset -= begins[-1] * stride
    dims = tuple(strides.index(stride) if stride in strides else -1 for stride in tensor.stride())
    if -1 in dims or len(set(dims)) < len(dims):
        return None
    sizes = dict(zip(dims, tensor.shape, strict=True))
    return View(tuple((begin, begin + sizes.get(dim, 1)) for dim, begin in enumerate(begins)), dims)


def float32_among(base_model: nn.Module, name: str) -> frozenset[torch.dtype]:
    """The dtypes beside which the model's checkpoints keep a tensor in float32, by what transformers models declare."""
    found = set()
    for attribute, dtypes in (
        ("_keep_in_fp32_modules", (torch.float16,)),  # bfloat16 is wide enough for these
        ("_keep_in_fp32_modules_strict", (torch.float16, torch.bfloat16)),
    ):
        for pattern in getattr(base_model, attribute, None) or ():
            if re.search(rf"(^|\.)({pattern.replace('*', '.*')})(\.|$)", name):
                found.update(dtypes)
    return frozenset(found)


def _twin(module: nn.Module, inner: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The same tree of modules under the classes that they had before they were wrapped and sharded, for the conversion goes
    by class names."""
    module = inner(module)
    plain = shards.class_before_sharding(module)
    twin = plain.__new__(plain)
    children = {name: None if child is None else _twin(child, inner) for name, child in module._modules.items()}
    twin.__dict__ = {**module.__dict__, "_modules": children}
    return twin
