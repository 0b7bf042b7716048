"""Filling a batch: its merges and copies are enqueued where the weights lie, later waited for, and accounted.

    Filling(batch) ──► wait() ──► hand_over(tensor), one by one ──► announce()

The CPU has finished when Filling() returns. A device runs ahead of the host: while one batch is handed over, the next one
is being merged.
"""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from lora_stream import shards
from lora_stream.fidelity import Rounding
from lora_stream.gathering import Arrived, Gathering, Report
from lora_stream.merging import (
    NEAREST,
    Arithmetic,
    Merge,
    Pair,
    Traffic,
    merge,
    not_finite,
    pair_of,
    replace_rows,
    scale_of,
)
from lora_stream.plan import Task


class Part(NamedTuple):
    """Elements [begin, end) of a task's flattened tensor, and where they go: `out` has the tensor's shape where the part
    is all of it, [rows, cols] where it is whole rows, and is flat otherwise."""

    task: Task
    begin: int
    end: int
    out: torch.Tensor

    @property
    def is_last(self) -> bool:
        return self.end == self.numel

    @property
    def is_all(self) -> bool:
        return self.begin == 0 and self.is_last

    @property
    def numel(self) -> int:
        """Of the whole tensor."""
        return torch.Size(self.task.meta.shape).numel()


class Batch(NamedTuple):
    """What is filled in one go. `announce` is called when it is full and was handed over: what the consumer has not seen
    yet nobody else has, so that a failed update can tell what it may have replaced."""

    parts: Iterable[Part]
    announce: Callable[[], None]


class Filling:
    """A batch on its way. `parts` are still to be handed over."""

    def __init__(
        self,
        batch: Batch,
        *,
        arithmetic: Arithmetic = NEAREST,
        gathering: Gathering | None = None,
        traffic: Traffic | None = None,
        scales: dict[str, torch.Tensor] | None = None,
        check_finite: bool = True,
    ) -> None:
        """gathering: where the tensors that are not whole on this rank come from. traffic: counts what is done. scales: of
        DoRA's weights that are cut over batches, by checkpoint name; one for all batches of a pass."""
        self.parts = deque(batch.parts)
        self.announce = batch.announce
        self.num_bytes = sum(part.out.nbytes for part in self.parts)
        self._traffic = Traffic() if traffic is None else traffic
        self._scales = {} if scales is None else scales
        self._check_finite = check_finite
        self._arithmetic = arithmetic
        # What was made here, whether from its first element on, and its statistics. Not the parts, which hold `out`.
        self._made: list[tuple[list[tuple[Task, bool]], torch.Tensor]] = []
        self._reports: list[tuple[Report, torch.Tensor]] = []  # of buckets that were gathered, as they come to the host
        self._gathered: set[str] = set()  # checkpoint names of tensors from those buckets whose first part is here
        self._queues: dict[torch.device, torch.Stream] = {}
        self._events: dict[torch.device, torch.Event] = {}
        self._copied: list[torch.Event] = []
        self._devices = {part.out.device for part in self.parts}
        try:
            # The consumer may be in inference mode; what it gets must be an ordinary tensor all the same.
            with torch.inference_mode(False), torch.no_grad():
                own: dict[torch.device, list[Part]] = {}
                for part in self.parts:
                    if gathering is not None and gathering.holds(part.task):
                        self._take(part, gathering.arrived(part.task))
                    else:
                        own.setdefault(_workplace(part), []).append(part)
                for device, parts in own.items():
                    self._fill(parts, device)
        except BaseException:
            self._record()
            self.settle()
            raise
        self._record()

    def _record(self) -> None:
        for device in self._devices:
            if (queue := queue_of(device)) is not None:
                self._queues[device], self._events[device] = queue, queue.record_event()

    def wait(self) -> list[tuple[str, Rounding, bool]]:
        """Until the batch is full. Returns for each merged part the tensor's name, what rounding did, and whether it is
        the tensor's first part; for a gathered tensor all of it comes with the first. Raises ValueError where what was made is
        not finite, RankError where another rank could not send its part."""
        self.settle()
        made = []
        for parts, statistics in self._made:
            made += [(*part, row) for part, row in zip(parts, statistics.tolist(), strict=True)]
        for report, headers in self._reports:
            rows = report.read(headers)
            made += [(task, True, rows[task.meta.name]) for task in report.tasks if task.meta.name in self._gathered]
        found = []
        for task, is_first, row in made:
            rounding = self._rounding(task, row)
            if task.adapters:
                found.append((task.meta.name, rounding, is_first))
        return found

    def _rounding(self, task: Task, row: Sequence[float]) -> Rounding:
        changed, unmoved, kept_sq, delta_sq, projected, checksum = row
        if self._check_finite and math.isnan(kept_sq):
            raise not_finite(task)
        return Rounding(
            changed=int(changed),
            unmoved=int(unmoved),
            kept_sq=kept_sq,
            delta_sq=delta_sq,
            projected=projected,
            checksum=int(checksum),
        )

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

    def _take(self, part: Part, arrived: Arrived) -> None:
        """From a bucket that was gathered."""
        if part.begin == 0:
            self._gathered.add(part.task.meta.name)
        for report in arrived.reports:
            if all(report is not known for known, _ in self._reports):
                on_host = report.headers if queue_of(report.headers.device) is None else _bring_to_host(report.headers)
                self._reports.append((report, on_host))
        for source, out in arrived.copies(part.task, part.begin, part.end, part.out):
            self._devices.add(source.device)
            self._copy_one(source, out)

    def _fill(self, parts: Sequence[Part], device: torch.device) -> None:
        self._devices.add(device)
        queue = queue_of(device)
        far: list[tuple[torch.Tensor, torch.Tensor]] = []  # made on the device, to be copied to where they go
        made = [(part.task, part.begin == 0) for part in parts]
        self._made.append((made, self._make(parts, device, far)))
        if far:
            self._copy(far, queue)

    def _make(
        self, parts: Sequence[Part], device: torch.device, far: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """All merges and copies in one call of the grouped kernel. Returns their statistics, on the host when the device has
        got there."""
        merges = []
        for part in parts:
            out = part.out
            stores = writes_to_host() and not part.task.rows and _is_pinned(out)
            if not (_is_near(out, device) or stores):
                out = torch.empty_like(part.out, device=device)
                far.append((out, part.out))
                self._traffic.cross(out, part.out.device)
            merges.append(self._merge(part, out, device) if part.task.adapters else self._copy_of(part, out, device))
        statistics = merge(merges, arithmetic=self._arithmetic, traffic=self._traffic)
        return statistics if queue_of(device) is None else _bring_to_host(statistics)

    def _merge(self, part: Part, out: torch.Tensor, device: torch.device) -> Merge:
        rows = _rows(part)
        base = self._traffic.to(shards.local(part.task.base, part.task.view)[rows], device)
        pairs = [
            pair_of(part.task, adapter, shards.local(adapter.lora_A), shards.local(adapter.lora_B), 0, rows)
            for adapter in part.task.adapters
        ]
        places = self._arithmetic.places(part.task, out, 0, rows.start or 0)
        return Merge(base, pairs, out, places, self._scale(part, base, pairs[0]))

    def _copy_of(self, part: Part, out: torch.Tensor, device: torch.device) -> Merge:
        base = shards.local(part.task.base, part.task.view)
        source = base if part.is_all else _elements(base, part.begin, part.end).view(part.out.shape)
        source = self._traffic.to(source, device)
        if part.task.rows:
            out.copy_(source)
            values = lambda rows: shards.local(rows.values)  # noqa: E731
            replace_rows(part.task, out, values, own=_rows(part), traffic=self._traffic)
            source = out  # for its statistics
        return Merge(source, [], out)

    def _scale(self, part: Part, base: torch.Tensor, pair: Pair) -> torch.Tensor | None:
        """base, pair: of the part's rows."""
        (adapter, *_), name = part.task.adapters, part.task.meta.name
        if adapter.magnitude is None:
            return None
        magnitude = shards.local(adapter.magnitude)
        of = partial(scale_of, adapter, arithmetic=self._arithmetic, traffic=self._traffic)
        if not adapter.transposed:
            return of(base, pair, magnitude[_rows(part)])
        if part.is_all:
            return of(base, pair, magnitude)
        if part.begin == 0:
            # A row holds one input of all outputs: the norms are of the whole weight, and all of its parts need them.
            whole = self._traffic.to(shards.local(part.task.base), base.device)
            pair = pair_of(part.task, adapter, shards.local(adapter.lora_A), shards.local(adapter.lora_B))
            self._scales[name] = of(whole, pair, magnitude)
        return self._scales[name]

    def _copy_one(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """On the current stream. With another device, a cast is made before the way if that makes it shorter."""
        if source.device != out.device and out.dtype.itemsize < source.dtype.itemsize:
            source = source.to(out.dtype)
        self._traffic.cross(source, out.device)
        out.copy_(source, non_blocking=queue_of(source.device) is not None and _is_pinned(out))

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


def _bring_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """On the host once the device has got there."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _elements(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Of the flattened tensor; where it lies otherwise, only the rows that hold them are copied."""
    size = tensor[0].numel()
    first = begin // size
    return tensor[first : -(-end // size)].reshape(-1)[begin - first * size : end - first * size]


def _workplace(part: Part) -> torch.device:
    """Where the part is made: where its base lies. A base on the host whose tensor goes to a device moves there first only
    if that is less to move than the tensor."""
    base, out = part.task.base, part.out
    is_shorter = base.dtype.itemsize < out.dtype.itemsize
    return out.device if base.device.type == "cpu" and is_shorter else base.device


def _rows(part: Part) -> slice:
    """Of the tensor's first dimension: rows of a matrix, or experts."""
    size = part.numel // max(part.task.meta.shape[0], 1)
    if part.begin % max(size, 1) or part.end % max(size, 1):
        raise ValueError(
            f"{part.task.fqn}: a slot of the staging does not hold one of its rows of {size} elements; make slots larger"
        )
    return slice(None) if size == 0 else slice(part.begin // size, part.end // size)
