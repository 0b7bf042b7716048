"""The drop-in call: bring an engine to the model's present policy, and prove it.

    lora_stream.sync(model, engine)     after every optimizer step

The engine ends on the new policy, or on the one it had, or marked so that the next sync sends everything; never on a
mixture that is taken for good.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from lora_stream.engine_side import Outcome, Side, SyncError, Timed
from lora_stream.engines import STAGING_BYTES
from lora_stream.merged_weights import Stream, logger, ranks_of
from lora_stream.merging import Arithmetic
from lora_stream.ops import Precision
from lora_stream.plan import ParamMeta, Plan
from lora_stream.report import SyncReport
from lora_stream.ring import DEADLINE_S
from lora_stream.rounding import RoundingMode
from lora_stream.shards import RankError, Ranks
from lora_stream.vllm.channel import RefusedError


class UnmovedError(RuntimeError):
    """The adapter has moved, and the sync has changed nothing. `report` tells what was sent."""

    def __init__(self, message: str, report: SyncReport) -> None:
        super().__init__(message)
        self.report = report


def sync(
    model: nn.Module,
    engine: object | None,
    *,
    full: bool = False,
    base_loaded: bool = False,
    wire_dtype: torch.dtype | None = None,
    adapter_name: str | None = None,
    onload: Callable[..., object] | None = None,
    offload: Callable[..., object] | None = None,
    precision: Precision = "float32",
    rounding: RoundingMode = "dither",
    seed: int = 0,
    fidelity: bool | None = None,
    untie: bool = False,
    rename: Callable[[str], str] | None = None,
    check_finite: bool = True,
    weight_version: str | None = None,
    allow_unmoved: bool = False,
    in_place: bool = False,
    deadline_s: float = DEADLINE_S,
    staging_bytes: int = STAGING_BYTES,
    bucket_bytes: int | None = None,
    on_tensor: Callable[[ParamMeta, Plan], object] | None = None,
) -> SyncReport:
    """Send the model's merged weights to the engine. Of a sharded model every rank calls it, see engine.

    engine: a ``vllm.LLM``, in this process or with its engine core in others; the URL of a vLLM server on this host, or a
        ``ServerClient``; a Ray actor that wraps an engine on this host, or a ``RayClient`` of several; a client of
        your own with vLLM's four weight-transfer calls; any object with ``load_weights(iterable of (name, tensor))``.
        Except for an LLM in this process, vLLM must run with ``weight_transfer_config={"backend": "lora_stream"}``.
        None on the ranks of a sharded trainer that have none: they take part in the gathers and never hold a whole
        tensor. Several ranks may have one each. All ranks end with a report, or all raise where an engine failed.
    full: send every tensor. Without it the first sync to an engine sends everything, unless base_loaded says that the
        engine was started on the very base weights of the model; later ones send what trains ("trained" scope).
        base_loaded does not count for an engine that says that somebody has sent it weights since.
    wire_dtype: None takes the engine's dtype, or bfloat16 where it has no wish.
    adapter_name, onload, offload, precision, fidelity, untie, rename, check_finite: as in ``stream``.
    rounding, seed: as in ``stream``; a sync dithers, because a rollout engine is to follow every step of its trainer. The
        checkpoint that a merge writes is rounded to nearest: pass "nearest" to have an engine that is equal to it.
    weight_version: what the engine reports with its outputs from now on; None counts syncs.
    allow_unmoved: do not raise when an adapter that has moved changes nothing after rounding.
    in_place: write exactly the touched tensors where the engine keeps them, without vLLM's reload and without the siblings
        that it wants: faster, and refused where the engine keeps weights in any other form than they are loaded.
    deadline_s: the longest silence of an engine in other processes, in seconds, before the sync fails.
    staging_bytes: shared memory to such an engine, held from the first sync on for as long as the engine's object, or
        this process for a URL.
    bucket_bytes: what a sharded trainer gathers at once, as in ``stream``.
    on_tensor: called with each tensor's meta and the plan when the engine asks for it (progress bars).

    Raises ValueError before anything is sent for what cannot be merged or loaded, SyncError when loading failed (its
    text says what the engine holds now), UnmovedError when the sync changed nothing though the adapter has moved, RankError
    where the ranks disagree or one is lost.
    """
    begin = time.perf_counter()
    arithmetic = Arithmetic(precision=precision, rounding=rounding, seed=seed, fidelity=fidelity)
    side = Side(
        model,
        adapter_name=adapter_name,
        wire_dtype=wire_dtype,
        in_place=in_place,
        untie=untie,
        rename=rename,
        has_loading=onload is not None or offload is not None,
    )
    prepare = partial(
        side.prepare, engine, full=full, base_loaded=base_loaded, deadline_s=deadline_s, staging_bytes=staging_bytes
    )
    ranks = ranks_of(model)
    wishes = ranks.agree(prepare, "prepare the sync")
    everything, plan = side.plans(wishes)
    seconds_plan = time.perf_counter() - begin
    versions = ranks.agree(lambda: side.check(plan, weight_version), "check the sync")
    version = next((found for found in versions.values() if found is not None), "")
    seconds_check = time.perf_counter() - begin - seconds_plan

    def stream_of(plan: Plan, receives: bool, arithmetic: Arithmetic, model: nn.Module | None = None) -> Stream:
        return Stream(
            plan,
            model=model,
            ranks=ranks,
            receives=receives,
            onload=onload,
            offload=offload,
            staging=None if side.target is None else side.target.staging,
            bucket_bytes=bucket_bytes,
            arithmetic=arithmetic,
            check_finite=check_finite,
        )

    begin_update = time.perf_counter()
    stream = stream_of(plan, side.target is not None, arithmetic, model)
    timed = Timed(stream, on_tensor)
    error: BaseException | None = None
    try:
        stream.begin()
        side.update(plan, timed, version)
    except BaseException as caught:
        if not stream.is_agreed:
            raise  # on all ranks; the engine knows nothing of it
        error = caught
    finally:
        stream.close()
    stats = stream.stats
    own = side.outcome(plan, stats.rounding, stats.sent, base_loaded, error)
    outcomes, lost = _tell(ranks, own, stats.is_lost)
    failures = {
        rank: f"sync failed at tensor {outcome.num_sent} of {len(plan.tasks)}: {outcome.error}; "
        + side.restore(outcome, plan, error if rank == ranks.rank else None, stream_of)
        for rank, outcome in outcomes.items()
        if outcome.error is not None and outcome.token is not None
    }
    if error is None:
        side.resume()
    seconds_waited = 0.0 if side.target is None else side.target.staging.seconds_waited
    seconds_update = time.perf_counter() - begin_update
    roundings = next((each.rounding for each in outcomes.values() if each.token is not None and each.error is None), {})
    moved = {name for outcome in outcomes.values() for name in outcome.moved}
    moved_names = [task.meta.name for task in plan.tasks if task.meta.name in moved]
    unmoved = tuple(name for name in moved_names if name in roundings and side.state.is_unmoved(name, roundings[name]))
    is_silent = (
        moved_names and len(unmoved) == len(moved_names) and not any(o.has_moved_otherwise for o in outcomes.values())
    )
    side.remember(outcomes, plan, version, arithmetic)
    _raise_failures(failures, ranks, error)
    if lost is not None:
        raise RankError(f"the sync went well on this rank, but of the others that is not known: {lost}") from lost
    report = SyncReport(
        weight_version=version,
        scope=plan.scope,
        rounding_mode=rounding,
        seed=seed,
        merged=plan.names("merged"),
        copied=plan.names("copied"),
        left=plan.names("left"),
        consumed=plan.names("consumed"),
        account=plan.account,
        num_bytes=plan.num_bytes,
        num_bytes_left=everything.num_bytes - plan.num_bytes,
        num_bytes_gathered=stats.traffic.gathered,
        num_bytes_crossed=stats.traffic.crossed,
        made_on=dict(stats.traffic.made_on),
        peak_staging_bytes=stats.peak_staging_bytes,
        seconds={
            "plan": seconds_plan,
            "check": seconds_check,
            "merge": stats.seconds_merge,
            "transfer": timed.seconds - stats.seconds_merge - seconds_waited,
            "engine": seconds_update - timed.seconds + seconds_waited,
            "total": time.perf_counter() - begin,
        },
        seconds_loading=None if side.target is None else side.target.seconds_loading,
        rounding=roundings,
        unmoved_targets=unmoved,
    )
    logger.info("weight version %s: %s", version, report.line())
    if is_silent and not allow_unmoved:
        raise UnmovedError(
            f"the adapter has moved but none of the {len(unmoved)} targets has: every update was smaller than a rounding "
            f"step of {plan.tasks[0].meta.dtype}, or the engine was sent what it had; check the learning rate and "
            f"the adapter's name, {'' if rounding == 'dither' else 'round by dither, '}use a wider wire_dtype, or pass "
            "allow_unmoved=True",
            report,
        )
    return report


def _tell(ranks: Ranks, own: Outcome, is_lost: bool) -> tuple[dict[int, Outcome], RankError | None]:
    """Everybody's outcome; only this rank's where others are lost, and why. Nothing can be restored with those."""
    try:
        if not is_lost:
            return ranks.exchange(own, "tell how the sync went"), None
        lost = None  # the update's own error tells
    except RankError as error:
        lost = error
    if own.num_sent:
        own.to_restore = None
    return {ranks.rank: own}, lost


def _raise_failures(failures: dict[int, str], ranks: Ranks, error: BaseException | None) -> None:
    """Of this rank its own error, of the others what they tell."""
    if isinstance(error, RefusedError) or (error is not None and not isinstance(error, Exception)):
        raise error
    if ranks.rank in failures:
        raise SyncError(failures[ranks.rank]) from error
    if error is not None:
        raise error
    for rank, text in failures.items():
        raise SyncError(f"on rank {rank}: {text}")
