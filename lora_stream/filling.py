"""Filling a batch: its merges and copies are enqueued where the weights lie, later waited for, and accounted.

    Filling(batch) ──► wait() ──► hand_over(tensor), one by one ──► announce()

The CPU has finished when Filling() returns. A device runs ahead of the host: while one batch is handed over, the next one
is being merged.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lora_stream import ops
from lora_stream.plan import Task


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


class Batch(NamedTuple):
    """What is filled in one go. `announce` is called when it is full and was handed over: what the consumer has not seen
    yet nobody else has, so that a failed update can tell what it may have replaced."""

    parts: Iterable[Part]
    announce: Callable[[], None]


class Filling:
    """A batch on its way. `parts` are still to be handed over."""

    def __init__(self, batch: Batch, *, precision: ops.Precision = "float32") -> None:
        self.parts = deque(batch.parts)
        self.announce = batch.announce
        self.num_bytes = sum(part.out.nbytes for part in self.parts)
        self._merges: list[tuple[list[tuple[str, str, bool]], torch.Tensor]] = []  # whose, and their statistics
        self._queues: dict[torch.device, torch.Stream] = {}
        self._events: dict[torch.device, torch.Event] = {}
        self._copied: list[torch.Event] = []
        try:
            # The consumer may be in inference mode; what it gets must be an ordinary tensor all the same.
            with torch.inference_mode(False), torch.no_grad():
                for device in {part.task.base.device for part in self.parts}:
                    self._fill([part for part in self.parts if part.task.base.device == device], device, precision)
        except BaseException:
            self._record()
            self.settle()
            raise
        self._record()

    def _record(self) -> None:
        for device in {d for part in self.parts for d in (part.task.base.device, part.out.device)}:
            if (queue := queue_of(device)) is not None:
                self._queues[device], self._events[device] = queue, queue.record_event()

    def wait(self) -> list[tuple[str, Rounding, bool]]:
        """Until the batch is full. Returns for each merged part the tensor's name, what rounding did, and whether it is
        the tensor's first part. Raises ValueError where a delta is not finite."""
        self.settle()
        found = []
        for owners, statistics in self._merges:
            for (name, fqn, is_first), row in zip(owners, statistics.tolist(), strict=True):
                changed, unmoved, kept_sq, delta_sq, checksum = row
                if not math.isfinite(delta_sq):
                    raise ValueError(
                        f"{fqn}: the delta of its adapter is not finite (NaN or infinity in lora_A or lora_B, or an "
                        "overflow); the engine keeps its weights. Look for a diverged training step"
                    )
                rounding = Rounding(
                    changed=int(changed),
                    unmoved=int(unmoved),
                    kept_sq=kept_sq,
                    delta_sq=delta_sq,
                    checksum=int(checksum),
                )
                found.append((name, rounding, is_first))
        return found

    def settle(self) -> None:
        """Until no device writes to the batch's memory any more."""
        for event in (*self._events.values(), *self._copied):
            event.synchronize()

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Order what the consumer does with the tensor after the work that made it, and the reuse of its memory after what
        the consumer does: it may have changed its current stream since it asked for the batch."""
        queue = queue_of(tensor.device)
        if queue is not None and queue != self._queues[tensor.device]:
            queue.wait_event(self._events[tensor.device])
            tensor.record_stream(queue)

    def _fill(self, parts: Sequence[Part], device: torch.device, precision: ops.Precision) -> None:
        queue = queue_of(device)
        far: list[tuple[torch.Tensor, torch.Tensor]] = []  # made on the device, to be copied to where they go
        for part in parts:
            if not part.task.adapters:
                base = part.task.base
                is_whole = part.begin == 0 and part.is_last
                source = base if is_whole else base.reshape(-1)[part.begin : part.end].view(part.out.shape)
                part.out.copy_(source, non_blocking=queue is not None and _is_pinned(part.out))
        merges = [part for part in parts if part.task.adapters]
        if merges:
            owners = [(part.task.meta.name, part.task.fqn, part.begin == 0) for part in merges]
            self._merges.append((owners, _merge(merges, device, far, precision)))
        if far:
            self._copy(far, queue)

    def _copy(self, far: Sequence[tuple[torch.Tensor, torch.Tensor]], queue: "torch.Stream | None") -> None:
        if queue is None:
            for made, out in far:
                out.copy_(made)
            return
        copying = _copy_queue_of(queue.device)
        copying.wait_event(queue.record_event())
        with copying:
            for made, out in far:
                out.copy_(made, non_blocking=_is_pinned(out))
                made.record_stream(copying)
            self._copied.append(copying.record_event())


def queue_of(device: torch.device) -> "torch.Stream | None":
    """The stream that work on the device goes to now; None where the host does the work itself."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device)


_copy_queues: dict[torch.device, torch.Stream] = {}


def _copy_queue_of(device: torch.device) -> torch.Stream:
    """One more stream, so that copies to the host and the next merge run side by side."""
    if device not in _copy_queues:
        _copy_queues[device] = torch.Stream(device=device)
    return _copy_queues[device]


def writes_to_host() -> bool:
    """Whether kernels write into pinned host memory themselves (LORA_STREAM_TO_HOST=store). By default (copy) they write
    to the device and a copy engine brings it to the host."""
    way = os.environ.get("LORA_STREAM_TO_HOST", "copy")
    if way not in ("copy", "store"):
        raise ValueError(f"LORA_STREAM_TO_HOST must be copy or store, got {way!r}")
    return way == "store"


def _is_near(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device == device


def _is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_pinned()


def _merge(
    parts: Sequence[Part],
    device: torch.device,
    far: list[tuple[torch.Tensor, torch.Tensor]],
    precision: ops.Precision,
) -> torch.Tensor:
    """All merges in one call of the grouped kernel. Returns their statistics, on the host when the device has got there."""
    bases, pairs, outs = [], [], []
    for part in parts:
        rows = _rows(part)
        lora_A, lora_B, scaling = _summed(part.task)
        base = part.task.base.detach()[rows]
        # The kernel wants a row's elements adjacent; a base that was loaded transposed is copied, one tensor at a time.
        bases.append(base if base.stride(1) == 1 else base.contiguous())
        # The base may be offloaded, and the adapter not: the merge is where the base is.
        pairs.append((lora_A.to(device), lora_B[rows].to(device), scaling))
        if _is_near(part.out, device) or (writes_to_host() and _is_pinned(part.out)):
            outs.append(part.out)
        else:
            outs.append(torch.empty_like(part.out, device=device))
            far.append((outs[-1], part.out))
    found = torch.empty(len(parts), ops.NUM_STATS, dtype=torch.float64, device=device)
    lora_As, lora_Bs, scalings = zip(*pairs, strict=True)
    ops.merge_cast_grouped_(bases, list(lora_As), list(lora_Bs), list(scalings), outs, found, precision=precision)
    return found if queue_of(device) is None else _bring_to_host(found)


def _bring_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """On the host once the device has got there."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


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
