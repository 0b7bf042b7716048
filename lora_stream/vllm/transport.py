"""How tensors get from the sender to the worker. This one serves a single process: a drawer of iterators.

The sender puts an iterator in and sends its ticket with the update; the worker takes it out. Nothing is copied.
"""

import secrets
from collections.abc import Iterator

import torch

Weights = Iterator[tuple[str, torch.Tensor]]

_drawer: dict[str, Weights] = {}


def put(weights: Weights) -> str:
    """Offer the weights; returns their ticket. The caller must withdraw() it when the update is over."""
    ticket = secrets.token_hex(16)
    _drawer[ticket] = weights
    return ticket


def withdraw(ticket: str) -> None:
    _drawer.pop(ticket, None)


def take(ticket: str) -> Weights:
    """The weights of a ticket, once. Raises ValueError in a process where they were not offered."""
    try:
        return _drawer.pop(ticket)
    except KeyError:
        raise ValueError(
            "no weights are offered under this ticket here: sender and worker must share one process; set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported"
        ) from None
