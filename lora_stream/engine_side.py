"""One rank's side of a sync: its engine, if it has one, and what it knows of the engines of other ranks.

    prepare ──► plans ──► check ──► update ──► outcome ──► restore ──► remember
       └───── what a rank finds is told to all, so that all plan, fail and restore alike

Without sharding there is one rank, and it tells nobody.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lora_stream.engine_state import EngineState, Policy, known_elsewhere, state_elsewhere, state_of
from lora_stream.engines import Engine, by_url, engine_of
from lora_stream.fidelity import Rounding
from lora_stream.held import Held
from lora_stream.merged_weights import Stream
from lora_stream.merging import Arithmetic
from lora_stream.peft import read_model
from lora_stream.plan import FUSED_MODULES, ParamMeta, Plan, Scope, build_plan
from lora_stream.ring import PeerLostError


class SyncError(RuntimeError):
    """A sync failed after the engine began to load. The text says which weights the engine now holds."""


class Timed:
    """Passes a stream on; knows how long it took and what has gone out."""

    def __init__(self, stream: Stream, on_tensor: Callable[[ParamMeta, Plan], object] | None) -> None:
        self._stream = stream
        self._on_tensor = on_tensor
        self.seconds = 0.0

    @property
    def num_sent(self) -> int:
        return len(self._stream.stats.sent)

    def __iter__(self) -> "Timed":
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        begin = time.perf_counter()
        try:
            item = next(self._stream)
        finally:
            self.seconds += time.perf_counter() - begin
        if self._on_tensor is not None:
            self._on_tensor(self._stream.stats.sent[-1], self._stream.plan)
        return item


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a rank's engine needs of a sync."""

    token: str | None = None  # of the engine; None: the rank has none
    url: str | None = None
    full: bool = False
    is_synced: bool = False
    wire_dtype: torch.dtype | None = None
    fused_modules: Sequence[Sequence[str]] = ()
    # By token of all engines that the rank knows: FQNs of what they may not hold, and of what was written since they got it,
    # by this rank's part of it.
    stale: Mapping[str, tuple[Collection[str], Collection[str]]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Outcome:
    """How an update went on a rank."""

    token: str | None = None  # of its engine
    error: str | None = None
    num_sent: int = 0
    to_restore: Sequence[str] | None = None  # tensors whose old values its engine must get; None: they are not known
    moved: Sequence[str] = ()  # merged tensors whose adapters have moved, by this rank's part of them
    has_moved_otherwise: bool = False  # what goes without a delta, or what the engine did not hold before for certain
    rounding: Mapping[str, Rounding] = field(default_factory=dict)


class Side:
    """Lives for one sync."""

    def __init__(
        self,
        model: nn.Module,
        *,
        adapter_name: str | None,
        wire_dtype: torch.dtype | None,
        in_place: bool,
        untie: bool,
        rename: Callable[[str], str] | None,
        has_loading: bool,
    ) -> None:
        """has_loading: see Held."""
        self._model, self._adapter_name, self._untie = model, adapter_name, untie
        self._has_loading = has_loading
        self._wire_dtype, self._in_place, self._rename = wire_dtype, in_place, rename
        self.target: Engine | None = None
        self.state = EngineState()  # of this rank's engine; without one, of the first of the others'
        self._states: dict[str, EngineState] = {}  # of all engines, by token
        self._stale: set[str] = set()  # FQNs of what the engines may not hold
        self._written: dict[str, set[str]] = {}  # by their tokens: FQNs of what may have been written since they got it

    def prepare(
        self, engine: object | None, *, full: bool, base_loaded: bool, deadline_s: float, staging_bytes: int
    ) -> Wish:
        """Look at the model and the engine. Raises ValueError for what cannot be synced."""
        self._records = read_model(self._model, adapter_name=self._adapter_name, untie=self._untie)
        if engine is None:
            everything = self._plan("all", self._wire_dtype, ())  # so that it refuses before the others go on
            return Wish(stale=_stale(everything, known_elsewhere(self._model)))
        url = engine.rstrip("/") if isinstance(engine, str) else None
        engine = by_url(engine)
        target = engine_of(engine, in_place=self._in_place, deadline_s=deadline_s, staging_bytes=staging_bytes)
        state = state_of(engine)
        if state.model is None or state.model() is not self._model:
            state.forget(self._model)
        if state.synced and target.fingerprint() != state.fingerprint:
            # Somebody else has written to the engine, or it slept its weights away, or restarted.
            state.needs_full = True
        if target.is_mixture or (not state.synced and not target.is_pristine):
            state.needs_full = True  # what another sender left in it
        self.target, self.state = target, state
        everything = self._plan("all", target.wire_dtype, target.fused_modules)
        return Wish(
            token=state.token,
            url=url,
            full=full or state.needs_full or not (state.synced or base_loaded),
            is_synced=state.synced,
            wire_dtype=target.wire_dtype,
            fused_modules=[list(group) for group in target.fused_modules],
            stale=_stale(everything, [state, *known_elsewhere(self._model)]),
        )

    def plans(self, wishes: Mapping[int, Wish]) -> tuple[Plan, Plan]:
        """Everything, and what is to be sent: the same on all ranks."""
        engines = [wish for wish in wishes.values() if wish.token is not None]
        if not engines:
            if len(wishes) > 1:
                raise ValueError("no rank has an engine: pass it on the rank that is to send, and None on the others")
            nothing = Plan(tasks=(), scope="all", account={})  # a replica whose fellow sends
            return nothing, nothing
        urls = [wish.url for wish in engines if wish.url is not None]
        if len(set(urls)) < len(urls):
            raise ValueError(
                f"several ranks pass the same server ({urls}): pass it on one of them, and None on the others"
            )
        for wish in engines:
            is_own = wish.token == self.state.token and self.target is not None
            self._states[wish.token] = self.state if is_own else state_elsewhere(self._model, wish.token)
        if self.target is None:
            self.state = self._states[engines[0].token]
        dtypes = {wish.wire_dtype for wish in engines if wish.wire_dtype is not None}
        if self._wire_dtype is None and len(dtypes) > 1:
            raise ValueError(f"the engines of this trainer want different dtypes: {dtypes}; pass wire_dtype")
        wire_dtype = next(iter(dtypes), None)
        fused_modules = [group for wish in engines for group in wish.fused_modules]
        everything = self._everything = self._plan("all", wire_dtype, fused_modules)
        stale = self._stale
        is_known = True
        for wish in engines:
            told = [each.stale[wish.token] for each in wishes.values() if wish.token in each.stale]
            # A rank whose part of the model is new cannot tell what the engine holds of it.
            is_known = is_known and (len(told) == len(wishes) or not wish.is_synced)
            stale.update(*(names for names, _ in told))
            self._written[wish.token] = set().union(*(names for _, names in told))
        if any(wish.full for wish in engines) or not is_known:
            return everything, everything
        return everything, self._plan("trained", wire_dtype, fused_modules, stale)

    def _plan(
        self,
        scope: Scope,
        wire_dtype: torch.dtype | None,
        fused_modules: Sequence[Sequence[str]],
        also: Collection[str] = (),
    ) -> Plan:
        return build_plan(
            self._records,
            wire_dtype=self._wire_dtype or wire_dtype or torch.bfloat16,
            scope=scope,
            also=also,
            fused_modules=None if self._in_place else (*FUSED_MODULES, *fused_modules),
            rename=self._rename,
        )

    def check(self, plan: Plan, weight_version: str | None) -> str | None:
        """Raise ValueError if the engine would not take it. Returns the version that it will have."""
        if self.target is None:
            return None
        self.target.check(plan.metadata())
        self.state.num_syncs += 1
        return weight_version if weight_version is not None else str(self.state.num_syncs)

    def update(self, plan: Plan, weights: Timed, version: str) -> None:
        """Bring the weights into the engine and let it go on; without one, take part in the gathers."""
        if self.target is None:
            for name, _ in weights:
                raise AssertionError(f"{name} came to a rank without an engine")
            return
        self.target.pause()
        self.target.update(plan.metadata(), weights, version)
        if weights.num_sent < len(plan.tasks):
            raise RuntimeError(f"the engine took only {weights.num_sent} of {len(plan.tasks)} tensors")

    def resume(self) -> None:
        """After an update that went well."""
        try:
            if self.target is not None:
                self.target.resume()
        except Exception as error:
            raise SyncError(f"the engine holds the new weights, but could not be resumed: {error}") from error

    def outcome(
        self,
        plan: Plan,
        rounding: Mapping[str, Rounding],
        sent: Sequence[ParamMeta],
        base_loaded: bool,
        error: BaseException | None,
    ) -> Outcome:
        """After the update, whether it went well or not. An engine that may hold a mixture is marked first of all."""
        outcome = Outcome(token=None if self.target is None else self.state.token, num_sent=len(sent))
        if error is None:
            outcome.rounding = rounding
            outcome.moved = self.state.moved_adapters(plan, rounding)
            outcome.has_moved_otherwise = (
                (self.state.synced and self.state.needs_full)
                or self.state.moved_copies(plan)
                or any(
                    task.fqn in self._stale for task in plan.tasks if not (task.adapters or task.rows or task.trained)
                )
            )
            return outcome
        outcome.error = str(error) or type(error).__name__
        if isinstance(error, PeerLostError):
            self.state.needs_full = True
        elif not sent:
            outcome.to_restore = ()
        elif self.target is not None:
            knows = (self.state.synced or base_loaded) and not self.state.needs_full
            # Only a finished sync, this one or a restoring one, clears it.
            self.state.needs_full = True
            names = {meta.name for meta in sent}
            units = {task.unit for task in plan.tasks if task.meta.name in names}
            old = [task for task in plan.tasks if task.unit in units]
            written = self._written[self.state.token]
            if knows and None not in [self.state.old_task(task, written) for task in old]:
                outcome.to_restore = [task.meta.name for task in old]
        return outcome

    def restore(
        self,
        outcome: Outcome,
        plan: Plan,
        error: BaseException | None,
        stream_of: Callable[[Plan, bool, Arithmetic], Stream],
    ) -> str:
        """After a failed update of one engine, on all ranks: send it the old values of all that may have been replaced. Says
        what it holds, and lets it go on, unless that is a mixture.

        error: of this rank's update, if it is this rank's engine. stream_of: a pass over a plan that this rank receives, or
        only takes part in, computed as the old ones were.
        """
        is_own = self.target is not None and outcome.token == self.state.token
        if isinstance(error, PeerLostError):
            return "the engine does not answer any more: start it anew, the next sync will be a full one"
        mixture = "it must get a full sync, as the next one will be; until then it stays paused, if it was"
        if outcome.to_restore is None:
            return f"the engine may hold a mixture of old and new weights: {mixture}"
        if outcome.to_restore:
            state = self._states[outcome.token]
            names = set(outcome.to_restore)
            written = self._written[outcome.token]
            old = [state.old_task(task, written) for task in plan.tasks if task.meta.name in names]
            assert None not in old, "a state is the same on all ranks"
            restoring = stream_of(Plan(tasks=tuple(old), scope=plan.scope, account={}), is_own, state.arithmetic)
            try:
                restoring.begin()
                if is_own:
                    self.target.update(restoring.metadata(), restoring, state.weight_version)
                else:
                    next(restoring, None)
            except Exception as failure:
                return f"restoring its old weights failed too ({failure}): {mixture}"
            finally:
                restoring.close()
        if is_own:
            try:
                if outcome.to_restore:
                    self.state.fingerprint, self.state.needs_full = self.target.fingerprint(), False
                self.target.resume()
            except Exception as failure:
                return f"the engine is on its old weights, but could not be resumed ({failure})"
        return (
            "the engine was put back on its old weights" if outcome.to_restore else "the engine holds its old weights"
        )

    def remember(self, outcomes: Mapping[int, Outcome], plan: Plan, version: str, arithmetic: Arithmetic) -> None:
        """What each engine holds now that its update went well."""
        policy = held = None
        for outcome in outcomes.values():
            if outcome.token is not None and outcome.error is None:
                if policy is None:  # one copy for all of them
                    policy, held = Policy.of(plan), Held(self._everything, has_loading=self._has_loading)
                is_own = self.target is not None and outcome.token == self.state.token
                fingerprint = self.target.fingerprint() if is_own else None
                self._states[outcome.token].remember(policy, held, outcome.rounding, version, fingerprint, arithmetic)


def _stale(everything: Plan, states: Sequence[EngineState]) -> dict[str, tuple[set[str], set[str]]]:
    """For a Wish. Of engines that got the model at once one answer serves all."""
    answers: dict[int, tuple[set[str], set[str]]] = {}
    for state in states:
        if state.held is not None and id(state.held) not in answers:
            written = state.held.written(everything)
            answers[id(state.held)] = state.held.stale(everything, written), written
    return {state.token: answers[id(state.held)] for state in states if state.held is not None}
