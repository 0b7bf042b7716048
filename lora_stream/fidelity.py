"""How much of an adapter's update arrives, once the merged weights are rounded.

    captured = <out - base, delta> / <delta, delta>

is 1 where all of the update is there, 0 where nothing is, whatever rounding adds in other directions; summed over all merged
weights, or over one of them. Rounding to nearest loses update where most deltas are smaller than half a step of their weights;
dithering keeps it, see docs/rounding.md.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

logger = logging.getLogger("lora_stream")

LEAST_CAPTURED = 0.9  # below this much a pass warns


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What rounding to the wire dtype did to one merged tensor. `nearest` is the rounding of its base."""

    changed: int  # elements with a delta other than zero
    unmoved: int  # of those, elements with out == nearest(base)
    kept_sq: float  # sum of (out - nearest(base))**2
    delta_sq: float  # sum of delta**2
    projected: float  # sum of (out - base) * delta; NaN where nobody has looked
    checksum: int  # of the merged values

    def __add__(self, other: "Rounding") -> "Rounding":
        """Of two parts of one tensor."""
        return Rounding(
            changed=self.changed + other.changed,
            unmoved=self.unmoved + other.unmoved,
            kept_sq=self.kept_sq + other.kept_sq,
            delta_sq=self.delta_sq + other.delta_sq,
            projected=self.projected + other.projected,
            checksum=(self.checksum + other.checksum) % 2**32,
        )


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """Of many merged tensors together."""

    captured: float | None  # None: there is no delta, or nobody has looked
    moved: float  # share of the elements with a delta whose value is not that of the base; 0 where none has one
    norm_ratio: float  # norm of what the weights moved by over that of the deltas; 0 where there is no delta
    by_name: tuple[tuple[str, float], ...]  # captured of each tensor that has a delta, the least first

    @staticmethod
    def of(roundings: Mapping[str, Rounding]) -> "Fidelity":
        total = _sum(roundings.values())
        by_name = [(name, captured) for name, each in roundings.items() if (captured := _captured(each)) is not None]
        return Fidelity(
            captured=_captured(total),
            moved=1 - total.unmoved / total.changed if total.changed else 0.0,
            norm_ratio=math.sqrt(total.kept_sq / total.delta_sq) if total.delta_sq else 0.0,
            by_name=tuple(sorted(by_name, key=lambda each: each[1])),
        )

    def worst(self, count: int = 3) -> tuple[tuple[str, float], ...]:
        """Names and `captured` of the tensors that got the least of their update."""
        return self.by_name[:count]

    @property
    def text(self) -> str:
        """Of `captured`, for people."""
        if self.captured is not None:
            return f"{self.captured:.1%}"
        return "not measured (fidelity=True does on devices)" if self.norm_ratio else "there is no update"

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each line that people read."""
        rows = [
            ("update captured", self.text),
            ("weights moved", f"{self.moved:.1%} of those with a delta"),
            ("norm of the moves", f"{self.norm_ratio:.3f} of the delta's"),
        ]
        if self.by_name:
            rows.append(("captured least", ", ".join(f"{name} {captured:.1%}" for name, captured in self.worst())))
        return rows


def _sum(roundings: Iterable[Rounding]) -> Rounding:
    total = Rounding(changed=0, unmoved=0, kept_sq=0.0, delta_sq=0.0, projected=0.0, checksum=0)
    for each in roundings:
        total += each
    return total


def _captured(rounding: Rounding) -> float | None:
    return None if math.isnan(rounding.projected) or not rounding.delta_sq else rounding.projected / rounding.delta_sq


def warn_if_low(roundings: Mapping[str, Rounding]) -> None:
    """After a pass that has rounded to nearest."""
    fidelity = Fidelity.of(roundings)
    if fidelity.captured is None or fidelity.captured >= LEAST_CAPTURED:
        return
    logger.warning(
        "only %.1f %% of the adapter's update has arrived (least: %s): most deltas are smaller than half a step of the weights "
        'that they were added to, and have been rounded away; rounding "dither" delivers them',
        100 * fidelity.captured,
        ", ".join(f"{name} {captured:.1%}" for name, captured in fidelity.worst()),
    )
