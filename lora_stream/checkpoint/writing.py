"""A Hugging Face checkpoint, written while its tensors come, in any order: what goes where is known before, from the plan.

safetensors' own writer wants a whole file's tensors in memory. The format is simple (an 8-byte length, a JSON header, then the
bytes), so each tensor goes straight to its place in it: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from lora_stream.checkpoint.aside import flush_directory
from lora_stream.filling import Batch, Part
from lora_stream.plan import ParamMeta, Plan

_FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 64  # of a tensor in a bucket: a line of the cache
_CHUNK_BYTES = 8 * 1024 * 1024
# Of what was merged so much may wait to be written, and of what was written so much before the disk is told to begin.
_WAITING_BYTES = 64 * 1024 * 1024
_FLUSH_BYTES = 64 * 1024 * 1024

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(size: int | str) -> int:
    """Bytes of 5_000_000 or "5GB". Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None or (found := int(float(match[1]) * unit)) <= 0:
        raise ValueError(f"a size must be a positive number of bytes or look like 5GB, got {size!r}")
    return found


class ReusedStaging:
    """Two buckets in turn, for a stream whose tensors are written: the first touch of fresh memory would cost more than the
    merge. A tensor that is larger than a bucket gets memory of its own."""

    def __init__(self, bucket_bytes: int) -> None:
        self.num_bytes = 2 * bucket_bytes
        self.seconds_waited = 0.0
        self._slots = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        self._in_use: list[list[Future]] = [[], []]

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """Of one bucket."""
        self._slots.reverse()
        self._in_use.reverse()
        while self._in_use[0]:
            self._in_use[0].pop().result()
        slot, at, parts = self._slots[0], 0, []
        for task in plan.tasks:
            end = at + task.meta.num_bytes
            if end > slot.numel():
                out = torch.empty(task.meta.shape, dtype=task.meta.dtype)
            else:
                out = slot[at:end].view(task.meta.dtype).view(task.meta.shape)
                at = -(-end // _ALIGNMENT) * _ALIGNMENT
            parts.append(Part(task, 0, out.numel(), out))
        yield Batch(parts, announce=lambda: None)

    def until(self, written: Future) -> None:
        """The bucket of the last batch is in use until then."""
        self._in_use[0].append(written)


class _Place(NamedTuple):
    path: Path
    begin: int  # byte in the file


class Weights:
    """The weights of a checkpoint in `directory`. One of `finish` and `abandon` ends it."""

    def __init__(
        self,
        directory: Path,
        metas: Sequence[ParamMeta],
        *,
        max_shard_bytes: int,
        metadata: Mapping[str, str],
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """metas: all that will come. metadata: put into every file. progress: called with the bytes written so far and all.

        Raises ValueError where they need more room than the disk has left.
        """
        self._directory = directory
        self._progress = progress
        self.num_bytes = sum(meta.num_bytes for meta in metas)
        self._num_written = 0
        if (free := shutil.disk_usage(directory).free) < self.num_bytes:
            raise ValueError(
                f"{directory.parent}: has {free / 1e9:.2f} GB left, the checkpoint needs {self.num_bytes / 1e9:.2f} GB"
            )
        shards = _shards(metas, max_shard_bytes)
        self.paths = [directory / _file_name(i, len(shards)) for i in range(len(shards))]
        self._metas = {meta.name: meta for meta in metas}
        self._places: dict[str, _Place] = {}
        self._headers = {}
        for path, shard in zip(self.paths, shards, strict=True):
            header, begins = _header(shard, {"format": "pt", **metadata})
            self._headers[path] = header
            self._places |= {name: _Place(path, len(header) + begin) for name, begin in begins.items()}
        self._left = {path: {meta.name for meta in shard} for path, shard in zip(self.paths, shards, strict=True)}
        self._files: dict[Path, int] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._waiting: list[tuple[int, Future]] = []
        # The disk works while the next tensors are merged: else all of it would be waited for at the end.
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-flusher")
        self._flush: Future | None = None
        self._num_unflushed = 0

    def write(self, name: str, tensor: torch.Tensor) -> Future:
        """The tensor is the writer's until what is returned is done. Errors of the disk are raised there or by a later call."""
        meta = self._metas[name]
        found = ParamMeta(name, tensor.dtype, tuple(tensor.shape))
        assert found == meta, f"{found} came where {meta} was announced"
        written = self._writer.submit(self._write, name, tensor.contiguous())
        self._waiting.append((tensor.nbytes, written))
        self._wait(_WAITING_BYTES)
        return written

    def _wait(self, num_bytes: int) -> None:
        """Until no more than so many bytes are left to write, or one tensor."""
        while self._waiting and (num_bytes == 0 or sum(size for size, _ in self._waiting) > num_bytes):
            if num_bytes and len(self._waiting) == 1:
                return
            self._waiting.pop(0)[1].result()

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        path, begin = self._places[name]
        if path not in self._files:
            self._files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _write_all(self._files[path], memoryview(self._headers[path]), 0)
        content = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        for at in range(0, len(content), _CHUNK_BYTES):
            chunk = content[at : at + _CHUNK_BYTES]
            _write_all(self._files[path], chunk, begin + at)
            self._num_written += len(chunk)
            if self._progress is not None:
                self._progress(self._num_written, self.num_bytes)
        self._left[path].remove(name)
        self._num_unflushed += len(content)
        if not self._left[path]:
            self._end_flush()
            os.fsync(self._files[path])
            os.close(self._files.pop(path))
        elif self._num_unflushed > _FLUSH_BYTES and (self._flush is None or self._flush.done()):
            self._end_flush()
            self._flush = self._flusher.submit(os.fdatasync, self._files[path])
            self._num_unflushed = 0

    def _end_flush(self) -> None:
        """Before its file is closed. Raises what the disk has raised."""
        if self._flush is not None:
            self._flush.result()
            self._flush = None

    def abandon(self) -> None:
        """What is written is of no use."""
        self._writer.shutdown(cancel_futures=True)
        self._flusher.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def finish(self) -> None:
        """Wait for the disk, and write the index where there are several files. Raises what the disk has raised."""
        try:
            self._wait(0)
        finally:
            self.abandon()
        if missing := [name for left in self._left.values() for name in left]:
            raise AssertionError(f"{missing[0]} and {len(missing) - 1} more never came")
        if len(self.paths) > 1:
            weight_map = {name: place.path.name for name, place in sorted(self._places.items())}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            write_file(self._directory / "model.safetensors.index.json", (json.dumps(index, indent=2) + "\n").encode())
        flush_directory(self._directory)


def list_files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write_all(descriptor: int, content: memoryview, at: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, at)
        content, at = content[written:], at + written


def _shards(metas: Sequence[ParamMeta], max_bytes: int) -> list[list[ParamMeta]]:
    """Consecutive tensors of together at most max_bytes; a larger one alone."""
    shards: list[list[ParamMeta]] = [[]]
    size = 0
    for meta in metas:
        if shards[-1] and size + meta.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(meta)
        size += meta.num_bytes
    return shards


def _file_name(i: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"


def _header(metas: Iterable[ParamMeta], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """A file's header, and where behind it each tensor begins. The widest elements come first: readers want every tensor at a
    multiple of its element's size."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    begins, at = {}, 0
    for meta in sorted(metas, key=lambda meta: -meta.dtype.itemsize):
        begins[meta.name] = at
        end = at + math.prod(meta.shape) * meta.dtype.itemsize
        entries[meta.name] = {
            "dtype": _FORMAT_NAMES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begins
