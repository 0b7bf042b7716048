"""DoRA (Liu et al., 2024, equation 5): magnitude * (W + delta) / ||W + delta||, one norm for each output over all inputs.

Two passes of the merge kernel, into float32 and block by block, so that a block stays in the cache: the first takes the
norms, the second scales and rounds. Every sum runs in an order that the shape alone decides: the same bits come out
however the weight is cut, on every CPU.
"""

from collections.abc import Iterator

import torch

from lora_stream import ops, reference
from lora_stream.rounding import Place

BLOCK_ELEMENTS = 1 << 20  # 4 MiB: more packs lora_A less often, but leaves the cache


def norms(
    base: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float, dim: int, precision: ops.Precision
) -> torch.Tensor:
    """||base + scaling * lora_B @ lora_A|| along `dim`, float32; [rows, 1] for dim 1, [1, cols] for dim 0.

    base: [rows, cols]; lora_A: [r, cols]; lora_B: [rows, r], on one device.
    """
    sums = torch.zeros(base.shape[1 - dim], dtype=torch.float64, device=base.device)
    for rows, merged in _blocks(base, lora_A, lora_B, scaling, precision):
        add_squares(merged, dim, sums[rows] if dim == 1 else sums)
    return sums.sqrt_().float().unsqueeze(dim)


def merge(
    base: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor, float],
    scale: torch.Tensor,
    out: torch.Tensor,
    precision: ops.Precision,
    place: Place | None = None,
) -> torch.Tensor:
    """out = round(scale * (base + delta)). Returns what rounding did, [NUM_STATS] float64, see ops; the delta is all that the
    adapter changes, scale included.

    base, out: [rows, cols]; pair: lora_A [r, cols], lora_B [rows, r], scaling; scale: float32 [rows, 1] or [1, cols]; place: of
    base[0, 0], to dither; None rounds to nearest.
    """
    statistics = torch.zeros(ops.NUM_STATS, dtype=torch.float64, device=base.device)
    by_row = scale.shape == (base.shape[0], 1)
    for rows, merged in _blocks(base, *pair, precision):
        scale_cast(
            merged,
            scale[rows] if by_row else scale,
            _adjacent(base[rows]),
            out[rows],
            statistics,
            None if place is None else place.moved(rows.start),
        )
    return statistics


def add_squares(merged: torch.Tensor, dim: int, sums: torch.Tensor) -> None:
    """Add the squares along `dim` to sums, float64."""
    if merged.is_cpu:
        torch.ops.lora_stream._add_squares_(merged, dim, sums)
    else:
        sums += merged.double().square_().sum(dim)


def scale_cast(
    merged: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    place: Place | None = None,
) -> None:
    """out = round(scale * merged), and add what that did against base to the statistics."""
    if merged.is_cpu:
        numbers = [] if place is None else list(place)
        torch.ops.lora_stream._scale_cast_(merged, scale.contiguous(), base, out, statistics, numbers)
    else:
        scale_cast_reference(merged, scale, base, out, statistics, place)


def scale_cast_reference(
    merged: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    out: torch.Tensor,
    statistics: torch.Tensor,
    place: Place | None = None,
) -> None:
    """The same in torch's own ops, on any device."""
    merged = merged * scale
    delta = merged - base.float()
    out.copy_(merged if place is None else reference.dither(merged, base.float(), out.dtype, place))
    rounded, rounded_base = out.float(), base.to(out.dtype).float()
    is_changed = delta != 0
    statistics += torch.stack(
        [
            is_changed.sum().double(),
            (is_changed & (rounded == rounded_base)).sum().double(),
            (rounded - rounded_base).double().square_().sum() + (rounded * 0.0).sum(),  # NaN if that is not finite
            delta.double().square_().sum(),
            ((rounded - base.float()).double() * delta).sum(),
            rounded.contiguous().view(torch.int32).long().bitwise_and_(2**32 - 1).sum().remainder_(2**32).double(),
        ]
    ).to(statistics.device)


def _blocks(
    base: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float, precision: ops.Precision
) -> Iterator[tuple[slice, torch.Tensor]]:
    """base + delta in float32, some rows at a time. The memory is used again for the next."""
    num_rows, num_cols = base.shape
    step = max(1, BLOCK_ELEMENTS // max(1, num_cols))
    memory = torch.empty(min(step, num_rows), num_cols, dtype=torch.float32, device=base.device)
    for begin in range(0, num_rows, step):
        rows = slice(begin, min(begin + step, num_rows))
        merged = memory[: rows.stop - begin]
        ops.merge_cast_(_adjacent(base[rows]), lora_A, lora_B[rows], scaling, merged, precision=precision)
        yield rows, merged


def _adjacent(matrix: torch.Tensor) -> torch.Tensor:
    """The kernels want a row's elements adjacent."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()
