"""The drop-in call: bring an engine to the model's present policy, and prove it.

    lora_stream.sync(model, engine)     after every optimizer step

The engine ends on the new policy, or on the one it had, or marked so that the next sync sends everything; never on a
mixture that is taken for good.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from lora_stream.engine_state import EngineState, state_of
from lora_stream.engines import STAGING_BYTES, Engine, by_url, engine_of
from lora_stream.merged_weights import Stream
from lora_stream.ops import Precision, is_fast
from lora_stream.peft import read_model
from lora_stream.plan import FUSED_MODULES, ParamMeta, Plan, Scope, build_plan, fused_unit
from lora_stream.report import SyncReport
from lora_stream.ring import DEADLINE_S, PeerLostError
from lora_stream.vllm.channel import RefusedError


class SyncError(RuntimeError):
    """A sync failed after the engine began to load. The text says which weights the engine now holds."""


class UnmovedError(RuntimeError):
    """The adapter has moved, and the sync has changed nothing. `report` tells what was sent."""

    def __init__(self, message: str, report: SyncReport) -> None:
        super().__init__(message)
        self.report = report


def sync(
    model: nn.Module,
    engine: object,
    *,
    full: bool = False,
    base_loaded: bool = False,
    wire_dtype: torch.dtype | None = None,
    adapter_name: str | None = None,
    onload: Callable[..., object] | None = None,
    offload: Callable[..., object] | None = None,
    precision: Precision = "float32",
    weight_version: str | None = None,
    allow_unmoved: bool = False,
    in_place: bool = False,
    deadline_s: float = DEADLINE_S,
    staging_bytes: int = STAGING_BYTES,
    on_tensor: Callable[[ParamMeta, Plan], object] | None = None,
) -> SyncReport:
    """Send the model's merged weights to the engine.

    engine: a ``vllm.LLM``, in this process or with its engine core in others; the URL of a vLLM server on this host, or a
        ``ServerClient``; a Ray actor that wraps an engine on this host, or a ``RayClient`` of several; a client of
        your own with vLLM's four weight-transfer calls; any object with ``load_weights(iterable of (name, tensor))``.
        Except for an LLM in this process, vLLM must run with ``weight_transfer_config={"backend": "lora_stream"}``.
    full: send every tensor. Without it the first sync to an engine sends everything, unless base_loaded says that the
        engine was started on the very base weights of the model; later ones send what trains ("trained" scope).
        base_loaded does not count for an engine that says that somebody has sent it weights since.
    wire_dtype: None takes the engine's dtype, or bfloat16 where it has no wish.
    adapter_name, onload, offload, precision: as in ``stream``.
    weight_version: what the engine reports with its outputs from now on; None counts syncs.
    allow_unmoved: do not raise when an adapter that has moved changes nothing after rounding.
    in_place: write exactly the touched tensors where the engine keeps them, without vLLM's reload and without the siblings
        that it wants: faster, and refused where the engine keeps weights in any other form than they are loaded.
    deadline_s: the longest silence of an engine in other processes, in seconds, before the sync fails.
    staging_bytes: shared memory to such an engine, held from the first sync on for as long as the engine's object, or
        this process for a URL.
    on_tensor: called with each tensor's meta and the plan when the engine asks for it (progress bars).

    Raises ValueError before anything is sent for what cannot be merged or loaded, SyncError when loading failed (its
    text says what the engine holds now), UnmovedError when the sync changed nothing though the adapter has moved.
    """
    begin = time.perf_counter()
    is_fast(precision)  # refuses what is no precision
    engine = by_url(engine)
    target = engine_of(engine, in_place=in_place, deadline_s=deadline_s, staging_bytes=staging_bytes)
    state = state_of(engine)
    if state.model is None or state.model() is not model:
        state.forget(model)
    if state.synced and target.fingerprint() != state.fingerprint:
        state.needs_full = True  # somebody else has written to the engine, or it slept its weights away, or restarted
    if target.is_mixture or (not state.synced and not target.is_pristine):
        state.needs_full = True  # what another sender left in it

    records = read_model(model, adapter_name=adapter_name)
    groups = None if in_place else (*FUSED_MODULES, *target.fused_modules)

    def plan_of(scope: Scope) -> Plan:
        return build_plan(
            records,
            wire_dtype=wire_dtype or target.wire_dtype or torch.bfloat16,
            scope=scope,
            fused_modules=groups,
        )

    everything = plan_of("all")
    plan = everything
    if not full and not state.needs_full and (state.synced or base_loaded):
        trained = plan_of("trained")
        # Another adapter may have other targets: the old ones' weights must go back then, by a full sync.
        if state.covered_by(trained):
            plan = trained
    seconds_plan = time.perf_counter() - begin
    target.check(plan.metadata())
    seconds_check = time.perf_counter() - begin - seconds_plan

    state.num_syncs += 1
    weight_version = weight_version if weight_version is not None else str(state.num_syncs)
    stream = Stream(plan, onload=onload, offload=offload, staging=target.staging, precision=precision)
    timed = _Timed(stream, on_tensor)
    begin_update = time.perf_counter()
    try:
        target.pause()
        target.update(plan.metadata(), timed, weight_version)
        if len(timed.sent) < len(plan.tasks):
            raise RuntimeError(f"the engine took only {len(timed.sent)} of {len(plan.tasks)} tensors")
    except BaseException as error:
        stream.close()
        restored = _restore(target, state, base_loaded, plan, timed.sent, groups, onload, offload, precision, error)
        if isinstance(error, RefusedError) or not isinstance(error, Exception):
            raise
        raise SyncError(f"sync failed at tensor {len(timed.sent)} of {len(plan.tasks)}: {error}; {restored}") from error
    finally:
        stream.close()
    seconds_waited = target.staging.seconds_waited
    _resume(target)
    seconds_update = time.perf_counter() - begin_update

    stats = stream.stats
    moved_names = state.moved_adapters(plan, stats.rounding)
    unmoved = tuple(name for name in moved_names if state.is_unmoved(name, stats.rounding[name]))
    report = SyncReport(
        weight_version=weight_version,
        scope=plan.scope,
        merged=plan.names("merged"),
        copied=plan.names("copied"),
        left=plan.names("left"),
        consumed=plan.names("consumed"),
        num_bytes=plan.num_bytes,
        num_bytes_left=everything.num_bytes - plan.num_bytes,
        peak_staging_bytes=stats.peak_staging_bytes,
        seconds={
            "plan": seconds_plan,
            "check": seconds_check,
            "merge": stats.seconds_merge,
            "transfer": timed.seconds - stats.seconds_merge - seconds_waited,
            "engine": seconds_update - timed.seconds + seconds_waited,
            "total": time.perf_counter() - begin,
        },
        seconds_loading=target.seconds_loading,
        rounding=stats.rounding,
        unmoved_targets=unmoved,
    )
    silent = moved_names and len(unmoved) == len(moved_names) and not state.moved_copies(plan)
    state.remember(plan, stats.rounding, weight_version, target.fingerprint())
    if silent and not allow_unmoved:
        raise UnmovedError(
            f"the adapter has moved but none of the {len(unmoved)} targets has: every update was smaller than a rounding "
            f"step of {plan.tasks[0].meta.dtype}, or the engine was sent what it had; check the learning rate and "
            "the adapter's name, use a wider wire_dtype, or pass allow_unmoved=True",
            report,
        )
    return report


class _Timed:
    """Passes a stream on; knows how long it took and what has gone out."""

    def __init__(self, stream: Stream, on_tensor: Callable[[ParamMeta, Plan], object] | None) -> None:
        self._stream = stream
        self._on_tensor = on_tensor
        self.seconds = 0.0

    @property
    def sent(self) -> list[ParamMeta]:
        return self._stream.stats.sent

    def __iter__(self) -> "_Timed":
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        begin = time.perf_counter()
        try:
            item = next(self._stream)
        finally:
            self.seconds += time.perf_counter() - begin
        if self._on_tensor is not None:
            self._on_tensor(self.sent[-1], self._stream.plan)
        return item


def _restore(
    target: Engine,
    state: EngineState,
    base_loaded: bool,
    plan: Plan,
    sent: Sequence[ParamMeta],
    groups: Sequence[Sequence[str]] | None,
    onload: Callable[..., object] | None,
    offload: Callable[..., object] | None,
    precision: Precision,
    error: BaseException,
) -> str:
    """After a failed update: send the old values of all that may have been replaced. Says what the engine holds, and lets
    it go on, unless that is a mixture."""
    if isinstance(error, PeerLostError):
        state.needs_full = True
        return "the engine does not answer any more: start it anew, the next sync will be a full one"
    if sent:
        known = (state.synced or base_loaded) and not state.needs_full
        # Only a finished sync, this one or a restoring one, clears it.
        state.needs_full = True
        mixture = "it must get a full sync, as the next one will be; until then it stays paused, if it was"
        if not known:
            return f"the engine may hold a mixture of old and new weights: {mixture}"
        units = {fused_unit(meta.name, groups) for meta in sent}
        old = [state.old_task(task) for task in plan.tasks if fused_unit(task.meta.name, groups) in units]
        if None in old:
            return f"the engine may hold a mixture of old and new weights: {mixture}"
        restoring = Stream(
            Plan(tasks=tuple(old), scope=plan.scope, account={}),
            onload=onload,
            offload=offload,
            staging=target.staging,
            precision=precision,
        )
        try:
            target.update(restoring.metadata(), restoring, state.weight_version)
        except Exception as failure:
            return f"restoring its old weights failed too ({failure}): {mixture}"
        finally:
            restoring.close()
        state.needs_full = False
    try:
        target.resume()
    except Exception as failure:
        return f"the engine is on its old weights, but could not be resumed ({failure})"
    return "the engine was put back on its old weights" if sent else "the engine holds its old weights"


def _resume(target: Engine) -> None:
    try:
        target.resume()
    except Exception as error:
        raise SyncError(f"the engine holds the new weights, but could not be resumed: {error}") from error
