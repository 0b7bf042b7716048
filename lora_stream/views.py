"""Parts of live tensors that a checkpoint holds as tensors of their own.

transformers keeps all experts of a layer in one tensor, and gate and up together; checkpoints hold them one by one. A view
says which part of the live tensor a checkpoint tensor is, so that each is merged straight into memory of its own.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class View:
    """ranges: [begin, end) of each of the live tensor's dimensions. dims: those of them that the checkpoint tensor has, in
    its order; the others have one element each and are dropped."""

    ranges: tuple[tuple[int, int], ...]
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.ranges[dim][1] - self.ranges[dim][0] for dim in self.dims)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a live tensor, without a copy."""
        for dim, (begin, end) in enumerate(self.ranges):
            tensor = tensor.narrow(dim, begin, end - begin)
        dropped = [dim for dim in range(tensor.dim()) if dim not in self.dims]
        tensor = tensor.permute(*self.dims, *dropped)
        for _ in dropped:
            if not tensor.shape[-1]:  # another rank holds it
                return tensor.new_empty(0, *self.shape[1:])
            tensor = tensor.select(-1, 0)
        return tensor

    def within(self, dim: int, begin: int, end: int) -> "View":
        """The same of a tensor that holds only [begin, end) of dimension `dim` of the live one."""
        low, high = self.ranges[dim]
        low, high = (min(max(each, begin), end) - begin for each in (low, high))
        return View((*self.ranges[:dim], (low, high), *self.ranges[dim + 1 :]), self.dims)

    @property
    def can_be_merged(self) -> bool:
        """Whether it is made of matrices that the live tensor is made of, or of parts of them, perhaps transposed."""
        last = len(self.ranges) - 1
        return set(self.dims[-2:]) == {last - 1, last} and list(self.dims[:-2]) == sorted(self.dims[:-2])

    def of_factors(self, lora_A: torch.Tensor, lora_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of this part of the delta. lora_A: [..., r, cols]; lora_B: [..., rows, r], of a live tensor
        [..., rows, cols]."""
        assert self.can_be_merged
        rows, cols = len(self.ranges) - 2, len(self.ranges) - 1
        lora_A = lora_A.narrow(-1, self.ranges[cols][0], self.ranges[cols][1] - self.ranges[cols][0])
        lora_B = lora_B.narrow(-2, self.ranges[rows][0], self.ranges[rows][1] - self.ranges[rows][0])
        for dim in reversed(range(rows)):
            begin, end = self.ranges[dim]
            lora_A, lora_B = (each.narrow(dim, begin, end - begin) for each in (lora_A, lora_B))
            if dim not in self.dims:
                lora_A, lora_B = lora_A.select(dim, 0), lora_B.select(dim, 0)
        return (lora_A, lora_B) if self.dims[-1] == cols else (lora_B.mT, lora_A.mT)
