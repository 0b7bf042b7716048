"""`bench merge`: how far is one merge from just copying the weight, and from what else merges it?

Ceiling: `out.copy_(W)`, which reads W and writes out once, without any arithmetic.
Rivals:  eager    `(W + s * (B @ A)).to(bfloat16)`, the merge of most trainers
         addmm    `torch.addmm(W, B, A, alpha=s)` and the cast
         addmm_   `W.addmm_(B, A, alpha=s)` in place and the cast; what puts W back is not counted
         PEFT     `W + layer.get_delta_weight(...)` and the cast
         Triton   a kernel of the same idea, on CUDA devices
and for DoRA PEFT's own safe merge of one.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lora_stream import _C, dora, ops
from lora_stream.bench import measuring
from lora_stream.bench.results import Group, Way
from lora_stream.rounding import ORIGIN

SCALING = 0.7
CEILING, OURS = "copy", "ours"


@dataclass(frozen=True, kw_only=True)
class Case:
    label: str  # of the shape, or none
    rows: int
    cols: int
    rank: int
    dtype: torch.dtype  # of W; A and B are float32, out is bfloat16
    threads: int

    @property
    def num_bytes(self) -> int:
        """That a copy reads and writes."""
        return self.rows * self.cols * (self.dtype.itemsize + torch.bfloat16.itemsize)

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        label = f"{self.label} " if self.label else ""
        return f"{label}{self.rows} x {self.cols}, {dtype}, r={self.rank}, {self.threads} threads"


@dataclass
class Buffers:
    """Of one merge; several, so that the next one's are not in the cache."""

    base: torch.Tensor
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    out: torch.Tensor
    full: torch.Tensor  # like base: for results before the cast, and the one that is written in place


def make_buffers(case: Case, device: torch.device) -> list[Buffers]:
    """Enough of them that together they do not fit into the cache twice. Raises MemoryError where they would not fit at all."""
    set_bytes = case.rows * case.cols * (2 * case.dtype.itemsize + torch.bfloat16.itemsize)
    count = max(2, -(-2 * measuring.cache_bytes(device) // set_bytes))
    # What the rivals need for themselves: the product, the sum and the cast.
    if (needed := count * set_bytes + 3 * 4 * case.rows * case.cols) > 0.8 * measuring.available_bytes(device):
        raise MemoryError(f"{needed >> 20} MiB are needed for buffers that the cache does not hold")

    def one() -> Buffers:
        base = (0.02 * torch.randn(case.rows, case.cols, device=device)).to(case.dtype)  # as weights are
        return Buffers(
            base,
            torch.randn(case.rank, case.cols, device=device),
            torch.randn(case.rows, case.rank, device=device) * 0.01,
            torch.empty(case.rows, case.cols, device=device, dtype=torch.bfloat16),
            base.clone(),
        )

    return [one() for _ in range(count)]


def bench(
    case: Case, *, paths: Sequence[str], device: torch.device, repeats: int, progress: measuring.Progress
) -> Group:
    """paths: of the CPU kernel, beside the fastest."""
    group = Group(name=case.name, ceiling=CEILING, ours=OURS)
    try:
        buffers = make_buffers(case, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        group.note = f"not measured: {error}"
        return group
    turn = measuring.rotating(buffers)
    stats = torch.empty(1, ops.NUM_STATS, dtype=torch.float64, device=device)
    same = case.dtype == torch.float32

    def merge() -> None:
        b = next(turn)
        ops.merge_cast_(b.base, b.lora_A, b.lora_B, SCALING, b.out)

    def dither() -> None:
        b = next(turn)
        ops.merge_cast_(b.base, b.lora_A, b.lora_B, SCALING, b.out, rounding="dither")

    def merge_with_statistics(**rounding) -> None:
        b = next(turn)
        ops.merge_cast_grouped_([b.base], [b.lora_A], [b.lora_B], [SCALING], [b.out], stats, **rounding)

    def copy() -> None:
        b = next(turn)
        b.out.copy_(b.base)

    def eager() -> None:
        b = next(turn)
        (b.base + SCALING * (b.lora_B @ b.lora_A)).to(torch.bfloat16)

    def addmm() -> None:
        b = next(turn)
        lora_A, lora_B = (b.lora_A, b.lora_B) if same else (b.lora_A.to(case.dtype), b.lora_B.to(case.dtype))
        torch.addmm(b.base, lora_B, lora_A, alpha=SCALING, out=b.full).to(torch.bfloat16)

    def addmm_in_place() -> None:
        b = next(turn)
        lora_A, lora_B = (b.lora_A, b.lora_B) if same else (b.lora_A.to(case.dtype), b.lora_B.to(case.dtype))
        b.out.copy_(b.full.addmm_(lora_B, lora_A, alpha=SCALING))

    candidates = {
        CEILING: copy,
        OURS: merge,
        "ours, dithered": dither,
        "ours, with statistics": merge_with_statistics,
        "ours, dithered, with statistics": lambda: merge_with_statistics(places=[ORIGIN]),
        "eager": eager,
        "addmm": addmm,
        "addmm_": addmm_in_place,
    }
    missing = {}
    for path in paths:
        candidates[f"ours, {path}"] = _on_path(path, merge)
    for name, make in {"PEFT": _peft, "Triton": _triton}.items():
        try:
            candidates[name] = make(case, buffers)
        except (ImportError, RuntimeError) as error:
            missing[name] = str(error)
    previous = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        seconds = measuring.interleaved(candidates, repeats, device=device, progress=progress)
    finally:
        torch.set_num_threads(previous)
    group.ways = [Way(name=name, seconds=values) for name, values in seconds.items()]
    group.ways += [Way(name=name, missing=reason) for name, reason in missing.items()]
    return group


def bench_dora(case: Case, *, device: torch.device, repeats: int, progress: measuring.Progress) -> Group:
    """Norms, scaling, statistics and the one rounding, beside PEFT's safe merge and the cast of what it makes."""
    from peft import LoraConfig, get_peft_model

    group = Group(name=f"DoRA, {case.name}", ceiling="ours, without DoRA", ours=OURS)
    linear = nn.Linear(case.cols, case.rows, bias=False, device=device).to(case.dtype)
    config = LoraConfig(r=case.rank, lora_alpha=2 * case.rank, use_dora=True, target_modules=["0"])
    layer = get_peft_model(nn.Sequential(linear), config).base_model.model[0]
    parts = (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
    weight, lora_A, lora_B, magnitude = (
        each.weight.detach() for each in (linear, *(part["default"] for part in parts))
    )
    lora_B.normal_(std=0.01)
    out = torch.empty(case.rows, case.cols, dtype=torch.bfloat16, device=device)
    stats = torch.empty(1, ops.NUM_STATS, dtype=torch.float64, device=device)

    def merge_dora() -> None:
        norms = dora.norms(weight, lora_A, lora_B, 2.0, 1, "float32")
        dora.merge(weight, (lora_A, lora_B, 2.0), magnitude.float().unsqueeze(1) / norms, out, "float32")

    @torch.no_grad()
    def merge_by_peft() -> None:
        layer.lora_variant["default"].merge_safe(layer, "default", weight).to(torch.bfloat16)

    previous = torch.get_num_threads()
    torch.set_num_threads(case.threads)
    try:
        seconds = measuring.interleaved(
            {
                group.ceiling: lambda: ops.merge_cast_grouped_([weight], [lora_A], [lora_B], [2.0], [out], stats),
                OURS: merge_dora,
                "PEFT": merge_by_peft,
            },
            repeats,
            device=device,
            progress=progress,
        )
    finally:
        torch.set_num_threads(previous)
    group.ways = [Way(name=name, seconds=values) for name, values in seconds.items()]
    return group


def supported_paths(wanted: Sequence[str]) -> list[str]:
    """Raises ValueError for a CPU path that is not built in or that this processor lacks."""
    known = dict(_C.cpu_paths())
    for name in wanted:
        if not known.get(name, False):
            raise ValueError(f"--paths {name}: this processor supports {[each for each, has in known.items() if has]}")
    return list(wanted)


def _on_path(path: str, run):
    def call() -> None:
        before = os.environ.get("LORA_STREAM_CPU")
        os.environ["LORA_STREAM_CPU"] = path  # read at every call
        try:
            run()
        finally:
            if before is None:
                del os.environ["LORA_STREAM_CPU"]
            else:
                os.environ["LORA_STREAM_CPU"] = before

    return call


def _peft(case: Case, buffers: list[Buffers]):
    from peft import LoraConfig, get_peft_model

    linear = nn.Linear(case.cols, case.rows, bias=False, device=buffers[0].base.device, dtype=case.dtype)
    model = get_peft_model(nn.Sequential(linear), LoraConfig(r=case.rank, lora_alpha=6, target_modules=["0"]))
    layer = model.base_model.model[0]
    turn = measuring.rotating(buffers)

    @torch.no_grad()
    def by_peft() -> None:
        b = next(turn)
        linear.weight.data = b.base
        layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = b.lora_A, b.lora_B
        (linear.weight + layer.get_delta_weight("default")).to(torch.bfloat16)

    return by_peft


def _triton(case: Case, buffers: list[Buffers]):
    if not buffers[0].base.is_cuda:
        raise RuntimeError("Triton is measured on CUDA devices")
    from lora_stream.bench.triton_merge import TritonMerge

    turn = measuring.rotating([TritonMerge([(b.base, b.lora_A, b.lora_B, b.out)], SCALING) for b in buffers])
    return lambda: next(turn)()
