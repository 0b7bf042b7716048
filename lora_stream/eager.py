"""The merge by torch's own operations, for devices that this build has no kernel for. Slow, and says so once.

In float64, block of rows by block of rows: no float32 matmul setting (TF32) can reach it, and memory stays bounded.
"""

import warnings
from collections.abc import Sequence

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
    for i, parts in enumerate(zip(bases, lora_As, lora_Bs, scalings, outs, strict=True)):
        _warn_once(parts[0].device.type)
        sums = _merge(*parts, with_stats=stats is not None)
        if stats is not None:
            stats[i] = sums.cpu()


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
