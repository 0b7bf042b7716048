"""The merge ops: ``torch.ops.lora_stream.merge_cast_`` and ``merge_cast_grouped_``, with their meta kernels.

    out = round(fp32(base) + scaling * (fp32(lora_B) @ fp32(lora_A)))

accumulated in float32 and rounded once, to nearest even, to the dtype of ``out``. ``reference.py`` has the slow twin.
"""

from collections.abc import Sequence

import torch

from lora_stream import _C as _C  # registers the ops
from lora_stream import eager

NUM_STATS = 5  # columns of `stats`: changed, unmoved, kept_sq, delta_sq, checksum


def merge_cast_(
    base: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float, out: torch.Tensor
) -> None:
    """Write ``base + scaling * lora_B @ lora_A`` into ``out``, rounded once.

    base: [rows, cols]; lora_A: [rank, cols]; lora_B: [rows, rank]; out: [rows, cols]. Each of float32, bfloat16 or
    float16, independently. lora_A and lora_B may have any strides; base and out any row stride. rank 0 is a cast. out
    may be base itself. Not differentiable: call it without gradients.

    Against the exact sum the error is at most half a step of out's dtype plus
    ``2**-18 * (|base| + |scaling| * sum_k |lora_B[i, k] * lora_A[k, j]|)`` for rank up to 1024.

    Raises RuntimeError for a wrong shape, dtype, device or stride, and where out overlaps an input without being base.
    """
    torch.ops.lora_stream.merge_cast_(base, lora_A, lora_B, scaling, out)


def merge_cast_grouped_(
    bases: Sequence[torch.Tensor],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    outs: Sequence[torch.Tensor],
    stats: torch.Tensor | None = None,
) -> None:
    """``merge_cast_`` of many matrices in one parallel loop; all lists have the same length.

    stats: float64 [len(outs), NUM_STATS] or None; receives for each matrix, with ``delta`` the float32 product and
    ``round`` the rounding to out's dtype: the number of elements with delta != 0, how many of those have
    round(base + delta) == round(base), sum (round(base + delta) - round(base))**2, sum delta**2, and a checksum of the
    rounded values (a sum of float32 bit patterns modulo 2**32).
    """
    torch.ops.lora_stream.merge_cast_grouped_(bases, lora_As, lora_Bs, scalings, outs, stats)


@torch.library.register_fake("lora_stream::merge_cast_")
def _(base, lora_A, lora_B, scaling, out):
    eager.check_shapes(base, lora_A, lora_B, out)


@torch.library.register_fake("lora_stream::merge_cast_grouped_")
def _(bases, lora_As, lora_Bs, scalings, outs, stats=None):
    for base, lora_A, lora_B, out in zip(bases, lora_As, lora_Bs, outs, strict=True):
        eager.check_shapes(base, lora_A, lora_B, out)


# Where there is no kernel yet. Kept for as long as the ops are registered.
_cuda = torch.library.Library("lora_stream", "IMPL", "CUDA")
_cuda.impl("merge_cast_", eager.merge_cast_)
_cuda.impl("merge_cast_grouped_", eager.merge_cast_grouped_)
