"""The slow twins of the ops: what they compute, in one line that a reader can check by eye."""

import torch

from lora_stream.rounding import Place


def merge_cast(
    base: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float, dtype: torch.dtype
) -> torch.Tensor:
    """``base + scaling * lora_B @ lora_A`` in float64, rounded once to `dtype`; shapes as in ops.merge_cast_.

    scaling is rounded to float32 first, as the ops take it.
    """
    scaling = torch.tensor(scaling, dtype=torch.float32).item()
    exact = base.double() + scaling * (lora_B.double() @ lora_A.double())
    return round_once(exact, dtype)


def round_once(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 to `dtype`, nearest-even. torch goes by way of float32, which rounds twice: here the way is made odd.

    Rounding to odd in float32 (sticky last bit) and then to nearest in a dtype of at most 22 fraction bits gives the
    correctly rounded result (Boldo and Melquiond, 2008).
    """
    single = exact.float()
    if dtype == torch.float32:
        return single
    inexact = single.double() != exact
    bits = single.view(torch.int32)
    towards_zero = torch.where(single.double().abs() > exact.abs(), bits - 1, bits)
    odd = torch.where(inexact & exact.isfinite(), towards_zero | 1, bits)
    return odd.view(torch.float32).to(dtype)


def dither(sums: torch.Tensor, base: torch.Tensor, dtype: torch.dtype, place: Place) -> torch.Tensor:
    """float32 sums [rows, cols] dithered to bfloat16 or float16, bit for bit as the kernels do, on any device.

    base: of the same shape; where a sum is equal to it, it is rounded to nearest. place: of sums[0, 0], see rounding.py. Like
    csrc/dither.h and csrc/dtype.h, in int64, which holds 32-bit numbers without a sign.
    """
    if dtype == torch.float32:
        return sums
    bits = sums.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    magnitude = bits & 0x7FFFFFFF
    random = random_bits(place, *sums.shape, sums.device)
    dropped, largest = (16, 0x7F7F0000) if dtype == torch.bfloat16 else (13, 0x477FE000)
    added = torch.where(magnitude < largest, random >> (16 - dropped), 0)
    dithered = ((bits + added) >> dropped) << dropped
    dithered = torch.where(dithered >= 2**31, dithered - 2**32, dithered).int().view(torch.float32)
    keeps = ~sums.isfinite() | (sums == base)
    if dtype == torch.float16:
        steps = sums.abs() * 2.0**24  # of denormals
        whole = steps.floor()
        small = (whole + ((random + 0.5) * 2.0**-16 < steps - whole)) * 2.0**-24
        dithered = torch.where(magnitude < 0x38800000, small.copysign(sums), dithered)
        keeps |= magnitude >= 0x47800000  # 2**16: an overflow
    return torch.where(keeps, sums, dithered).to(dtype)


def random_bits(place: Place, rows: int, cols: int, device: torch.device | None = None) -> torch.Tensor:
    """The 16 random bits of each element, int64 [rows, cols]."""
    key = torch.arange(place.row, place.row + rows, device=device) + 1
    key = key * _signed(0x9E3779B97F4A7C15) + place.key
    key = (key ^ _shifted(key, 30)) * _signed(0xBF58476D1CE4E5B9)
    key = (key ^ _shifted(key, 27)) * _signed(0x94D049BB133111EB)
    key = (key ^ _shifted(key, 31)).unsqueeze(1)
    col = torch.arange(place.col, place.col + cols, device=device)
    pair = (col >> 1) & 0xFFFFFFFF
    pair = (pair ^ (pair >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    pair = (pair ^ (pair >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    pair = pair ^ (pair >> 16)
    product = (pair ^ (key & 0xFFFFFFFF)) * (_shifted(key, 32) | 1) & 0xFFFFFFFF
    both = product ^ (product >> 16)
    return torch.where(col % 2 == 1, both >> 16, both & 0xFFFF)


def _signed(number: int) -> int:
    """64 bits as int64 has them."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(number: torch.Tensor, count: int) -> torch.Tensor:
    """int64 shifted right as if it had no sign."""
    return (number >> count) & (2 ** (64 - count) - 1)
