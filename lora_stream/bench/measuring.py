"""How we measure: interleaved repeats after a warm-up, buffers that the cache does not hold, and where it was done."""

import ctypes
import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from lora_stream import _C

Progress = Callable[[str], object]  # told what is done next


def interleaved(
    candidates: dict[str, Callable[[], object]],
    repeats: int,
    *,
    device: torch.device | None = None,
    progress: Progress = lambda what: None,
) -> dict[str, list[float]]:
    """Seconds of each candidate in every repeat. One more round comes first, to warm up, and is not counted.

    In turn within a round, so that whatever else the machine does meets all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_ in range(repeats + 1):
        for name, run in candidates.items():
            progress(name)
            wait(device)
            begin = time.perf_counter()
            run()
            wait(device)
            if round_:
                seconds[name].append(round(time.perf_counter() - begin, 9))
    return seconds


def wait(device: torch.device | None) -> None:
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


def rotating(sets: Sequence) -> Iterator:
    """One after the other, for ever: what is asked for next left the cache, if all of them together do not fit in."""
    return itertools.cycle(sets)


def cache_bytes(device: torch.device) -> int:
    """Of the last level; where it is not known, more than most have."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    found = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K"):
            found.append(int(text[:-1]) << 10)
    return max(found) or 64 << 20


def available_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024


class ExtraMemory:
    """Peak memory above what was there when it began: of the process on the CPU, of torch's allocator on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        ctypes.CDLL(None).malloc_trim(0)  # what ran before must not serve this one unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts anew
        self._before = _status("VmRSS")

    def num_bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _status("VmHWM") - self._before)


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def machine() -> dict[str, object]:
    found: dict[str, object] = {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_path": _C.cpu_path(),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def versions(*distributions: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("lora_stream", "torch", "peft", "transformers", *distributions):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
