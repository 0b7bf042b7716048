"""DoRA (Liu et al., 2024, equation 5): magnitude * (W + delta) / ||W + delta||, one norm for each output over all inputs.

Two passes of the merge kernel, into float32 and block by block, so that a block stays in the cache: the first takes the
norms, the second scales and rounds. Every sum runs in an order that the shape alone decides: the same bits come out
however the weight is cut.
"""

from collections.abc import Iterator

import torch

from lora_stream import ops

BLOCK_ELEMENTS = 1 << 18


def norms(
    base: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float, dim: int, precision: ops.Precision
) -> torch.Tensor:
    """||base + scaling * lora_B @ lora_A|| along `dim`, float32; [rows, 1] for dim 1, [1, cols] for dim 0.

    base: [rows, cols]; lora_A: [r, cols]; lora_B: [rows, r], on one device.
    """
    sums = [_sum(merged.double().square_(), dim) for _, merged in _blocks(base, lora_A, lora_B, scaling, precision)]
    if not sums:
        return base.new_zeros((base.shape[0], 1) if dim == 1 else (1, base.shape[1]), dtype=torch.float32)
    return (torch.cat(sums) if dim == 1 else _sum(torch.cat(sums), 0)).sqrt_().float()


def merge(
    base: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor, float],
    scale: torch.Tensor,
    out: torch.Tensor,
    precision: ops.Precision,
) -> torch.Tensor:
    """out = round(scale * (base + delta)). Returns what rounding did, [NUM_STATS] float64, see ops; the delta is all that the
    adapter changes, scale included.

    base, out: [rows, cols]; pair: lora_A [r, cols], lora_B [rows, r], scaling; scale: float32 [rows, 1] or [1, cols].
    """
    statistics = torch.zeros(ops.NUM_STATS, dtype=torch.float64, device=base.device)
    for rows, merged in _blocks(base, *pair, precision):
        merged *= scale[rows] if scale.shape[0] > 1 else scale
        out[rows] = merged
        statistics += _statistics(base[rows], merged, out.dtype)
    return statistics


def _blocks(
    base: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float, precision: ops.Precision
) -> Iterator[tuple[slice, torch.Tensor]]:
    """base + delta in float32, some rows at a time. The memory is used again for the next."""
    num_rows, num_cols = base.shape
    step = max(1, BLOCK_ELEMENTS // max(1, num_cols))
    memory = torch.empty(min(step, num_rows), num_cols, dtype=torch.float32, device=base.device)
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        block = base[rows] if base.stride(1) == 1 else base[rows].contiguous()
        merged = memory[: rows.stop - begin]
        ops.merge_cast_(block, lora_A, lora_B[rows], scaling, merged, precision=precision)
        yield rows, merged


def _sum(terms: torch.Tensor, dim: int) -> torch.Tensor:
    """Pairwise, by halves. torch's own sum orders its terms by the number of rows and threads."""
    if terms.shape[dim] == 0:
        return terms.sum(dim, keepdim=True)
    while (size := terms.shape[dim]) > 1:
        half = size // 2
        folded = terms.narrow(dim, 0, half) + terms.narrow(dim, half, half)
        if size % 2:
            folded.narrow(dim, 0, 1).add_(terms.narrow(dim, size - 1, 1))
        terms = folded
    return terms


def _statistics(base: torch.Tensor, merged: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of one block, as the kernel counts them."""
    delta = merged - base.float()
    rounded, rounded_base = merged.to(dtype).float(), base.to(dtype).float()
    is_changed = delta != 0
    return torch.stack(
        [
            is_changed.sum().double(),
            (is_changed & (rounded == rounded_base)).sum().double(),
            (rounded - rounded_base).double().square_().sum(),
            delta.double().square_().sum(),
            rounded.view(torch.int32).long().bitwise_and_(2**32 - 1).sum().remainder_(2**32).double(),
        ]
    )
