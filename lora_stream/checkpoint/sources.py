"""What a directory with an adapter in it is, and how its tensors' names belong to a model.

    a PEFT adapter      adapter_config.json, adapter_model.safetensors or .bin: names of PEFT's own, without the adapter's
    verl shards         model_world_size_W_rank_R.pt, one for each rank
    a torch DCP         .metadata, *.distcp
    accelerate's FSDP   pytorch_model_fsdp_0/ (a torch DCP) or pytorch_model_fsdp.bin in a checkpoint of the HF Trainer
    a full model        config.json and weights, among whose names are an adapter's

Names are *stored* ones, as a PEFT adapter's files have them, without the adapter's name; or *live* ones, as
`named_parameters()` of the trained model has them, perhaps behind a prefix of whatever wrapped it, with the base weights or
without. accelerate stores adapters alone, so its names are stored ones too.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lora_stream.checkpoint.adapters import CONFIG_NAME
from lora_stream.checkpoint.tensors import (
    Distributed,
    Pickled,
    RankShards,
    Tensors,
    in_directory,
    read_json,
)
from lora_stream.plan import listed

Kind = Literal[
    "PEFT adapter", "verl FSDP checkpoint", "torch DCP checkpoint", "accelerate FSDP checkpoint", "model with adapter"
]

# What holds one tensor or module for each adapter, by the adapter's name.
_BY_ADAPTER = (
    "lora_A",
    "lora_B",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "lora_velora_embed",
    "modules_to_save",
    "trainable_tokens_delta",
    "trainable_tokens_original",
)
# Segments that wrappers put into names; private to torch, so that no model has them of its own.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@dataclass
class Source:
    directory: Path
    kind: Kind
    tensors: Tensors
    names: dict[str, str]  # without wrappers -> as in the files
    is_stored: bool  # whether the names are those of a stored adapter
    adapter_names: list[str] = field(default_factory=list)  # that the names tell; stored ones tell none

    @property
    def meta_directories(self) -> list[Path]:
        """Where lora_train_meta.json or adapter_config.json may be. verl keeps a full model in a directory beside it, accelerate
        the weights in one of their own."""
        is_inner = self.kind == "model with adapter" or self.directory.name.startswith(_ACCELERATE)
        return [self.directory, self.directory.parent if is_inner else self.directory / "lora_adapter"]

    @property
    def config_directory(self) -> Path | None:
        """Where the model's config is, and its tokenizer; verl has them in a directory of their own."""
        for each in (self.directory, self.directory / "huggingface"):
            if (each / "config.json").exists():
                return each
        return None

    def adapted_modules(self, adapter: str) -> list[str]:
        """As named here: those with a LoRA of this adapter, each once."""
        found = {}
        for name in self.names:
            segments = name.split(".")
            for part in ("lora_A", "lora_embedding_A"):
                if part in segments and (
                    self.is_stored or segments[segments.index(part) + 1 : segments.index(part) + 2] == [adapter]
                ):
                    module = segments[: segments.index(part)]
                    # PEFT wraps a module once for each of its parameters that has one.
                    found[".".join(each for each in module if each != "base_layer")] = None
        return list(found)

    def saved_modules(self, adapter: str) -> list[str]:
        """As named here: modules of which this adapter has a copy."""
        found = {}
        for name in self.names:
            if self.is_stored:
                if not is_stored_part(name):
                    found[name.rpartition(".")[0]] = None
                continue
            before, _, after = name.partition(f".modules_to_save.{adapter}.")
            if after:
                found[before] = None
        return list(found)


def open_source(directory: Path) -> Source:
    """Raises ValueError for a directory that is none of the kinds, holds no adapter, or lacks parts of itself."""
    if not directory.is_dir():
        raise ValueError(f"{directory}: is no directory; expected a PEFT adapter or a checkpoint with one")
    directory = _of_weights(directory)
    kind = kind_of(directory)
    tensors: Tensors | None
    if kind == "verl FSDP checkpoint":
        tensors = RankShards(directory, _world_size(directory))
    elif kind == "torch DCP checkpoint":
        tensors = Distributed(directory)
    elif kind == "accelerate FSDP checkpoint":
        tensors = Pickled([directory / f"{_ACCELERATE}.bin"])
    else:
        tensors = in_directory(directory, "adapter_model" if kind == "PEFT adapter" else "model")
    if tensors is None:
        raise ValueError(f"{directory}: {CONFIG_NAME} is there, but no adapter_model.safetensors or .bin")
    names: dict[str, str] = {}
    for name in tensors.infos:
        plain = ".".join(segment for segment in name.split(".") if segment not in _WRAPPERS)
        if plain in names:
            raise ValueError(f"{directory}: {name} and {names[plain]} are one name but for their wrappers")
        names[plain] = name
    if kind in ("torch DCP checkpoint", "accelerate FSDP checkpoint"):
        names = _of_the_model(names)
    is_stored = kind == "PEFT adapter"
    if kind in ("torch DCP checkpoint", "accelerate FSDP checkpoint") and not _adapter_names(names):
        stored = _without_prefix(names, directory)
        is_stored, names = bool(stored), stored or names
    source = Source(directory, kind, tensors, names, is_stored)
    if not is_stored:
        source.adapter_names = _adapter_names(names)
        if not source.adapter_names:
            raise ValueError(
                f"{directory}: holds no adapter: none of its {len(names)} tensors is a lora_A or lora_B. It is a plain model, or "
                "merged already; there is nothing to merge"
            )
    elif not names:
        raise ValueError(f"{directory}: the adapter holds no tensors")
    _check_pairs(source)
    return source


_ACCELERATE = "pytorch_model_fsdp"


def _of_weights(directory: Path) -> Path:
    """Of a checkpoint of the HF Trainer the directory that holds its sharded weights, where it holds none itself."""
    inner = directory / f"{_ACCELERATE}_0"
    has_own = any(next(directory.glob(pattern), None) for pattern in ("*.safetensors", "*.bin", ".metadata"))
    return inner if (inner / ".metadata").exists() and not has_own else directory


# Segments of the names of what is saved beside a model, under names that are built from the model's.
_OPTIMIZER = re.compile(
    r"optim|optimizers?|optim(izer)?_states?|param_groups|master_params|exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|"
    r"(lr_)?schedulers?|dataloaders?|train_state"
)


def _of_the_model(names: dict[str, str]) -> dict[str, str]:
    """Without what an optimizer keeps for each tensor, before or behind its name."""

    def is_beside(name: str) -> bool:
        segments = name.split(".")
        container = next((i for i, each in enumerate(segments) if each in _LORA), None)
        # A lora_A ends in its adapter's name, and its module's own: what follows is somebody else's.
        has_more = container is not None and len(segments) > container + 3
        return has_more or any(map(_OPTIMIZER.fullmatch, segments))

    kept = {plain: name for plain, name in names.items() if not is_beside(plain)}
    return kept if any(set(name.split(".")) & set(_LORA) for name in kept) else names


def _without_prefix(names: dict[str, str], directory: Path) -> dict[str, str]:
    """Stored names from where PEFT's begin. Empty where there are none."""
    found: dict[str, str] = {}
    if not any(_PAIR.fullmatch(name) for name in names):
        return found
    for plain, name in names.items():
        before, mark, after = plain.partition("base_model.model.")
        if not mark or (before and not before.endswith(".")):
            continue
        if mark + after in found:
            raise ValueError(
                f"{directory}: {name} and {found[mark + after]} are one name of an adapter's; which is meant?"
            )
        found[mark + after] = name
    return found


def kind_of(directory: Path) -> Kind:
    """By the files that are there. Raises ValueError for none of the kinds, saying where one may be."""
    has_shards = bool(RankShards.files_in(directory))
    has_adapter = any((directory / f"adapter_model.{suffix}").exists() for suffix in ("safetensors", "bin"))
    has_model = (directory / "config.json").exists() and any(
        next(directory.glob(pattern), None) for pattern in ("model*.safetensors*", "pytorch_model*.bin*")
    )
    is_dcp = (directory / ".metadata").exists()
    is_whole = (directory / f"{_ACCELERATE}.bin").exists()
    if sum((has_shards, is_dcp)) > 1:
        raise ValueError(f"{directory}: holds shards of verl and a torch.distributed.checkpoint; keep one")
    if has_shards:
        return "verl FSDP checkpoint"
    if is_dcp:
        return "torch DCP checkpoint"
    if is_whole and not has_adapter:
        return "accelerate FSDP checkpoint"
    if has_adapter or ((directory / CONFIG_NAME).exists() and not has_model):
        return "PEFT adapter"
    if has_model:
        return "model with adapter"
    inside = [path for path in _directories_in(directory) if _looks_like_one(path)]
    where = f"; did you mean {inside[0]}?" if inside else ""
    raise ValueError(
        f"{directory}: is no PEFT adapter, no verl or torch.distributed checkpoint and no Hugging Face model{where}"
    )


def _directories_in(directory: Path) -> list[Path]:
    found = sorted(path for path in directory.iterdir() if path.is_dir())
    return [*found, *(inner for path in found for inner in sorted(path.iterdir()) if inner.is_dir())]


def _looks_like_one(directory: Path) -> bool:
    return bool(RankShards.files_in(directory)) or any(
        (directory / name).exists() for name in (".metadata", CONFIG_NAME, "model.safetensors")
    )


def _world_size(directory: Path) -> int | None:
    path = directory / "fsdp_config.json"
    if not path.exists():
        return None
    size = read_json(path).get("world_size")
    if not isinstance(size, int):
        raise ValueError(f"{path}: has no world_size")
    return size


def _adapter_names(names: Collection[str]) -> list[str]:
    """Of those that have a LoRA, by live names."""
    found = {}
    for name in names:
        segments = name.split(".")
        for i, segment in enumerate(segments[:-1]):
            # A stored one has its own name right behind: `lora_A.weight`.
            if segment in _LORA and not is_stored_part(name):
                found[segments[i + 1]] = None
    return list(found)


def is_stored_part(name: str) -> bool:
    """Whether it is a part of an adapter by its stored name, which ends with the kind of part."""
    return _STORED.fullmatch(name) is not None


_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_STORED = re.compile(
    r".*\.(lora_[AB]\.(weight|bias)|lora_embedding_[AB]|lora_magnitude_vector(\.weight)?|trainable_tokens_delta|"
    r"token_adapter\.trainable_tokens_delta|lora_velora_embed)"
)


def adapter_of(name: str) -> str | None:
    """Whose tensor this is, by its live name; None for one of the model itself."""
    segments = name.split(".")
    return next((segments[i + 1] for i, each in enumerate(segments[:-1]) if each in _BY_ADAPTER), None)


_PAIR = re.compile(r"(^|.*\.)lora_(embedding_)?([AB])(\..*)?")


def _check_pairs(source: Source) -> None:
    """Raise ValueError for a lora_A without its lora_B, or the other way round."""
    halves: dict[tuple, set[str]] = {}
    for name in source.names:
        match = _PAIR.fullmatch(name)
        if match and not (match[4] or "").endswith(".bias"):
            halves.setdefault((match[1], match[2], match[4]), set()).add(match[3])
    for (before, embedding, after), found in halves.items():
        if len(found) == 1:
            (there,) = found
            missing = "B" if there == "A" else "A"
            pair = [f"{before}lora_{embedding or ''}{half}{after or ''}" for half in (there, missing)]
            raise ValueError(f"{source.directory}: {pair[0]} is there but {pair[1]} is not; the adapter is not whole")


def prefix_of(modules: Sequence[str], known: Collection[str], where: Path) -> str:
    """What stands before the model's own names in those of a source. modules: that have an adapter, as named in the source; known:
    paths of the model's modules.

    Raises ValueError where no one prefix makes all of them modules of the model.
    """
    first = modules[0].split(".")
    fitting = []
    for i in range(len(first)):
        prefix = ".".join(first[:i]) + ("." if i else "")
        if all(module.startswith(prefix) and module[len(prefix) :] in known for module in modules):
            fitting.append(prefix)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(f"{where}: its names fit the model behind each of {fitting}; which is meant cannot be told")
    # Which of them is the odd one, by the prefix that fits most.
    prefixes = [".".join(first[:i]) + ("." if i else "") for i in range(len(first))]
    best = max(prefixes, key=lambda prefix: sum(module.removeprefix(prefix) in known for module in modules))
    odd = [module for module in modules if module.removeprefix(best) not in known]
    raise ValueError(
        f"{where}: {listed(odd)}: has an adapter, but the model has no such module; --base is another model"
    )
