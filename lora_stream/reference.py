"""The slow twins of the ops: what they compute, in one line that a reader can check by eye."""

import torch


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
