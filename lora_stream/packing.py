"""How tensors lie in messages of bounded size. Both sides compute it from the metadata, so nothing of it is sent.

    metadata ──► pack ──► messages: pieces of tensors, each with its place

Consecutive tensors share a message; one that is larger than a message gets messages of its own, cut between rows.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lora_stream.plan import ParamMeta

ALIGNMENT = 256  # bytes; of every piece in its message


class Piece(NamedTuple):
    """Elements [begin, end) of a flattened tensor, laid at `offset` bytes into the message."""

    index: int  # of the tensor in the metadata
    begin: int
    end: int
    offset: int


class Message(NamedTuple):
    pieces: tuple[Piece, ...]
    num_bytes: int


def pack(metadata: Sequence[ParamMeta], message_bytes: int) -> Iterator[Message]:
    """The messages that carry these tensors, in order. Every tensor has at least one piece, an empty one too.

    message_bytes: a positive multiple of ALIGNMENT.
    """
    pieces: list[Piece] = []
    used = 0
    for index, meta in enumerate(metadata):
        numel = meta.num_bytes // meta.dtype.itemsize
        if meta.num_bytes > message_bytes:
            if pieces:
                yield Message(tuple(pieces), used)
                pieces, used = [], 0
            step = _elements_per_message(meta, message_bytes)
            for begin in range(0, numel, step):
                end = min(begin + step, numel)
                yield Message((Piece(index, begin, end, 0),), (end - begin) * meta.dtype.itemsize)
            continue
        offset = -(-used // ALIGNMENT) * ALIGNMENT
        if pieces and offset + meta.num_bytes > message_bytes:
            yield Message(tuple(pieces), used)
            pieces, offset = [], 0
        pieces.append(Piece(index, 0, numel, offset))
        used = offset + meta.num_bytes
    if pieces:
        yield Message(tuple(pieces), used)


def _elements_per_message(meta: ParamMeta, message_bytes: int) -> int:
    """Whole rows where one fits: the kernel merges rows."""
    most = message_bytes // meta.dtype.itemsize
    row = meta.num_bytes // meta.dtype.itemsize // meta.shape[0]
    return most // row * row if row <= most else most
