"""The gathers of one pass over a sharded model, bucket by bucket, the same on every rank.

    adapters ──gather──► merge own rows ──► what this rank sends, wire dtype ──gather──► tensors, part by part

A rank merges what it holds: only the small lora_A and lora_B come from the others before, and only wire-dtype bytes after.
A bucket takes one collective for its adapters and one for its tensors, not one for each tensor.

A rank that fails takes part all the same and says so in what it sends: those that wait for it learn it there.
"""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from lora_stream import fsdp1, ops, shards
from lora_stream.merging import (
    Arithmetic,
    Merge,
    Pair,
    Traffic,
    merge,
    pair_of,
    replace_rows,
    scale_of,
)
from lora_stream.packing import ALIGNMENT
from lora_stream.plan import Adapter, ParamMeta, Plan, Task, as_matrix
from lora_stream.shards import Box


class Report:
    """What came with tensors that were merged elsewhere or before: whether that went well, and what rounding did."""

    def __init__(self, tasks: Sequence[Task], headers: torch.Tensor, ranks: Sequence[int]) -> None:
        """headers: [len(ranks), 1 + NUM_STATS * len(tasks)] float64: not 0 where that rank failed, then its statistics."""
        self.tasks, self.headers = tasks, headers
        self._ranks = ranks

    def read(self, headers: torch.Tensor) -> dict[str, list[float]]:
        """Statistics by checkpoint name, from the headers as they are on the host. Raises RankError for a rank that failed."""
        for rank, header in zip(self._ranks, headers, strict=True):
            if header[0] != 0:
                raise shards.RankError(
                    f"rank {rank} failed before it could send its part of {self.tasks[0].fqn}"
                    f"{f' to {self.tasks[-1].fqn}' if len(self.tasks) > 1 else ''}; its own error says why"
                )
        sums = headers[:, 1:].view(len(headers), -1, ops.NUM_STATS).sum(0)
        sums[:, -1].remainder_(2.0**32)  # the checksum, see ops; whole numbers below 2**53, so this is exact
        return {task.meta.name: row for task, row in zip(self.tasks, sums.tolist(), strict=True)}


class Arrived:
    """A bucket that has arrived on this rank: tensors in parts by rank, or whole."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.num_bytes = 0
        self._parts: dict[str, tuple[_Group, int, list[torch.Tensor]]] = {}
        self._whole: dict[str, torch.Tensor] = {}

    def add_parts(self, group: "_Group", sent: list[torch.Tensor]) -> None:
        """sent: by each rank, see _Group."""
        self.num_bytes += sum(part.nbytes for part in sent)
        self._parts |= {task.meta.name: (group, i, sent) for i, task in enumerate(group.tasks)}
        headers = torch.stack([group.header(part) for part in sent])
        self.reports.append(Report(group.tasks, headers, shards.members(group.process_group)))

    def add_whole(self, task: Task, tensor: torch.Tensor) -> None:
        self.num_bytes += tensor.nbytes
        self._whole[task.meta.name] = tensor

    def whole(self, task: Task) -> torch.Tensor:
        return self._whole[task.meta.name]

    def copies(
        self, task: Task, begin: int, end: int, out: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (source, destination) that together bring elements [begin, end) of a tensor into `out`."""
        name = task.meta.name
        if name not in self._whole:
            group, i, sent = self._parts[name]
            box = group.boxes[i]
            parts = [group.part(memory, i, index) for index, memory in enumerate(sent)]
            if box.dim == 0:  # each part is a run of the flattened tensor
                first = 0
                for part in parts:
                    low, high = max(begin, first), min(end, first + part.numel())
                    if low < high:
                        yield part.view(-1)[low - first : high - first], out.view(-1)[low - begin : high - begin]
                    first += part.numel()
                return
            is_all = out.shape == task.meta.shape
            whole = out if is_all else torch.empty(task.meta.shape, dtype=out.dtype, device=sent[0].device)
            for first, part in zip(box.bounds, parts, strict=False):
                yield part, whole.narrow(box.dim, first, part.shape[box.dim])
            if is_all:
                return
            self.add_whole(task, whole)
        yield self._whole[name].view(-1)[begin:end], out.view(-1)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Tensors of a bucket that are cut over the same ranks, and how they lie in what each rank sends.

    Each sends its header, see Report, and then its part of each tensor.
    """

    tasks: tuple[Task, ...]
    boxes: tuple[Box, ...]
    offsets: tuple[tuple[int, ...], ...]  # for each rank, of its part of each tensor
    sizes: tuple[int, ...]  # for each rank, of all that it sends

    @staticmethod
    def of(cut: Sequence[tuple[Task, Box]]) -> "_Group":
        tasks, boxes = zip(*cut, strict=True)
        offsets, sizes = [], []
        for index in range(boxes[0].group.size()):
            parts = (_num_bytes(task, box.shape(task.meta.shape, index)) for task, box in cut)
            *own, size = itertools.accumulate(map(_aligned, parts), initial=_aligned(8 * _header_length(tasks)))
            offsets.append(tuple(own))
            sizes.append(size)
        return _Group(tasks=tasks, boxes=boxes, offsets=tuple(offsets), sizes=tuple(sizes))

    @property
    def process_group(self):
        return self.boxes[0].group

    def part(self, sent: torch.Tensor, i: int, index: int) -> torch.Tensor:
        """Of tensor i, in what rank `index` sends."""
        task = self.tasks[i]
        shape = self.boxes[i].shape(task.meta.shape, index)
        offset = self.offsets[index][i]
        return sent[offset : offset + _num_bytes(task, shape)].view(task.meta.dtype).view(shape)

    def header(self, sent: torch.Tensor) -> torch.Tensor:
        return sent[: 8 * _header_length(self.tasks)].view(torch.float64)


def _header_length(tasks: Sequence[Task]) -> int:
    return 1 + ops.NUM_STATS * len(tasks)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _num_bytes(task: Task, shape: Sequence[int]) -> int:
    return torch.Size(shape).numel() * task.meta.dtype.itemsize


class Gathering:
    """The gathers of a pass. Every rank goes through all buckets in order, whatever happens to it."""

    def __init__(
        self,
        plan: Plan,
        *,
        bucket_bytes: int,
        receivers: Collection[int],
        receives: bool,
        arithmetic: Arithmetic,
        traffic: Traffic,
        loaded: Callable[[Sequence[torch.Tensor]], contextlib.AbstractContextManager],
    ) -> None:
        """receivers: global ranks that get the tensors; receives: whether this is one; loaded: open while the parameters of a
        bucket are read."""
        gathered = [task for task in plan.tasks if needs_gather(task)]
        self._buckets: list[tuple[Task, ...]] = []
        for units, run in itertools.groupby(gathered, key=fsdp1.units_of):
            tasks = tuple(run)  # of one FSDP1 unit they come together, so that it is opened once
            self._buckets += [tasks] if units else replace(plan, tasks=tasks).buckets(bucket_bytes)
        self._bucket_of = {task.meta.name: i for i, bucket in enumerate(self._buckets) for task in bucket}
        self._receivers, self._receives = receivers, receives
        self._arithmetic = arithmetic
        self._traffic = traffic
        self._loaded = loaded
        self._kept: dict[tuple, torch.Tensor] = {}
        self._adapters: dict[tuple, dict[int, torch.Tensor | None]] = {}  # gathered, by group and who got them, and id
        self._live: dict[int, torch.Tensor] = {}  # gathered whole, by id
        self._arrived: Arrived | None = None
        self._num_gathered = 0
        self._failure: BaseException | None = None
        self.is_lost = False  # nobody can take part any more

    def holds(self, task: Task) -> bool:
        """Whether it comes from here; otherwise each rank has all of it."""
        return task.meta.name in self._bucket_of

    def arrived(self, task: Task) -> Arrived:
        """The bucket that holds the task, gathered if it is not yet. What came before it is dropped.

        Raises what this rank's own merge raises, after it took part; RankError where another does not.
        """
        while self._num_gathered <= self._bucket_of[task.meta.name]:
            self._gather_next()
            if self._failure is not None:
                raise self._failure
        assert self._arrived is not None
        return self._arrived

    def finish(self) -> None:
        """Gather what is left; raises as `arrived`."""
        if self._num_gathered < len(self._buckets):
            self.arrived(self._buckets[-1][-1])

    @property
    def num_bytes(self) -> int:
        return 0 if self._arrived is None else self._arrived.num_bytes

    def fail(self, error: BaseException) -> None:
        """From now on tell the others, as soon as they gather, that nothing good comes from here."""
        self._failure = error

    def drain(self) -> None:
        """Take part in what is left, for the others."""
        try:
            while self._num_gathered < len(self._buckets) and not self.is_lost:
                self._gather_next()
        finally:
            self._arrived = None
            self._kept.clear()
            self._adapters.clear()
            self._live.clear()

    def _gather_next(self) -> None:
        bucket = self._buckets[self._num_gathered]
        self._arrived = None  # its memory goes first
        arrived = Arrived()
        try:
            # An interrupt between two collectives of a bucket would leave the others in the second.
            with uninterrupted(), torch.inference_mode(False), torch.no_grad():
                loaded = contextlib.ExitStack()
                self._attempt(
                    lambda: loaded.enter_context(self._loaded([t for task in bucket for t in task.tensors()]))
                )
                self._gather(bucket, arrived)
                self._attempt(loaded.close)
                self._num_gathered += 1
                self._forget()
        except Exception:
            self.is_lost = True
            raise
        self._arrived = arrived

    def _gather(self, bucket: Sequence[Task], arrived: Arrived) -> None:
        cut: dict[tuple, list[tuple[Task, Box]]] = {}
        rest = []
        for task in bucket:
            box = _cut_of(task)
            if box is None:
                rest.append(task)
            else:
                cut.setdefault((box.group.group_name, task.base.device.type), []).append((task, box))
        for tasks in cut.values():
            self._gather_parts(_Group.of(tasks), arrived)
        if rest:
            with fsdp1.opened(fsdp1.units_of(rest[0]), self._traffic):
                self._gather_whole(rest, arrived)

    def _gather_parts(self, group: _Group, arrived: Arrived) -> None:
        process_group = group.process_group
        receivers = shards.indices_of(process_group, self._receivers)

        def merging(of: "shards.ProcessGroup") -> Collection[int]:
            """Who needs adapters: all, to merge their parts, or nobody. Of another group some may."""
            return range(of.size()) if receivers or of.group_name != process_group.group_name else ()

        whole = self._gather_adapters(group.tasks, group.boxes, merging)
        if not receivers:
            return
        home = group.tasks[0].base.device
        device = shards.device_of(process_group, home)
        if device != home and home.type == "cpu":
            # Over to the device goes whichever is less: the rows as they lie, or merged on the host.
            as_they_lie = sum(shards.local(task.base, task.view).nbytes for task in group.tasks)
            home = home if group.sizes[process_group.rank()] <= as_they_lie else device
        memory = partial(self._memory, (process_group.group_name, home.type))
        sends = memory("sends", max(group.sizes)) if home.type == "cpu" else _new_bytes(max(group.sizes), home)
        header = group.header(sends)
        header.zero_()
        if self._failure is None:
            self._attempt(lambda: self._merge_own(group, whole, sends))
        if self._failure is not None:
            header[0] = 1
        first, last = group.tasks[0].fqn, group.tasks[-1].fqn
        what = f"could not gather {first} to {last}"
        sent = self._exchange(group, self._traffic.to(sends, device), receivers, what, memory)
        if sent is not None:
            arrived.add_parts(group, sent)

    def _memory(self, group: tuple, role: object, num_bytes: int) -> torch.Tensor:
        """On the host, for one part of what a group's ranks send. The next bucket's is the same: new pages cost about as much
        as what is written into them."""
        kept = self._kept.pop((group, role), None)
        if kept is None or kept.numel() < num_bytes:
            kept = None  # its memory goes first
            kept = _new_bytes(num_bytes, torch.device("cpu"))
        self._kept[group, role] = kept
        return kept[:num_bytes]

    def _exchange(
        self,
        group: _Group,
        sends: torch.Tensor,
        receivers: Collection[int],
        what: str,
        memory: Callable[[int, int], torch.Tensor] | None = None,
    ) -> list[torch.Tensor] | None:
        with self._traffic.gathering():
            sent = shards.gather_bytes(sends, group.sizes, group.process_group, receivers, what, memory)
        if sent is not None:
            own = group.process_group.rank()
            self._traffic.gathered += sum(part.nbytes for i, part in enumerate(sent) if i != own)
        return sent

    def _merge_own(self, group: _Group, whole: dict[int, torch.Tensor], sends: torch.Tensor) -> None:
        index = group.process_group.rank()
        merges = []
        for i, (task, box) in enumerate(zip(group.tasks, group.boxes, strict=True)):
            base = self._traffic.to(shards.local(task.base, task.view), sends.device)
            merges.append(self._merge_of(task, base, group.part(sends, i, index), whole, box))
        statistics = merge(merges, arithmetic=self._arithmetic, traffic=self._traffic)
        group.header(sends)[1:].copy_(statistics.view(-1))

    def _merge_of(
        self, task: Task, base: torch.Tensor, out: torch.Tensor, whole: dict[int, torch.Tensor], box: Box | None
    ) -> Merge:
        if task.rows:
            out.copy_(base)
            own = () if box is None else (box.dim, box.own)
            replace_rows(task, out, lambda rows: whole[id(rows.values)], *own, traffic=self._traffic)
            base = out
        if not task.adapters:
            return Merge(base, [], out)
        pairs = [_pair(task, adapter, whole, box) for adapter in task.adapters]
        adapter = task.adapters[0]
        places = self._arithmetic.places(task, out, *(() if box is None else (box.dim, box.own.start)))
        if adapter.magnitude is None:
            return Merge(base, pairs, out, places)
        if _lies_with(task, adapter, adapter.magnitude, box):
            magnitude = shards.local(adapter.magnitude)
        else:
            magnitude = whole[id(adapter.magnitude)][slice(None) if box is None else box.own]
        scale = scale_of(adapter, base, pairs[0], magnitude, arithmetic=self._arithmetic, traffic=self._traffic)
        return Merge(base, pairs, out, places, scale)

    def _gather_whole(self, tasks: Sequence[Task], arrived: Arrived) -> None:
        """Tensors that are whole on each rank once gathered: those cut more than once, and FSDP1's; or that are whole, but
        their adapters are not. Every rank that receives merges all of them."""
        boxes = [None] * len(tasks)
        whole = self._gather_adapters(tasks, boxes, lambda group: shards.indices_of(group, self._receivers))
        for task in tasks:
            if id(task.base) not in self._live:
                self._live[id(task.base)] = self._whole(task.base)
        live = [self._live[id(task.base)] for task in tasks]
        bases = [each if task.view is None else task.view.of(each) for task, each in zip(tasks, live, strict=True)]
        if self._receives and self._failure is None:
            self._attempt(lambda: self._merge_whole(tasks, bases, whole, arrived))

    def _merge_whole(
        self, tasks: Sequence[Task], bases: Sequence[torch.Tensor], whole: dict[int, torch.Tensor], arrived: Arrived
    ) -> None:
        merges = []
        for task, base in zip(tasks, bases, strict=True):
            out = torch.empty(task.meta.shape, dtype=task.meta.dtype, device=base.device)
            merges.append(self._merge_of(task, base, out, whole, None))
            arrived.add_whole(task, out)
        statistics = merge(merges, arithmetic=self._arithmetic, traffic=self._traffic)
        header = torch.cat([statistics.new_zeros(1), statistics.view(-1)])
        arrived.reports.append(Report(tasks, header[None], [0]))

    def _attempt(self, work: Callable[[], object]) -> None:
        """What concerns this rank alone: its failure must not keep it from the others."""
        try:
            work()
        except BaseException as error:
            self._failure = self._failure or error

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        if fsdp1.is_flattened(tensor):
            return fsdp1.read(tensor)
        if not shards.is_sharded(tensor):
            return shards.local(tensor)
        with self._traffic.gathering():
            whole = shards.gather_whole(tensor)
        self._traffic.gathered += whole.nbytes - shards.local(tensor).nbytes
        return whole

    def _gather_adapters(
        self,
        tasks: Sequence[Task],
        boxes: Sequence[Box | None],
        merging: "Callable[[shards.ProcessGroup], Collection[int]]",
    ) -> dict[int, torch.Tensor]:
        """Every adapter tensor that a merge here needs all of, by id: those of one group in one collective.

        merging: which of a group's ranks merge."""
        needed = {id(rows.values): rows.values for task in tasks for rows in task.rows}
        needed |= {
            id(tensor): tensor
            for task, box in zip(tasks, boxes, strict=True)
            for adapter in task.adapters
            for tensor in adapter.tensors()
            if not _lies_with(task, adapter, tensor, box)
        }
        whole: dict[int, torch.Tensor] = {}
        by_group: dict[tuple, list[tuple[torch.Tensor, Box]]] = {}
        for key, tensor in needed.items():
            box = shards.box_of(tensor)
            if box is None:
                whole[key] = self._whole(tensor)
            else:
                by_group.setdefault((box.group.group_name, tensor.device.type), []).append((tensor, box))
        what = f"could not gather the adapters of {tasks[0].fqn} to {tasks[-1].fqn}"
        for key, cut in by_group.items():
            receivers = merging(cut[0][1].group)
            # Experts are one weight each to a checkpoint, with one adapter for all of them: it is gathered once. All ranks
            # know alike what was gathered before, whether they got it or not.
            kept = self._adapters.setdefault((*key, tuple(receivers)), {})
            missing = [(tensor, box) for tensor, box in cut if id(tensor) not in kept]
            if missing:
                kept |= self._gather_tensors(missing, receivers, what)
            whole |= {id(tensor): kept[id(tensor)] for tensor, _ in cut if kept[id(tensor)] is not None}
        return whole

    def _forget(self) -> None:
        """Adapters, and tensors that were gathered whole, that the next bucket does not need."""
        following = self._buckets[self._num_gathered : self._num_gathered + 1]
        needed = {id(tensor) for task in itertools.chain(*following) for tensor in task.tensors()}
        self._adapters = {
            key: {each: whole for each, whole in kept.items() if each in needed} for key, kept in self._adapters.items()
        }
        self._live = {each: whole for each, whole in self._live.items() if each in needed}

    def _gather_tensors(
        self, cut: Sequence[tuple[torch.Tensor, Box]], receivers: Collection[int], what: str
    ) -> dict[int, torch.Tensor | None]:
        group = cut[0][1].group
        layout = _Group.of([(_as_task(tensor), box) for tensor, box in cut])
        device = shards.device_of(group, cut[0][0].device)
        sends = _new_bytes(max(layout.sizes), device)
        for i, (tensor, _) in enumerate(cut):
            part = shards.local(tensor)
            self._traffic.cross(part, device)
            layout.part(sends, i, group.rank()).copy_(part)
        sent = self._exchange(layout, sends, receivers, what)
        if sent is None:
            return {id(tensor): None for tensor, _ in cut}
        return {
            id(tensor): torch.cat([layout.part(memory, k, i) for i, memory in enumerate(sent)], dim=box.dim)
            for k, (tensor, box) in enumerate(cut)
        }


def _new_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def needs_gather(task: Task) -> bool:
    return any(shards.is_sharded(tensor) or fsdp1.is_flattened(tensor) for tensor in task.tensors())


def _as_task(tensor: torch.Tensor) -> Task:
    return Task(meta=ParamMeta("", tensor.dtype, tuple(tensor.shape)), fqn="", base=tensor)


def _cut_of(task: Task) -> Box | None:
    """How the ranks merge it, each its part; None where it must be gathered first."""
    box = shards.box_of(task.base, task.view)
    if box is not None and task.adapters:
        inputs = 0 if task.adapters[0].transposed else 1
        is_whole_norm = task.adapters[0].magnitude is None or box.dim != inputs
        is_matrix = task.adapters[0].num_experts is not None or box.dim <= 1
        if not (is_whole_norm and is_matrix):
            return None
    return box


def _lies_with(task: Task, adapter: Adapter, tensor: torch.Tensor, box: Box | None) -> bool:
    """Whether this rank holds exactly what its rows of the weight need of lora_B or the magnitude: FSDP2 cuts all alike."""
    lies_otherwise = adapter.transposed or adapter.num_experts is not None or task.view is not None
    if box is None or box.dim != 0 or lies_otherwise or tensor is adapter.lora_A:
        return False
    return box.lies_like(shards.box_of(tensor))


def _pair(task: Task, adapter: Adapter, whole: dict[int, torch.Tensor], box: Box | None) -> Pair:
    """What makes the delta of this rank's part of the weight; of all of it without a box."""
    lora_A = whole[id(adapter.lora_A)]
    if _lies_with(task, adapter, adapter.lora_B, box):
        return as_matrix(lora_A), as_matrix(shards.local(adapter.lora_B)), adapter.scaling
    part = () if box is None else (box.dim, box.own)
    return pair_of(task, adapter, lora_A, whole[id(adapter.lora_B)], *part)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts = []
    before = signal.signal(signal.SIGINT, lambda *args: interrupts.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
        if interrupts and callable(before):
            before(*interrupts[0])
