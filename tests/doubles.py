"""Stand-ins of several layers."""

import torch

import lora_stream
from lora_stream.filling import Batch, Part


class Recorder:
    """Holds what it was sent, as an engine does. Fails before tensor number `fail_at` of the next load."""

    def __init__(self):
        self.weights = {}
        self.loads = []
        self.fail_at = None

    def load_weights(self, weights):
        names = []
        self.loads.append(names)
        for i, (name, tensor) in enumerate(weights):
            if i == self.fail_at:
                self.fail_at = None
                raise RuntimeError("engine broke")
            names.append(name)
            self.weights[name] = tensor.clone()


class Loads:
    """onload and offload that note the order of things."""

    def __init__(self):
        self.events = []

    def onload(self):
        self.events.append("onload")

    def offload(self):
        self.events.append("offload")


class Pieces:
    """A staging that cuts every matrix into pieces of some rows, as a ring with small slots does."""

    num_bytes, seconds_waited = 0, 0.0

    def __init__(self, rows):
        self._rows = rows
        self.tensors = {}

    def batches(self, plan):
        for task in plan.tasks:
            self.tensors[task.meta.name] = out = torch.empty(task.meta.shape, dtype=task.meta.dtype)
            if out.dim() < 2:
                yield Batch([Part(task, 0, out.numel(), out)], announce=lambda: None)
                continue
            size = out[0].numel()
            for begin in range(0, out.shape[0], self._rows):
                part = out[begin : begin + self._rows]
                yield Batch([Part(task, begin * size, begin * size + part.numel(), part)], announce=lambda: None)


def in_pieces(model, rows):
    """What a model's stream puts into such a staging."""
    pieces = Pieces(rows)
    for _ in lora_stream.MergedWeights(model).stream_into(pieces):
        pass
    return pieces.tensors
