"""The stream: one pass over a model's merged weights as a generator, which owns order and lifetime.

    for name, tensor in lora_stream.stream(model): ...

A yielded tensor belongs to the consumer: it is contiguous, shares no storage with the model and is never written again.
The live model is only read. Merging goes batch by batch, into memory that a *staging* gives: fresh tensors, of which at most
one bucket, or one larger tensor, is alive on this side, or the slots of a ring that another process reads.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import nn

from lora_stream import ops
from lora_stream.peft import read_model
from lora_stream.plan import FUSED_MODULES, ParamMeta, Plan, Scope, Task, build_plan

BUCKET_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What rounding to the wire dtype did to one merged tensor, against its base rounded alike."""

    changed: int  # elements with a delta other than zero
    unmoved: int  # of those, elements whose merged value rounds to what the base rounds to
    kept_sq: float  # sum of (round(base + delta) - round(base))**2
    delta_sq: float  # sum of delta**2
    checksum: int  # of the merged values

    def __add__(self, other: "Rounding") -> "Rounding":
        """Of two parts of one tensor."""
        return Rounding(
            changed=self.changed + other.changed,
            unmoved=self.unmoved + other.unmoved,
            kept_sq=self.kept_sq + other.kept_sq,
            delta_sq=self.delta_sq + other.delta_sq,
            checksum=(self.checksum + other.checksum) % 2**32,
        )


@dataclass(kw_only=True)
class PassStats:
    """What one pass did, filled while it runs."""

    seconds_merge: float = 0.0
    peak_staging_bytes: int = 0
    sent: list[ParamMeta] = field(default_factory=list)
    rounding: dict[str, Rounding] = field(default_factory=dict)  # by checkpoint name


class Part(NamedTuple):
    """Elements [begin, end) of a task's flattened tensor, and where they go: `out` has the tensor's shape where the part
    is all of it, [rows, cols] where it is whole rows, and is flat otherwise."""

    task: Task
    begin: int
    end: int
    out: torch.Tensor

    @property
    def is_last(self) -> bool:
        return self.end == self.task.base.numel()


class Staging(Protocol):
    """Where a pass puts its tensors."""

    num_bytes: int  # of memory that it holds now
    seconds_waited: float  # for room, in this pass

    def batches(self, plan: Plan) -> Iterator[Iterable[Part]]:
        """The plan in parts, in order. A batch is filled before the next one is asked for."""


class FreshStaging:
    """New tensors, a bucket at a time; each belongs to who takes it."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes
        self.num_bytes = 0
        self.seconds_waited = 0.0

    def batches(self, plan: Plan) -> Iterator[Iterable[Part]]:
        for bucket in plan.buckets(self._bucket_bytes):
            self.num_bytes = sum(task.meta.num_bytes for task in bucket)
            # No name for the list: the tensors are held by who takes them alone.
            yield [
                Part(
                    task,
                    0,
                    task.base.numel(),
                    torch.empty(task.meta.shape, dtype=task.meta.dtype, device=task.base.device),
                )
                for task in bucket
            ]


class MergedWeights:
    """The merged weights of a model under checkpoint names; each ``iter()`` is a fresh pass.

    model: a PEFT model or a plain module, wrappers at any depth.
    wire_dtype: dtype of floating-point tensors as yielded; None keeps each as the parameter is.
    scope: "all", or "trained": merged targets and whatever else trains, closed over what vLLM stacks with them.
    adapter_name: the adapter to merge; None merges the active ones, summed.
    onload, offload: called without arguments before the first tensor and once after the last, on every way out.
    bucket_bytes: how much is merged ahead of the consumer.
    fused_modules: names of modules that the engine stacks into one, see plan.py.

    Raises ValueError at once for a model that cannot be merged right, naming the tensor and what to do.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: torch.dtype | None = torch.bfloat16,
        scope: Scope = "all",
        adapter_name: str | None = None,
        onload: Callable[[], object] | None = None,
        offload: Callable[[], object] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        fused_modules: Sequence[Sequence[str]] = FUSED_MODULES,
    ) -> None:
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        self._model = model
        self._wire_dtype = wire_dtype
        self._scope: Scope = scope
        self._adapter_name = adapter_name
        self._onload = onload
        self._offload = offload
        self._bucket_bytes = bucket_bytes
        self._fused_modules = fused_modules
        self.plan = self._build_plan()

    def _build_plan(self) -> Plan:
        records = read_model(self._model, adapter_name=self._adapter_name)
        return build_plan(records, wire_dtype=self._wire_dtype, scope=self._scope, fused_modules=self._fused_modules)

    def metadata(self) -> list[ParamMeta]:
        """What iteration yields, element for element: name, wire dtype, full shape. No communication."""
        return self.plan.metadata()

    def __len__(self) -> int:
        return len(self.plan.tasks)

    def __iter__(self) -> "Stream":
        """A fresh pass over the weights as they are now.

        Raises ValueError if the model would now yield other names, dtypes or shapes than ``metadata()`` said.
        """
        return self.stream_into(FreshStaging(self._bucket_bytes))

    def stream_into(self, staging: "Staging") -> "Stream":
        """A fresh pass that puts its tensors where `staging` says; otherwise as ``iter()``."""
        plan = self._build_plan()  # afresh: scalings and active adapters are read when a pass begins
        if plan.metadata() != self.metadata():
            raise ValueError("the model's adapters or parameters have changed since; make a new MergedWeights")
        self.plan = plan
        return Stream(plan, onload=self._onload, offload=self._offload, staging=staging)


def stream(
    model: nn.Module,
    *,
    wire_dtype: torch.dtype | None = torch.bfloat16,
    scope: Scope = "all",
    adapter_name: str | None = None,
    onload: Callable[[], object] | None = None,
    offload: Callable[[], object] | None = None,
) -> "Stream":
    """One pass over the model's merged weights: an iterator of ``(checkpoint name, tensor)`` and a context manager.

    The arguments are those of MergedWeights, and so are the errors.
    """
    weights = MergedWeights(model, wire_dtype=wire_dtype, scope=scope, adapter_name=adapter_name)
    return Stream(weights.plan, onload=onload, offload=offload)


class Stream:
    """One pass. ``offload`` runs exactly once, however the pass ends: exhausted, closed, dropped, or by an error.

    With a staging of its own, what is yielded is that staging's memory.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        onload: Callable[[], object] | None = None,
        offload: Callable[[], object] | None = None,
        staging: Staging | None = None,
    ) -> None:
        self.plan = plan
        self.stats = PassStats()
        # No reference from the generator back to self: a dropped Stream must close it at once, not at the next
        # collection of cycles.
        staging = FreshStaging() if staging is None else staging
        self._generator = _generate(plan, onload, offload, staging, self.stats, _Versions(plan), _Ready(plan))
        # A generator that was never started skips its `finally`; so start it here, up to a first empty yield.
        next(self._generator)

    def metadata(self) -> list[ParamMeta]:
        return self.plan.metadata()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._generator)

    def close(self) -> None:
        self._generator.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _generate(
    plan: Plan,
    onload: Callable[[], object] | None,
    offload: Callable[[], object] | None,
    staging: Staging,
    stats: PassStats,
    versions: "_Versions",
    ready: "_Ready",
) -> Iterator[tuple[str, torch.Tensor]]:
    # No context manager may be open at a yield: a no_grad() would hold in the consumer until it asks again.
    loaded = onload is None
    batches = staging.batches(plan)
    try:
        yield  # type: ignore[misc]  # Stream.__init__ stops here
        versions.check()
        if onload is not None:
            loaded = True  # first: an onload that fails halfway is undone as well
            onload()
            versions = _Versions(plan)
        while batch := _next_batch(batches):
            versions.check()
            ready.wait()
            begin = time.perf_counter()
            _materialize(batch, stats)
            stats.seconds_merge += time.perf_counter() - begin
            stats.peak_staging_bytes = max(stats.peak_staging_bytes, staging.num_bytes)
            while batch:
                if not batch[0].is_last:
                    batch.popleft()
                    continue
                stats.sent.append(batch[0].task.meta)
                yield batch[0].task.meta.name, batch.popleft().out  # held nowhere else: dropping it is the release
    finally:
        batches.close()  # type: ignore[attr-defined]
        if loaded and offload is not None:
            offload()


class _Ready:
    """Orders the pass after the work that made the weights, on devices that work in streams of their own.

    Recorded when the pass is requested: the generator's body first runs under the consumer's stream, where an event
    would no longer be ordered after the optimizer's step.
    """

    def __init__(self, plan: Plan) -> None:
        self._events = {}
        for device in {task.base.device for task in plan.tasks if task.base.device.type != "cpu"}:
            self._events[device] = torch.accelerator.current_stream(device).record_event()

    def wait(self) -> None:
        for device, event in self._events.items():
            torch.accelerator.current_stream(device).wait_event(event)


class _Versions:
    """Notices that a pass would mix two states of the weights: an optimizer step bumps `_version`."""

    def __init__(self, plan: Plan) -> None:
        self._seen: list[tuple[str, torch.Tensor, int]] = []
        for task in plan.tasks:
            tensors = [task.base, *(part for adapter in task.adapters for part in (adapter.lora_A, adapter.lora_B))]
            # Tensors made in inference mode count no versions.
            self._seen += [(task.fqn, tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def check(self) -> None:
        for fqn, tensor, version in self._seen:
            if tensor._version != version:
                raise RuntimeError(
                    f"{fqn}: the weights were written to (an optimizer step?) while they were streamed, so the pass would "
                    "mix two policies; finish or close the stream before the next step"
                )


def _next_batch(batches: Iterator[Iterable[Part]]) -> deque[Part]:
    # The consumer may be in inference mode; what it gets must be an ordinary tensor all the same.
    with torch.inference_mode(False):
        return deque(next(batches, ()))


def _materialize(batch: Iterable[Part], stats: PassStats) -> None:
    """Fill the batch: all merges in one call of the grouped kernel, the rest copied."""
    with torch.inference_mode(False), torch.no_grad():
        merges = [part for part in batch if part.task.adapters]
        for part in batch:
            if not part.task.adapters:
                base = part.task.base
                is_whole = part.begin == 0 and part.is_last
                part.out.copy_(base if is_whole else base.reshape(-1)[part.begin : part.end].view(part.out.shape))
        if merges:
            _merge(merges, stats)


def _merge(parts: Sequence[Part], stats: PassStats) -> None:
    bases, pairs, outs = [], [], []
    for part in parts:
        rows = _rows(part)
        lora_A, lora_B, scaling = _summed(part.task)
        base = part.task.base.detach()[rows]
        # The kernel wants a row's elements adjacent; a base that was loaded transposed is copied, one tensor at a time.
        bases.append(base if base.stride(1) == 1 else base.contiguous())
        pairs.append((lora_A, lora_B[rows], scaling))
        # A kernel writes on its own device; from there it is copied into staging that lies elsewhere.
        is_near = part.out.device == base.device
        outs.append(part.out if is_near else torch.empty_like(part.out, device=base.device))
    rounding = torch.empty(len(parts), ops.NUM_STATS, dtype=torch.float64)
    ops.merge_cast_grouped_(
        bases, [A for A, _, _ in pairs], [B for _, B, _ in pairs], [s for _, _, s in pairs], outs, rounding
    )
    for part, out, (changed, unmoved, kept_sq, delta_sq, checksum) in zip(parts, outs, rounding.tolist(), strict=True):
        if not math.isfinite(delta_sq):
            raise ValueError(
                f"{part.task.fqn}: the delta of its adapter is not finite (NaN or infinity in lora_A or lora_B, or an "
                "overflow); the engine keeps its weights. Look for a diverged training step"
            )
        if out is not part.out:
            part.out.copy_(out)
        found = Rounding(
            changed=int(changed), unmoved=int(unmoved), kept_sq=kept_sq, delta_sq=delta_sq, checksum=int(checksum)
        )
        name = part.task.meta.name
        stats.rounding[name] = found if part.begin == 0 else stats.rounding[name] + found


def _rows(part: Part) -> slice:
    cols = part.task.base.shape[1]
    if part.begin % max(cols, 1) or part.end % max(cols, 1):
        raise ValueError(
            f"{part.task.fqn}: a slot of the staging does not hold one of its rows of {cols} elements; make slots larger"
        )
    return slice(None) if cols == 0 else slice(part.begin // cols, part.end // cols)


def _summed(task: Task) -> tuple[torch.Tensor, torch.Tensor, float]:
    """One pair (lora_A, lora_B, scaling) for the sum of the task's adapters: concatenated along the rank, with differing
    scalings multiplied into lora_B in float32."""
    first, *others = task.adapters
    if not others:
        return first.lora_A.detach(), first.lora_B.detach(), first.scaling
    if all(adapter.scaling == first.scaling for adapter in others):
        scalings, scaling = [1.0] * len(task.adapters), first.scaling
    else:
        scalings, scaling = [adapter.scaling for adapter in task.adapters], 1.0
    lora_A = torch.cat([adapter.lora_A.detach().float() for adapter in task.adapters])
    lora_B = torch.cat(
        [adapter.lora_B.detach().float() * s for adapter, s in zip(task.adapters, scalings, strict=True)], dim=1
    )
    return lora_A, lora_B, scaling
