"""What an engine was sent, so that the next sync knows what may differ from it.

What trains *now* does not tell: a tensor may have been trained, switched or replaced since, and frozen again.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from lora_stream import fsdp1, shards
from lora_stream.plan import ParamMeta, Plan, Task
from lora_stream.samples import Sample, bits_of


@dataclass(frozen=True)
class _Entry:
    """Of one live tensor, as it was sent."""

    tensor: int  # id of what the optimizer writes to
    version: int | None  # None: it counts none
    metas: tuple[ParamMeta, ...]
    was_adapted: bool
    was_trained: bool


class Held:
    """A snapshot of a model as an engine got it: this rank's part of it."""

    def __init__(self, everything: Plan, *, has_loading: bool) -> None:
        """everything: the model's "all" plan. What the sync has left out the engine holds from before. has_loading: whether
        the caller brings the weights to their device before they are read, and takes them away again."""
        self._sample, self._on_host_only = Sample(), has_loading
        self._entries: dict[str, _Entry] = {}
        tasks = _by_fqn(everything)
        for fqn, (task, metas) in tasks.items():
            stepped = fsdp1.stepped(task.base)
            self._entries[fqn] = _Entry(
                tensor=id(stepped),
                version=_version(stepped),
                metas=metas,
                was_adapted=bool(task.adapters or task.rows),
                was_trained=task.trained,
            )
        self._values = {fqn: self._values_of(task) for fqn, (task, _) in tasks.items()}
        # An id is of one tensor only for as long as that lives. Where there are values, another tensor of this id has others.
        # (No weak references: torch cannot move a sharded model, by to(), while there are any to its parameters.)
        self._kept = [fsdp1.stepped(task.base) for fqn, (task, _) in tasks.items() if self._values[fqn] is None]

    def written(self, everything: Plan) -> set[str]:
        """FQNs of live tensors that are not known to be the ones that were sent, or to be unwritten since."""
        tasks = {fqn: task for fqn, (task, _) in _by_fqn(everything).items()}
        known = [fqn for fqn in tasks if fqn in self._entries]
        same = [fqn for fqn in known if self._is_same_object(fqn, tasks[fqn])]
        values = {fqn: self._values_of(tasks[fqn]) for fqn in same if self._values[fqn] is not None}
        return set(tasks) - set(same) | _differing(self._values, values)

    def stale(self, everything: Plan, written: set[str]) -> set[str]:
        """FQNs of live tensors whose present values the engine may not hold. written: see there.

        What was trained when it was sent may have been trained once more before it was frozen."""
        return {
            fqn
            for fqn, (_, metas) in _by_fqn(everything).items()
            if fqn in written or (entry := self._entries[fqn]).was_adapted or entry.was_trained or entry.metas != metas
        }

    def _is_same_object(self, fqn: str, task: Task) -> bool:
        entry, stepped = self._entries[fqn], fsdp1.stepped(task.base)
        if entry.tensor != id(stepped):
            return False
        # A move to another device may begin a new count; then the values must tell.
        version = _version(stepped)
        return entry.version is None or version is None or version <= entry.version

    def _values_of(self, task: Task) -> torch.Tensor | None:
        """A sample of this rank's part. None where its values are not there now: then its version must tell."""
        part = fsdp1.own_part(task.base) if fsdp1.is_flattened(task.base) else shards.local(task.base)
        if part is None or part.is_meta or (self._on_host_only and part.device.type != "cpu"):
            return None
        if part.untyped_storage().nbytes() < part.nbytes:  # taken away, by an offload that keeps the tensor's shape
            return None
        return self._sample.of(part)


def _by_fqn(plan: Plan) -> dict[str, tuple[Task, tuple[ParamMeta, ...]]]:
    """One task of each live tensor, and what all its tasks send."""
    metas: dict[str, list[ParamMeta]] = {}
    for task in plan.tasks:
        metas.setdefault(task.fqn, []).append(task.meta)
    return {task.fqn: (task, tuple(metas[task.fqn])) for task in plan.tasks}


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _differing(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> set[str]:
    """Keys of `other` whose values differ, bit by bit. All at once, and one by one only if there are any."""
    pairs = {key: [one[key], values] for key, values in other.items() if values is not None}
    if _same_bits(pairs.values()):
        return set()
    return {key for key, pair in pairs.items() if not _same_bits([pair])}


def _same_bits(pairs: Collection[list[torch.Tensor]]) -> bool:
    return torch.equal(bits_of([one for one, _ in pairs]), bits_of([other for _, other in pairs]))
