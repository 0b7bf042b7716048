"""Merge an adapter into its base, from files into files, by the plan and the kernel of the stream.

    source + base ──► assembly ──► plan ──► bucket by bucket: read, merge, write
                      PEFT's layers, so     names,
                      it is read as a       order
                      live model

Memory: the adapter, two buckets and the largest tensor, what waits for the disk (writing.py), and of mapped files what
tensors.py says.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from lora_stream.checkpoint.adapters import CONFIG_NAME, config_json, spec_of
from lora_stream.checkpoint.aside import check_is_free, new_directory
from lora_stream.checkpoint.assembling import Assembly
from lora_stream.checkpoint.bases import MERGED_KEY, Base
from lora_stream.checkpoint.configs import config_json as model_config_json
from lora_stream.checkpoint.reports import CheckpointReport
from lora_stream.checkpoint.rest import Rest, rest_of
from lora_stream.checkpoint.side_files import carry_over
from lora_stream.checkpoint.sources import adapter_of, open_source
from lora_stream.checkpoint.tensors import read_json
from lora_stream.checkpoint.writing import ReusedStaging, Weights, list_files, parse_size, write_file
from lora_stream.fidelity import warn_if_low
from lora_stream.merged_weights import Stream, logger
from lora_stream.merging import Arithmetic, is_finite, not_finite
from lora_stream.peft import lora_layers, read_model
from lora_stream.plan import MERGE_DTYPES, Plan, Task, build_plan
from lora_stream.rounding import RoundingMode

BUCKET_BYTES = 32 * 1024 * 1024
ADAPTER_DIRECTORY = "lora_adapter"

Progress = Callable[[int, int], object]


def merge(
    source: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    rounding: RoundingMode = "nearest",
    seed: int = 0,
    max_shard_size: int | str = "5GB",
    adapter_only: bool = False,
    with_adapter: bool = False,
    adapter_name: str | None = None,
    rank: int | None = None,
    lora_alpha: float | None = None,
    use_rslora: bool | None = None,
    untie: bool = False,
    trust_remote_code: bool = False,
    check_finite: bool = True,
    progress: Progress | None = None,
) -> CheckpointReport:
    """Write the merged model as a Hugging Face checkpoint, and/or the adapter as PEFT loads it.

    source: a PEFT adapter directory, a verl FSDP checkpoint (`.../actor`), a torch.distributed.checkpoint, or a Hugging Face model
        among whose tensors are an adapter's.
    out: a directory that does not exist or is empty; it is there when all is written, or not at all.
    base: the base model's directory; None: the one that the adapter names, or the source itself where it holds the base too.
    dtype: of floating-point weights as written; integer buffers keep theirs, and what the model's checkpoints hold in float32
        beside it stays in float32.
    rounding, seed: of merged weights to that dtype, see rounding.py. To nearest, the checkpoint is what anybody else would merge;
        dithered, it is what a dithered sync of the same adapter has sent.
    max_shard_size: of one file, in bytes or like "5GB"; a larger tensor has a file of its own.
    adapter_only: write the adapter alone, which needs no more of the base than its config. with_adapter: write it too, to `out/lora_adapter`.
    adapter_name: which of several. rank, lora_alpha, use_rslora: the training's, where no file tells them; they overrule files.
    untie: write both of two tensors that are tied, and say so in the config; needed where the adapter has broken the tie.
    trust_remote_code: run code that comes with the base.
    check_finite: raise where a tensor is not finite in the dtype that it is written in.
    progress: called with the bytes written so far and all there will be, from another thread.

    Raises ValueError or OSError, and leaves no `out`, where anything is missing, does not fit, is left over or is in doubt.
    """
    begin = time.perf_counter()
    source, out = Path(source), Path(out)
    base = None if base is None else Path(base)
    max_shard_bytes = parse_size(max_shard_size)
    if dtype not in MERGE_DTYPES:
        raise ValueError(f"dtype must be one of {MERGE_DTYPES}, got {dtype}")
    arithmetic = Arithmetic(rounding=rounding, seed=seed)
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
    assembly = Assembly(found, spec, base, trust_remote_code)
    report = CheckpointReport(
        out=str(out),
        source=str(source),
        kind=found.kind,
        adapter_name=spec.name,
        r=spec.r,
        lora_alpha=spec.lora_alpha,
        rounding=rounding,
        seed=seed,
    )
    with new_directory(out) as aside:
        if not adapter_only:
            report.dtype = str(dtype).removeprefix("torch.")
            job = _Merge(assembly, dtype, untie, arithmetic, check_finite)
            job.write_configs(aside)
            job.write_weights(aside, max_shard_bytes, report, progress)
        if adapter_only or with_adapter:
            _write_adapter(assembly, aside if adapter_only else aside / ADAPTER_DIRECTORY)
        report.files = list_files(aside)
    report.seconds = time.perf_counter() - begin
    return report


def _check_places(source: Path, base: Path | None, out: Path) -> None:
    for what, path in (("the source", source), ("the base", base)):
        if path is None:
            continue
        if not path.exists():
            raise ValueError(f"{path}: there is no such directory")
        if out.resolve() == path.resolve() or path.resolve() in out.resolve().parents:
            raise ValueError(f"{out}: is {what} or in it; write somewhere else")
    check_is_free(out)


class _Merge:
    """The plan of a merge, and where each of its tasks reads the base."""

    def __init__(
        self, assembly: Assembly, dtype: torch.dtype, untie: bool, arithmetic: Arithmetic, check_finite: bool
    ) -> None:
        self._assembly, self._dtype, self._untie = assembly, dtype, untie
        self._arithmetic, self._check_finite = arithmetic, check_finite
        self._base: Base | None = None  # where the source does not hold it, or not all of it
        self._rests: list[Rest] = []
        plan = self._build()
        if assembly.ignored:
            names = {meta.name for meta in plan.metadata()}
            self._rests.append(
                rest_of(assembly.ignored, assembly.config_directory, assembly.base_model, written=names, places=())
            )
            plan = self._build()
        if self._needs_base(plan):
            self._base = Base(assembly.base_directory, assembly)
            if not self._base.fits(plan, untie):
                self._base.load_whole(plan)
        elif assembly.base_directory is not None:
            self._base = self._base_with_more(plan)
        if self._base is not None:
            self._rests.append(self._base.rest)
        self._plan = self._build()

    def _build(self) -> Plan:
        records = read_model(self._assembly.model, adapter_name=self._assembly.spec.name, untie=self._untie)
        carried = [record for rest in self._rests for record in rest.carried]
        records.records += carried
        records.all_fqns += [record.fqn for record in carried]
        return build_plan(records, wire_dtype=self._dtype, planning_only=True)

    def _base_with_more(self, plan: Plan) -> Base | None:
        """The base beside a source that holds all of the model, where it holds what the model has no module for."""
        try:
            base = Base(self._assembly.base_directory, self._assembly)
            base.look_through(plan)
        except ValueError as error:  # the merge does not need it
            logger.warning("what only the base may hold is not carried over: %s", error)
            return None
        return base if base.rest.carried else None

    def _needs_base(self, plan: Plan) -> bool:
        """Whether weights come from a base beside the source. Raises ValueError where that is in doubt."""
        assembly, where = self._assembly, self._assembly.source.directory
        wanted = [task for task in plan.tasks if task.base.is_meta]
        lacking = [task for task in wanted if not assembly.has(task)]
        if not lacking:
            return False
        absent = [task for task in lacking if not assembly.is_packed(task)]
        name = assembly.source_name((absent or lacking)[0].fqn)
        if absent and len(lacking) < len(wanted):
            raise ValueError(f"{where}: {name} is not there, while other base weights are; the checkpoint is not whole")
        if assembly.base_directory is None:
            named = assembly.spec.base_name
            raise ValueError(
                f"{where}: {name} {'is not there' if absent else 'is quantised there'}; say with --base where the base model"
                + (" is" if absent else "'s full-precision weights are")
                + (f" (the adapter names {named!r})" if named else "")
            )
        if assembly.spec.changes_base:
            raise ValueError(
                f"{assembly.spec.origin}: init_lora_weights={assembly.spec.fields['init_lora_weights']!r} has taken something "
                "out of the base weights, so the adapter belongs to that residual and not to the model it was made from. "
                "Convert the adapter with PEFT (save_pretrained(..., path_initial_model_for_weight_conversion=...)), or, if "
                "--base is the residual, set init_lora_weights to true in the adapter's config"
            )
        return True

    def write_configs(self, directory: Path) -> None:
        """All but the weights."""
        assembly = self._assembly
        changed = model_config_json(
            read_json(assembly.config_directory / "config.json"),
            assembly.base_model.config,
            dtype=self._dtype,
            architecture=type(assembly.base_model).__name__,
            tied=False if self._untie else None,
        )
        write_file(directory / "config.json", changed)
        source = assembly.source
        places = [source.directory] if source.kind in ("PEFT adapter", "model with adapter") else []
        places += [each for each in (source.config_directory, assembly.base_directory) if each is not None]
        carry_over(dict.fromkeys(places), directory, base=assembly.base_directory)

    def write_weights(
        self, directory: Path, max_shard_bytes: int, report: CheckpointReport, progress: Progress | None
    ) -> None:
        held = [] if self._base is None else self._base.merged_adapters
        weights = Weights(
            directory,
            self._plan.metadata(),
            max_shard_bytes=max_shard_bytes,
            metadata={MERGED_KEY: " ".join([*held, self._assembly.digest])},
            progress=progress,
        )
        try:
            staging = ReusedStaging(BUCKET_BYTES)
            for bucket in self._plan.buckets(BUCKET_BYTES):
                part = replace(self._plan, tasks=tuple(map(self._with_values, bucket)))
                self._write_bucket(part, weights, staging, report)
                del part
                self._assembly.source.tensors.let_go()
                if self._base is not None:
                    self._base.tensors.let_go()
        except BaseException:
            weights.abandon()
            raise
        weights.finish()
        report.base = None if self._base is None else str(self._base.directory)
        for rest in self._rests:
            report.carried += [record.name for record in rest.carried]
            report.left_out |= rest.left_out
        report.finish(self._plan)
        if self._arithmetic.rounding == "nearest":
            warn_if_low(report.roundings)

    def _with_values(self, task: Task) -> Task:
        """The task with its base read from where it is."""
        if not task.base.is_meta:
            return task
        if self._assembly.has(task):
            base = self._assembly.read(task)
            name = self._assembly.source_name(task.fqn)
            self._check_fits(f"{self._assembly.source.directory}: {name}", base, tuple(task.base.shape), task)
            return replace(task, base=base)
        assert self._base is not None
        name = self._base.place(task)
        assert name is not None
        base = self._base.tensors.read(name)
        self._check_fits(f"{self._base.directory}: {name}", base, task.meta.shape, task)
        return task.with_piece(base)

    def _write_bucket(self, bucket: Plan, weights: Weights, staging: ReusedStaging, report: CheckpointReport) -> None:
        """Of tasks with values."""
        made = []
        for task in bucket.tasks:
            if not task.is_as_it_lies:
                made.append(task)
                continue
            if self._check_finite and not is_finite(task.base):
                raise not_finite(task)
            weights.write(task.meta.name, task.base)  # as it is read, without a copy
        part = replace(bucket, tasks=tuple(made))
        with Stream(
            part, staging=staging, arithmetic=self._arithmetic, check_finite=self._check_finite, warns=False
        ) as stream:
            for name, tensor in stream:
                staging.until(weights.write(name, tensor))
        report.roundings |= stream.stats.rounding

    def _check_fits(self, what: str, base: torch.Tensor, shape: tuple[int, ...], task: Task) -> None:
        if tuple(base.shape) != shape:
            raise ValueError(
                f"{what} must have shape {shape}, as {self._assembly.config_directory / 'config.json'} and the adapter say, "
                f"got {tuple(base.shape)}"
            )
        accepted = MERGE_DTYPES if task.adapters else (*MERGE_DTYPES, torch.float64)
        if task.base.is_floating_point() != base.is_floating_point() or (
            base.is_floating_point() and base.dtype not in accepted
        ):
            raise ValueError(
                f"{what} is {base.dtype}, expected one of {accepted}: name a base with --base that is not quantised"
            )


def _write_adapter(assembly: Assembly, directory: Path) -> None:
    """As PEFT saves it, in the dtype that it has in the source."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    source, spec = assembly.source, assembly.spec
    if spec.changes_base:
        raise ValueError(
            f"{spec.origin}: init_lora_weights={spec.fields['init_lora_weights']!r} has taken something out of the base weights, "
            "so the adapter alone would be wrong on the model it was made from; merge it"
        )
    is_its_own = lambda name: source.is_stored or adapter_of(name) == spec.name  # noqa: E731
    dtypes = {source.tensors.infos[stored].dtype for name, stored in source.names.items() if is_its_own(name)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    state = get_peft_model_state_dict(assembly.model, adapter_name=spec.name, save_embedding_layers=False)
    tensors = {name: value.detach().to(dtype).contiguous() for name, value in state.items() if not value.is_meta}
    layers = {path: layer for path, layer in lora_layers(assembly.model) if spec.name in layer.scaling}
    scalings = {path: (layer.r[spec.name], layer.scaling[spec.name]) for path, layer in layers.items()}
    base = spec.base_name or (None if assembly.base_directory is None else str(assembly.base_directory))
    directory.mkdir(exist_ok=True)
    write_file(directory / CONFIG_NAME, config_json(spec, sorted(layers), scalings, base))
    write_file(directory / "adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
