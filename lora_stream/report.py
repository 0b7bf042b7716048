"""What a sync did, for people and for loggers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property

from lora_stream.fidelity import Fidelity, Rounding
from lora_stream.plan import Fate, Scope
from lora_stream.rounding import RoundingMode, described


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """The proof of one sync. Byte counts are of the wire dtype, times are seconds of wall clock.

    Of a sharded trainer every rank has its own: what is sent is the same, what was moved and how long it took is the rank's.

    seconds: "plan" (reading the model), "check" (asking the engine whether it would take it), "merge" (the kernel and
        copies into staging), "transfer" (the rest of the stream: onload, offload, handing over), "engine" (waiting for
        the engine: pause, loading, cache reset, resume), "total".
    seconds_loading: of an engine in other processes, what the slowest worker spent in its own loading; it overlaps the
        merging, so that "total" less this is what merging and transport cost.
    """

    weight_version: str
    scope: Scope
    rounding_mode: RoundingMode  # of merged tensors
    seed: int  # of dithering
    merged: tuple[str, ...]  # checkpoint names
    copied: tuple[str, ...]  # checkpoint names
    left: tuple[str, ...]  # FQNs: not sent, because unchanged, tied to another tensor or not part of the policy
    consumed: tuple[str, ...]  # FQNs of the adapter tensors that went into the merged ones
    # All that the model has, each once: FQN -> its fate, and the checkpoint name it has or goes into, or why it is left.
    account: Mapping[str, tuple[Fate, str]] = field(repr=False, default_factory=dict)
    num_bytes: int
    num_bytes_left: int  # of unchanged base weights that were not sent again
    num_bytes_gathered: int = 0  # that this rank received from others
    num_bytes_crossed: int = 0  # copied between the host and a device by this rank
    made_on: Mapping[str, int] = field(default_factory=dict)  # bytes that this rank merged or copied, by type of device
    peak_staging_bytes: int
    seconds: Mapping[str, float]
    seconds_loading: float | None = None
    rounding: Mapping[str, Rounding] = field(
        repr=False, default_factory=dict
    )  # by checkpoint name, merged tensors only
    # Merged tensors whose adapter has moved since the last sync, or is not zero in the first, and whose values have not.
    unmoved_targets: tuple[str, ...] = ()

    @cached_property
    def fidelity(self) -> Fidelity:
        """How much of the adapter's update has arrived."""
        return Fidelity.of(self.rounding)

    @property
    def how_rounded(self) -> str:
        return described(self.rounding_mode, self.seed)

    def rows(self) -> list[tuple[str, str]]:
        """Label and text of each line that people read."""
        rows = [
            ("weight version", self.weight_version),
            ("scope", self.scope),
            ("merged", f"{len(self.merged)} tensors"),
            ("copied", f"{len(self.copied)} tensors"),
            ("left", f"{len(self.left)} tensors, {format_bytes(self.num_bytes_left)} not sent again"),
            ("adapter tensors", f"{len(self.consumed)} consumed"),
            ("sent", format_bytes(self.num_bytes)),
            ("made on", ", ".join(f"{device} {format_bytes(count)}" for device, count in self.made_on.items())),
            ("gathered", format_bytes(self.num_bytes_gathered)),
            ("host to device or back", format_bytes(self.num_bytes_crossed)),
            ("peak staging", format_bytes(self.peak_staging_bytes)),
            ("seconds", ", ".join(f"{phase} {value:.3f}" for phase, value in self.seconds.items())),
            ("rounding", self.how_rounded),
            *self.fidelity.rows(),
        ]
        if self.unmoved_targets:
            rows.append(("UNMOVED", f"{len(self.unmoved_targets)} targets: {', '.join(self.unmoved_targets[:3])} ..."))
        return rows

    def line(self) -> str:
        """The shortest account, for logs."""
        return (
            f"{format_bytes(self.num_bytes)} sent in {self.seconds['total']:.3f} s, scope {self.scope}, "
            f"{len(self.merged)} tensors merged and {len(self.copied)} copied, {format_bytes(self.num_bytes_gathered)} "
            f"gathered, rounded by {self.how_rounded}, update captured: {self.fidelity.text}"
        )

    def __str__(self) -> str:
        width = max(len(label) for label, _ in self.rows())
        return "\n".join(f"{label:<{width}}  {text}" for label, text in self.rows())

    def to_dict(self) -> dict:
        """Plain numbers, strings, lists and dicts: json.dumps takes it."""
        return {
            **{each.name: _plain(getattr(self, each.name)) for each in fields(self)},
            "seconds": dict(self.seconds),
            "made_on": dict(self.made_on),
            "account": {fqn: list(entry) for fqn, entry in self.account.items()},
            "rounding": {name: asdict(rounding) for name, rounding in self.rounding.items()},
            "captured": self.fidelity.captured,
            "moved": self.fidelity.moved,
            "norm_ratio": self.fidelity.norm_ratio,
            "worst": [list(each) for each in self.fidelity.worst()],
        }


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
