"""What a directory is, what it lacks, and how it would be merged."""

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lora_stream.checkpoint.adapters import AdapterSpec, spec_of
from lora_stream.checkpoint.sources import Source, adapter_of, kind_of, open_source
from lora_stream.checkpoint.tensors import in_directory, read_json


@dataclass(kw_only=True)
class Inspection:
    """r, lora_alpha and scaling: of modules that no pattern names."""

    path: str
    kind: str
    adapter_names: list[str] = field(default_factory=list)
    adapter_name: str | None = None
    r: int | None = None
    lora_alpha: float | None = None
    scaling: float | None = None
    origin: str | None = None  # where r and lora_alpha come from
    targets: list[str] | str | None = None
    modules_to_save: list[str] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)  # rsLoRA, DoRA, patterns and the like
    num_tensors: int = 0
    num_bytes: int = 0
    has_base: bool = False
    base: str | None = None
    missing: list[str] = field(default_factory=list)  # what a merge would stop at, or have to be told
    command: str | None = None  # that would merge it

    def to_dict(self) -> dict:
        return asdict(self)


def inspect(path: str | Path) -> Inspection:
    """Look at a directory without loading weights. Raises ValueError for one that is nothing with an adapter in it; what a merge
    would stop at is told in `missing`."""
    directory = Path(path)
    if not directory.is_dir():
        raise ValueError(f"{directory}: is no directory; expected a PEFT adapter or a checkpoint with one")
    found = Inspection(path=str(directory), kind=_kind(directory))
    source = _attempt(lambda: open_source(directory), found)
    if source is None:
        return found
    infos = source.tensors.infos.values()
    found.num_tensors, found.num_bytes = len(infos), sum(info.num_bytes for info in infos)
    found.adapter_names = source.adapter_names
    found.has_base = not source.is_stored and any(
        ".base_layer." in name and adapter_of(name) is None for name in source.names
    )
    options = ["--adapter-name", source.adapter_names[0]] if len(source.adapter_names) > 1 else []
    spec = _attempt(lambda: spec_of(source.directory, source.meta_directories, names_found=source.adapter_names), found)
    if spec is not None:
        _describe(found, source, spec)
        options = []
    elif not options:
        options = ["--rank", "R", "--lora-alpha", "ALPHA"]
    options += _base_options(found, source, spec)
    found.command = shlex.join(["lora-stream", "merge", str(directory), *options, "--out", "OUT"])
    return found


def _kind(directory: Path) -> str:
    kind = kind_of(directory)
    if kind == "model with adapter":
        tensors = in_directory(directory, "model")
        if tensors is not None and not any(adapter_of(name) for name in tensors.infos):
            architecture = (read_json(directory / "config.json").get("architectures") or ["unknown"])[0]
            return f"Hugging Face model ({architecture}) without adapter"
    return kind


def _attempt(attempt: Callable, found: Inspection):
    try:
        return attempt()
    except (ValueError, OSError) as error:
        found.missing.append(str(error))
        return None


def _describe(found: Inspection, source: Source, spec: AdapterSpec) -> None:
    found.adapter_name, found.origin = spec.name, spec.origin
    found.r, found.lora_alpha, found.scaling = spec.r, spec.lora_alpha, spec.scaling
    fields = spec.fields
    targets = fields.get("target_modules") or fields.get("target_parameters")
    if targets is None:
        targets = {each.rpartition(".")[2] for each in source.adapted_modules(spec.name)}
    found.targets = targets if isinstance(targets, str) else sorted(targets)
    found.modules_to_save = sorted(fields.get("modules_to_save") or [])
    found.variants = [
        *(key for key in ("use_rslora", "use_dora", "lora_bias") if fields.get(key)),
        *(
            key
            for key in ("rank_pattern", "alpha_pattern", "layer_replication", "target_parameters")
            if fields.get(key)
        ),
    ]
    if spec.changes_base:
        found.variants.append(f"init_lora_weights={fields['init_lora_weights']}")


def _base_options(found: Inspection, source: Source, spec: AdapterSpec | None) -> list[str]:
    """What a command needs to find the base, where the source does not hold it."""
    named = spec.base_name if spec is not None else None
    found.base = named
    is_here = named is not None and (Path(named) / "config.json").exists()
    if is_here or (found.has_base and source.config_directory is not None):
        return []
    what = "its config and tokenizer" if found.has_base else "the base model"
    found.missing.append(f"{what}: {named!r} is no local directory" if named else f"{what}: say where with --base")
    return ["--base", "BASE"]


def rows(found: Inspection) -> list[tuple[str, str]]:
    """Label and text of each line that people read."""
    lines = [("is a", found.kind), ("tensors", f"{found.num_tensors}, {found.num_bytes / 1e6:.1f} MB")]
    if found.adapter_names:
        lines.append(("adapters", ", ".join(found.adapter_names)))
    if found.r is not None:
        lines += [
            ("adapter", f"{found.adapter_name}, by {found.origin}"),
            ("r", str(found.r)),
            ("lora_alpha", f"{found.lora_alpha:g}"),
            ("scaling", f"{found.scaling:g}"),
            ("targets", found.targets if isinstance(found.targets, str) else ", ".join(found.targets or [])),
        ]
    for label, texts in (("trained whole", found.modules_to_save), ("with", found.variants)):
        if texts:
            lines.append((label, ", ".join(texts)))
    lines.append(("base", "in it" if found.has_base else found.base or "not named"))
    lines += [("missing", text) for text in found.missing]
    if found.command is not None:
        lines.append(("merge with", found.command))
    return lines
