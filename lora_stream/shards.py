"""How tensors lie over ranks, and what ranks tell each other. The only module that knows DTensor and process groups.

    Box      a tensor cut along one dimension over the ranks of one group: who holds which part
    Ranks    all who hold parts of one model: they agree, or all of them raise

Only metadata decides; values are never looked at.
"""

import contextlib
import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lora_stream.views import View

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.tensor import DTensor

T = TypeVar("T")


class RankError(RuntimeError):
    """The ranks of a sharded trainer could not do their work together. The text says which rank, at what and why."""


# -- one tensor ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """Rank i of `group` holds [bounds[i], bounds[i + 1]) of dimension `dim`; that may be nothing."""

    dim: int
    bounds: tuple[int, ...]
    group: "ProcessGroup"

    def shape(self, full: Sequence[int], index: int) -> tuple[int, ...]:
        """Of what rank `index` holds of a tensor of shape `full`."""
        return (*full[: self.dim], self.bounds[index + 1] - self.bounds[index], *full[self.dim + 1 :])

    @property
    def own(self) -> slice:
        """What this rank holds of dimension `dim`."""
        index = self.group.rank()
        return slice(self.bounds[index], self.bounds[index + 1])

    def lies_like(self, other: "Box | None") -> bool:
        return other is not None and (self.dim, self.bounds, self.group.group_name) == (
            other.dim,
            other.bounds,
            other.group.group_name,
        )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether other ranks hold parts of it that this one does not."""
    return bool(_cuts(tensor))


def box_of(tensor: torch.Tensor, view: View | None = None) -> Box | None:
    """Where the parts of a tensor, or of a view of it, are; None for one that is whole here, or cut more than once (TP with
    FSDP)."""
    cuts = _cuts(tensor)
    if len(cuts) != 1:
        return None
    from torch.distributed.tensor import Shard

    ((mesh_dim, placement),) = cuts
    if type(placement) is not Shard:  # a _StridedShard has another order than that of the ranks
        return None
    mesh = _dtensor(tensor).device_mesh
    dim = placement.dim % tensor.dim()
    box = Box(dim, _bounds(tensor.shape[dim], mesh.size(mesh_dim)), mesh.get_group(mesh_dim))
    return box if view is None else _box_of_view(box, view)


def _bounds(size: int, num_ranks: int) -> tuple[int, ...]:
    """As torch.chunk cuts: all parts of one size, then a smaller one, then none."""
    part = -(-size // num_ranks)
    return tuple(min(i * part, size) for i in range(num_ranks + 1))


def _box_of_view(box: Box, view: View) -> Box:
    low, high = view.ranges[box.dim]
    bounds = tuple(min(max(bound, low), high) - low for bound in box.bounds)
    if box.dim in view.dims:
        return Box(view.dims.index(box.dim), bounds, box.group)
    # One index of the dimension that is cut: all of it is on one rank.
    return Box(0, tuple(bound * view.shape[0] for bound in bounds), box.group)


def local(tensor: torch.Tensor, view: View | None = None) -> torch.Tensor:
    """The part that this rank holds of a tensor, or of a view of it, as it lies, without a graph. A tensor that is not sharded
    is its own part."""
    with torch.no_grad():
        part = _dtensor(tensor).to_local().detach() if _is_dtensor(tensor) else tensor.detach()
    if view is None:
        return part
    box = box_of(tensor)
    return (view if box is None else view.within(box.dim, box.own.start, box.own.stop)).of(part)


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that is cut more than once. Collective over its mesh."""
    with torch.no_grad():
        return _dtensor(tensor).full_tensor().detach()


def check_supported(fqn: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor whose parts do not tell its values, or that lies in a way unknown here."""
    if hasattr(tensor, "ds_id"):
        raise ValueError(
            f"{fqn}: is partitioned by DeepSpeed ZeRO-3, which leaves an empty parameter behind; shard the model with "
            "FSDP2 (torch.distributed.fsdp.fully_shard), use ZeRO-2, or stream inside "
            "deepspeed.zero.GatheredParameters(model.parameters())"
        )
    if not _is_dtensor(tensor):
        return
    from torch.distributed.tensor import Replicate, Shard

    dtensor = _dtensor(tensor)
    for placement in dtensor.placements:
        if placement.is_partial():
            raise ValueError(
                f"{fqn}: has placements {dtensor.placements}: a Partial is a sum that was not made yet; redistribute it to "
                "Replicate or Shard first"
            )
        if not isinstance(placement, Shard | Replicate) and type(placement).__name__ != "_StridedShard":
            raise ValueError(f"{fqn}: has placements {dtensor.placements}; only Shard and Replicate are supported")
    box = box_of(tensor)
    if box is not None and local(tensor).shape != box.shape(tensor.shape, box.group.rank()):
        raise ValueError(
            f"{fqn}: this rank holds {tuple(local(tensor).shape)} of {tuple(tensor.shape)}, expected "
            f"{box.shape(tensor.shape, box.group.rank())} for {dtensor.placements}, as torch.chunk cuts; other cuts are "
            "not supported"
        )


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether this rank's parts of two tensors are equal; False for two that lie differently. No communication."""
    if describe(one) != describe(other):
        return False
    a, b = local(one), local(other)
    if a.is_meta or b.is_meta:
        return (
            a.shape == b.shape
        )  # nothing more is known of a model without values, which is planned and never streamed
    return a.shape == b.shape and torch.equal(a.to(b.device), b)


def know_dtensor() -> None:
    """Let torch.load know DTensors; its weights_only loader then takes them and no other classes more."""
    import torch.distributed.tensor  # noqa: F401


def check_pieces(pieces: Sequence[torch.Tensor]) -> None:
    """pieces: what each rank of a run, in their order, has saved of one tensor; read without a process group.

    Raises ValueError where they do not make up the tensor, or are cut in more than one way.
    """
    if not _is_dtensor(pieces[0]):
        return
    from torch.distributed.tensor import Shard

    dtensor = _dtensor(pieces[0])
    ranks = dtensor.device_mesh.mesh
    if ranks.flatten().tolist() != list(range(len(pieces))):
        raise ValueError(
            f"is spread over the ranks {ranks.tolist()}, but the shards are of ranks 0 to {len(pieces) - 1}"
        )
    cuts = _cuts(pieces[0])
    if len(cuts) > 1 or any(type(placement) is not Shard for _, placement in cuts):
        raise ValueError(
            f"has placements {dtensor.placements}; only one Shard, beside Replicate, can be put together here. Save it with "
            "torch.distributed.checkpoint, which knows where its parts belong"
        )
    for (mesh_dim, placement), bounds in ((cut, _bounds_of(dtensor, cut)) for cut in cuts):
        for rank, piece in enumerate(pieces):
            index = int((ranks == rank).nonzero()[0][mesh_dim])
            expected = list(dtensor.shape)
            expected[placement.dim] = bounds[index + 1] - bounds[index]
            if list(local(piece).shape) != expected:
                raise ValueError(f"rank {rank} holds {tuple(local(piece).shape)} of it, expected {tuple(expected)}")


def join_pieces(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor, of pieces that have been checked. Raises ValueError where whole copies differ."""
    cuts = _cuts(pieces[0])
    if not cuts:
        whole, *others = map(local, pieces)
        if not all(torch.equal(whole, other) for other in others):
            raise ValueError("each rank has all of it, with other values; which one is right cannot be told")
        return whole
    ((mesh_dim, placement),) = cuts
    mesh = _dtensor(pieces[0]).device_mesh
    size = mesh.size(mesh_dim)
    ranks = mesh.mesh.movedim(mesh_dim, 0).flatten().view(size, -1)[:, 0]  # of one replica
    return torch.cat([local(pieces[rank]) for rank in ranks.tolist()], dim=placement.dim)


def _bounds_of(dtensor: "DTensor", cut: tuple) -> tuple[int, ...]:
    mesh_dim, placement = cut
    return _bounds(dtensor.shape[placement.dim], dtensor.device_mesh.size(mesh_dim))


def describe(tensor: torch.Tensor) -> str:
    """How it lies, in words that are equal on all ranks."""
    if not _is_dtensor(tensor):
        return "plain"
    dtensor = _dtensor(tensor)
    return f"{dtensor.placements} over {tuple(dtensor.device_mesh.shape)} ranks"


def _is_dtensor(tensor: torch.Tensor) -> bool:
    # Where the module was never imported no DTensor can exist.
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return dtensor is not None and isinstance(tensor, dtensor)


def _dtensor(tensor: torch.Tensor) -> "DTensor":
    return tensor  # type: ignore[return-value]  # for the type checker


def _cuts(tensor: torch.Tensor) -> list:
    """(mesh dimension, placement) of each dimension of the mesh that a tensor is cut over."""
    if not _is_dtensor(tensor):
        return []
    dtensor = _dtensor(tensor)
    return [
        (mesh_dim, placement)
        for mesh_dim, placement in enumerate(dtensor.placements)
        if not placement.is_replicate() and dtensor.device_mesh.size(mesh_dim) > 1
    ]


# -- FSDP2's modules -----------------------------------------------------------------------------------------------------


def _is_fsdp2(module: nn.Module) -> bool:
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return fsdp is not None and isinstance(module, fsdp)


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """The module's class without the one that fully_shard puts before it."""
    return type(module).__mro__[2] if _is_fsdp2(module) else type(module)


def masters(model: nn.Module) -> dict[int, dict[str, torch.Tensor]]:
    """The sharded parameters of all FSDP2 modules, by id of the module that holds them and own name: what the next forward
    gathers.

    After a forward a root, and every module that does not reshard, has gathered copies in the compute dtype in their place.
    To reshard it and gather it again would show the masters too, but it is collective, and planning is not.

    Raises ValueError for a parameter that was replaced where FSDP2 does not see it, and goes on with the old one.
    """
    found: dict[int, dict[str, torch.Tensor]] = {}
    for module in model.modules():
        if not _is_fsdp2(module):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.13; one at most before
        for group in filter(None, [state._fsdp_param_group] if groups is None else groups):
            for parameter in group.fsdp_params:
                info = parameter._module_info
                master = _master(parameter, is_read=group._reset_sharded_params)
                homes = [
                    (info.module, info.param_name),
                    *zip(info.shared_modules, info.shared_param_names, strict=True),
                ]
                for home, name in homes:
                    found.setdefault(id(home), {})[name] = master
    return found


def _master(parameter, *, is_read: bool) -> torch.Tensor:
    """Of one FSDPParam. is_read: FSDP2 has looked at the module's parameters for the last time, as it does at the first forward,
    after load_state_dict and after to(); what is put there otherwise it replaces by its own."""
    info, sharded = parameter._module_info, parameter.sharded_param
    there = info.module._parameters.get(info.param_name)
    own = (sharded, *(getattr(parameter, name, None) for name in ("_unsharded_param", "_sharded_post_forward_param")))
    is_replaced = there is not None and all(there is not each for each in own)
    if is_replaced and not is_read and _is_dtensor(there):
        return there
    data = parameter._sharded_param_data
    is_moved = is_read and type(data) is torch.Tensor and _storage(local(sharded)) != _storage(data)
    if is_replaced or is_moved:
        raise ValueError(
            f"{parameter._param_fqn or info.param_name}: was replaced where FSDP2 does not see it, and the next forward computes "
            "with the old values; copy the new values into the parameter, or load them with load_state_dict"
        )
    return sharded


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# -- all ranks -----------------------------------------------------------------------------------------------------------


class Ranks:
    """All that hold parts of one model, or just this process. Collective calls are made by all of them, in one order."""

    def __init__(self, groups: Sequence["ProcessGroup"]) -> None:
        """groups: one after the other they reach everybody, as the dimensions of a mesh do."""
        self._groups = [group for group in groups if group.size() > 1]
        self.rank = dist.get_rank() if self._groups else 0

    @property
    def is_alone(self) -> bool:
        return not self._groups

    @property
    def is_first(self) -> bool:
        return all(group.rank() == 0 for group in self._groups)

    def exchange(self, value: T, what: str) -> dict[int, T]:
        """Everybody's value, by global rank. Raises RankError where one takes no part."""
        found = {self.rank: value}
        for group in self._groups:
            gathered: list = [None] * group.size()
            with explained(f"the ranks could not {what}"):
                dist.all_gather_object(gathered, found, group=group)
            found = {rank: each for part in gathered for rank, each in part.items()}
        return dict(sorted(found.items()))

    def agree(self, attempt: Callable[[], T], what: str) -> dict[int, T]:
        """Everybody's result of the attempt; where it raises on one rank, all raise."""
        error: BaseException | None = None
        result = None
        try:
            result = attempt()
        except BaseException as caught:
            if self.is_alone:
                raise
            error = caught
        if error is None:
            return self._agreed((None, result), what)  # type: ignore[return-value]
        self.refuse(error, what)
        raise error

    def refuse(self, error: BaseException, what: str) -> None:
        """In place of the others' `agree`: they raise, and so must the caller."""
        try:
            self._agreed((error, None), what)
        except Exception as late:  # the others are lost; what happened here matters more
            error.add_note(f"the other ranks could not be told: {late}")

    def _agreed(self, own: tuple[BaseException | None, object], what: str) -> dict:
        error, result = own
        told = None if error is None else (isinstance(error, ValueError), f"{type(error).__name__}: {error}")
        found = self.exchange((told, result), what)
        if error is not None:
            return {}
        failed = {rank: told for rank, (told, _) in found.items() if told is not None}
        if failed:
            rank, (is_refusal, text) = next(iter(failed.items()))
            raise (ValueError if is_refusal else RankError)(f"rank {rank} could not {what}: {text}")
        return {rank: value for rank, (_, value) in found.items()}


def ranks_of(model: nn.Module) -> Ranks:
    """Who holds parts of the model: along each dimension of each mesh that its parameters lie on."""
    groups = {}
    for parameter in [*model.parameters(), *(p for own in masters(model).values() for p in own.values())]:
        if is_sharded(parameter):
            mesh = _dtensor(parameter).device_mesh
            groups |= {group.group_name: group for group in map(mesh.get_group, range(mesh.ndim))}
    return Ranks(list(groups.values()))


def all_ranks() -> Ranks:
    """Of the default process group."""
    return Ranks([dist.group.WORLD])


def is_first_process() -> bool:
    """Of the default process group; anybody is without one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def one_writes(write: Callable[[], None], where: str, content: bytes, is_writer: bool | None) -> None:
    """One rank of the default process group writes `content` to `where`, and the others return after that. Not collective: the
    writer waits for nobody, and may be the only one to call. The others wait for the writing of their own call: the second
    one of the same content for the second.

    is_writer: whether this rank is the one; None: the first is. Raises RankError on the others where it fails or stays away.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        if is_writer is not False:
            write()
        return
    store = dist.distributed_c10d._get_default_store()
    key = _new_key(store, f"lora_stream/{where}/{hashlib.sha256(content).hexdigest()}")
    if is_writer or (is_writer is None and dist.get_rank() == 0):
        try:
            write()
        except BaseException as error:
            store.set(key, f"{type(error).__name__}: {error}")
            raise
        store.set(key, "")
        return
    with explained(f"{where}: the rank that writes it did not within the timeout (is_writer= says which does)"):
        store.wait([key])
    if failed := store.get(key).decode():
        raise RankError(f"{where}: the rank that writes it could not: {failed}")


# Calls of one_writes so far, by what they wrote, in the process group of this store.
_calls: tuple[object, dict[str, int]] = (None, {})


def _new_key(store: "dist.Store", what: str) -> str:
    """Another one at each call: the store outlives a call, and a second writing is waited for as the first was."""
    global _calls
    if _calls[0] is not store:
        _calls = (store, {})
    counts = _calls[1]
    counts[what] = counts.get(what, 0) + 1
    return f"{what}/{counts[what]}"


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Says what a collective was for where it fails: the rank that is missing cannot."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"{what}: {str(error).splitlines()[0]}. A rank has died, or takes no part: every rank of the trainer must call "
            "stream, sync or iter together, in the same order, and read the stream or close it"
        ) from error


# -- bytes ---------------------------------------------------------------------------------------------------------------


def device_of(group: "ProcessGroup", wish: torch.device) -> torch.device:
    """Where the group can gather what lies on `wish`: there; with NCCL alone, on the device; with gloo alone, on the host."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    if wish.type != "cpu" and backends.get(wish.type) == "gloo" and "cpu" in backends:
        return torch.device("cpu")
    if wish.type in backends:
        return wish
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type in backends:
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device(next(iter(backends)))


def members(group: "ProcessGroup") -> list[int]:
    """Global ranks of the group, in its order."""
    return dist.get_process_group_ranks(group)


def indices_of(group: "ProcessGroup", ranks: Collection[int]) -> tuple[int, ...]:
    """Which of the group's members are among these global ranks."""
    return tuple(i for i, rank in enumerate(members(group)) if rank in ranks)


def gather_bytes(
    flat: torch.Tensor,
    sizes: Sequence[int],
    group: "ProcessGroup",
    receivers: Collection[int],
    what: str,
    memory: Callable[[int, int], torch.Tensor] | None = None,
) -> list[torch.Tensor] | None:
    """What every rank of the group sends, uint8, on those that receive; None on the others. One collective.

    flat: [max(sizes)], of which rank i sends the first sizes[i] bytes; receivers: indices in the group; memory: for what rank
    i sends, so many bytes on the host; None: new.
    """
    size, index = group.size(), group.rank()
    with explained(what):
        if len(receivers) == size and flat.device.type != "cpu":
            out = torch.empty(size, flat.numel(), dtype=torch.uint8, device=flat.device)
            # torch 2.13 has renamed it and warns about the old name.
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(out.view(-1), flat, group=group)
            return list(out.unbind())
        # gloo's own gathers go through buffers of its own, at less than half the speed.
        parts = None
        messages = [
            dist.P2POp(dist.isend, flat[: sizes[index]], group=group, group_peer=i) for i in receivers if i != index
        ]
        if index in receivers:
            if memory is None or flat.device.type != "cpu":
                memory = partial(_new_bytes, flat.device)
            parts = [flat if i == index else memory(i, sizes[i]) for i in range(size)]
            messages += [dist.P2POp(dist.irecv, parts[i], group=group, group_peer=i) for i in range(size) if i != index]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
    return parts


def _new_bytes(device: torch.device, index: int, num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
