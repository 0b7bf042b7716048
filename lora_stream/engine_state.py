"""What an engine holds, as far as its syncs tell."""

import uuid
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lora_stream import fsdp1, shards
from lora_stream.fidelity import Rounding
from lora_stream.held import Held
from lora_stream.merging import NEAREST, Arithmetic
from lora_stream.plan import Adapter, Plan, Rows, Task


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What of a plan changes from step to step, copied: this rank's part of it.

    The base is frozen, so the adapters, and what else trains, are enough to merge an old policy again.
    """

    adapters: dict[str, tuple[Adapter, ...]] = field(default_factory=dict)  # by FQN, as all that follows
    rows: dict[str, tuple[Rows, ...]] = field(default_factory=dict)
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    is_known: bool = True  # not of FSDP1, whose parameters can only be read while it gathers them

    @staticmethod
    def of(plan: Plan) -> "Policy":
        """A model that trains without adapters is not copied: it is too large."""
        if any(fsdp1.is_flattened(tensor) for task in plan.tasks for tensor in task.tensors()):
            return Policy(is_known=False)
        policy = Policy()
        with_adapters = any(task.fate == "merged" for task in plan.tasks)
        for task in by_fqn(plan).values():
            if task.adapters:
                policy.adapters[task.fqn] = tuple(adapter.map(_copied) for adapter in task.adapters)
            if task.rows:
                policy.rows[task.fqn] = tuple(replace(rows, values=_copied(rows.values)) for rows in task.rows)
            if with_adapters and _base_moves(task):
                policy.copies[task.fqn] = _sent_base(task).clone()
        return policy


def by_fqn(plan: Plan) -> dict[str, Task]:
    """One task of each live tensor: what adapts it is the same for all its parts."""
    return {task.fqn: task for task in plan.tasks}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


@dataclass
class EngineState:
    """What an engine holds, as far as its syncs tell: enough to merge the last policy again.

    Of a sharded trainer every rank keeps one for each engine, by the engine's token, whichever rank that is on.
    """

    model: weakref.ref | None = None
    synced: bool = False
    needs_full: bool = False
    num_syncs: int = 0
    weight_version: str | None = None
    fingerprint: object = None  # of the engine after its last sync
    policy: Policy = field(default_factory=Policy)
    held: Held | None = None  # None: nothing of this model yet
    arithmetic: Arithmetic = NEAREST  # that the policy was merged by
    checksums: dict[str, int] = field(default_factory=dict)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def forget(self, model: nn.Module) -> None:
        """Another model: what the engine holds is nothing that this one could restore or complete."""
        self.model = weakref.ref(model)
        self.needs_full = self.needs_full or self.synced
        self.synced, self.weight_version = False, None
        self.policy, self.held, self.checksums = Policy(), None, {}

    def remember(
        self,
        policy: Policy,
        held: Held,
        rounding: Mapping[str, Rounding],
        weight_version: str | None,
        fingerprint: object,
        arithmetic: Arithmetic,
    ) -> None:
        """The engine now holds this."""
        self.synced, self.needs_full = True, False
        self.weight_version, self.fingerprint = weight_version, fingerprint
        self.policy, self.held, self.arithmetic = policy, held, arithmetic
        self.checksums = {name: found.checksum for name, found in rounding.items()}

    def moved_adapters(self, plan: Plan, rounding: Mapping[str, Rounding]) -> list[str]:
        """Names of merged tensors whose adapters differ, in this rank's part, from those of the last sync; in the first,
        those with a delta."""
        if not self.synced:
            return [name for name, found in rounding.items() if found.changed]
        if not self.policy.is_known:
            return []
        moved = {
            fqn
            for fqn, task in by_fqn(plan).items()
            if task.adapters and not _same(self.policy.adapters.get(fqn, ()), task.adapters)
        }
        return [task.meta.name for task in plan.tasks if task.fqn in moved]

    def moved_copies(self, plan: Plan) -> bool:
        """Whether a tensor that trains without a delta differs from what was last sent, or was never sent."""
        for fqn, task in by_fqn(plan).items():
            if task.rows and not _same_rows(self.policy.rows.get(fqn, ()), task.rows):
                return True
            if _base_moves(task):
                old_copy = self.policy.copies.get(fqn)
                if old_copy is None or not shards.same_values(old_copy, _sent_base(task)):
                    return True
        return False

    def is_unmoved(self, name: str, rounding: Rounding) -> bool:
        if name in self.checksums:
            return self.checksums[name] == rounding.checksum
        return rounding.unmoved == rounding.changed

    def old_task(self, task: Task, written: Collection[str]) -> Task | None:
        """The task that sends what the engine held before; None where that is not known.

        written: FQNs of what may have been written since; of an engine that was never synced nothing has, but what trains."""
        policy = self.policy
        if not policy.is_known:
            return None
        is_written = task.fqn in written or _base_moves(task) or (self.held is None and task.trained)
        if is_written and task.fqn not in policy.copies:
            return None  # only the engine's own checkpoint has it
        return replace(
            task,
            base=policy.copies.get(task.fqn, task.base),
            adapters=policy.adapters.get(task.fqn, ()),
            rows=policy.rows.get(task.fqn, ()),
        )


def _base_moves(task: Task) -> bool:
    """Whether the base itself is part of the policy: it goes as it is, or trains under its adapter. A base that an adapter's
    initialisation has changed does not move any more."""
    return task.trained and (task.fate == "copied" or task.base.requires_grad)


def _sent_base(task: Task) -> torch.Tensor:
    """In the wire dtype; under an adapter as it is, to be merged again."""
    base = task.base.detach()
    return base.to(task.meta.dtype) if task.fate == "copied" else base


def _same(one: Sequence[Adapter], other: Sequence[Adapter]) -> bool:
    # By value: every dtype of an adapter is exact in float32, and a cast or a move alone is no update.
    if len(one) != len(other):
        return False
    return all(
        a.scaling == b.scaling
        and len(a.tensors()) == len(b.tensors())
        and all(
            shards.same_values(x.detach().float(), y.detach().float())
            for x, y in zip(a.tensors(), b.tensors(), strict=True)
        )
        for a, b in zip(one, other, strict=True)
    )


def _same_rows(one: Sequence[Rows], other: Sequence[Rows]) -> bool:
    return len(one) == len(other) and all(
        a.indices == b.indices and shards.same_values(a.values.detach(), b.values.detach())
        for a, b in zip(one, other, strict=True)
    )


_states: "weakref.WeakKeyDictionary[object, EngineState]" = weakref.WeakKeyDictionary()
# Of engines that other ranks hold, by model and token.
_elsewhere: "weakref.WeakKeyDictionary[nn.Module, dict[str, EngineState]]" = weakref.WeakKeyDictionary()


def state_of(engine: object) -> EngineState:
    try:
        return _states.setdefault(engine, EngineState())
    except TypeError:  # not hashable or not weakly referable: cannot be known again, so each sync is its first
        return EngineState()


def known_elsewhere(model: nn.Module) -> list[EngineState]:
    """Of the engines on other ranks that this rank's part of the model was sent to."""
    return list(_elsewhere.get(model, {}).values())


def state_elsewhere(model: nn.Module, token: str) -> EngineState:
    """What an engine on another rank holds of this rank's part of the model."""
    states = _elsewhere.setdefault(model, {})
    if token not in states:
        states[token] = EngineState(model=weakref.ref(model), token=token)
    return states[token]
