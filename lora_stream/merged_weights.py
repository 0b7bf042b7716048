"""The stream: one pass over a model's merged weights as a generator, which owns order and lifetime.

    for name, tensor in lora_stream.stream(model): ...

A yielded tensor belongs to the consumer: it is contiguous, shares no storage with the model and is never written again.
The live model is only read. Merging goes batch by batch, into memory that a *staging* gives: fresh tensors, of which at most
one bucket, or one larger tensor, is alive on this side (two on a device, which merges one while the other is consumed), or
the slots of a ring that another process reads.
"""

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from lora_stream import ops
from lora_stream.filling import Batch, Filling, Part, Rounding, queue_of
from lora_stream.peft import read_model
from lora_stream.plan import FUSED_MODULES, ParamMeta, Plan, Scope, build_plan

BUCKET_BYTES = 64 * 1024 * 1024
# A device merges a bucket of the size above faster than Python prepares the next one; this is a layer of a model of 8 G
# parameters.
DEVICE_BUCKET_BYTES = 512 * 1024 * 1024


@dataclass(kw_only=True)
class PassStats:
    """What one pass did, filled while it runs."""

    seconds_merge: float = 0.0
    peak_staging_bytes: int = 0
    sent: list[ParamMeta] = field(default_factory=list)
    rounding: dict[str, Rounding] = field(default_factory=dict)  # by checkpoint name


class Staging(Protocol):
    """Where a pass puts its tensors."""

    num_bytes: int  # of memory that it holds for good; 0 where every batch gets its own
    seconds_waited: float  # for room, in this pass

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """The plan in parts, in order. The next batch may be asked for before the last one is full."""


class FreshStaging:
    """New tensors, a bucket at a time; each belongs to who takes it."""

    def __init__(self, bucket_bytes: int | None = None) -> None:
        self._bucket_bytes = bucket_bytes
        self.num_bytes = 0
        self.seconds_waited = 0.0

    def batches(self, plan: Plan) -> Iterator[Batch]:
        bucket_bytes = self._bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = DEVICE_BUCKET_BYTES if _is_on_device(plan) else BUCKET_BYTES
        for bucket in plan.buckets(bucket_bytes):
            # No name for the list: the tensors are held by who takes them alone.
            yield Batch(
                [
                    Part(
                        task,
                        0,
                        task.base.numel(),
                        torch.empty(task.meta.shape, dtype=task.meta.dtype, device=task.base.device),
                    )
                    for task in bucket
                ],
                announce=_nothing,
            )


class MergedWeights:
    """The merged weights of a model under checkpoint names; each ``iter()`` is a fresh pass.

    model: a PEFT model or a plain module, wrappers at any depth.
    wire_dtype: dtype of floating-point tensors as yielded; None keeps each as the parameter is.
    scope: "all", or "trained": merged targets and whatever else trains, closed over what vLLM stacks with them.
    adapter_name: the adapter to merge; None merges the active ones, summed.
    onload, offload: called before the first tensor and once after the last, on every way out. Where they take an argument
        it is the list of the parameters that the pass reads: in the trained scope the rest may stay where it is.
    bucket_bytes: how much is merged ahead of the consumer; None takes BUCKET_BYTES, or DEVICE_BUCKET_BYTES on a device.
    precision: of the product on CUDA devices, see ops.merge_cast_.
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
        onload: Callable[..., object] | None = None,
        offload: Callable[..., object] | None = None,
        bucket_bytes: int | None = None,
        precision: ops.Precision = "float32",
        fused_modules: Sequence[Sequence[str]] = FUSED_MODULES,
    ) -> None:
        if bucket_bytes is not None and bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}")
        ops.is_fast(precision)
        self._precision: ops.Precision = precision
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
        return Stream(plan, onload=self._onload, offload=self._offload, staging=staging, precision=self._precision)


def stream(
    model: nn.Module,
    *,
    wire_dtype: torch.dtype | None = torch.bfloat16,
    scope: Scope = "all",
    adapter_name: str | None = None,
    onload: Callable[..., object] | None = None,
    offload: Callable[..., object] | None = None,
    precision: ops.Precision = "float32",
) -> "Stream":
    """One pass over the model's merged weights: an iterator of ``(checkpoint name, tensor)`` and a context manager.

    The arguments are those of MergedWeights, and so are the errors.
    """
    weights = MergedWeights(model, wire_dtype=wire_dtype, scope=scope, adapter_name=adapter_name, precision=precision)
    return Stream(weights.plan, onload=onload, offload=offload, precision=precision)


class Stream:
    """One pass. ``offload`` runs exactly once, however the pass ends: exhausted, closed, dropped, or by an error.

    With a staging of its own, what is yielded is that staging's memory.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        onload: Callable[..., object] | None = None,
        offload: Callable[..., object] | None = None,
        staging: Staging | None = None,
        precision: ops.Precision = "float32",
    ) -> None:
        self.plan = plan
        self.stats = PassStats()
        # No reference from the generator back to self: a dropped Stream must close it at once, not at the next
        # collection of cycles.
        staging = FreshStaging() if staging is None else staging
        self._generator = _generate(
            plan, onload, offload, staging, self.stats, _Versions(plan), _Ready(plan), precision
        )
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
    onload: Callable[..., object] | None,
    offload: Callable[..., object] | None,
    staging: Staging,
    stats: PassStats,
    versions: "_Versions",
    ready: "_Ready",
    precision: ops.Precision,
) -> Iterator[tuple[str, torch.Tensor]]:
    # No context manager may be open at a yield: a no_grad() would hold in the consumer until it asks again.
    loaded = onload is None
    batches = staging.batches(plan)
    filling: deque[Filling] = deque()
    try:
        yield  # type: ignore[misc]  # Stream.__init__ stops here
        versions.check()
        if onload is not None:
            loaded = True  # first: an onload that fails halfway is undone as well
            _call(onload, plan)
            versions, ready = _Versions(plan), _Ready(plan)
        # A device merges one batch while the one before is consumed; the host does one thing at a time.
        ahead = 1 if _is_on_device(plan) else 0
        has_more = True
        while has_more or filling:
            if has_more and len(filling) <= ahead:
                has_more = (batch := _next_batch(batches)) is not None
                if batch is not None:
                    versions.check()
                    ready.wait()
                    begin = time.perf_counter()
                    filling.append(Filling(batch, precision=precision))
                    del batch  # the tensors are held by who takes them alone
                    stats.seconds_merge += time.perf_counter() - begin
                    alive = sum(each.num_bytes for each in filling)
                    stats.peak_staging_bytes = max(stats.peak_staging_bytes, staging.num_bytes, alive)
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
    finally:
        for late in filling:
            late.settle()  # before its memory is used for something else
        batches.close()  # type: ignore[attr-defined]
        if loaded and offload is not None:
            _call(offload, plan)


def _call(load: Callable[..., object], plan: Plan) -> None:
    """Call onload or offload, with the parameters that the pass reads if it takes an argument."""
    try:
        takes = any(
            parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            and parameter.default is parameter.empty
            for parameter in inspect.signature(load).parameters.values()
        )
    except ValueError:  # a builtin that does not tell
        takes = False
    load(plan.tensors()) if takes else load()


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

    def wait(self) -> None:
        for device, event in self._events.items():
            queue_of(device).wait_event(event)


class _Versions:
    """Notices that a pass would mix two states of the weights: an optimizer step bumps `_version`."""

    def __init__(self, plan: Plan) -> None:
        self._seen: list[tuple[str, torch.Tensor, int]] = []
        for task in plan.tasks:
            tensors = task.tensors()
            # Tensors made in inference mode count no versions.
            self._seen += [(task.fqn, tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

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
