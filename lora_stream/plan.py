"""What a sync will send, decided before the first tensor leaves. Pure data; knows torch only.

    records of a model ──► build_plan ──► Plan: tasks in wire order, and an account of every tensor of the model

A *task* hands over one checkpoint tensor. A task with adapters is *merged*, one without is *copied*. What the scope
leaves out is *left*; an adapter tensor that goes into a merge is *consumed*. Each tensor of the model has exactly one
of these fates, or the plan is refused.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from lora_stream.views import View

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

    delta = scaling * lora_B @ lora_A; where the weight lies as [in, out] (Embedding, Conv1D), the transpose of it. Other
    weights are taken as matrices: a convolution's [out, in, *kernel] as [out, in * kernel], with lora_A [r, in, *kernel] and
    lora_B [out, r, 1, ...]; a bias [out] as [out, 1], with lora_A [1, 1] and lora_B [out]. A weight of experts has three
    dimensions, [experts, out, in] or [experts, in, out], and one such delta for each: lora_A is [experts * r, in], one expert
    after the other, and lora_B [out, r * experts], in which the experts alternate.

    magnitude: [out], of DoRA (Liu et al., 2024, equation 5): the merged weight is magnitude * (W + delta) / ||W + delta||,
    with one norm for each of the outputs, over all inputs.
    """

    name: str
    lora_A: torch.Tensor
    lora_B: torch.Tensor
    scaling: float
    transposed: bool = False
    num_experts: int | None = None
    magnitude: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [self.lora_A, self.lora_B, *([] if self.magnitude is None else [self.magnitude])]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Adapter":
        """The same with other tensors."""
        magnitude = None if self.magnitude is None else change(self.magnitude)
        return replace(self, lora_A=change(self.lora_A), lora_B=change(self.lora_B), magnitude=magnitude)

    def factors(self, lora_A: torch.Tensor, lora_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What stands right and left in the delta's product, as views: [..., r, cols] and [..., rows, r] of a weight
        [..., rows, cols].

        lora_A, lora_B: all of this adapter's, perhaps gathered or moved.
        """
        if self.num_experts is None:
            lora_A, lora_B = as_matrix(lora_A), as_matrix(lora_B)
        else:
            rank = lora_A.shape[0] // self.num_experts
            lora_A = lora_A.unflatten(0, (self.num_experts, rank))
            lora_B = lora_B.unflatten(1, (rank, self.num_experts)).permute(2, 0, 1)
        return (lora_B.mT, lora_A.mT) if self.transposed else (lora_A, lora_B)


def as_matrix(weight: torch.Tensor) -> torch.Tensor:
    """[out] as [out, 1], [out, in, *kernel] as [out, in * kernel]."""
    return weight.unsqueeze(1) if weight.dim() == 1 else weight.flatten(1)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of a weight that an adapter replaces by its own (PEFT's trainable tokens). values: [len(indices), cols]."""

    name: str  # of the adapter
    indices: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Record:
    """One checkpoint tensor of a model, as found."""

    name: str  # checkpoint name
    fqn: str  # of the live tensor, as named_parameters() spells it
    tensor: torch.Tensor  # the base weight; never written
    view: View | None = None  # what of it the checkpoint tensor is; None: all of it
    adapters: tuple[Adapter, ...] = ()
    rows: tuple[Rows, ...] = ()  # replaced; on a weight without adapters
    trained: bool = False  # may differ from what the base checkpoint holds
    float32_among: frozenset[torch.dtype] = frozenset()  # wire dtypes beside which it stays in float32

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.view is None else self.view.shape


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
    """Hand over one tensor: ``round(base + sum of the adapters' deltas)``, or ``base`` in the wire dtype, perhaps with some
    rows replaced; of it the part that `view` says."""

    meta: ParamMeta
    fqn: str
    base: torch.Tensor
    view: View | None = None
    adapters: tuple[Adapter, ...] = ()
    rows: tuple[Rows, ...] = ()
    trained: bool = False
    own_name: str = ""  # in checkpoints of the model, whatever rename= makes of it: dithering goes by it
    unit: str = ""  # what the engine loads at once, see fused_unit

    @property
    def fate(self) -> Fate:
        return "merged" if self.adapters or self.rows else "copied"

    def tensors(self) -> list[torch.Tensor]:
        """Of the model, that are read for it."""
        parts = [tensor for adapter in self.adapters for tensor in adapter.tensors()]
        return [self.base, *parts, *(rows.values for rows in self.rows)]

    def factors(
        self, adapter: Adapter, lora_A: torch.Tensor, lora_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The adapter's, see there, for what is handed over."""
        factors = adapter.factors(lora_A, lora_B)
        return factors if self.view is None else self.view.of_factors(*factors)

    @property
    def is_as_it_lies(self) -> bool:
        """Whether the base's own bytes are what is handed over."""
        is_changed = bool(self.adapters or self.rows or self.view) or self.base.dtype != self.meta.dtype
        return not is_changed and self.base.is_contiguous()

    def with_piece(self, piece: torch.Tensor) -> "Task":
        """The same where the base is `piece`: what the view takes of it, from somewhere else."""
        if self.view is None:
            return replace(self, base=piece)
        return replace(self, base=piece, view=None, adapters=tuple(map(self._of_piece, self.adapters)))

    def _of_piece(self, adapter: Adapter) -> Adapter:
        lora_A, lora_B = self.factors(adapter, adapter.lora_A, adapter.lora_B)
        num_experts = None
        if lora_A.dim() == 3:  # [experts, r, cols] and [experts, rows, r], as an Adapter has them
            num_experts = lora_A.shape[0]
            lora_A, lora_B = lora_A.flatten(0, 1), lora_B.permute(1, 2, 0).flatten(1)
        return replace(adapter, lora_A=lora_A, lora_B=lora_B, transposed=False, num_experts=num_experts)


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
    also: Collection[str] = (),
    fused_modules: Sequence[Sequence[str]] | None = FUSED_MODULES,
    rename: Callable[[str], str] | None = None,
    planning_only: bool = False,
) -> Plan:
    """Decide what is sent and in which order.

    wire_dtype: dtype of floating-point tensors on the wire; None keeps each as it is. Integer buffers keep theirs, and what
        the model's checkpoints hold in float32 beside this dtype is sent in float32.
    scope: "all", or "trained": merged targets and what else may have changed, with everything that vLLM stacks with it.
    also: FQNs of what is sent in the trained scope besides, though it does not train now.
    fused_modules: what is stacked; None for a consumer that takes each tensor by itself.
    rename: of checkpoint names, for a consumer that has its own.
    planning_only: accept tensors without values (meta device); such a plan can be read, not streamed.

    Raises ValueError, naming the tensor and what to do: nothing to merge on a model with adapters, two tensors of one
    name, a tensor that no fate fits, dtypes and devices that cannot be merged.
    """
    if scope not in ("all", "trained"):
        raise ValueError(f'scope must be "all" or "trained", got {scope!r}')
    if wire_dtype is not None and wire_dtype not in MERGE_DTYPES:
        raise ValueError(f"wire_dtype must be torch.bfloat16, float16, float32 or None, got {wire_dtype}")
    if model.has_adapters and not any(record.adapters or record.rows for record in model.records):
        raise ValueError(
            "the model has adapter layers but no weight to merge: none of its layers holds the chosen adapter; "
            "activate it (model.set_adapter) or name it (adapter_name=...)"
        )
    _check_account(model)
    for record in model.records:
        _check_record(record, planning_only)

    # What travels together, and in which order, goes by the names that all models have in common.
    keys = {record.name: fused_unit(record.name, fused_modules) for record in model.records}
    touched = {
        keys[record.name]
        for record in model.records
        if record.adapters or record.rows or record.trained or record.fqn in also
    }
    by_name: dict[str, Record] = {}
    tasks = []
    account: dict[str, tuple[Fate, str]] = {}
    sent: dict[str, list[str]] = {}  # fqn -> names of its parts
    for record in _wire_order(model.records, keys):
        name = record.name if rename is None else rename(record.name)
        if (other := by_name.setdefault(name, record)) is not record:
            what = "rename one of the modules" if rename is None else "rename= must keep them apart"
            raise ValueError(f"{record.fqn} and {other.fqn} both have the checkpoint name {name!r}; {what}")
        if scope == "trained" and keys[record.name] not in touched:
            account.setdefault(record.fqn, ("left", "unchanged base weight"))
            continue
        dtype = _wire_dtype_of(record, wire_dtype)
        if record.adapters and dtype not in MERGE_DTYPES:
            raise ValueError(
                f"{record.fqn}: a merge must be sent as one of {MERGE_DTYPES}, got wire_dtype={wire_dtype}"
            )
        task = Task(
            meta=ParamMeta(name, dtype, record.shape),
            fqn=record.fqn,
            base=record.tensor,
            view=record.view,
            adapters=record.adapters,
            rows=record.rows,
            trained=record.trained,
            own_name=record.name,
            unit=keys[record.name],
        )
        tasks.append(task)
        parts = sent.setdefault(record.fqn, [])
        parts.append(name)
        account[record.fqn] = (task.fate, listed(parts))
    account |= {fqn: ("consumed", name) for fqn, name in model.consumed.items()}
    account |= {fqn: ("left", reason) for fqn, reason in model.left.items()}
    return Plan(tasks=tuple(tasks), scope=scope, account=account)


def listed(names: Sequence[str]) -> str:
    """What a tensor of the model is in a checkpoint that splits it."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _wire_dtype_of(record: Record, wire_dtype: torch.dtype | None) -> torch.dtype:
    if wire_dtype is None or not record.tensor.is_floating_point():
        return record.tensor.dtype
    return torch.float32 if wire_dtype in record.float32_among else wire_dtype


def _check_account(model: ModelRecords) -> None:
    parts: dict[str, list[Record]] = {}
    for record in model.records:
        parts.setdefault(record.fqn, []).append(record)
    for fqn, records in parts.items():
        sent = sum(torch.Size(record.shape).numel() for record in records)
        whole = records[0].tensor.numel()
        assert sent <= whole, f"{fqn} was placed twice"
        if sent < whole:
            raise ValueError(
                f"{fqn}: a checkpoint would hold only {sent} of its {whole} elements ({records[0].name} ...); it is not "
                "known what becomes of the rest"
            )
    fates = [*parts, *model.consumed, *model.left]
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
    for rows in record.rows:
        _check_rows(record, rows, planning_only)
    if not record.adapters:
        return
    base = record.tensor
    if base.dtype not in MERGE_DTYPES:
        raise ValueError(f"{record.fqn}: cannot merge into {base.dtype}; expected one of {MERGE_DTYPES}")
    if record.view is not None and not record.view.can_be_merged:
        raise ValueError(
            f"{record.fqn}: checkpoints hold it with its dimensions in another order ({record.name}), in which a delta cannot "
            "be merged; leave it out of the adapter's targets"
        )
    for adapter in record.adapters:
        _check_adapter(record, adapter, planning_only)
        if adapter.magnitude is not None and (
            len(record.adapters) > 1 or record.view is not None or adapter.num_experts is not None or base.dim() != 2
        ):
            raise ValueError(
                f"{record.fqn}: adapter {adapter.name!r} has a magnitude (DoRA), which is only supported alone, on a matrix "
                "that checkpoints hold as it is; choose one adapter (adapter_name=...)"
            )


def _check_adapter(record: Record, adapter: Adapter, planning_only: bool) -> None:
    base = record.tensor
    experts = () if adapter.num_experts is None else (adapter.num_experts,)
    shape = base.shape if experts else _matrix_shape(base.shape)
    cols, rows = shape[-2:] if adapter.transposed else reversed(shape[-2:])
    rank = adapter.lora_A.shape[0]
    if shape[:-2] != experts or rank % (adapter.num_experts or 1):
        raise ValueError(
            f"{record.fqn}: adapter {adapter.name!r} of rank {rank} for {adapter.num_experts} experts does not fit a "
            f"weight of shape {tuple(base.shape)}"
        )
    parts = [("lora_A", adapter.lora_A, (rank, cols)), ("lora_B", adapter.lora_B, (rows, rank))]
    if adapter.magnitude is not None:
        parts.append(("the magnitude", adapter.magnitude, (rows, 1)))
    for name, tensor, expected in parts:
        where = f"{record.fqn}: {name} of adapter {adapter.name!r}"
        if tensor.is_meta and not planning_only:
            raise ValueError(f"{where} is on the meta device, it has no values; load the adapter first")
        if _matrix_shape(tensor.shape) != expected:
            raise ValueError(f"{where} must have shape {expected}, got {tuple(tensor.shape)}")
        if tensor.dtype not in MERGE_DTYPES:
            raise ValueError(f"{where} must be one of {MERGE_DTYPES}, got {tensor.dtype}")


def _check_rows(record: Record, rows: Rows, planning_only: bool) -> None:
    base, where = record.tensor, f"{record.fqn}: the rows that adapter {rows.name!r} replaces"
    if rows.values.is_meta and not planning_only:
        raise ValueError(f"{where} are on the meta device, they have no values; load the adapter first")
    if record.view is not None or base.dim() != 2 or record.adapters:
        raise ValueError(
            f"{where} must be rows of a matrix that checkpoints hold as it is, with no other adapter on it"
        )
    if tuple(rows.values.shape) != (len(rows.indices), base.shape[1]):
        expected = (len(rows.indices), base.shape[1])
        raise ValueError(f"{where} must have shape {expected}, got {tuple(rows.values.shape)}")
    taken = [index for each in record.rows for index in each.indices]
    if len(set(taken)) < len(taken) or not all(0 <= index < base.shape[0] for index in rows.indices):
        raise ValueError(f"{where}, {rows.indices}, must be different rows of the {base.shape[0]} that there are")


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Of a weight as_matrix."""
    return shape[0], torch.Size(shape[1:]).numel()


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
