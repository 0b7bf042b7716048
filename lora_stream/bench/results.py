"""What a benchmark found: groups of ways that were measured in turn, and what may be said of two of them.

Nothing here knows how to measure or to draw; a result is plain data that goes to JSON and back.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple


class Spread(NamedTuple):
    """Lower quartile, median, upper quartile."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def is_difference(self) -> bool:
        """Of ratios: whether they are farther from 1 than they scatter. What is not may not be called a win."""
        return abs(self.median - 1) > self.high - self.low

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g} {self.high:.3g}]"


@dataclass(kw_only=True)
class Way:
    """One way to do the job of its group."""

    name: str
    seconds: list[float] = field(
        default_factory=list
    )  # of every repeat; repeat i of all ways of a group ran side by side
    phases: dict[str, float] = field(default_factory=dict)  # what of a repeat went into what, seconds, medians
    num_bytes: dict[str, int] = field(
        default_factory=dict
    )  # what became of bytes: "merged", "copied", "gathered", "left"
    extra_bytes: int | None = None  # peak memory above what was there, median
    figures: dict[str, float] = field(default_factory=dict)  # anything else, with its unit in the name
    missing: str = ""  # why it was not measured

    def over(self, other: "Way") -> Spread:
        """Time over the other's, repeat by repeat."""
        return Spread.of([mine / its for mine, its in zip(self.seconds, other.seconds, strict=True)])


@dataclass(kw_only=True)
class Group:
    """Ways that were measured in turn on the same thing."""

    name: str
    ceiling: str  # the way that nothing can beat, because it does a part of every way's work
    ours: str
    ways: list[Way] = field(default_factory=list)
    note: str = ""  # what was left out, and why

    def way(self, name: str) -> Way | None:
        return next((way for way in self.ways if way.name == name and not way.missing), None)


@dataclass(kw_only=True)
class Result:
    benchmark: str
    machine: Mapping[str, object]
    versions: Mapping[str, str]
    config: Mapping[str, object]
    command: str
    groups: list[Group] = field(default_factory=list)

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict) -> "Result":
        """Raises ValueError for what no benchmark of ours wrote."""
        try:
            groups = [
                Group(**{**group, "ways": [Way(**way) for way in group["ways"]]}) for group in found.pop("groups")
            ]
            return cls(**found, groups=groups)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no result of `lora-stream bench`: {error}") from error


def verdict(way: Way, ours: Way) -> str:
    """What may be said of a way beside ours."""
    ratio = way.over(ours)
    if not ratio.is_difference():
        return "within the spread"
    return f"takes {ratio.median:.3g} times as long" if ratio.median > 1 else f"takes {ratio.median:.3g} of the time"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One way before and after, in units of its group's ceiling where both have one: the machine's speed drifts, that does
    less."""

    group: str
    way: str
    before: Spread
    after: Spread
    unit: str  # "ceiling" or "s"

    @property
    def ratio(self) -> Spread:
        """After over before; the runs were apart, so every pairing of the two spreads is possible."""
        return Spread(
            self.after.low / self.before.high, self.after.median / self.before.median, self.after.high / self.before.low
        )

    def to_dict(self) -> dict:
        return {**asdict(self), "ratio": self.ratio, "verdict": self.verdict()}

    def verdict(self) -> str:
        if not self.ratio.is_difference():
            return "within the spread"
        return "slower" if self.ratio.median > 1 else "faster"


def changes(before: Result, after: Result) -> list[Change]:
    """Of all ways that both measured. Raises ValueError where they have nothing in common."""
    if before.benchmark != after.benchmark:
        raise ValueError(f"one is of `bench {before.benchmark}`, the other of `bench {after.benchmark}`")
    found = []
    earlier = {group.name: group for group in before.groups}
    for group in after.groups:
        if group.name not in earlier:
            continue
        for way in group.ways:
            pair = [(each, each.way(way.name)) for each in (earlier[group.name], group)]
            if any(measured is None or not measured.seconds for _, measured in pair):
                continue
            ceilings = [each.way(each.ceiling) for each, _ in pair]
            in_ceilings = None not in ceilings and way.name != group.ceiling
            spreads = [
                measured.over(ceiling) if in_ceilings else Spread.of(measured.seconds)
                for (_, measured), ceiling in zip(pair, ceilings, strict=True)
            ]
            found.append(
                Change(
                    group=group.name,
                    way=way.name,
                    before=spreads[0],
                    after=spreads[1],
                    unit="ceiling" if in_ceilings else "s",
                )
            )
    if not found:
        raise ValueError(
            f"the two have no way in common: groups {[group.name for group in before.groups]} and "
            f"{[group.name for group in after.groups]}"
        )
    return found
