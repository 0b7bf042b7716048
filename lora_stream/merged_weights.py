"""The stream: one pass over a model's merged weights as a generator, which owns order and lifetime.

    for name, tensor in lora_stream.stream(model): ...

A yielded tensor belongs to the consumer: it is contiguous, shares no storage with the model and is never written again.
The live model is only read. Merging goes batch by batch, into memory that a *staging* gives: fresh tensors, of which at most
one bucket, or one larger tensor, is alive on this side (two on a device, which merges one while the other is consumed), or
the slots of a ring that another process reads.

Of a sharded model every rank iterates, and gathers its buckets with the others, see gathering.py. A pass that ends early goes
on taking part, so that nobody waits for it; one that fails tells the others.
"""

import contextlib
import hashlib
import inspect
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import nn

from lora_stream import fsdp1, ops, shards
from lora_stream.fidelity import Rounding, warn_if_low
from lora_stream.filling import Batch, Filling, Part, queue_of
from lora_stream.gathering import Gathering, needs_gather, uninterrupted
from lora_stream.merging import NEAREST, Arithmetic, Traffic
from lora_stream.peft import read_model
from lora_stream.plan import FUSED_MODULES, ParamMeta, Plan, Scope, Task, build_plan, listed
from lora_stream.rounding import RoundingMode
from lora_stream.shards import RankError, Ranks

logger = logging.getLogger("lora_stream")

BUCKET_BYTES = 64 * 1024 * 1024
# A device merges a bucket of the size above faster than Python prepares the next one.
DEVICE_BUCKET_BYTES = 256 * 1024 * 1024

Gather = Literal["all", "sender"]


@dataclass(kw_only=True)
class PassStats:
    """What one pass did, filled while it runs."""

    seconds_merge: float = 0.0
    peak_staging_bytes: int = 0
    sent: list[ParamMeta] = field(default_factory=list)
    rounding: dict[str, Rounding] = field(default_factory=dict)  # by checkpoint name
    traffic: Traffic = field(default_factory=Traffic)
    is_lost: bool = False  # a gather failed: the ranks are no more where they should be


class Staging(Protocol):
    """Where a pass puts its tensors."""

    num_bytes: int  # of memory that it holds for good; 0 where every batch gets its own
    seconds_waited: float  # for room, in this pass

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """The plan in parts, in order. The next batch may be asked for before the last one is full."""


class FreshStaging:
    """New tensors, a bucket at a time; each belongs to who takes it."""

    def __init__(self, bucket_bytes: int | None = None, device: torch.device | None = None) -> None:
        """device: where they are; None: where their base lies."""
        self._bucket_bytes = bucket_bytes
        self._device = device
        self.num_bytes = 0
        self.seconds_waited = 0.0

    def batches(self, plan: Plan) -> Iterator[Batch]:
        for bucket in plan.buckets(bucket_bytes_for(plan, self._bucket_bytes)):
            if any(map(needs_gather, bucket)):
                # They lie in a gathered bucket already: no more than one of them at a time shall be there twice.
                for task in bucket:
                    yield Batch([self._part(task)], announce=_nothing)
            else:
                # No name for the list: the tensors are held by who takes them alone.
                yield Batch([self._part(task) for task in bucket], announce=_nothing)

    def _part(self, task: Task) -> Part:
        device = task.base.device if self._device is None else self._device
        out = torch.empty(task.meta.shape, dtype=task.meta.dtype, device=device)
        return Part(task, 0, out.numel(), out)


def bucket_bytes_for(plan: Plan, bucket_bytes: int | None) -> int:
    if bucket_bytes is not None:
        return bucket_bytes
    return DEVICE_BUCKET_BYTES if _is_on_device(plan) else BUCKET_BYTES


class MergedWeights:
    """The merged weights of a model under checkpoint names; each ``iter()`` is a fresh pass.

    model: a PEFT model or a plain module, wrappers at any depth; sharded by FSDP2 or FSDP1, on all ranks.
    wire_dtype: dtype of floating-point tensors as yielded; None keeps each as the parameter is.
    scope: "all", or "trained": merged targets and whatever else trains, closed over what vLLM stacks with them.
    adapter_name: the adapter to merge; None merges the active ones, summed.
    onload, offload: called before the first tensor and once after the last, on every way out. Where they take an argument
        it is the list of the parameters that are read: in the trained scope the rest stays where it is, and what is
        sharded comes and goes bucket by bucket. A model that lies on the host needs neither: it is merged there.
    bucket_bytes: how much is merged ahead of the consumer, and gathered at once; None takes BUCKET_BYTES, or
        DEVICE_BUCKET_BYTES on a device. Memory above the model: two buckets and the largest tensor.
    device: where the yielded tensors are; None: where they were made, which is where the base lies.
    precision: of the product on CUDA devices, see ops.merge_cast_.
    rounding: of merged weights to the wire dtype, "nearest" or "dither", see rounding.py. A pass that rounds to nearest warns
        where less than nine tenths of the update arrive.
    seed: of dithering: which random numbers. With one seed, the same policy gives the same weights.
    fidelity: whether to sum up on CUDA devices too how much of the update arrives; None: on the host only.
    untie: yield both of two tensors that are tied in the model's checkpoints (embedding and head), for an engine that was
        started untied; without it one of them, and a tie that adapters have broken is refused.
    rename: of checkpoint names, for a consumer that has its own.
    check_finite: raise for a tensor with a NaN or an infinity, merged or copied, before a tensor of its batch is yielded.
    fused_modules: names of modules that the engine stacks into one, see plan.py.
    gather: of a sharded model: "all" yields every tensor on every rank; "sender" on those that send them on, the others
        take part, get nothing and never hold a whole tensor.
    is_sender: whether this rank is one; None: the first rank is. There may be several.

    Raises ValueError at once for a model that cannot be merged right, naming the tensor and what to do; of a sharded model
    on all ranks, there when they begin a pass. A pass raises RankError where the ranks disagree or one is lost.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: torch.dtype | None = torch.bfloat16,
        scope: Scope = "all",
        adapter_name: str | None = None,
        onload: Callable[..., object] | None = None,
        offload: Callable[..., object] | None = None,
        bucket_bytes: int | None = None,
        device: torch.device | str | None = None,
        precision: ops.Precision = "float32",
        rounding: RoundingMode = "nearest",
        seed: int = 0,
        fidelity: bool | None = None,
        untie: bool = False,
        rename: Callable[[str], str] | None = None,
        check_finite: bool = True,
        fused_modules: Sequence[Sequence[str]] = FUSED_MODULES,
        gather: Gather = "all",
        is_sender: bool | None = None,
    ) -> None:
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        if gather not in ("all", "sender"):
            raise ValueError(f'gather must be "all" or "sender", got {gather!r}')
        self._arithmetic = Arithmetic(precision=precision, rounding=rounding, seed=seed, fidelity=fidelity)
        self._model = model
        self._wire_dtype = wire_dtype
        self._scope: Scope = scope
        self._adapter_name = adapter_name
        self._onload = onload
        self._offload = offload
        self._bucket_bytes = bucket_bytes
        self._device = None if device is None else torch.device(device)
        self._untie, self._rename = untie, rename
        self._check_finite = check_finite
        self._fused_modules = fused_modules
        self._gather: Gather = gather
        self._is_sender = is_sender
        self.plan, self._ranks = self._build_plan()

    def _build_plan(self) -> tuple[Plan, Ranks]:
        ranks = ranks_of(self._model)
        try:
            plan = build_plan(
                read_model(self._model, adapter_name=self._adapter_name, untie=self._untie),
                wire_dtype=self._wire_dtype,
                scope=self._scope,
                fused_modules=self._fused_modules,
                rename=self._rename,
            )
        except BaseException as error:
            refuse(ranks, error)
            raise
        return plan, ranks

    def metadata(self) -> list[ParamMeta]:
        """What iteration yields, element for element: name, wire dtype, full shape. No communication."""
        return self.plan.metadata()

    def __len__(self) -> int:
        return len(self.plan.tasks)

    def __iter__(self) -> "Stream":
        """A fresh pass over the weights as they are now.

        Raises ValueError if the model would now yield other names, dtypes or shapes than ``metadata()`` said.
        """
        return self.stream_into(FreshStaging(self._bucket_bytes, self._device))

    def stream_into(self, staging: "Staging") -> "Stream":
        """A fresh pass that puts its tensors where `staging` says; otherwise as ``iter()``."""
        plan, ranks = self._build_plan()  # afresh: scalings and active adapters are read when a pass begins
        if plan.metadata() != self.metadata():
            error = ValueError("the model's adapters or parameters have changed since; make a new MergedWeights")
            refuse(ranks, error)
            raise error
        self.plan = plan
        return self._stream(plan, ranks, staging)

    def first_pass(self) -> "Stream":
        """A pass over the weights as they were when this was made, at once."""
        return self._stream(self.plan, self._ranks, FreshStaging(self._bucket_bytes, self._device))

    def _stream(self, plan: Plan, ranks: Ranks, staging: "Staging") -> "Stream":
        is_sender = ranks.is_first if self._is_sender is None else self._is_sender
        return Stream(
            plan,
            model=self._model,
            ranks=ranks,
            receives=self._gather == "all" or is_sender,
            onload=self._onload,
            offload=self._offload,
            staging=staging,
            bucket_bytes=self._bucket_bytes,
            arithmetic=self._arithmetic,
            check_finite=self._check_finite,
        )


def ranks_of(model: nn.Module) -> Ranks:
    """Who holds parts of the model."""
    return shards.all_ranks() if fsdp1.is_used_in(model) else shards.ranks_of(model)


def refuse(ranks: Ranks, error: BaseException) -> None:
    """Tell the other ranks, which begin a pass, that this one cannot."""
    if not ranks.is_alone:
        logger.error("rank %d cannot stream, and tells the other ranks: %s", ranks.rank, error)
        ranks.refuse(error, _BEGIN)


_BEGIN = "begin to stream the model"


def stream(
    model: nn.Module,
    *,
    wire_dtype: torch.dtype | None = torch.bfloat16,
    scope: Scope = "all",
    adapter_name: str | None = None,
    onload: Callable[..., object] | None = None,
    offload: Callable[..., object] | None = None,
    bucket_bytes: int | None = None,
    device: torch.device | str | None = None,
    precision: ops.Precision = "float32",
    rounding: RoundingMode = "nearest",
    seed: int = 0,
    fidelity: bool | None = None,
    untie: bool = False,
    rename: Callable[[str], str] | None = None,
    check_finite: bool = True,
    gather: Gather = "all",
    is_sender: bool | None = None,
) -> "Stream":
    """One pass over the model's merged weights: an iterator of ``(checkpoint name, tensor)`` and a context manager.

    The arguments are those of MergedWeights, and so are the errors. Of a sharded model every rank calls it and reads it, or
    closes it once it has begun; the others go on without a rank that stops.
    """
    return MergedWeights(
        model,
        wire_dtype=wire_dtype,
        scope=scope,
        adapter_name=adapter_name,
        onload=onload,
        offload=offload,
        bucket_bytes=bucket_bytes,
        device=device,
        precision=precision,
        rounding=rounding,
        seed=seed,
        fidelity=fidelity,
        untie=untie,
        rename=rename,
        check_finite=check_finite,
        gather=gather,
        is_sender=is_sender,
    ).first_pass()


class Stream:
    """One pass. ``offload`` runs exactly once, however the pass ends: exhausted, closed, dropped, or by an error.

    With a staging of its own, what is yielded is that staging's memory. Of a sharded model a pass that has begun takes part
    in all its gathers, however it ends.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        model: nn.Module | None = None,
        ranks: Ranks | None = None,
        receives: bool = True,
        onload: Callable[..., object] | None = None,
        offload: Callable[..., object] | None = None,
        staging: Staging | None = None,
        bucket_bytes: int | None = None,
        arithmetic: Arithmetic = NEAREST,
        check_finite: bool = True,
        warns: bool = True,
    ) -> None:
        """model: whose tensors the plan reads; a pass raises where they are its no more. None: they are nobody's else.
        ranks: who goes through this pass together; receives: whether this rank is to get the tensors; warns: of what rounding
        loses, at the end."""
        self.plan = plan
        self.stats = PassStats()
        self._has_begun = False
        self.is_agreed = False
        # No reference from the generator back to self: a dropped Stream must close it at once, not at the next
        # collection of cycles.
        self._generator = _generate(
            plan,
            Ranks([]) if ranks is None else ranks,
            receives,
            onload,
            offload,
            FreshStaging() if staging is None else staging,
            bucket_bytes_for(plan, bucket_bytes),
            arithmetic,
            check_finite,
            warns,
            self.stats,
            _Objects(model, plan),
            _Versions(plan),
            _Ready(plan),
        )
        # A generator that was never started skips its `finally`; so start it here, up to a first empty yield.
        next(self._generator)

    def metadata(self) -> list[ParamMeta]:
        return self.plan.metadata()

    def begin(self) -> None:
        """Agree with the other ranks on the pass now, and not at the first tensor. Raises on all of them if one cannot."""
        if not self._has_begun:
            self._has_begun = True
            next(self._generator)
            self.is_agreed = True

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        self.begin()
        return next(self._generator)

    def close(self) -> None:
        self._generator.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _generate(
    plan: Plan,
    ranks: Ranks,
    receives: bool,
    onload: Callable[..., object] | None,
    offload: Callable[..., object] | None,
    staging: Staging,
    bucket_bytes: int,
    arithmetic: Arithmetic,
    check_finite: bool,
    warns: bool,
    stats: PassStats,
    objects: "_Objects",
    versions: "_Versions",
    ready: "_Ready",
) -> Iterator[tuple[str, torch.Tensor]]:
    # No context manager may be open at a yield: a no_grad() would hold in the consumer until it asks again.
    loading = _Loading(onload, offload, plan)
    batches = staging.batches(plan)
    filling: deque[Filling] = deque()
    gathering: Gathering | None = None
    tells = False
    scales: dict[str, torch.Tensor] = {}
    try:
        yield  # type: ignore[misc]  # Stream.__init__ stops here
        with uninterrupted():  # an interrupt after they agreed would leave the others in the first gather
            gathering, tells = _agree(plan, ranks, receives, bucket_bytes, arithmetic, stats.traffic, loading)
        yield  # type: ignore[misc]  # Stream.begin stops here
        objects.check()
        versions.check()
        if onload is not None:
            loading.begin()
            versions, ready = _Versions(plan), _Ready(plan)
        # A device merges one batch while the one before is consumed; the host does one thing at a time.
        ahead = 1 if _is_on_device(plan) else 0
        has_more = receives
        while has_more or filling:
            if has_more and len(filling) <= ahead:
                has_more = (batch := _next_batch(batches)) is not None
                if batch is not None:
                    versions.check()
                    ready.wait()
                    begin = time.perf_counter()
                    filling.append(
                        Filling(
                            batch,
                            arithmetic=arithmetic,
                            gathering=gathering,
                            traffic=stats.traffic,
                            scales=scales,
                            check_finite=check_finite,
                        )
                    )
                    del batch  # the tensors are held by who takes them alone
                    alive = sum(each.num_bytes for each in filling) + (gathering.num_bytes if gathering else 0)
                    stats.peak_staging_bytes = max(stats.peak_staging_bytes, staging.num_bytes, alive)
                    stats.seconds_merge += time.perf_counter() - begin
                continue
            begin = time.perf_counter()
            for name, rounding, is_first in filling[0].wait():
                stats.rounding[name] = rounding if is_first else stats.rounding[name] + rounding
            stats.seconds_merge += time.perf_counter() - begin
            parts = filling[0].parts
            while parts:
                if not parts[0].is_last:
                    parts.popleft()
                    continue
                filling[0].hand_over(parts[0].out)
                stats.sent.append(parts[0].task.meta)
                yield parts[0].task.meta.name, parts.popleft().out  # held nowhere else: dropping it is the release
            filling.popleft().announce()
        if gathering is not None:  # a rank that gets nothing
            versions.check()
            ready.wait()
            gathering.finish()
        objects.check()
        if tells and warns and arithmetic.rounding == "nearest":
            warn_if_low(stats.rounding)
    except GeneratorExit:
        raise  # the consumer wants no more; the others get theirs
    except BaseException as error:
        if gathering is not None:
            gathering.fail(error)
        raise
    finally:
        try:
            for late in filling:
                late.settle()  # before its memory is used for something else
            batches.close()  # type: ignore[attr-defined]
            if gathering is not None:
                gathering.drain()
        finally:
            stats.is_lost = gathering is not None and gathering.is_lost
            loading.end()


def _agree(
    plan: Plan,
    ranks: Ranks,
    receives: bool,
    bucket_bytes: int,
    arithmetic: Arithmetic,
    traffic: Traffic,
    loading: "_Loading",
) -> tuple[Gathering | None, bool]:
    """Make sure that all ranks go through the same pass. Returns its gathers, None where there are none, and whether this rank is
    the one to tell what all that get the tensors know."""
    lines = [*map(_describe, plan.tasks), f"buckets of {bucket_bytes} bytes", arithmetic.describe()]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    found = ranks.agree(lambda: (digest, receives), _BEGIN)
    if any(other != digest for other, _ in found.values()):
        _raise_difference(ranks, lines)
    receivers = {rank for rank, (_, gets) in found.items() if gets}
    if not receivers and not ranks.is_alone:
        raise ValueError("no rank is to get the tensors: pass is_sender=True on the ranks that send them on")
    tells = ranks.rank == min(receivers, default=None)
    if not any(map(needs_gather, plan.tasks)):
        return None, tells
    gathering = Gathering(
        plan,
        bucket_bytes=bucket_bytes,
        receivers=receivers,
        receives=receives,
        arithmetic=arithmetic,
        traffic=traffic,
        loaded=loading.bucket,
    )
    return gathering, tells


def _describe(task: Task) -> str:
    """All of a task that must be equal on all ranks."""
    parts = [f"{task.fqn} as {task.meta}", shards.describe(task.base), str(task.base.dtype)]
    for a in task.adapters:
        parts.append(f"adapter {a.name} times {a.scaling}")
        parts += [f"{tuple(each.shape)} {each.dtype} {shards.describe(each)}" for each in a.tensors()]
    for rows in task.rows:
        parts.append(f"rows {rows.indices} of adapter {rows.name}, {rows.values.dtype} {shards.describe(rows.values)}")
    return ", ".join(parts)


def _raise_difference(ranks: Ranks, lines: list[str]) -> None:
    found = ranks.exchange(lines, "compare their plans")
    (first_rank, first), *others = found.items()
    for rank, other in others:
        for i in range(max(len(first), len(other))):
            one, two = (each[i] if i < len(each) else "nothing" for each in (first, other))
            if one != two:
                raise RankError(
                    f"the ranks would stream different things: rank {first_rank} has {one}; rank {rank} has {two}. All must "
                    "hold the same model, adapters and scalings, and call with the same arguments"
                )


class _Loading:
    """A caller's onload and offload, in pairs."""

    def __init__(self, onload: Callable[..., object] | None, offload: Callable[..., object] | None, plan: Plan) -> None:
        self._onload, self._offload = onload, offload
        # Without an onload it was the caller who loaded all, before the pass: its end is to undo that.
        self._must_offload = onload is None
        self._by_bucket = onload is not None and any(map(_takes_argument, filter(None, (onload, offload))))
        tasks = [task for task in plan.tasks if not (self._by_bucket and needs_gather(task))]
        self._tensors = replace(plan, tasks=tuple(tasks)).tensors()

    def begin(self) -> None:
        """Before the first tensor: all, or what does not come by bucket."""
        if self._onload is not None and (self._tensors or not self._by_bucket):
            self._must_offload = True  # first: an onload that fails halfway is undone as well
            _call(self._onload, self._tensors)

    def end(self) -> None:
        if self._must_offload:
            self._must_offload = False
            _call(self._offload, self._tensors)

    @contextlib.contextmanager
    def bucket(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """While a bucket of sharded tensors is read."""
        if not self._by_bucket:
            yield
            return
        try:
            _call(self._onload, tensors)
            yield
        finally:
            _call(self._offload, tensors)


def _call(load: Callable[..., object] | None, tensors: Sequence[torch.Tensor]) -> None:
    if load is None:
        return
    name = getattr(load, "__name__", "loading")
    logger.debug("before %s: %s", name, _memory())
    if _takes_argument(load):
        load(list({id(held): held for held in map(fsdp1.storage_of, tensors)}.values()))
    else:
        load()
    logger.debug("after %s: %s", name, _memory())


def _takes_argument(load: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(load).parameters.values()
    except ValueError:  # a builtin that does not tell
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in positional and each.default is each.empty for each in parameters)


def _memory() -> str:
    """Of this process now, for logs."""
    if not logger.isEnabledFor(logging.DEBUG):
        return ""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = [f"{pages * os.sysconf('SC_PAGE_SIZE') >> 20} MiB resident"]
    if (accelerator := torch.accelerator.current_accelerator()) is not None and torch.accelerator.is_available():
        found.append(f"{torch.accelerator.memory_allocated() >> 20} MiB allocated on {accelerator.type}")
    return ", ".join(found)


def _is_on_device(plan: Plan) -> bool:
    return any(queue_of(task.base.device) is not None for task in plan.tasks)


def _nothing() -> None:
    pass


class _Ready:
    """Orders the pass after the work that made the weights, on devices that work in streams of their own.

    Recorded when the pass is requested: the generator's body first runs under the consumer's stream, where an event
    would no longer be ordered after the optimizer's step.
    """

    def __init__(self, plan: Plan) -> None:
        self._events = {}
        for device in {tensor.device for tensor in plan.tensors()}:
            if (queue := queue_of(device)) is not None:
                self._events[device] = queue.record_event()
        # What is offloaded into pinned memory may still be on its way there, by a copy that the host did not wait for.
        self._arrival: torch.Event | None = None
        if any(_is_pinned(tensor) for tensor in plan.tensors()):
            self._arrival = torch.accelerator.current_stream().record_event()

    def wait(self) -> None:
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None
        for device, event in self._events.items():
            queue_of(device).wait_event(event)


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and shards.local(fsdp1.stepped(tensor)).is_pinned()


class _Objects:
    """Notices that the model computes with other tensors than a pass reads: one was replaced, by setattr, load_state_dict with
    assign, or by a merge of PEFT's."""

    def __init__(self, model: nn.Module | None, plan: Plan) -> None:
        self._model = None if model is None else weakref.ref(model)
        live = set() if model is None else fsdp1.live_tensors(model)
        read = (
            (id(fsdp1.stepped(each)), task.fqn)
            for task in plan.tasks
            for each in task.tensors()
            if fsdp1.keeps_object(each)
        )
        self._read = {
            each: fqn for each, fqn in read if each in live
        }  # not what was computed for the plan: lora_bias's sum

    def check(self) -> None:
        model = None if self._model is None else self._model()
        if model is None:
            return
        if replaced := self._read.keys() - fsdp1.live_tensors(model):
            fqns = [self._read[each] for each in self._read if each in replaced]
            raise RuntimeError(
                f"{listed(list(dict.fromkeys(fqns)))}: a tensor of it was replaced since the stream was made, which reads the "
                "one that it found then; make a new one"
            )


class _Versions:
    """Notices that a pass would mix two states of the weights: an optimizer step bumps `_version`."""

    def __init__(self, plan: Plan) -> None:
        # Each once: all experts of a layer share their tensors. Those made in inference mode count no versions.
        owners = {id(each): (task.fqn, each) for task in plan.tasks for each in map(fsdp1.stepped, task.tensors())}
        self._seen = [(fqn, each, each._version) for fqn, each in owners.values() if not each.is_inference()]

    def check(self) -> None:
        for fqn, tensor, version in self._seen:
            if tensor._version != version:
                raise RuntimeError(
                    f"{fqn}: the weights were written to (an optimizer step?) while they were streamed, so the pass would "
                    "mix two policies; finish or close the stream before the next step"
                )


def _next_batch(batches: Iterator[Batch]) -> Batch | None:
    # The consumer may be in inference mode; what it gets must be an ordinary tensor all the same.
    with torch.inference_mode(False):
        return next(batches, None)
