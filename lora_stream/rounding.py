"""How a merge rounds to the wire dtype, and which random numbers dithering takes.

    nearest   the nearest value, ties to even: what a cast does. Of a delta smaller than half a step of its weight nothing is
              left.
    dither    one of the two neighbours, the further one with a probability equal to the fraction of the step (stochastic
              rounding): the expectation is the exact sum.

The random numbers are a function of a seed and of the element's place in the whole parameter: every rank, sharding, processor
and device rounds alike, the same policy is sent alike twice, and as its delta grows an element moves once and stays moved. See
csrc/dither.h and docs/rounding.md.
"""

import hashlib
from typing import Literal, NamedTuple

RoundingMode = Literal["nearest", "dither"]


class Place(NamedTuple):
    """Where the first element of a matrix lies in a parameter. key: of the parameter, 64 bits with a sign."""

    key: int
    row: int = 0
    col: int = 0

    @staticmethod
    def in_parameter(seed: int, name: str) -> "Place":
        """Of the first element of a parameter; name: what checkpoints call it."""
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        return Place(int.from_bytes(digest, "little", signed=True))

    def moved(self, rows: int, cols: int = 0) -> "Place":
        return Place(self.key, self.row + rows, self.col + cols)


ORIGIN = Place(0)


def described(rounding: RoundingMode, seed: int) -> str:
    """For reports."""
    return f"dither, seed {seed}" if rounding == "dither" else rounding


def check_rounding(rounding: str, seed: int) -> None:
    """Raises ValueError for what is neither mode, and for a seed that is no whole number."""
    if rounding not in ("nearest", "dither"):
        raise ValueError(f"rounding must be 'nearest' or 'dither', got {rounding!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
