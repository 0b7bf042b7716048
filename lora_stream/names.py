"""Wrappers that put a segment into parameter names, and the names that a checkpoint does not repeat.

Prefixes are removed by looking at module types while walking, never by searching in strings: a model may have a module
of its own called `module` or `base_layer`.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from lora_stream import shards
from lora_stream.plan import Record

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


def checkpoint_names(base_model: nn.Module, records: Sequence[Record]) -> list[Record]:
    """The records under the names that `base_model.save_pretrained` would write.

    transformers 5 keeps some models under other names, or other shapes, than their checkpoints: its own reverse
    conversion, run on meta tensors, tells which. Renamed tensors are renamed; raises ValueError for one that a
    checkpoint splits, joins or reshapes.
    """
    loading = sys.modules.get("transformers.core_model_loading")  # transformers 5 has it, and only models of its own
    revert = getattr(loading, "revert_weight_conversion", None)
    pretrained = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if revert is None or pretrained is None or not isinstance(base_model, pretrained):
        return list(records)
    shapes = tuple((record.name, tuple(record.tensor.shape)) for record in records)
    known_shapes, known_names = _converted.get(base_model, (None, None))
    if known_shapes != shapes:
        known_names = _revert(base_model, records, revert)
        _converted[base_model] = (shapes, known_names)
    return [replace(record, name=name) for record, name in zip(records, known_names, strict=True)]


# What the conversion said of a model, which is slow to ask: {model: (names and shapes asked for, checkpoint names)}.
_converted: "weakref.WeakKeyDictionary[nn.Module, tuple[tuple, list[str]]]" = weakref.WeakKeyDictionary()


def _revert(base_model: nn.Module, records: Sequence[Record], revert: Callable) -> list[str]:
    metas = {
        record.name: torch.empty(record.tensor.shape, dtype=record.tensor.dtype, device="meta") for record in records
    }
    base_model = _with_plain_classes(base_model)
    if revert(base_model, dict(metas)).keys() == metas.keys():
        return [record.name for record in records]
    checkpoint_names = []
    for record in records:
        written = revert(base_model, {record.name: metas[record.name]})
        (name, tensor), *others = written.items()
        if others or tensor.shape != record.tensor.shape:
            raise ValueError(
                f"{record.fqn}: checkpoints of {type(base_model).__name__} hold it as {sorted(written)[:4]}, in other "
                "pieces than the model does; such models are not supported yet"
            )
        checkpoint_names.append(name)
    return checkpoint_names


def _with_plain_classes(module: nn.Module) -> nn.Module:
    """The same tree of modules under the classes that they had before fully_shard, for the conversion goes by class names;
    the module itself where nothing in it was sharded so."""
    if all(shards.class_before_sharding(each) is type(each) for each in module.modules()):
        return module
    plain = shards.class_before_sharding(module)
    twin = plain.__new__(plain)
    children = {name: None if child is None else _with_plain_classes(child) for name, child in module._modules.items()}
    twin.__dict__ = {**module.__dict__, "_modules": children}
    return twin
