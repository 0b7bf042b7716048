"""Merges of whole matrices or of some of their rows: one call of the grouped kernel for many, where the weights lie."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lora_stream import ops

# lora_A: [..., r, cols]; lora_B: [..., rows, r]; scaling. Of a weight [..., rows, cols].
Pair = tuple[torch.Tensor, torch.Tensor, float]


@dataclass(kw_only=True)
class Traffic:
    """What one pass has moved and where it has worked on this rank, in bytes."""

    gathered: int = 0  # received from other ranks
    crossed: int = 0  # copied between the host and a device, either way
    made_on: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # merged or copied, by type of device

    def to(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on the device."""
        self.cross(tensor, device)
        return tensor.to(device)

    def cross(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Count a copy of the tensor to the device."""
        if tensor.device.type != device.type:
            self.crossed += tensor.nbytes


class Merge(NamedTuple):
    """out = round(base + sum of the pairs' deltas). base and out: [rows, cols] or [experts, rows, cols], of one device."""

    base: torch.Tensor
    pairs: Sequence[Pair]
    out: torch.Tensor


def merge(merges: Sequence[Merge], *, precision: ops.Precision, traffic: Traffic) -> torch.Tensor:
    """Do them, without gradients. Returns what rounding did, [len(merges), NUM_STATS] float64 on their device, see ops."""
    device = merges[0].base.device
    bases, lora_As, lora_Bs, scalings, outs, owners = [], [], [], [], [], []
    for i, (base, pairs, out) in enumerate(merges):
        lora_A, lora_B, scaling = _summed(pairs)
        # The base may be offloaded, and the adapter not: the merge is where the base is.
        matrices = [base, traffic.to(lora_A, device), traffic.to(lora_B, device), out]
        for matrix, A, B, into in zip(*matrices, strict=True) if base.dim() == 3 else [matrices]:
            # The kernel wants a row's elements adjacent; a base that was loaded transposed is copied, one at a time.
            bases.append(matrix if matrix.stride(1) == 1 else matrix.contiguous())
            lora_As.append(A)
            lora_Bs.append(B)
            scalings.append(scaling)
            outs.append(into)
            owners.append(i)
    statistics = torch.empty(len(bases), ops.NUM_STATS, dtype=torch.float64, device=device)
    if bases:  # of experts there may be none on this rank
        ops.merge_cast_grouped_(bases, lora_As, lora_Bs, scalings, outs, statistics, precision=precision)
    traffic.made_on[device.type] += sum(out.nbytes for out in outs)
    if owners == list(range(len(merges))):
        return statistics
    sums = statistics.new_zeros(len(merges), ops.NUM_STATS)
    sums.index_add_(0, torch.tensor(owners, dtype=torch.long, device=device), statistics)
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
