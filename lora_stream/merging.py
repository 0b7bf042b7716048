"""Merges of weights or of parts of them: one call of the grouped kernel for many, where the weights lie."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lora_stream import dora, ops
from lora_stream.plan import Adapter, Rows, Task, as_matrix
from lora_stream.rounding import ORIGIN, Place, RoundingMode, check_rounding

_COPIED_ROW, _SHORT_ROW = 4096, 64  # elements of a row, as a copy takes it
_KEPT_SQ = 2  # column of the statistics, see ops

# lora_A: [..., r, cols]; lora_B: [..., rows, r]; scaling. Of a weight [..., rows, cols].
Pair = tuple[torch.Tensor, torch.Tensor, float]


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """How a pass computes: see ops.merge_cast_ and rounding.py. Raises ValueError for what there is not."""

    precision: ops.Precision = "float32"
    rounding: RoundingMode = "nearest"
    seed: int = 0  # of dithering
    fidelity: bool | None = None  # whether `projected` is summed up on devices; None: only on the host

    def __post_init__(self) -> None:
        ops.is_fast(self.precision)
        check_rounding(self.rounding, self.seed)

    def describe(self) -> str:
        """All that must be equal on all ranks."""
        return f"rounding {self.rounding!r} with seed {self.seed}, precision {self.precision!r}"

    def places(self, task: Task, part: torch.Tensor, dim: int = 0, start: int = 0) -> list[Place]:
        """Of the matrices in `part`, which is what the task hands over from `start` of dimension `dim` on: of one, or of one for
        each expert, which lie one below the other."""
        whole = Place.in_parameter(self.seed, task.own_name)
        if len(task.meta.shape) == 3 and any(adapter.num_experts is not None for adapter in task.adapters):
            first, row, col = (start if axis == dim else 0 for axis in range(3))
            num_rows = task.meta.shape[1]
            return [whole.moved((first + expert) * num_rows + row, col) for expert in range(len(part))]
        width = torch.Size(task.meta.shape[2:]).numel()  # of a kernel
        return [whole.moved(start, 0) if dim == 0 else whole.moved(0, start * width)]


NEAREST = Arithmetic()


@dataclass(kw_only=True)
class Traffic:
    """What one pass has moved and where it has worked on this rank, in bytes where nothing else is said."""

    gathered: int = 0  # received from other ranks
    seconds_gathering: float = 0.0  # between ranks; on devices, until it is enqueued
    crossed: int = 0  # copied between the host and a device, either way
    made_on: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # merged or copied, by type of device

    @contextlib.contextmanager
    def gathering(self) -> Iterator[None]:
        """Counts the time."""
        begin = time.perf_counter()
        yield
        self.seconds_gathering += time.perf_counter() - begin

    def to(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on the device."""
        self.cross(tensor, device)
        return tensor.to(device)

    def cross(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Count a copy of the tensor to the device."""
        if tensor.device.type != device.type:
            self.crossed += tensor.nbytes


class Merge(NamedTuple):
    """out = round(base + sum of the pairs' deltas), or round(scale * (base + delta)); a copy without pairs. All of one device.

    base and out: of one shape; [experts, rows, cols] where the pairs are of experts, otherwise a matrix or taken as one, see
    plan.Adapter; of any shape and dtype without pairs. places: of each matrix, see Arithmetic. scale: float32 [rows, 1] or [1, cols], see dora.py.
    """

    base: torch.Tensor
    pairs: Sequence[Pair]
    out: torch.Tensor
    places: Sequence[Place] = ()
    scale: torch.Tensor | None = None


def pair_of(
    task: Task, adapter: Adapter, lora_A: torch.Tensor, lora_B: torch.Tensor, dim: int = 0, own: slice = slice(None)
) -> Pair:
    """What makes the delta of [own] of dimension `dim` of what the task hands over. lora_A, lora_B: all of the adapter's."""
    lora_A, lora_B = task.factors(adapter, lora_A, lora_B)
    axis = dim - (lora_A.dim() - 2)
    if axis < 0:  # experts
        lora_A, lora_B = lora_A[own], lora_B[own]
    elif axis == 0:
        lora_B = lora_B[..., own, :]
    else:
        assert axis == 1, "a kernel's dimensions are not cut"
        width = torch.Size(task.meta.shape[dim + 1 :]).numel()  # of a convolution's [out, in, *kernel]
        lora_A = lora_A[..., own.start * width : own.stop * width]
    return lora_A, lora_B, adapter.scaling


def scale_of(
    adapter: Adapter,
    base: torch.Tensor,
    pair: Pair,
    magnitude: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    traffic: Traffic,
) -> torch.Tensor:
    """Of DoRA, for a Merge. base: matrix with all inputs of some outputs, and the pair and the magnitude of these."""
    lora_A, lora_B, scaling = pair
    lora_A, lora_B, magnitude = (traffic.to(each, base.device) for each in (lora_A, lora_B, magnitude))
    dim = 0 if adapter.transposed else 1
    return magnitude.float().unsqueeze(dim) / dora.norms(base, lora_A, lora_B, scaling, dim, arithmetic.precision)


def is_finite(tensor: torch.Tensor) -> bool:
    """Of any shape and dtype, in one read."""
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.is_complex():
        return bool(tensor.isfinite().all())
    return all(map(math.isfinite, torch.aminmax(tensor)))  # NaN is its own minimum


def not_finite(task: Task) -> ValueError:
    what = "what its adapter makes of it" if task.adapters or task.rows else "it"
    return ValueError(
        f"{task.fqn}: {what} is not finite as {task.meta.dtype} (NaN, infinity, or an overflow of that dtype). Nothing of it "
        "has left. Look for a diverged training step, or pass check_finite=False (--no-check-finite) to have it all the same"
    )


def replace_rows(
    task: Task,
    out: torch.Tensor,
    values_of: Callable[[Rows], torch.Tensor],
    dim: int = 0,
    own: slice = slice(None),
    *,
    traffic: Traffic,
) -> None:
    """Write the rows that the task's adapters replace into what was made of [own] of dimension `dim`."""
    for rows in task.rows:
        values = traffic.to(values_of(rows), out.device)
        indices = torch.tensor(rows.indices, device=out.device)
        if dim == 1:
            values = values[:, own]
        elif own != slice(None):
            is_own = (indices >= own.start) & (indices < own.stop)
            values, indices = values[is_own], indices[is_own] - own.start
        out[indices] = values.to(out.dtype)


def merge(merges: Sequence[Merge], *, arithmetic: Arithmetic, traffic: Traffic) -> torch.Tensor:
    """Do them, without gradients. Returns what rounding did, [len(merges), NUM_STATS] float64 on their device, see ops."""
    device = merges[0].base.device
    dithers = arithmetic.rounding == "dither"
    bases, lora_As, lora_Bs, scalings, outs, places, owners = [], [], [], [], [], [], []
    others: dict[int, torch.Tensor] = {}  # statistics of what is no product
    for i, (base, pairs, out, own_places, scale) in enumerate(merges):
        if not pairs and not ops.casts(base, out):
            others[i] = _copied(base, out)
            continue
        if not pairs:
            base, out = _as_one_matrix(base, out)
            pairs, own_places = [_no_delta(base)], [ORIGIN]
        lora_A, lora_B, scaling = _summed(pairs)
        # The base may be offloaded, and the adapter not: the merge is where the base is.
        lora_A, lora_B = traffic.to(lora_A, device), traffic.to(lora_B, device)
        if scale is not None:
            pair = lora_A, lora_B, scaling
            others[i] = dora.merge(
                as_matrix(base), pair, scale, as_matrix(out), arithmetic.precision, own_places[0] if dithers else None
            )
            continue
        # Views of out: it is contiguous, or rows of what is.
        if lora_A.dim() == 2:
            matrices = [(as_matrix(base), lora_A, lora_B, as_matrix(out))]
        else:
            matrices = zip(base, lora_A, lora_B, out, strict=True)
        places += own_places
        for matrix, A, B, into in matrices:
            # The kernel wants a row's elements adjacent; a base that was loaded transposed is copied, one at a time.
            bases.append(matrix if matrix.stride(1) == 1 else matrix.contiguous())
            lora_As.append(A)
            lora_Bs.append(B)
            scalings.append(scaling)
            outs.append(into)
            owners.append(i)
    statistics = torch.empty(len(bases), ops.NUM_STATS, dtype=torch.float64, device=device)
    if bases:  # of experts there may be none on this rank
        ops.merge_cast_grouped_(
            bases,
            lora_As,
            lora_Bs,
            scalings,
            outs,
            statistics,
            precision=arithmetic.precision,
            places=places if dithers else None,
            fidelity=device.type == "cpu" if arithmetic.fidelity is None else arithmetic.fidelity,
        )
    traffic.made_on[device.type] += sum(merge.out.nbytes for merge in merges)
    if owners == list(range(len(merges))):
        return statistics
    sums = statistics.new_zeros(len(merges), ops.NUM_STATS)
    sums.index_add_(0, torch.tensor(owners, dtype=torch.long, device=device), statistics)
    for i, row in others.items():
        sums[i] = row
    sums[:, -1].remainder_(2.0**32)  # the checksum, see ops; whole numbers below 2**53, so this is exact
    return sums


def _summed(pairs: Sequence[Pair]) -> Pair:
    """One pair for the sum of all: concatenated along the rank, with differing scalings multiplied into lora_B in float32."""
    (lora_A, lora_B, scaling), *others = pairs
    if not others:
        return lora_A, lora_B, scaling
    differ = any(other != scaling for _, _, other in others)
    factors = [pair[2] if differ else 1.0 for pair in pairs]
    joined_A = torch.cat([lora_A.float() for lora_A, _, _ in pairs], dim=-2)
    joined_B = torch.cat(
        [lora_B.float() * factor for (_, lora_B, _), factor in zip(pairs, factors, strict=True)], dim=-1
    )
    return joined_A, joined_B, 1.0 if differ else scaling


def _as_one_matrix(base: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a copy, with as many rows as the kernel needs to share them out."""
    if not base.is_contiguous():
        return as_matrix(base), as_matrix(out)
    width = math.gcd(out.numel(), _COPIED_ROW)
    if width < _SHORT_ROW:
        width = out.numel()
    return base.view(-1, width), out.view(-1, width)


def _no_delta(matrix: torch.Tensor) -> Pair:
    """Of rank 0."""
    num_rows, num_cols = matrix.shape
    return matrix.new_empty(0, num_cols), matrix.new_empty(num_rows, 0), 1.0


def _copied(base: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A copy of what the kernel does not know. Returns its statistics, of which there is only whether all is finite."""
    out.copy_(base)
    statistics = torch.zeros(ops.NUM_STATS, dtype=torch.float64, device=base.device)
    if out.is_floating_point() or out.is_complex():
        statistics[_KEPT_SQ].masked_fill_(~out.isfinite().all().to(base.device), math.nan)
    return statistics
