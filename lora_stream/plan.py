"""What a sync will send, decided before the first tensor leaves. Pure data; knows torch only.

    records of a model ──► build_plan ──► Plan: tasks in wire order, and an account of every tensor of the model

A *task* hands over one checkpoint tensor. A task with adapters is *merged*, one without is *copied*. What the scope
leaves out is *left*; an adapter tensor that goes into a merge is *consumed*. Each tensor of the model has exactly one
of these fates, or the plan is refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

Scope = Literal["all", "trained"]
Fate = Literal["merged", "copied", "left", "consumed"]

MERGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Modules that vLLM stacks into one, by the last segment of their names. A stack that gets only some of its parts is
# filled with uninitialised memory, so the parts always travel together. Engines that tell their own stacks add to this.
FUSED_MODULES: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


class ParamMeta(NamedTuple):
    """One tensor as the consumer will get it: checkpoint name, wire dtype, full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One LoRA pair on one weight, as its module holds it. lora_A: [r, in]; lora_B: [out, r].

    delta = scaling * lora_B @ lora_A; where the weight lies as [in, out] (Embedding, Conv1D), the transpose of it. A weight
    of experts has three dimensions, [experts, out, in] or [experts, in, out], and one such delta for each: lora_A is
    [experts * r, in], one expert after the other, and lora_B [out, r * experts], in which the experts alternate.
    """

    name: str
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scaling: float
    transposed: bool = False
    num_experts: int | None = None

    def factors(self, lora_A: torch.Tensor, lora_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What stands right and left in the delta's product, as views: [..., r, cols] and [..., rows, r] of a weight
        [..., rows, cols].

        lora_A, lora_B: all of this adapter's, perhaps gathered or moved.
        """
        if self.num_experts is not None:
            rank = lora_A.shape[0] // self.num_experts
            lora_A = lora_A.unflatten(0, (self.num_experts, rank))
            lora_B = lora_B.unflatten(1, (rank, self.num_experts)).permute(2, 0, 1)
        return (lora_B.mT, lora_A.mT) if self.transposed else (lora_A, lora_B)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One checkpoint tensor of a model, as found."""

    name: str  # checkpoint name
    fqn: str  # of the live tensor, as named_parameters() spells it
    tensor: torch.Tensor  # the base weight; never written
    adapters: tuple[Adapter, ...] = ()
    trained: bool = False  # may differ from what the base checkpoint holds


@dataclass(kw_only=True)
class ModelRecords:
    """Everything that a model holds: what it would hand over, and why the rest stays."""

    records: list[Record] = field(default_factory=list)
    consumed: dict[str, str] = field(default_factory=dict)  # fqn -> name of the record that it is merged into
    left: dict[str, str] = field(default_factory=dict)  # fqn -> reason
    all_fqns: list[str] = field(default_factory=list)  # parameters and persistent buffers, shared ones repeated
    has_adapters: bool = False


@dataclass(frozen=True, kw_only=True)
class Task:
    """Hand over one tensor: ``round(base + sum of the adapters' deltas)``, or ``base`` in the wire dtype."""

    meta: ParamMeta
    fqn: str
    base: torch.Tensor
    adapters: tuple[Adapter, ...] = ()
    trained: bool = False

    @property
    def fate(self) -> Fate:
        return "merged" if self.adapters else "copied"

    def tensors(self) -> list[torch.Tensor]:
        """Of the model, that are read for it."""
        return [self.base, *(part for adapter in self.adapters for part in (adapter.lora_A, adapter.lora_B))]


@dataclass(frozen=True, kw_only=True)
class Plan:
    tasks: tuple[Task, ...]
    scope: Scope
    account: dict[str, tuple[Fate, str]]  # fqn -> fate and its reason or checkpoint name

    def metadata(self) -> list[ParamMeta]:
        return [task.meta for task in self.tasks]

    def names(self, fate: Fate) -> tuple[str, ...]:
        """Checkpoint names of merged and copied tensors, FQNs of left and consumed ones."""
        if fate in ("merged", "copied"):
            return tuple(task.meta.name for task in self.tasks if task.fate == fate)
        return tuple(fqn for fqn, (found, _) in self.account.items() if found == fate)

    @property
    def num_bytes(self) -> int:
        return sum(task.meta.num_bytes for task in self.tasks)

    def tensors(self) -> list[torch.Tensor]:
        """Of the model, that are read: each once, whatever number of tasks it serves."""
        return list({id(tensor): tensor for task in self.tasks for tensor in task.tensors()}.values())

    def buckets(self, bucket_bytes: int) -> Iterator[tuple[Task, ...]]:
        """Consecutive tasks of together at most bucket_bytes; a larger one alone."""
        bucket: list[Task] = []
        size = 0
        for task in self.tasks:
            if bucket and size + task.meta.num_bytes > bucket_bytes:
                yield tuple(bucket)
                bucket, size = [], 0
            bucket.append(task)
            size += task.meta.num_bytes
        if bucket:
            yield tuple(bucket)


def build_plan(
    model: ModelRecords,
    *,
    wire_dtype: torch.dtype | None = torch.bfloat16,
    scope: Scope = "all",
    fused_modules: Sequence[Sequence[str]] | None = FUSED_MODULES,
    planning_only: bool = False,
) -> Plan:
    """Decide what is sent and in which order.

    wire_dtype: dtype of floating-point tensors on the wire; None keeps each as it is. Integer buffers keep theirs.
    scope: "all", or "trained": merged targets and what else may have changed, with everything that vLLM stacks with it.
    fused_modules: what is stacked; None for a consumer that takes each tensor by itself.
    planning_only: accept tensors without values (meta device); such a plan can be read, not streamed.

    Raises ValueError, naming the tensor and what to do: nothing to merge on a model with adapters, two tensors of one
    name, a tensor that no fate fits, dtypes and devices that cannot be merged.
    """
    if scope not in ("all", "trained"):
        raise ValueError(f'scope must be "all" or "trained", got {scope!r}')
    if wire_dtype is not None and wire_dtype not in MERGE_DTYPES:
        raise ValueError(f"wire_dtype must be torch.bfloat16, float16, float32 or None, got {wire_dtype}")
    if model.has_adapters and not any(record.adapters for record in model.records):
        raise ValueError(
            "the model has adapter layers but no weight to merge: none of its layers holds the chosen adapter; "
            "activate it (model.set_adapter) or name it (adapter_name=...)"
        )
    _check_account(model)
    for record in model.records:
        _check_record(record, planning_only)

    by_name: dict[str, Record] = {}
    for record in model.records:
        if (other := by_name.setdefault(record.name, record)) is not record:
            raise ValueError(
                f"{record.fqn} and {other.fqn} both have the checkpoint name {record.name!r}; rename one of the modules"
            )

    keys = {record.name: fused_unit(record.name, fused_modules) for record in model.records}
    touched = {keys[record.name] for record in model.records if record.adapters or record.trained}
    tasks = []
    account: dict[str, tuple[Fate, str]] = {}
    for record in _wire_order(model.records, keys):
        if scope == "trained" and keys[record.name] not in touched:
            account[record.fqn] = ("left", "unchanged base weight")
            continue
        floating = record.tensor.is_floating_point()
        dtype = wire_dtype if floating and wire_dtype is not None else record.tensor.dtype
        if record.adapters and dtype not in MERGE_DTYPES:
            raise ValueError(
                f"{record.fqn}: a merge must be sent as one of {MERGE_DTYPES}, got wire_dtype={wire_dtype}"
            )
        task = Task(
            meta=ParamMeta(record.name, dtype, tuple(record.tensor.shape)),
            fqn=record.fqn,
            base=record.tensor,
            adapters=record.adapters,
            trained=record.trained,
        )
        tasks.append(task)
        account[record.fqn] = (task.fate, record.name)
    account |= {fqn: ("consumed", name) for fqn, name in model.consumed.items()}
    account |= {fqn: ("left", reason) for fqn, reason in model.left.items()}
    return Plan(tasks=tuple(tasks), scope=scope, account=account)


def _check_account(model: ModelRecords) -> None:
    fates = [record.fqn for record in model.records] + list(model.consumed) + list(model.left)
    placed = set(fates)
    assert len(placed) == len(fates), "a tensor was placed twice"
    assert placed <= set(model.all_fqns), sorted(placed - set(model.all_fqns))
    if remainder := [fqn for fqn in model.all_fqns if fqn not in placed]:
        shown = ", ".join(remainder[:5]) + (f" and {len(remainder) - 5} more" if len(remainder) > 5 else "")
        raise ValueError(
            f"{shown}: found in the model, but lora_stream does not know what it does to the merged weights; "
            "it belongs to an adapter kind or a wrapper that is not supported"
        )


def _check_record(record: Record, planning_only: bool) -> None:
    if record.tensor.is_meta and not planning_only:
        raise ValueError(f"{record.fqn}: is on the meta device, it has no values; load the weights first")
    if not record.adapters:
        return
    base = record.tensor
    if base.dtype not in MERGE_DTYPES:
        raise ValueError(f"{record.fqn}: cannot merge into {base.dtype}; expected one of {MERGE_DTYPES}")
    for adapter in record.adapters:
        cols, rows = base.shape[-2:] if adapter.transposed else reversed(base.shape[-2:])
        rank = adapter.lora_A.shape[0]
        experts = () if adapter.num_experts is None else (adapter.num_experts,)
        if base.shape[:-2] != experts or rank % (adapter.num_experts or 1):
            raise ValueError(
                f"{record.fqn}: adapter {adapter.name!r} of rank {rank} for {adapter.num_experts} experts does not fit a "
                f"weight of shape {tuple(base.shape)}"
            )
        for name, tensor, shape in (
            ("lora_A", adapter.lora_A, (rank, cols)),
            ("lora_B", adapter.lora_B, (rows, rank)),
        ):
            where = f"{record.fqn}: {name} of adapter {adapter.name!r}"
            if tensor.is_meta and not planning_only:
                raise ValueError(f"{where} is on the meta device, it has no values; load the adapter first")
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{where} must have shape {shape}, got {tuple(tensor.shape)}")
            if tensor.dtype not in MERGE_DTYPES:
                raise ValueError(f"{where} must be one of {MERGE_DTYPES}, got {tensor.dtype}")


def fused_unit(name: str, fused_modules: Sequence[Sequence[str]] | None) -> str:
    """What vLLM loads as one unit with `name`: its module, the stack of its module, or all experts of a layer. With None
    each tensor is a unit."""
    if fused_modules is None:
        return name
    module = name.rpartition(".")[0]
    segments = module.split(".")
    if "experts" in segments:
        return ".".join(segments[: segments.index("experts") + 1])
    for group in fused_modules:
        if segments[-1] in group:
            return ".".join([*segments[:-1], "+".join(group)])
    return module


def _layer_key(name: str) -> str:
    """`name` up to its first number: the decoder layer; the whole name where there is none."""
    segments = name.split(".")
    for i, segment in enumerate(segments):
        if segment.isdigit():
            return ".".join(segments[: i + 1])
    return name


def _wire_order(records: Iterable[Record], keys: dict[str, str]) -> list[Record]:
    """By decoder layer, and in it by what vLLM loads as one unit; otherwise as found.

    vLLM's layerwise reload buffers every tensor of a unit until the last one came: parts that are far apart would keep
    many units in memory at once.
    """
    records = list(records)
    first: dict[str, int] = {}
    for i, record in enumerate(records):
        first.setdefault(_layer_key(record.name), i)
        first.setdefault("unit:" + keys[record.name], i)
    return sorted(records, key=lambda record: (first[_layer_key(record.name)], first["unit:" + keys[record.name]]))
