"""The merge by torch's own operations, for devices that this build has no kernel for. Slow, and says so once.

In float64, block of rows by block of rows: no float32 matmul setting (TF32) can reach it, and memory stays bounded.
"""

import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch

_BLOCK_BYTES = 64 * 1024 * 1024
_warned: set[str] = set()


def merge_cast_(
    base: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float, out: torch.Tensor
) -> None:
    """As ops.merge_cast_."""
    merge_cast_grouped_([base], [lora_A], [lora_B], [scaling], [out])


def merge_cast_grouped_(
    bases: Sequence[torch.Tensor],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    outs: Sequence[torch.Tensor],
    stats: torch.Tensor | None = None,
) -> None:
    """As ops.merge_cast_grouped_; stats is on the CPU."""
    for base, lora_A, lora_B, out in zip(bases, lora_As, lora_Bs, outs, strict=True):
        check_shapes(base, lora_A, lora_B, out)
    _check_disjoint(bases, lora_As, lora_Bs, outs)
    for i, parts in enumerate(zip(bases, lora_As, lora_Bs, scalings, outs, strict=True)):
        _warn_once(parts[0].device.type)
        sums = _merge(*parts, with_stats=stats is not None)
        if stats is not None:
            stats[i] = sums.cpu()


def check_shapes(base: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, out: torch.Tensor) -> None:
    """Raise RuntimeError unless the shapes fit each other and all tensors are on one device: a meta tensor among real
    ones would have torch call the meta kernel for all, which computes nothing, and a larger out would be filled by
    broadcasting."""
    devices = {tensor.device for tensor in (base, lora_A, lora_B, out)}
    torch._check(len(devices) == 1, lambda: f"merge_cast_: all tensors must be on one device, got {devices}")
    rows, cols = base.shape
    rank = lora_A.shape[0]
    for name, tensor, shape in (
        ("lora_A", lora_A, (rank, cols)),
        ("lora_B", lora_B, (rows, rank)),
        ("out", out, (rows, cols)),
    ):
        torch._check(
            tuple(tensor.shape) == shape,
            lambda name=name, tensor=tensor, shape=shape: (
                f"merge_cast_: {name} must have shape {shape}, got {tuple(tensor.shape)}"
            ),
        )


def _check_disjoint(
    bases: Sequence[torch.Tensor],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
) -> None:
    """Raise RuntimeError if what is written overlaps what is read, save for an out that is its own base."""
    written = sorted((*_extent(out), i) for i, out in enumerate(outs) if out.numel())
    for (_, end, i), (begin, _, j) in pairwise(written):
        torch._check(end <= begin, lambda i=i, j=j: f"merge_cast_grouped_: outs {i} and {j} overlap; pass other memory")
    begins = [begin for begin, _, _ in written]
    for name, tensors in (("base", bases), ("lora_A", lora_As), ("lora_B", lora_Bs)):
        for i, tensor in enumerate(tensors):
            if tensor.numel() == 0:
                continue
            begin, end = _extent(tensor)
            for other_begin, other_end, j in written[
                max(0, bisect_right(begins, begin) - 1) : bisect_left(begins, end)
            ]:
                itself = name == "base" and i == j and begin == other_begin and tensor.stride() == outs[j].stride()
                torch._check(
                    other_end <= begin or (itself and tensor.dtype == outs[j].dtype),
                    lambda name=name, i=i, j=j: f"merge_cast_: out {j} overlaps {name} {i}; pass other memory",
                )


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.dtype.itemsize


def _warn_once(device_type: str) -> None:
    if device_type != "cpu" and device_type not in _warned:
        _warned.add(device_type)
        warnings.warn(
            f"lora_stream has no kernel for {device_type} in this build: merging there by torch in float64, which is slow",
            stacklevel=2,
        )


def _merge(base, lora_A, lora_B, scaling, out, *, with_stats: bool) -> torch.Tensor:
    scaling = torch.tensor(scaling, dtype=torch.float32).item()
    rows_per_block = max(1, _BLOCK_BYTES // max(1, 8 * base.shape[1]))
    sums = torch.zeros(5, dtype=torch.float64, device=base.device)
    exact_A = lora_A.double()
    for begin in range(0, base.shape[0], rows_per_block):
        rows = slice(begin, begin + rows_per_block)
        delta = (lora_B[rows].double() @ exact_A).mul_(scaling)
        merged = (base[rows].double() + delta if lora_A.shape[0] else base[rows]).to(out.dtype)
        if with_stats:
            rounded_base = base[rows].to(out.dtype)
            changed = delta != 0
            bits = merged.float().view(torch.int32).to(torch.int64)
            sums += torch.stack(
                [
                    changed.sum().double(),
                    (changed & (merged == rounded_base)).sum().double(),
                    (merged.double() - rounded_base.double()).square().sum(),
                    delta.square().sum(),
                    (bits.sum() % 2**32).double(),
                ]
            )
        out[rows] = merged
    sums[4] %= 2**32
    return sums
