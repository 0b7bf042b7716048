"""Merge an adapter into its base, from files into files, by the plan and the kernel of the stream.

    source + base ──► model without weights ──► plan ──► bucket by bucket: read, merge, write
                      PEFT's layers, so that    names,
                      it is read as a live one  order

Memory: the adapter, two buckets and the largest tensor, and of mapped files what tensors.OPEN_BYTES says.
"""

import contextlib
import gc
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from lora_stream.checkpoint import models
from lora_stream.checkpoint.adapters import CONFIG_NAME, AdapterSpec, config_json, spec_of
from lora_stream.checkpoint.aside import check_is_free, new_directory
from lora_stream.checkpoint.configs import config_json as model_config_json
from lora_stream.checkpoint.reports import CheckpointReport
from lora_stream.checkpoint.sources import Source, adapter_of, open_source, prefix_of
from lora_stream.checkpoint.tensors import Info, Tensors, in_directory, read_json
from lora_stream.checkpoint.writing import ReusedStaging, Weights, carry_over, list_files, parse_size, write_file
from lora_stream.merged_weights import Stream
from lora_stream.peft import lora_layers, read_model
from lora_stream.plan import MERGE_DTYPES, Plan, Task, build_plan, listed

logger = logging.getLogger("lora_stream")

BUCKET_BYTES = 32 * 1024 * 1024
ADAPTER_DIRECTORY = "lora_adapter"
# In the metadata of the files that a merge writes: which adapters they hold already.
_MERGED_KEY = "lora_stream.merged_adapters"

Progress = Callable[[int, int], object]


def merge(
    source: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: int | str = "5GB",
    adapter_only: bool = False,
    with_adapter: bool = False,
    adapter_name: str | None = None,
    rank: int | None = None,
    lora_alpha: float | None = None,
    use_rslora: bool | None = None,
    untie: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Write the merged model as a Hugging Face checkpoint, and/or the adapter as PEFT loads it.

    source: a PEFT adapter directory, a verl FSDP checkpoint (`.../actor`), a torch.distributed.checkpoint, or a Hugging Face model
        among whose tensors are an adapter's.
    out: a directory that does not exist or is empty; it is there when all is written, or not at all.
    base: the base model's directory; None: the one that the adapter names, or the source itself where it holds the base too.
    dtype: of floating-point weights as written; integer buffers keep theirs, and what the model's checkpoints hold in float32
        beside it stays in float32.
    max_shard_size: of one file, in bytes or like "5GB"; a larger tensor has a file of its own.
    adapter_only: write the adapter alone, which needs no base. with_adapter: write it too, to `out/lora_adapter`.
    adapter_name: which of several. rank, lora_alpha, use_rslora: the training's, where no file tells them; they overrule files.
    untie: write both of two tensors that are tied, and say so in the config; needed where the adapter has broken the tie.
    trust_remote_code: run code that comes with the base.
    progress: called with the bytes written so far and all there will be.

    Raises ValueError or OSError, and leaves no `out`, where anything is missing, does not fit, is left over or is in doubt.
    """
    begin = time.perf_counter()
    source, out = Path(source), Path(out)
    base = None if base is None else Path(base)
    max_shard_bytes = parse_size(max_shard_size)
    if dtype not in MERGE_DTYPES:
        raise ValueError(f"dtype must be one of {MERGE_DTYPES}, got {dtype}")
    _check_places(source, base, out)
    found = open_source(source)
    spec = spec_of(
        source,
        found.meta_directories,
        names_found=found.adapter_names,
        adapter_name=adapter_name,
        rank=rank,
        lora_alpha=lora_alpha,
        use_rslora=use_rslora,
    )
    with _no_collections():
        job = _Job(found, spec, base, trust_remote_code)
    report = CheckpointReport(
        out=str(out),
        source=str(source),
        kind=found.kind,
        base=None if job.base_directory is None else str(job.base_directory),
        adapter_name=spec.name,
        r=spec.r,
        lora_alpha=spec.lora_alpha,
    )
    with new_directory(out) as aside:
        if not adapter_only:
            plan = job.plan(dtype, untie)
            report.dtype = str(dtype).removeprefix("torch.")
            job.write_model(aside, plan, dtype, max_shard_bytes, untie, report, progress)
        if adapter_only or with_adapter:
            job.write_adapter(aside if adapter_only else aside / ADAPTER_DIRECTORY)
        report.files = list_files(aside)
    report.seconds = time.perf_counter() - begin
    return report


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """To make a model is to make a million objects that stay: to look through them again and again takes as long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_places(source: Path, base: Path | None, out: Path) -> None:
    for what, path in (("the source", source), ("the base", base)):
        if path is None:
            continue
        if not path.exists():
            raise ValueError(f"{path}: there is no such directory")
        if out.resolve() == path.resolve() or path.resolve() in out.resolve().parents:
            raise ValueError(f"{out}: is {what} or in it; write somewhere else")
    check_is_free(out)


class _Job:
    """One source, its model without weights, and the adapter's values."""

    def __init__(self, source: Source, spec: AdapterSpec, base: Path | None, trust_remote_code: bool) -> None:
        self.source, self.spec, self._trust = source, spec, trust_remote_code
        named = Path(spec.base_name) if spec.base_name else None
        is_named_here = base is None and named is not None and (named / "config.json").exists()
        self.base_directory = named if is_named_here else base
        self.config_directory = self._config_directory(base)
        self._config = models.config_of(self.config_directory, trust_remote_code=trust_remote_code)
        self._base_tensors: Tensors | None = None
        if self.base_directory is not None:
            self._base_tensors = in_directory(self.base_directory, "model")
        self._prefix = ""
        # Base tensors that lie under another adapter's layers, which the model does not have here.
        self._under_others = {}
        if len(source.adapter_names) > 1:
            self._under_others = {_without_peft(name): name for name in source.names if adapter_of(name) is None}
        self._places: dict[tuple, list[str]] = {}  # (id of a live parameter, view) -> names in a checkpoint
        self._model = self._make(None)
        self._check_source()

    def _config_directory(self, base: Path | None) -> Path:
        """The source's own tells of sizes that training has changed; that of a quantised base does not help."""
        own = self.source.config_directory
        if own is not None and base is not None and read_json(own / "config.json").get("quantization_config"):
            own = None
        if own is None and self.base_directory is None:
            name = self.spec.base_name
            raise ValueError(
                f"{self.source.directory}: its base model "
                + (f"{name!r} is no local directory with a config.json" if name else "is not named")
                + "; say where it is with --base"
            )
        return own if own is not None else self.base_directory

    # -- the model ------------------------------------------------------------------------------------------------------

    def _make(self, loaded: nn.Module | None) -> nn.Module:
        """The model with the adapter, and its values in it. loaded: the base with its weights, where it had to be loaded."""
        source, spec = self.source, self.spec
        is_peft = source.kind == "PEFT adapter"
        base = loaded if loaded is not None else self._empty()
        paths = {name for name, _ in base.named_modules()}
        if not is_peft:
            on = source.adapted_modules(spec.name)
            self._prefix = prefix_of(on, paths, source.directory)
            targets = sorted({each.removeprefix(self._prefix) for each in on})
            changes = {}
            if spec.fields.get("modules_to_save") is None:
                saved = {each.removeprefix(self._prefix) for each in source.saved_modules(spec.name)}
                changes["modules_to_save"] = sorted(saved) or None
            if spec.fields.get("target_modules") is None:
                changes |= self._told_by_names(targets, base)
            spec = self.spec = replace(spec, fields={**spec.fields, **changes})
        records = read_model(base, untie=True).records
        for record in records:
            self._places.setdefault((id(record.tensor), record.view), []).append(record.name)
        # Held, also where PEFT drops them: an id is of one tensor only for as long as that lives.
        self._known = [*base.parameters(), *(record.tensor for record in records)]
        known = set(map(id, self._known))
        model = models.with_adapter(base, spec)
        models.check_scalings(model, spec)
        self._load_adapter(model, known)
        return model

    def _told_by_names(self, targets: list[str], base: nn.Module) -> dict:
        """Of an adapter of which no file tells where it is: what its tensors' names tell."""
        for each in targets:
            if not hasattr(base.get_submodule(each), "weight"):
                raise ValueError(
                    f"{self.source.directory}: {each}: has an adapter on parameters (target_parameters), and names do not "
                    f"tell on which; put the adapter's {CONFIG_NAME} beside the checkpoint, or save one with "
                    "lora_stream.checkpoint.save_train_meta"
                )
        names = [name for name in self.source.names if adapter_of(name) == self.spec.name]
        if tokens := [name for name in names if ".trainable_tokens_delta." in name]:
            raise ValueError(
                f"{self.source.directory}: {tokens[0]}: holds trained token rows, and names do not tell of which tokens; put "
                f"the adapter's {CONFIG_NAME} beside the checkpoint"
            )
        return {
            "target_modules": targets,
            "use_dora": any(".lora_magnitude_vector." in name for name in names),
            "lora_bias": any(re.search(r"\.lora_B\.[^.]+\.bias$", name) for name in names),
        }

    def _empty(self) -> nn.Module:
        """The base without weights, of the sizes that the source's embeddings and heads have."""
        model = self._empty_of(self._config)
        config = self._config
        embedding = next((name for name, each in model.named_modules() if each is model.get_input_embeddings()), None)
        for module, key in ((embedding, "vocab_size"), ("score", "num_labels"), ("classifier", "num_labels")):
            rows = None if module is None else self._rows_of(module)
            holder = config.get_text_config() if key == "vocab_size" else config
            if rows is not None and rows != getattr(holder, key, rows):
                setattr(holder, key, rows)
                model = self._empty_of(config)
        return model

    def _empty_of(self, config) -> nn.Module:
        return models.empty_model(
            config,
            task_type=self.spec.task_type,
            where=self.config_directory / "config.json",
            trust_remote_code=self._trust,
        )

    def _rows_of(self, module: str) -> int | None:
        """Of a module's weight in the source, the trained copy's first."""
        ends = (
            f"{module}.modules_to_save.{self.spec.name}.weight",
            f"{module}.weight",
            f"{module}.base_layer.weight",
        )
        for end in ends:
            for name, stored in self.source.names.items():
                if name == end or name.endswith(f".{end}"):
                    return self.source.tensors.infos[stored].shape[0]
        return None

    def _load_adapter(self, model: nn.Module, known: set[int]) -> None:
        """Put the adapter's values into the model. Raises ValueError for one that is left over, is missing or does not fit."""
        source, where = self.source, self.source.directory
        if source.kind == "PEFT adapter":
            # VeLoRA's projection is of its backward pass alone.
            stored = {name: each for name, each in source.names.items() if ".lora_velora_embed" not in name}
            values = {name: source.tensors.read(each) for name, each in stored.items()}
            models.fill(model, known, source.tensors.infos)
            self._load_by_peft(model, values, known)
            return
        models.fill(model, known, {})
        for fqn, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_meta:
                continue
            name = self._source_name(fqn)
            if name not in source.names:
                raise ValueError(f"{where}: {name} is not there; {self.spec.origin} tells of it")
            self._check_fits(name, source.tensors.infos[source.names[name]], parameter)
            with torch.no_grad():
                parameter.copy_(source.tensors.read(source.names[name]))

    def _load_by_peft(self, model: nn.Module, values: Mapping[str, torch.Tensor], known: set[int]) -> None:
        from peft import set_peft_model_state_dict

        where = self.source.directory
        try:
            result = set_peft_model_state_dict(model, dict(values), adapter_name=self.spec.name)
        except KeyError as error:
            raise ValueError(f"{where}: {error.args[0]} is not there; {self.spec.origin} tells of it") from error
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{where}: the tensors do not fit what {self.spec.origin} tells (r={self.spec.r}): {error}"
            ) from error
        if result.unexpected_keys:
            raise ValueError(
                f"{where}: {listed(result.unexpected_keys)}: the model and {self.spec.origin} have no place for it; --base is "
                "another model, or the config of another adapter"
            )
        new = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
        missing = sorted(set(result.missing_keys) & {name for name in new if not model.get_parameter(name).is_meta})
        if missing:
            raise ValueError(f"{where}: {listed(missing)}: is not there; {self.spec.origin} tells of it")

    def _check_fits(self, name: str, info: Info, parameter: torch.Tensor) -> None:
        if info.shape != tuple(parameter.shape):
            raise ValueError(
                f"{self.source.directory}: {name} must have shape {tuple(parameter.shape)}, by {self.spec.origin} "
                f"(r={self.spec.r}), got {info.shape}"
            )
        if not info.dtype.is_floating_point:
            raise ValueError(f"{self.source.directory}: {name} must hold floating-point numbers, got {info.dtype}")

    def _source_name(self, fqn: str) -> str:
        """What a live tensor of the model is called in the source, if it is there."""
        name = self._prefix + fqn.removeprefix("base_model.model.")
        if name in self.source.names:
            return name
        return self._under_others.get(_without_peft(name), name)

    def _check_source(self) -> None:
        """Raise ValueError for a tensor of the source that the model has no place for."""
        if self.source.kind == "PEFT adapter":
            return  # PEFT said so
        fqns = {
            self._source_name(name)
            for named in (self._model.named_parameters, self._model.named_buffers)
            for name, _ in named(remove_duplicate=False)
        }
        tops = {name.removeprefix(self._prefix).split(".")[0] for name in fqns}
        for name in self.source.names:
            adapter = adapter_of(name)
            if name in fqns or adapter not in (None, self.spec.name) or ".lora_velora_embed" in name:
                continue
            if not name.startswith(self._prefix) or name.removeprefix(self._prefix).split(".")[0] not in tops:
                continue  # of something else that was saved with it: an optimizer
            if _is_ignored(self._model.get_base_model(), name.removeprefix(self._prefix)):
                continue
            if (packed := _unpacked_by(name, self.source)) is not None:
                if self.base_directory is not None:
                    continue
                raise ValueError(
                    f"{self.source.directory}: {packed} is quantised there; say with --base where the base model's "
                    "full-precision weights are"
                )
            raise ValueError(
                f"{self.source.directory}: {name}: the model and {self.spec.origin} have no place for it; --base is another "
                "model, or the metadata is of another adapter"
            )

    # -- the plan -------------------------------------------------------------------------------------------------------

    def plan(self, dtype: torch.dtype, untie: bool) -> Plan:
        plan = self._build(dtype, untie)
        if self._needs_base(plan) and not self._check_base(plan, untie):
            self._load_whole(plan)
            plan = self._build(dtype, untie)
        return plan

    def _build(self, dtype: torch.dtype, untie: bool) -> Plan:
        records = read_model(self._model, adapter_name=self.spec.name, untie=untie)
        return build_plan(records, wire_dtype=dtype, planning_only=True)

    def _needs_base(self, plan: Plan) -> bool:
        """Whether weights come from the base and not from the source. Raises ValueError where that is in doubt."""
        wanted = {self._source_name(task.fqn): task for task in plan.tasks if task.base.is_meta}
        own = [name for name in wanted if name in self.source.names and not self._is_packed(name, wanted[name])]
        if len(own) == len(wanted):
            return False
        if self.base_directory is None or self._base_tensors is None:
            missing = next(name for name in wanted if name not in own)
            what = "is quantised there" if missing in self.source.names else "is not there"
            raise ValueError(
                f"{self.source.directory}: {missing} {what}; say with --base where the base model"
                + ("'s full-precision weights are" if own or missing in self.source.names else " is")
                + (f" (the adapter names {self.spec.base_name!r})" if self.spec.base_name else "")
            )
        if self.spec.changes_base:
            raise ValueError(
                f"{self.spec.origin}: init_lora_weights={self.spec.fields['init_lora_weights']!r} has taken something out of "
                "the base weights, so the adapter belongs to that residual and not to the model it was made from. Convert "
                "the adapter with PEFT (save_pretrained(..., path_initial_model_for_weight_conversion=...)), or, if --base is "
                "the residual, set init_lora_weights to true in the adapter's config"
            )
        return True

    def _is_packed(self, name: str, task: Task) -> bool:
        info = self.source.tensors.infos[self.source.names[name]]
        return task.base.is_floating_point() and not info.dtype.is_floating_point

    def _check_base(self, plan: Plan, untie: bool) -> bool:
        """Whether the base's tensors have the names that the model's checkpoints have, every one of them."""
        assert self._base_tensors is not None
        assert self.base_directory is not None
        models.config_of(self.base_directory, trust_remote_code=self._trust)  # not quantised, and of a known kind
        self._check_not_merged()
        extra = self._extra()
        self.left_out = extra if self._is_other_head() else []
        if self._missing(plan) or (extra and not self.left_out):
            return False
        for names in self._places.values():
            self._check_same([name for name in names if name in self._base_tensors.infos], untie)
        return True

    def _missing(self, plan: Plan) -> list[str]:
        """What the base should hold and does not."""
        return [task.meta.name for task in plan.tasks if task.base.is_meta and self._place(task) is None]

    def _extra(self) -> list[str]:
        """What the base holds and the model has no place for."""
        known = {name for names in self._places.values() for name in names}
        base_model = self._model.get_base_model()
        return [name for name in self._base_tensors.infos if name not in known and not _is_ignored(base_model, name)]

    left_out: list[str] = []

    def _is_other_head(self) -> bool:
        """Whether the base is without the head that the adapter's task has, and with another."""
        found = read_json(self.base_directory / "config.json").get("architectures") or []
        return type(self._model.get_base_model()).__name__ not in found

    def _check_same(self, names: list[str], untie: bool) -> None:
        """Tied tensors that a base holds twice must be equal."""
        for name in names[1:]:
            if not untie and not torch.equal(*(self._base_tensors.read(each) for each in (names[0], name))):
                raise ValueError(
                    f"{self.base_directory}: {names[0]} and {name} are tied by its config but differ; pass --untie to write both"
                )

    def _check_not_merged(self) -> None:
        held = self._base_tensors.metadata.get(_MERGED_KEY, "").split()
        if self._digest in held:
            raise ValueError(
                f"{self.base_directory}: this adapter is merged into it already; its delta would count twice. Name the base "
                "that it was trained on"
            )

    def _load_whole(self, plan: Plan) -> None:
        """A base whose names are older than those that transformers writes: transformers knows them, if anybody."""
        missing = self._missing(plan)
        odd = f"{missing[0]} is not there" if missing else f"{self._extra()[0]} is not a name that the model has"
        base_model = self._model.get_base_model()
        model, info = type(base_model).from_pretrained(
            self.base_directory,
            config=base_model.config,
            dtype="auto",
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=self._trust,
        )
        lacking = sorted(set(info["missing_keys"]) & set(missing))
        left_over = [] if self._is_other_head() else sorted(info["unexpected_keys"])
        for names, what in ((lacking, "is not there"), (left_over, "the model has no place for it")):
            if names:
                raise ValueError(
                    f"{self.base_directory}: {listed(names)}: {what}; --base is another model, or not whole"
                )
        if info["mismatched_keys"]:
            raise ValueError(f"{self.base_directory}: {info['mismatched_keys']}: of another shape than the config says")
        logger.warning(
            "%s: %s; transformers knew the names of old and has loaded it whole, which takes the memory of the base",
            self.base_directory,
            odd,
        )
        self._model = self._make(model.requires_grad_(False))

    def _place(self, task: Task) -> str | None:
        """Where the base holds what a task reads."""
        names = self._places.get((id(task.base), task.view), [])
        return next((name for name in names if name in self._base_tensors.infos), None)

    @cached_property
    def _digest(self) -> str:
        """Of the adapter's values and scalings."""
        found = hashlib.sha256()
        for path, layer in lora_layers(self._model):
            found.update(f"{path} {layer.scaling.get(self.spec.name)!r}\n".encode())
        for name, parameter in self._model.named_parameters():
            if not parameter.is_meta and adapter_of(name) is not None:
                found.update(name.replace(f".{self.spec.name}", "").encode())
                found.update(parameter.detach().float().contiguous().numpy().data)
        return found.hexdigest()

    # -- writing --------------------------------------------------------------------------------------------------------

    def write_model(
        self,
        directory: Path,
        plan: Plan,
        dtype: torch.dtype,
        max_shard_bytes: int,
        untie: bool,
        report: CheckpointReport,
        progress: Progress | None,
    ) -> None:
        self._write_configs(directory, dtype, untie)
        held = "" if self._base_tensors is None else self._base_tensors.metadata.get(_MERGED_KEY, "")
        weights = Weights(
            directory,
            plan.metadata(),
            max_shard_bytes=max_shard_bytes,
            metadata={_MERGED_KEY: f"{held} {self._digest}".strip()},
            progress=progress,
        )
        try:
            staging = ReusedStaging(BUCKET_BYTES)
            for bucket in plan.buckets(BUCKET_BYTES):
                self._write_bucket(replace(plan, tasks=tuple(map(self._with_values, bucket))), weights, staging, report)
                for tensors in (self.source.tensors, self._base_tensors):
                    if tensors is not None:
                        tensors.let_go()
        except BaseException:
            weights.abandon()
            raise
        weights.finish()
        report.left_out = self.left_out
        report.finish(plan)

    @staticmethod
    def _write_bucket(bucket: Plan, weights: Weights, staging: ReusedStaging, report: CheckpointReport) -> None:
        """Of tasks with values."""
        made = []
        for task in bucket.tasks:
            if task.is_as_it_lies:  # it is written as it is read, without a copy
                weights.write(task.meta.name, task.base)
            else:
                made.append(task)
        with Stream(replace(bucket, tasks=tuple(made)), staging=staging) as stream:
            for name, tensor in stream:
                staging.until(weights.write(name, tensor))
        report.count(stream.stats.rounding.values())

    def _with_values(self, task: Task) -> Task:
        """The task with its base read from where it is."""
        if not task.base.is_meta:
            return task
        name = self._source_name(task.fqn)
        if name in self.source.names and not self._is_packed(name, task):
            base = self.source.tensors.read(self.source.names[name])
            self._check_shape(self.source.directory, name, base, tuple(task.base.shape), task)
            return replace(task, base=base)
        place = self._place(task)
        base = self._base_tensors.read(place)
        self._check_shape(self.base_directory, place, base, task.meta.shape, task)
        return task.with_piece(base)

    def _check_shape(self, where: Path, name: str, base: torch.Tensor, shape: tuple[int, ...], task: Task) -> None:
        if tuple(base.shape) != shape:
            raise ValueError(
                f"{where}: {name} must have shape {shape}, as {self.config_directory / 'config.json'} and the adapter say, got "
                f"{tuple(base.shape)}"
            )
        if base.is_floating_point() != task.base.is_floating_point() or (
            base.is_floating_point() and base.dtype not in (*MERGE_DTYPES, torch.float64)
        ):
            raise ValueError(
                f"{where}: {name} is {base.dtype}, a quantised weight; name a full-precision base with --base"
            )
        if task.adapters and base.dtype not in MERGE_DTYPES:
            raise ValueError(f"{where}: {name} is {base.dtype}; cannot be merged into, expected one of {MERGE_DTYPES}")

    def _write_configs(self, directory: Path, dtype: torch.dtype, untie: bool) -> None:
        model = self._model.get_base_model()
        content = read_json(self.config_directory / "config.json")
        changed = model_config_json(
            content, model.config, dtype=dtype, architecture=type(model).__name__, tied=False if untie else None
        )
        write_file(directory / "config.json", changed)
        places = [self.source.directory] if self.source.kind in ("PEFT adapter", "model with adapter") else []
        places += [each for each in (self.source.config_directory, self.base_directory) if each is not None]
        carry_over(dict.fromkeys(places), directory)

    def write_adapter(self, directory: Path) -> None:
        """As PEFT saves it."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save

        if self.spec.changes_base:
            raise ValueError(
                f"{self.spec.origin}: init_lora_weights={self.spec.fields['init_lora_weights']!r} has taken something out of "
                "the base weights, so the adapter alone would be wrong on the model it was made from; merge it"
            )
        state = get_peft_model_state_dict(self._model, adapter_name=self.spec.name, save_embedding_layers=False)
        tensors = {name: value.detach().contiguous() for name, value in state.items() if not value.is_meta}
        layers = {path: layer for path, layer in lora_layers(self._model) if self.spec.name in layer.scaling}
        scalings = {path: (layer.r[self.spec.name], layer.scaling[self.spec.name]) for path, layer in layers.items()}
        base = self.spec.base_name or (None if self.base_directory is None else str(self.base_directory))
        directory.mkdir(exist_ok=True)
        write_file(directory / CONFIG_NAME, config_json(self.spec, sorted(layers), scalings, base))
        write_file(directory / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))


def _without_peft(name: str) -> str:
    """Of a base tensor: its name without the layers that PEFT puts around it."""
    return ".".join(each for each in name.split(".") if each not in ("base_layer", "original_module", "token_adapter"))


def _is_ignored(model: nn.Module, name: str) -> bool:
    """Whether the model itself says that checkpoints may hold it and that it needs none."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) for pattern in patterns) or name.endswith("rotary_emb.inv_freq")


def _unpacked_by(name: str, source: Source) -> str | None:
    """The weight that a tensor only helps to unpack: it is named as that begins (bitsandbytes)."""
    before, found, _ = name.partition(".weight.")
    weight = f"{before}.weight"
    stored = source.names.get(weight) if found else None
    return weight if stored is not None and not source.tensors.infos[stored].dtype.is_floating_point else None
