"""Tensors of a base for which the merged model has no module: layers for multi-token prediction, another program's heads.

They belong to the model all the same, so they are carried over; of what is not, the report says why.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from lora_stream.checkpoint.tensors import Info, read_json
from lora_stream.names import float32_among
from lora_stream.plan import MERGE_DTYPES, Record

_CARRIED_DTYPES = (*MERGE_DTYPES, torch.float64)  # of floating-point tensors; others are quantised
# Buffers that older releases of transformers saved. The model computes them, in float32, whatever dtype is written here.
_COMPUTED = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|position_ids)")


@dataclass
class Rest:
    carried: list[Record] = field(default_factory=list)  # on the meta device
    left_out: dict[str, str] = field(default_factory=dict)  # name -> reason


def rest_of(
    infos: Mapping[str, Info],
    directory: Path,
    base_model: nn.Module,
    *,
    written: Collection[str],
    places: Iterable[Sequence[str]],
) -> Rest:
    """Of tensors of the base in `directory`, those that are not `written` for the merged model.

    places: names of each tensor of the base that the model has a place for; tied ones have several.
    """
    rest = Rest()
    kept = {name: next((each for each in names if each in written), None) for names in places for name in names}
    for name, (dtype, shape) in infos.items():
        if name in written:
            continue
        if name in kept:
            rest.left_out[name] = f"tied to {kept[name]}, which is written"
        elif is_computed(name):
            rest.left_out[name] = "the model computes it"
        elif _is_of_another_head(name, directory, base_model):
            rest.left_out[name] = "of a head that the merged model does not have"
        elif dtype.is_floating_point and dtype not in _CARRIED_DTYPES:
            rest.left_out[name] = f"quantised to {dtype}, and the model has no module for it"
        else:
            record = Record(
                name=name,
                fqn=name,
                tensor=torch.empty(shape, dtype=dtype, device="meta"),
                float32_among=float32_among(base_model, name),
            )
            rest.carried.append(record)
    return rest


def is_computed(name: str) -> bool:
    return _COMPUTED.fullmatch(name) is not None


def _is_of_another_head(name: str, directory: Path, base_model: nn.Module) -> bool:
    """Whether the model is of another kind than this directory's, and without the module at the top that this is in."""
    found = read_json(directory / "config.json").get("architectures") or []
    return type(base_model).__name__ not in found and name.split(".")[0] not in base_model._modules
