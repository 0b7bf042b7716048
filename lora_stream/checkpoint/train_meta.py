"""What must be known of a LoRA to use its weights again, kept beside a checkpoint: `lora_train_meta.json`.

Sharded checkpoints hold lora_A and lora_B and nothing of how they are scaled. Without this file a merge has to guess, and a
wrong alpha gives a model that is wrong without a word. verl's merger reads `r`, `lora_alpha` and `task_type` of it.
"""

import enum
import json
import logging
import math
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path

from torch import nn

from lora_stream import shards
from lora_stream.checkpoint.aside import replace_file
from lora_stream.checkpoint.tensors import read_json
from lora_stream.peft import live_adapter

logger = logging.getLogger("lora_stream")

FILE_NAME = "lora_train_meta.json"
FORMAT_VERSION = 1

HOW_TO_GIVE = "give the training's values with --rank and --lora-alpha (in Python rank=, lora_alpha=)"


@dataclass(frozen=True, kw_only=True)
class TrainMeta:
    """A LoRA adapter without its tensors. Names and meanings are those of peft.LoraConfig where it has them.

    In the file `lora_alpha` is an integer, for readers that take no other (verl's merger); where the alpha is fractional it is
    rounded there, to 1 at the least, and `lora_alpha_exact` has the value itself. This class has the exact one.
    """

    r: int
    lora_alpha: float
    task_type: str = "CAUSAL_LM"
    format_version: int | None = FORMAT_VERSION  # None: a file of three fields, as verl writes it
    adapter_name: str = "default"
    base_model_name_or_path: str | None = None
    peft_version: str | None = None
    init_lora_weights: bool | str | None = True
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    target_modules: list[str] | str | None = None  # as PEFT has resolved them; a string is a regular expression
    exclude_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    ensure_weight_tying: bool = False
    layer_replication: list[list[int]] | None = None
    # Path in the model without PEFT and wrappers: {"r": rank, "scaling": what multiplies lora_B @ lora_A}, as they were live.
    modules: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict:
        alpha = self.lora_alpha
        content = {
            **asdict(self),
            "lora_alpha": int(alpha) if float(alpha).is_integer() else max(1, round(alpha)),
            "lora_alpha_exact": alpha,
        }
        return {key: plain(value) for key, value in content.items()}


def save_train_meta(
    directory: str | Path, model: nn.Module, *, adapter_name: str | None = None, is_writer: bool | None = None
) -> TrainMeta | None:
    """Write `lora_train_meta.json` of a model with LoRA into `directory`, which is made if there is none.

    model: with PEFT's adapters, in whatever wrappers; only its metadata is read.
    adapter_name: which adapter; None: the active one if there is just one, else `default`, else the first.
    is_writer: whether this rank writes; None: rank 0 of the default process group does, or whoever has none. The other ranks
        return once it has, or raise RankError if it failed or does not come; it does not wait for them, so that one rank may
        also call alone.

    Returns what was written; None, and nothing is written, for a model without an adapter or with r <= 0. Readers see the old
    file or the new one, never a part. Raises ValueError for an alpha of 0 or one that is no finite number.
    """
    meta = train_meta_of(model, adapter_name=adapter_name)
    if meta is None:
        return None
    path = Path(directory) / FILE_NAME
    content = (json.dumps(meta.to_json(), indent=4, ensure_ascii=False) + "\n").encode()
    shards.one_writes(lambda: replace_file(path, content), str(path.absolute()), content, is_writer)
    return meta


def train_meta_of(model: nn.Module, *, adapter_name: str | None = None) -> TrainMeta | None:
    """Of a live model; None for one without an adapter or with r <= 0."""
    adapter = live_adapter(model, adapter_name)
    if adapter is None or (adapter.config.r or 0) <= 0:
        return None
    config = adapter.config
    alpha = config.r if config.lora_alpha is None else config.lora_alpha
    check_r_and_alpha(int(config.r), alpha, f"adapter {adapter.name!r}")
    if not float(alpha).is_integer():
        logger.warning(
            "adapter %r has lora_alpha=%s; readers that take integers only, like verl's merger, will find %s in %s",
            adapter.name,
            alpha,
            max(1, round(alpha)),
            FILE_NAME,
        )
    known = {each.name for each in fields(TrainMeta)}
    # Fields that an older PEFT lacks have their default.
    values = {name: plain(getattr(config, name)) for name in known if hasattr(config, name)}
    values |= {
        "r": int(config.r),
        "lora_alpha": alpha,
        "task_type": plain(config.task_type) or "CAUSAL_LM",
        "adapter_name": adapter.name,
        "peft_version": metadata.version("peft"),
        "target_parameters": _sorted(config, "target_parameters"),
        "modules": {path: {"r": r, "scaling": scaling} for path, (r, scaling) in sorted(adapter.layers.items())},
    }
    return TrainMeta(**values)


def load_train_meta(directory: str | Path) -> TrainMeta:
    """Of the file in `directory`, or of the file itself; verl's own, of three fields, too.

    Raises FileNotFoundError where there is none, and ValueError, saying how to give the values, for one that is no JSON, lacks
    r or lora_alpha, contradicts itself, has r <= 0 or alpha 0, or was written by a later version.
    """
    path = Path(directory)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"{path}: is missing; {HOW_TO_GIVE}")
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; {HOW_TO_GIVE}") from None
    return _read(content, path)


def _read(content: dict, path: Path) -> TrainMeta:
    version = content.get("format_version")
    if version is not None and version != FORMAT_VERSION:
        raise ValueError(f"{path}: has format_version {version!r}, this reads {FORMAT_VERSION}; update lora_stream")
    alpha = content.get("lora_alpha")
    exact = content.get("lora_alpha_exact", alpha)
    for each in (alpha, exact):
        check_r_and_alpha(content.get("r"), each, str(path))
    rounded = int(exact) if float(exact).is_integer() else max(1, round(exact))
    if alpha not in (exact, rounded):
        raise ValueError(f"{path}: lora_alpha {alpha!r} and lora_alpha_exact {exact!r} contradict; {HOW_TO_GIVE}")
    known = {each.name for each in fields(TrainMeta)}
    values = {key: value for key, value in content.items() if key in known}
    if unknown := sorted(content.keys() - known - {"lora_alpha_exact"}):
        logger.warning("%s: does not know %s, which another program has added; it is not read", path, unknown)
    task_type = values.get("task_type") or "CAUSAL_LM"
    meta = TrainMeta(**{**values, "lora_alpha": exact, "task_type": task_type, "format_version": version})
    _check_types(meta, path)
    return meta


def check_r_and_alpha(r: object, alpha: object, what: str) -> None:
    if isinstance(r, bool) or not isinstance(r, int) or r <= 0:
        raise ValueError(f"{what}: r must be a positive integer, got {r!r}; {HOW_TO_GIVE}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha == 0:
        raise ValueError(
            f"{what}: lora_alpha must be a number other than 0, got {alpha!r}: with 0 the adapter would do nothing; "
            f"{HOW_TO_GIVE}"
        )


def _check_types(meta: TrainMeta, path: Path) -> None:
    expected = {
        str: ("task_type", "adapter_name", "bias"),
        bool: ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying"),
        dict: ("rank_pattern", "alpha_pattern", "modules"),
    }
    for kind, names in expected.items():
        for name in names:
            if not isinstance(getattr(meta, name), kind):
                raise ValueError(
                    f"{path}: {name} must be a {kind.__name__}, got {getattr(meta, name)!r}; {HOW_TO_GIVE}"
                )
    for module, entry in meta.modules.items():
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(key), int | float) and math.isfinite(entry[key]) for key in ("r", "scaling")
        ):
            raise ValueError(f"{path}: modules: {module}: expected r and scaling, got {entry!r}; {HOW_TO_GIVE}")


def _sorted(config: object, name: str) -> list[str] | None:
    found = getattr(config, name, None)
    return None if found is None else sorted(found)


def plain(value: object) -> object:
    """As JSON has it, the same for every hash seed: sets sorted, enums by value."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=str)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {
            str(key): plain(each) for key, each in value.items()
        }  # in order: of patterns the first that fits counts
    return value
