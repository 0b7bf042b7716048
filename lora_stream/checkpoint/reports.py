"""What was written, for people and for scripts."""

from dataclasses import asdict, dataclass, field

from torch import nn

from lora_stream.fidelity import Fidelity, Rounding
from lora_stream.plan import Plan, listed
from lora_stream.report import format_bytes
from lora_stream.rounding import RoundingMode, described


@dataclass(kw_only=True)
class CheckpointReport:
    """Of one merge or export. Counts are of checkpoint tensors, bytes of what was written."""

    out: str
    source: str | None = None  # the checkpoint that was merged; None: a live model
    kind: str | None = None  # of the source
    base: str | None = None
    adapter_name: str | None = None
    r: int | None = None
    lora_alpha: float | None = None
    dtype: str | None = None  # None: no model was written
    merged: int = 0
    copied: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    files: list[str] = field(default_factory=list)
    carried: list[str] = field(
        default_factory=list
    )  # of the copied: the model has no module for them, the base holds them
    left_out: dict[str, str] = field(default_factory=dict)  # tensors of the base that are not written, and why
    rounding: RoundingMode = "nearest"
    seed: int = 0  # of dithering
    roundings: dict[str, Rounding] = field(default_factory=dict, repr=False)  # by checkpoint name, merged tensors only

    @property
    def changed(self) -> int:
        """Elements with a delta other than zero."""
        return sum(rounding.changed for rounding in self.roundings.values())

    @property
    def unmoved(self) -> int:
        """Of those, elements that rounding put back where they were."""
        return sum(rounding.unmoved for rounding in self.roundings.values())

    @property
    def fidelity(self) -> Fidelity:
        """How much of the adapter's update was written."""
        return Fidelity.of(self.roundings)

    def finish(self, plan: Plan) -> None:
        """Raises ValueError where the merge has changed nothing: that is a base under a new name."""
        self.merged, self.copied = len(plan.names("merged")), len(plan.names("copied"))
        self.num_bytes = plan.num_bytes
        # Buffers always count as trained; only a parameter tells that something was.
        whole = [task for task in plan.tasks if task.trained and isinstance(task.base, nn.Parameter)]
        replaces = any(not task.adapters for task in whole) or any(task.rows for task in plan.tasks)
        if self.merged == 0 or replaces or self.changed > self.unmoved:
            return
        where = self.source or self.out
        if self.changed == 0:
            raise ValueError(
                f"{where}: the adapter changes nothing, all its deltas are zero: it was saved before it was trained, or lora_B "
                "was lost"
            )
        raise ValueError(
            f"{where}: all of the adapter's deltas are smaller than a step of {self.dtype}, so the merged model would be the "
            "base; write it in float32 (--dtype float32), or dither (--rounding dither)"
        )

    def to_dict(self) -> dict:
        fidelity = self.fidelity
        return {
            **{key: value for key, value in asdict(self).items() if key != "roundings"},
            "changed": self.changed,
            "unmoved": self.unmoved,
            "captured": fidelity.captured,
            "moved": fidelity.moved,
            "norm_ratio": fidelity.norm_ratio,
            "worst": [list(each) for each in fidelity.worst()],
        }

    def rows(self) -> list[tuple[str, str]]:
        rows = [("written", self.out)]
        if self.source is not None:
            rows += [("from", f"{self.source} ({self.kind})"), ("base", self.base or "in the source")]
            rows += [("adapter", f"{self.adapter_name}, r={self.r}, lora_alpha={self.lora_alpha:g}")]
        if self.dtype is not None:
            rows += [
                ("merged", f"{self.merged} tensors"),
                ("copied", f"{self.copied} tensors"),
                ("weights", f"{format_bytes(self.num_bytes)} in {self.dtype}"),
                ("rounding", described(self.rounding, self.seed)),
                *(self.fidelity.rows() if self.changed else ()),
            ]
        if self.carried:
            rows += [("carried", f"{listed(self.carried)}: the model has no module for it")]
        for reason in dict.fromkeys(self.left_out.values()):
            rows += [
                ("left out", f"{listed([name for name, why in self.left_out.items() if why == reason])}: {reason}")
            ]
        return [*rows, ("files", ", ".join(self.files)), ("seconds", f"{self.seconds:.2f}")]
