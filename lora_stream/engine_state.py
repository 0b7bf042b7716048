"""What an engine holds, as far as its syncs tell."""

import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lora_stream import fsdp1, shards
from lora_stream.filling import Rounding
from lora_stream.plan import Adapter, Plan, Task


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What of a plan changes from step to step, copied: this rank's part of it.

    The base is frozen, so the adapters, and what else trains, are enough to merge an old policy again.
    """

    adapters: dict[str, tuple[Adapter, ...]] = field(default_factory=dict)  # by checkpoint name
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    is_known: bool = True  # not of FSDP1, whose parameters can only be read while it gathers them

    @staticmethod
    def of(plan: Plan) -> "Policy":
        """A model that trains without adapters is not copied: it is too large."""
        if any(fsdp1.is_flattened(tensor) for task in plan.tasks for tensor in task.tensors()):
            return Policy(is_known=False)
        adapters, copies = {}, {}
        with_adapters = any(task.adapters for task in plan.tasks)
        for task in plan.tasks:
            if task.adapters:
                adapters[task.meta.name] = tuple(
                    replace(a, lora_A=a.lora_A.detach().clone(), lora_B=a.lora_B.detach().clone())
                    for a in task.adapters
                )
            elif task.trained and with_adapters:
                copies[task.meta.name] = task.base.detach().to(task.meta.dtype, copy=True)
        return Policy(adapters=adapters, copies=copies)


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
    checksums: dict[str, int] = field(default_factory=dict)
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def forget(self, model: nn.Module) -> None:
        """Another model: what the engine holds is nothing that this one could restore or complete."""
        self.model = weakref.ref(model)
        self.needs_full = self.needs_full or self.synced
        self.synced, self.weight_version = False, None
        self.policy, self.checksums = Policy(), {}

    def covered_by(self, plan: Plan) -> bool:
        names = {task.meta.name for task in plan.tasks}
        return self.policy.adapters.keys() <= names and self.policy.copies.keys() <= names

    def remember(
        self, policy: Policy, rounding: Mapping[str, Rounding], weight_version: str | None, fingerprint: object
    ) -> None:
        """The engine now holds this."""
        self.synced, self.needs_full = True, False
        self.weight_version, self.fingerprint = weight_version, fingerprint
        self.policy = policy
        self.checksums = {name: found.checksum for name, found in rounding.items()}

    def moved_adapters(self, plan: Plan, rounding: Mapping[str, Rounding]) -> list[str]:
        """Names of merged tensors whose adapters differ, in this rank's part, from those of the last sync; in the first,
        those with a delta."""
        if not self.synced:
            return [name for name, found in rounding.items() if found.changed]
        if not self.policy.is_known:
            return []
        moved = []
        for task in plan.tasks:
            if not task.adapters:
                continue
            old = self.policy.adapters.get(task.meta.name, ())
            if len(old) != len(task.adapters) or not all(map(_same, old, task.adapters)):
                moved.append(task.meta.name)
        return moved

    def moved_copies(self, plan: Plan) -> bool:
        """Whether a tensor that trains without an adapter differs from what was last sent, or was never sent."""
        return any(
            task.meta.name not in self.policy.copies
            or not shards.same_values(self.policy.copies[task.meta.name], task.base.detach().to(task.meta.dtype))
            for task in plan.tasks
            if task.trained and not task.adapters
        )

    def is_unmoved(self, name: str, rounding: Rounding) -> bool:
        if name in self.checksums:
            return self.checksums[name] == rounding.checksum
        return rounding.unmoved == rounding.changed

    def old_task(self, task: Task) -> Task | None:
        """The task that sends what the engine held before; None where that is not known."""
        name = task.meta.name
        if not self.policy.is_known:
            return None
        if name in self.policy.adapters:
            return replace(task, adapters=self.policy.adapters[name])
        if name in self.policy.copies:
            return replace(task, base=self.policy.copies[name], adapters=())
        if task.trained and not task.adapters:
            return None  # never sent before: only the engine's own checkpoint has it
        return replace(task, adapters=())


def _same(one: Adapter, other: Adapter) -> bool:
    # By value: every dtype of an adapter is exact in float32, and a cast or a move alone is no update.
    pairs = ((one.lora_A, other.lora_A), (one.lora_B, other.lora_B))
    return one.scaling == other.scaling and all(
        shards.same_values(a.detach().float(), b.detach().float()) for a, b in pairs
    )


_states: "weakref.WeakKeyDictionary[object, EngineState]" = weakref.WeakKeyDictionary()
# Of engines that other ranks hold, by model and token.
_elsewhere: "weakref.WeakKeyDictionary[nn.Module, dict[str, EngineState]]" = weakref.WeakKeyDictionary()


def state_of(engine: object) -> EngineState:
    try:
        return _states.setdefault(engine, EngineState())
    except TypeError:  # not hashable or not weakly referable: cannot be known again, so each sync is its first
        return EngineState()


def state_elsewhere(model: nn.Module, token: str) -> EngineState:
    """What an engine on another rank holds of this rank's part of the model."""
    states = _elsewhere.setdefault(model, {})
    if token not in states:
        states[token] = EngineState(model=weakref.ref(model), token=token)
    return states[token]
