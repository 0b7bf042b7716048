"""Some elements of each of many tensors, to notice that somebody wrote them. Others at each sample, so that none is safe."""

import secrets

import torch

# Elements of each tensor, in runs: a run costs one read from memory. A step of an optimizer, or a reload, changes many.
_RUNS, _RUN_LENGTH = 32, 16


class Sample:
    """Which elements. It takes the same ones of a tensor each time it is asked."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)  # of this choice
        self._generator = torch.Generator().manual_seed(secrets.randbits(63))
        self._indices: dict[tuple[int, torch.device], torch.Tensor] = {}

    @torch.no_grad()
    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of them, flat; of a small tensor all."""
        key = tensor.numel(), tensor.device
        if key not in self._indices:
            self._indices[key] = self._choose(tensor.numel()).to(tensor.device)
        return tensor.detach().take(self._indices[key])

    def _choose(self, numel: int) -> torch.Tensor:
        if numel <= _RUNS * _RUN_LENGTH:
            return torch.arange(numel)
        starts = torch.randint(numel - _RUN_LENGTH + 1, (_RUNS, 1), generator=self._generator)
        return (starts + torch.arange(_RUN_LENGTH)).flatten()


def bits_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Contiguous tensors as bytes, one after the other, on the host: one copy for each device."""
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        on_device.setdefault(tensor.device, []).append(tensor.view(-1).view(torch.uint8))
    parts = [torch.cat(parts).cpu() for parts in on_device.values()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
