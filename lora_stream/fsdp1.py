"""FSDP1, which flattens the parameters of a unit into one and cuts that anywhere. The only module that knows it.

A flattened parameter is planned by its full shape and read while its unit is opened, which gathers the unit's float32 masters
on every rank. Nothing is written back.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lora_stream import shards
from lora_stream.merging import Traffic
from lora_stream.plan import Task


class Unit(NamedTuple):
    """An FSDP module that is opened at once: a root alone, or an outermost one below it with all that it holds."""

    module: nn.Module
    root: nn.Module

    @property
    def handles(self) -> list:
        """Of its flat parameters."""
        modules = [self.module] if self.module is self.root else self.module.modules()
        return [module._handle for module in modules if _is_fsdp1(module) and module._handle is not None]


class _Flattened(torch.Tensor):
    """Stands for a parameter inside a flat one: its shape, dtype and device, no values."""

    unit: Unit
    handle: object  # of the flat parameter
    stepped: torch.Tensor  # what the optimizer writes to
    home: tuple[nn.Module, str]  # where it can be read while its unit is open
    index: int  # among the flat parameter's

    @staticmethod
    def of(
        shape: torch.Size, handle, unit: Unit, home: tuple[nn.Module, str], stepped: torch.Tensor, index: int
    ) -> "_Flattened":
        empty = torch.empty((), dtype=handle._orig_param_dtype, device=handle.flat_param.device).expand(shape)
        self = torch.Tensor._make_subclass(_Flattened, empty, stepped.requires_grad)
        self.unit, self.handle, self.home, self.stepped, self.index = unit, handle, home, stepped, index
        return self


class Parameters:
    """All parameters of a model by module, as the optimizer has them: FSDP2's masters, and FSDP1's as what they are when
    their unit is open."""

    def __init__(self, model: nn.Module) -> None:
        self._masters = shards.masters(model)
        self._flattened: dict[int, dict[str, _Flattened]] = {}
        for unit in _units(model):
            for handle in unit.handles:
                self._read(handle, unit)

    def of(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The module's own, by name."""
        own = {
            name: parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and not getattr(parameter, "_is_flat_param", False)
        }
        return own | self._masters.get(id(module), {}) | self._flattened.get(id(module), {})

    def _read(self, handle, unit: Unit) -> None:
        """Raises ValueError for a flat parameter that FSDP1 is about to forget."""
        flat = handle.flat_param
        shard = getattr(flat, "_local_shard", None)
        if shard is not None and handle.is_sharded(flat) and flat.data_ptr() != shard.data_ptr():
            raise ValueError(
                f"{flat._fqns[0]}: FSDP1's flat parameter that holds it was given other memory (by to() of a part of the "
                "model?), and FSDP1 goes back to the old one; copy the new values into the parameter"
            )
        stepped = [flat] * len(flat._shapes) if flat._params is None else flat._params
        found = {}
        parameters = zip(flat._param_infos, flat._shapes, stepped, strict=True)
        for index, ((name, module, _), shape, each) in enumerate(parameters):
            there = module._parameters.get(name)
            if flat._params is not None and isinstance(there, nn.Parameter) and _is_in_shard(flat, index):
                each = there  # it may have been put there since: FSDP1 reads it when it next opens the unit. (No view of an open one.)
            found[id(module), name] = tensor = _Flattened.of(shape, handle, unit, (module, name), each, index)
            self._flattened.setdefault(id(module), {})[name] = tensor
        for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
            self._flattened.setdefault(id(module), {})[name] = found[id(first_module), first_name]


def live_tensors(model: nn.Module) -> set[int]:
    """Ids of all that the next forward computes with, as the optimizer has it."""
    parameters = Parameters(model)
    return {
        id(stepped(tensor))
        for module in model.modules()
        for tensor in (*parameters.of(module).values(), *module._buffers.values())
        if tensor is not None
    }


def is_flattened(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, _Flattened)


def keeps_object(tensor: torch.Tensor) -> bool:
    """Whether another object in its place is somebody's doing. After a backward pass of NO_SHARD it is FSDP1's own."""
    return not isinstance(tensor, _Flattened) or tensor.handle.uses_sharded_strategy  # type: ignore[attr-defined]


def is_used_in(model: nn.Module) -> bool:
    return any(_is_fsdp1(module) for module in model.modules())


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """The flat parameter that holds a flattened one; any other tensor itself."""
    return tensor.handle.flat_param if isinstance(tensor, _Flattened) else tensor  # type: ignore[attr-defined]


def stepped(tensor: torch.Tensor) -> torch.Tensor:
    """What the optimizer writes to, for a flattened parameter; any other tensor itself."""
    return tensor.stepped if isinstance(tensor, _Flattened) else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """What this rank holds of a flattened parameter, flat; None where that is not known. No communication."""
    flat = tensor.handle.flat_param  # type: ignore[attr-defined]
    shard, infos = getattr(flat, "_local_shard", None), getattr(flat, "_shard_param_infos", None)
    if shard is None or infos is None:
        return None
    info = infos[tensor.index]  # type: ignore[attr-defined]
    if not info.in_shard:
        return shard.detach()[:0]
    return shard.detach()[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]


def units_of(task: Task) -> list[Unit]:
    """What must be open for the task."""
    return list(dict.fromkeys(tensor.unit for tensor in task.tensors() if isinstance(tensor, _Flattened)))


@contextlib.contextmanager
def opened(units: Sequence[Unit], traffic: Traffic) -> Iterator[None]:
    """While open, the units' parameters are whole on every rank. Collective."""
    with contextlib.ExitStack() as stack:
        for unit in units:
            with shards.explained(f"could not gather the FSDP1 unit around {type(unit.module.module).__name__}"):
                if unit.root._is_root is None and unit.module is not unit.root:
                    # A unit that is opened before its root ever was takes itself for one, and FSDP1 is broken from then on.
                    with _summoned(Unit(unit.root, unit.root)):
                        pass
                with traffic.gathering():
                    stack.enter_context(_summoned(unit))
            for handle in unit.handles:
                _count(handle, traffic)
        yield


def read(tensor: torch.Tensor) -> torch.Tensor:
    """A flattened parameter's values, while its unit is open."""
    assert isinstance(tensor, _Flattened)
    module, name = tensor.home
    values = getattr(module, name).detach()
    assert values.shape == tensor.shape, "its unit is open"
    return values


def _is_in_shard(flat, index: int) -> bool:
    """Whether this rank holds a part of a flat parameter's parameter."""
    infos = getattr(flat, "_shard_param_infos", None)
    return infos is None or infos[index].in_shard


def _summoned(unit: Unit) -> contextlib.AbstractContextManager:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel.summon_full_params(
        unit.module, recurse=unit.module is not unit.root, writeback=False
    )


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return fsdp is not None and isinstance(module, fsdp)


def _units(model: nn.Module) -> Iterator[Unit]:
    for root in _outermost(model):
        yield Unit(root, root)
        for child in root.children():
            for module in _outermost(child):
                yield Unit(module, root)


def _outermost(module: nn.Module) -> list[nn.Module]:
    if _is_fsdp1(module):
        return [module]
    return [found for child in module.children() for found in _outermost(child)]


def _count(handle, traffic: Traffic) -> None:
    num_bytes = handle.flat_param._unpadded_unsharded_size.numel() * handle._orig_param_dtype.itemsize
    traffic.gathered += num_bytes - num_bytes // handle.world_size
    if handle._offload_params:
        traffic.crossed += num_bytes // handle.world_size
