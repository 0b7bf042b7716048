"""The merged checkpoint of a live trainer, sharded or not, straight from the stream: a last export, or for engines that reload
from the disk.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from lora_stream import shards
from lora_stream.checkpoint.aside import new_directory
from lora_stream.checkpoint.configs import live_config_json
from lora_stream.checkpoint.reports import CheckpointReport
from lora_stream.checkpoint.rest import rest_of
from lora_stream.checkpoint.side_files import carry_over
from lora_stream.checkpoint.tensors import Tensors, in_directory
from lora_stream.checkpoint.writing import Weights, list_files, parse_size, write_file
from lora_stream.merged_weights import MergedWeights, logger, ranks_of, refuse
from lora_stream.merging import is_finite, not_finite
from lora_stream.peft import base_model_of, read_model
from lora_stream.plan import MERGE_DTYPES, ModelRecords, Plan, build_plan
from lora_stream.rounding import RoundingMode


def export(
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rounding: RoundingMode = "nearest",
    seed: int = 0,
    max_shard_size: int | str = "5GB",
    adapter_name: str | None = None,
    untie: bool = False,
    processing_class: object | None = None,
    base: str | Path | None = None,
    is_writer: bool | None = None,
    check_finite: bool = True,
    onload: Callable[..., object] | None = None,
    offload: Callable[..., object] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> CheckpointReport | None:
    """Write a model, its adapters merged, as a Hugging Face checkpoint. The model is only read.

    model: a transformers model with PEFT's adapters or without, in whatever wrappers; of a sharded one every rank calls.
    directory: does not exist or is empty; it is there when all is written, or not at all.
    dtype, rounding, seed, max_shard_size, untie, check_finite: as of `merge`. adapter_name, onload, offload: as of MergedWeights.
    processing_class: a tokenizer or processor, or anything else with save_pretrained, to go with it.
    base: the directory whose tokenizer, processor, code and license go with it, and the tensors for which the model has no
        module; None: the one that the model was loaded from.
    is_writer: whether this rank writes; None: the first does. progress: called there with the bytes written and all there will be.

    Returns a report where it is written, None elsewhere; of a model that is not sharded the others return at once. Raises
    ValueError or OSError, of a sharded model on all ranks, and leaves no `directory`.
    """
    begin = time.perf_counter()
    directory = Path(directory)
    ranks = ranks_of(model)
    writes = (shards.is_first_process() if ranks.is_alone else ranks.is_first) if is_writer is None else is_writer
    if ranks.is_alone and not writes:
        return None
    if dtype not in MERGE_DTYPES:
        error = ValueError(f"dtype must be one of {MERGE_DTYPES}, got {dtype}")
        refuse(ranks, error)
        raise error
    weights = MergedWeights(
        model,
        wire_dtype=dtype,
        adapter_name=adapter_name,
        rounding=rounding,
        seed=seed,
        untie=untie,
        check_finite=check_finite,
        onload=onload,
        offload=offload,
        gather="sender",
        is_sender=writes,
    )
    report = CheckpointReport(out=str(directory), dtype=str(dtype).removeprefix("torch."), rounding=rounding, seed=seed)
    with ExitStack() as stack:
        aside, file = directory, None
        rest: _Rest | None = None

        def prepare() -> None:
            nonlocal aside, file, rest
            if not writes:
                return
            aside = stack.enter_context(new_directory(directory))
            origin = _origin(model, base)
            _write_beside(model, aside, dtype, untie, processing_class, origin)
            rest = _Rest.of(model, weights.plan, origin, dtype)
            file = Weights(
                aside,
                [*weights.metadata(), *rest.plan.metadata()],
                max_shard_bytes=parse_size(max_shard_size),
                metadata={},
                progress=progress,
            )
            stack.callback(file.abandon)

        ranks.agree(prepare, "prepare the export")
        stream = weights.first_pass()
        failed: BaseException | None = None
        try:
            with stream:
                for name, tensor in stream:
                    if file is not None:
                        file.write(name, tensor)
                    del tensor
        except BaseException as error:  # the stream has gone on taking part, for the other ranks
            if stream.stats.is_lost:
                raise  # nobody can be told
            failed = error

        def finish() -> None:
            if failed is not None:
                raise failed
            if file is None:
                return
            assert rest is not None
            for name, tensor in rest.tensors(check_finite):
                file.write(name, tensor)
            file.finish()
            report.roundings |= stream.stats.rounding
            report.finish(replace(stream.plan, tasks=stream.plan.tasks + rest.plan.tasks))
            report.carried, report.left_out = list(rest.plan.names("copied")), rest.left_out
            report.files = list_files(aside)
            stack.close()  # gives the directory its name

        ranks.agree(finish, "finish the export")
    report.seconds = time.perf_counter() - begin
    return report if writes else None


def _origin(model: nn.Module, base: str | Path | None) -> Path | None:
    """The directory of the model that it was made from. A model that was made from a config has no name: an empty one would be
    the current directory."""
    if base is not None and not Path(base).is_dir():
        raise ValueError(f"{base}: there is no such directory")
    origin = base or getattr(getattr(base_model_of(model), "config", None), "_name_or_path", None)
    return Path(origin) if origin and (Path(origin) / "config.json").exists() else None


def _write_beside(
    model: nn.Module,
    directory: Path,
    dtype: torch.dtype,
    untie: bool,
    processing_class: object | None,
    origin: Path | None,
) -> None:
    """All but the weights."""
    base_model = base_model_of(model)
    config = getattr(base_model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise ValueError(
            f"{type(base_model).__name__} has no transformers config, so there is no Hugging Face checkpoint of it"
        )
    architecture = shards.class_before_sharding(base_model).__name__
    content = live_config_json(config, dtype=dtype, architecture=architecture, tied=False if untie else None)
    write_file(directory / "config.json", content)
    if processing_class is not None:
        _save(processing_class, directory)
    generation = getattr(base_model, "generation_config", None)
    if generation is not None and not _save(generation, directory):
        (directory / "generation_config.json").write_text(generation.to_json_string())
    if origin is not None:
        carry_over([origin], directory, base=origin)


@dataclass
class _Rest:
    """What the model was made from, and has no module for."""

    source: Tensors | None
    plan: Plan
    left_out: dict[str, str]

    @staticmethod
    def of(model: nn.Module, written: Plan, origin: Path | None, dtype: torch.dtype) -> "_Rest":
        """Of an origin under the names that are written: what others name is not known to be left over."""
        nothing = _Rest(None, Plan(tasks=(), scope="all", account={}), {})
        try:
            source = None if origin is None else in_directory(origin, "model")
        except ValueError as error:  # the weights come from the model
            logger.warning("what only %s may hold is not carried over: %s", origin, error)
            return nothing
        if source is None or not _names_alike(written, source):
            return nothing
        places: dict[tuple, list[str]] = {}
        for record in read_model(model, untie=True).records:
            places.setdefault((id(record.tensor), record.view), []).append(record.name)
        names = {meta.name for meta in written.metadata()}
        rest = rest_of(source.infos, origin, base_model_of(model), written=names, places=places.values())
        records = ModelRecords(records=rest.carried, all_fqns=[record.fqn for record in rest.carried])
        return _Rest(source, build_plan(records, wire_dtype=dtype, planning_only=True), rest.left_out)

    def tensors(self, check_finite: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """As they are written."""
        for task in self.plan.tasks:
            assert self.source is not None
            tensor = self.source.read(task.meta.name).to(task.meta.dtype)
            if check_finite and not is_finite(tensor):
                raise not_finite(task)
            yield task.meta.name, tensor
            self.source.let_go()


def _names_alike(written: Plan, source: Tensors) -> bool:
    """Whether the source has all that is written, but for modules at the top that the model has got since, and buffers."""
    tops = {name.split(".")[0] for name in source.infos}
    parameters = {task.meta.name for task in written.tasks if isinstance(task.base, nn.Parameter)}
    shared = {name for name in parameters if name.split(".")[0] in tops}
    return bool(shared) and shared <= source.infos.keys()


def _save(beside: object, directory: Path) -> bool:
    """Whether it could be saved. transformers refuses to save what it finds invalid; the weights are worth more."""
    try:
        beside.save_pretrained(directory)  # type: ignore[attr-defined]
    except Exception as error:
        logger.warning("%s cannot save its files (%s); the weights are written", type(beside).__name__, error)
        return False
    return True
