"""The merge ops: ``torch.ops.lora_stream.merge_cast_`` and ``merge_cast_grouped_``, on the CPU and on CUDA devices.

    out = round(fp32(base) + scaling * (fp32(lora_B) @ fp32(lora_A)))

accumulated in float32 and rounded once to the dtype of ``out``, to nearest even or dithered, see rounding.py.
``reference.py`` has the slow twins.
"""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from lora_stream import _C as _C  # registers the ops
from lora_stream.rounding import ORIGIN, Place, RoundingMode, check_rounding

NUM_STATS = 6  # columns of `stats`: changed, unmoved, kept_sq, delta_sq, projected, checksum

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of what the ops read and write

Precision = Literal["float32", "fast"]


def merge_cast_(
    base: torch.Tensor,
    lora_A: torch.Tensor,
    lora_B: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
    *,
    precision: Precision = "float32",
    rounding: RoundingMode = "nearest",
    place: Place = ORIGIN,
) -> None:
    """Write ``base + scaling * lora_B @ lora_A`` into ``out``, rounded once.

    base: [rows, cols]; lora_A: [rank, cols]; lora_B: [rows, rank]; out: [rows, cols]. Each of float32, bfloat16 or
    float16, independently. lora_A and lora_B may have any strides; base and out any row stride. rank 0 is a cast. out
    may be base itself. Not differentiable: call it without gradients.

    On a CUDA device the merge is enqueued on the current stream, and out may also lie in pinned host memory, which the
    device writes to. No setting of torch's matters: TF32, autocast, inference mode.

    Against the exact sum the error is at most half a step of out's dtype plus
    ``2**-18 * (|base| + |scaling| * sum_k |lora_B[i, k] * lora_A[k, j]|)`` for rank up to 1024. precision="fast" makes
    that 2**-15 on CUDA devices, where lora_A and lora_B are float32 or differ in dtype, for half the arithmetic; it
    is meant for ranks from 64 on, where that may take longer than the memory. Elsewhere it changes nothing.

    rounding="dither" takes the neighbour further from zero with a probability equal to the fraction of the step (of float16's
    denormals, to 2**-17); `place` says which random numbers decide. The error is then less than a step, with expectation
    zero. A sum that is the base itself, so of every zero delta, is rounded to nearest; what is less than a step beyond the
    dtype's largest value becomes that, never infinite. To float32 there is nothing to round.

    Raises ValueError for another precision or rounding, RuntimeError for a wrong shape, dtype, device or stride, where out
    overlaps an input without being base, and on CUDA devices where this build has no kernel for them.
    """
    check_rounding(rounding, 0)
    numbers = list(place) if rounding == "dither" else []
    torch.ops.lora_stream.merge_cast_(base, lora_A, lora_B, scaling, out, place=numbers, fast=is_fast(precision))


def merge_cast_grouped_(
    bases: Sequence[torch.Tensor],
    lora_As: Sequence[torch.Tensor],
    lora_Bs: Sequence[torch.Tensor],
    scalings: Sequence[float],
    outs: Sequence[torch.Tensor],
    stats: torch.Tensor | None = None,
    *,
    precision: Precision = "float32",
    places: Sequence[Place] | None = None,
    fidelity: bool = True,
) -> None:
    """``merge_cast_`` of many matrices in one parallel loop or launch; all lists have the same length.

    places: of the matrices, to dither them; None rounds to nearest.
    stats: float64 [len(outs), NUM_STATS] or None; receives for each matrix, with ``delta`` the float32 product and
    ``nearest`` the rounding of a base to out's dtype: the number of elements with delta != 0, how many of those have
    out == nearest(base), sum (out - nearest(base))**2, sum delta**2, sum (out - base) * delta, and a checksum of the values
    (a sum of float32 bit patterns modulo 2**32). sum (out - nearest(base))**2 is NaN where, and only where, a value of out is
    not finite. Of rank 0 only that and the checksum are counted. On a CUDA device it lies there too, and is filled in stream order; there
    fidelity=False leaves out the last sum but one, which is NaN then.
    """
    numbers = [] if places is None else [number for place in places for number in place]
    torch.ops.lora_stream.merge_cast_grouped_(
        bases, lora_As, lora_Bs, scalings, outs, stats, places=numbers, fidelity=fidelity, fast=is_fast(precision)
    )


def casts(base: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the ops take them for a merge of rank 0: a rounding, or a copy, with its statistics."""
    if base.device.type == "cpu":
        reaches = out.device.type == "cpu"
    else:
        reaches = base.is_cuda and bool(_C.cuda_architectures) and (out.device == base.device or out.is_pinned())
    return reaches and base.dtype in DTYPES and out.dtype in DTYPES


def is_fast(precision: str) -> bool:
    """Raises ValueError for anything but the two precisions."""
    if precision not in ("float32", "fast"):
        raise ValueError(f"precision must be 'float32' or 'fast', got {precision!r}")
    return precision == "fast"


@torch.library.register_fake("lora_stream::merge_cast_")
def _(base, lora_A, lora_B, scaling, out, *, place=(), fast=False):
    _check_shapes(base, lora_A, lora_B, out)


@torch.library.register_fake("lora_stream::merge_cast_grouped_")
def _(bases, lora_As, lora_Bs, scalings, outs, stats=None, *, places=(), fidelity=True, fast=False):
    for base, lora_A, lora_B, out in zip(bases, lora_As, lora_Bs, outs, strict=True):
        _check_shapes(base, lora_A, lora_B, out)


def _check_shapes(base: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, out: torch.Tensor) -> None:
    """A meta tensor among real ones would have torch call the meta kernel for all, which computes nothing."""
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


# -- Every write counts in `_version`: without it autograd would take what is overwritten for what it saved. -------------


def _count_writes(op, keys, *args, **kwargs):
    """The kernel at ADInplaceOrView, which torch skips in inference mode and while it compiles."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    for name in _written[op]:
        written = given.get(name)
        for tensor in written if isinstance(written, list | tuple) else [written]:
            if tensor is not None and not tensor.is_inference():  # those count no versions
                torch.autograd.graph.increment_version(tensor)
    return op.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)


# Kept for as long as the ops are registered.
_counting = torch.library.Library("lora_stream", "IMPL")
_written = {}
with warnings.catch_warnings():
    # torch warns that this overrides what it does otherwise, which is nothing.
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    for _name in ("merge_cast_", "merge_cast_grouped_", "_scale_cast_", "_add_squares_"):
        _op = getattr(torch.ops.lora_stream, _name).default
        _written[_op] = [each.name for each in _op._schema.arguments if each.alias_info and each.alias_info.is_write]
        _counting.impl(_name, partial(_count_writes, _op), "ADInplaceOrView", with_keyset=True)


# -- CUDA: the current stream is only known here, and the kernel is particular about how lora_A and lora_B lie. --------


def _merge_cast_cuda_(base, lora_A, lora_B, scaling, out, *, place=(), fast=False):
    _merge_cast_grouped_cuda_([base], [lora_A], [lora_B], [scaling], [out], places=place, fast=fast)


@torch.no_grad()
def _merge_cast_grouped_cuda_(
    bases, lora_As, lora_Bs, scalings, outs, stats=None, *, places=(), fidelity=True, fast=False
):
    if not _C.cuda_architectures:
        raise RuntimeError(
            "merge_cast_: this build of lora_stream has no kernel for CUDA devices: install it again with "
            "LORA_STREAM_CUDA=1, which needs nvcc 12.1 or later, or merge on the CPU"
        )
    device = bases[0].device if bases else torch.device("cuda")
    torch._check(
        device.type == "cuda",
        lambda: f"merge_cast_: all tensors must be on one device, but the first base is on {device} and others are not",
    )
    pairs = [laid_out(lora_A, lora_B) for lora_A, lora_B in zip(lora_As, lora_Bs, strict=False)]
    if len(lora_As) == len(lora_Bs):
        lora_As, lora_Bs = [A for A, _ in pairs], [B for _, B in pairs]
    if stats is not None:
        stats.zero_()
    stream = torch.cuda.current_stream(device).cuda_stream
    torch.ops.lora_stream._merge_cast_cuda_(
        bases, lora_As, lora_Bs, scalings, outs, stats, places, stream, fidelity, fast
    )
    if stats is not None:
        stats[:, -1].remainder_(2.0**32)  # checksums: whole numbers below 2**53, so this is exact


def laid_out(lora_A: torch.Tensor, lora_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair as csrc/cuda/merge_kernel.h reads it, copied only where it lies otherwise: of one dtype, rows adjacent in
    memory, lora_A's rows aligned to 16 bytes and filled up to a multiple of 8 elements, an even rank, lora_B's rows
    aligned to two elements. What is filled up is zero. Shapes that do not fit stay, for the op to refuse."""
    if lora_A.dim() != 2 or lora_B.dim() != 2 or lora_A.shape[0] != lora_B.shape[1]:
        return lora_A, lora_B
    if not (lora_A.is_floating_point() and lora_B.is_floating_point()) or torch.float64 in (lora_A.dtype, lora_B.dtype):
        return lora_A, lora_B
    rank, cols = lora_A.shape
    dtype = lora_A.dtype if lora_A.dtype == lora_B.dtype else torch.float32
    even_rank = rank + rank % 2

    def lies_well(tensor: torch.Tensor, alignment: int) -> bool:
        return (
            tensor.dtype == dtype
            and rank == even_rank
            and tensor.stride(1) == 1
            and tensor.data_ptr() % alignment == 0
            and tensor.stride(0) * tensor.element_size() % alignment == 0
        )

    if not (cols % 8 == 0 and lies_well(lora_A, 16) and lora_A.stride(0) >= cols):
        filled = lora_A.new_zeros(even_rank, -(-cols // 8) * 8, dtype=dtype)
        filled[:rank, :cols] = lora_A
        lora_A = filled[:, :cols]
    if not (lies_well(lora_B, 2 * dtype.itemsize) and lora_B.stride(0) >= rank):
        filled = lora_B.new_zeros(lora_B.shape[0], even_rank, dtype=dtype)
        filled[:, :rank] = lora_B
        lora_B = filled
    return lora_A, lora_B


_cuda = torch.library.Library("lora_stream", "IMPL", "CUDA")
_cuda.impl("merge_cast_", _merge_cast_cuda_)
_cuda.impl("merge_cast_grouped_", _merge_cast_grouped_cuda_)
