"""An adapter without its tensors, as a checkpoint tells it: from `adapter_config.json`, from `lora_train_meta.json`, or from
what the caller gives. Nothing is guessed.
"""

import json
import logging
import math
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path

from lora_stream.checkpoint.tensors import read_json
from lora_stream.checkpoint.train_meta import (
    FILE_NAME,
    HOW_TO_GIVE,
    TrainMeta,
    check_r_and_alpha,
    load_train_meta,
    plain,
)
from lora_stream.peft import changes_base, check_formula
from lora_stream.plan import listed

logger = logging.getLogger("lora_stream")

CONFIG_NAME = "adapter_config.json"

# Fields of later or earlier PEFTs that say how an adapter trains, or what other fields are for, and change no formula.
_NEUTRAL = {
    "auto_mapping",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
    "velora_config",
}
# Those of them that PEFT wants in a form that JSON does not have, and that only training reads.
_OF_TRAINING = ("corda_config", "eva_config", "loftq_config", "lora_ga_config", "megatron_config", "runtime_config")


@dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """name: as the tensors' names have it. fields: of a peft.LoraConfig; target_modules None: where the tensors are."""

    name: str
    fields: dict = field(default_factory=dict)
    modules: dict[str, dict[str, float]] = field(default_factory=dict)  # as in TrainMeta; empty: as the fields say
    origin: str = ""  # which file or options these come from, for messages

    @property
    def r(self) -> int:
        return self.fields["r"]

    @property
    def lora_alpha(self) -> float:
        return self.fields["lora_alpha"]

    @property
    def scaling(self) -> float:
        """Of modules that no pattern names."""
        return self.lora_alpha / (math.sqrt(self.r) if self.fields.get("use_rslora") else self.r)

    @property
    def task_type(self) -> str | None:
        return self.fields.get("task_type")

    @property
    def base_name(self) -> str | None:
        return self.fields.get("base_model_name_or_path")

    @property
    def changes_base(self) -> bool:
        return changes_base(self.config())

    def config(self, **changes: object):
        """A peft.LoraConfig. Raises ValueError for what the installed PEFT does not take."""
        from peft import LoraConfig

        values = {key: value for key, value in self.fields.items() if key not in _OF_TRAINING}
        try:
            return LoraConfig(**{**values, **changes})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.origin}: PEFT {metadata.version('peft')} does not take it: {error}") from error


def spec_of(
    directory: Path,
    meta_directories: list[Path],
    *,
    names_found: list[str],
    adapter_name: str | None = None,
    rank: int | None = None,
    lora_alpha: float | None = None,
    use_rslora: bool | None = None,
) -> AdapterSpec:
    """directory: of the tensors. meta_directories: where its metadata may be, the first that has it counts. names_found: the
    adapters that the tensors' names tell; none where they tell no names. rank, lora_alpha, use_rslora: what the caller says; they
    win.

    Raises ValueError where r or alpha is missing, zero or contradictory, and for an adapter that is no LoRA or has a formula
    that is not known.
    """
    check_r_and_alpha(1 if rank is None else rank, 1 if lora_alpha is None else lora_alpha, "what is given")
    if adapter_name is not None and names_found and adapter_name not in names_found:
        raise ValueError(f"{directory}: holds no adapter {adapter_name!r}, but {listed(names_found)}")
    given = {"r": rank, "lora_alpha": lora_alpha, "use_rslora": use_rslora}
    given = {key: value for key, value in given.items() if value is not None}
    is_given = "r" in given and "lora_alpha" in given
    meta: TrainMeta | None = None
    config: AdapterSpec | None = None
    for each in meta_directories:
        if meta is None and (each / FILE_NAME).exists():
            try:
                meta = load_train_meta(each)
            except ValueError as error:
                if not is_given:
                    raise
                logger.warning("not used, because rank and lora_alpha are given: %s", error)
        if config is None and (each / CONFIG_NAME).exists():
            config = _of_config(each / CONFIG_NAME, given)
    name = adapter_name or _only_name(names_found, meta, directory)
    if meta is not None and meta.adapter_name != name and meta.format_version is not None:
        if not is_given:
            raise ValueError(
                f"{directory}: {FILE_NAME} is of adapter {meta.adapter_name!r}, not of {name!r}; {HOW_TO_GIVE} of that one"
            )
        meta = None
    found = config if config is not None else None if meta is None else _of_meta(meta, meta_directories)
    if config is not None and meta is not None:
        _check_agree(config, meta)
    if found is None:
        if not is_given:
            raise ValueError(f"{directory}: has neither {CONFIG_NAME} nor {FILE_NAME}; {HOW_TO_GIVE}")
        found = AdapterSpec(name=name, fields={"use_rslora": False}, origin="the given rank and lora_alpha")
    spec = replace(found, name=name, fields={**found.fields, **given})
    if any(found.fields.get(key, value) != value for key, value in given.items()):
        logger.warning("%s: is overruled by what is given: %s", found.origin, given)
        spec = replace(spec, modules={})
    check_formula(spec.config(), f"{spec.origin}: adapter {name!r}")
    return spec


def _only_name(names_found: list[str], meta: TrainMeta | None, directory: Path) -> str:
    if len(names_found) > 1:
        if meta is not None and meta.format_version is not None and meta.adapter_name in names_found:
            return meta.adapter_name
        raise ValueError(f"{directory}: holds several adapters, {listed(names_found)}; choose one with --adapter-name")
    return names_found[0] if names_found else "default" if meta is None else meta.adapter_name


def _of_config(path: Path, given: dict) -> AdapterSpec:
    """From a PEFT config of this or another version; of what is given it needs not say anything."""
    from peft import LoraConfig

    content = read_json(path)
    kind = content.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{path}: peft_type is {kind!r}, which cannot be merged here; only LORA is supported")
    check_r_and_alpha(given.get("r", content.get("r")), given.get("lora_alpha", content.get("lora_alpha")), str(path))
    known = {each.name for each in fields(LoraConfig) if each.init}
    unknown = {key: value for key, value in content.items() if key not in known}
    for key, value in unknown.items():
        if key in _NEUTRAL or not value:
            continue
        # A switch that is on, a config or a list: those are how PEFT asks for other formulas.
        if value is True or isinstance(value, dict | list):
            raise ValueError(
                f"{path}: has {key}={value!r}, which PEFT {metadata.version('peft')} does not know and which may change "
                f"how the adapter is merged (written by PEFT {content.get('peft_version') or 'of unknown version'}); update "
                "peft, or remove the field if it does not matter"
            )
        logger.warning("%s: does not know %s=%r; taken to change nothing", path, key, value)
    values = {key: value for key, value in content.items() if key in known and key != "runtime_config"}
    return AdapterSpec(name="default", fields=values, origin=str(path))


def _of_meta(meta: TrainMeta, directories: list[Path]) -> AdapterSpec:
    origin = next(str(each / FILE_NAME) for each in directories if (each / FILE_NAME).exists())
    if meta.format_version is None:
        logger.warning(
            "%s: has no more than r, lora_alpha and task_type; taken as plain LoRA (scaling lora_alpha / r), which is what "
            "verl trains. Say --use-rslora where it was that",
            origin,
        )
    from peft import LoraConfig

    taken = {each.name for each in fields(LoraConfig) if each.init}
    values = {each.name: getattr(meta, each.name) for each in fields(TrainMeta) if each.name in taken}
    if meta.target_parameters and values.get("target_modules") is None:
        values["target_modules"] = []
    return AdapterSpec(name=meta.adapter_name, fields=values, modules=meta.modules, origin=origin)


def _check_agree(config: AdapterSpec, meta: TrainMeta) -> None:
    for key in ("r", "lora_alpha", "use_rslora"):
        if meta.format_version is None and key == "use_rslora":
            continue
        said, other = config.fields.get(key, False), getattr(meta, key)
        if said != other:
            raise ValueError(
                f"{config.origin} says {key}={said!r}, {FILE_NAME} says {other!r}; remove the one that is wrong, or "
                f"{HOW_TO_GIVE}"
            )


def config_json(
    spec: AdapterSpec, targets: list[str], scalings: dict[str, tuple[int, float]], base: str | None
) -> bytes:
    """adapter_config.json of an adapter: what differs from PEFT's defaults, so that older and newer versions read it.

    targets: modules that have it, where the spec names none. scalings: rank and scaling of every layer, by path; where they are
    others than alpha and the patterns give, a pattern is written for them.
    """
    config = spec.config(base_model_name_or_path=base)
    content = {"peft_type": "LORA", "peft_version": metadata.version("peft"), "inference_mode": True}
    always = ("r", "lora_alpha", "task_type", "base_model_name_or_path", "target_modules", "bias", "use_rslora")
    for each in fields(config):
        value = getattr(config, each.name)
        if each.name in always or (
            each.init and each.name not in (*content, *_OF_TRAINING) and value != getattr(type(config)(), each.name)
        ):
            content[each.name] = value
    if content["target_modules"] is None:
        content["target_modules"] = targets
    # What a stored adapter starts from does not matter any more.
    content["init_lora_weights"] = True
    for path, (r, scaling) in scalings.items():
        if not math.isclose(_scaling_by_config(config, path), scaling, rel_tol=1e-12, abs_tol=0.0):
            alpha = scaling * (math.sqrt(r) if config.use_rslora else r)
            # First: of patterns the first that fits counts.
            content["alpha_pattern"] = {path: _whole(alpha), **content.get("alpha_pattern", {})}
    content["lora_alpha"] = _whole(content["lora_alpha"])
    return (json.dumps(plain(content), indent=2, sort_keys=False) + "\n").encode()


def _scaling_by_config(config, path: str) -> float:
    from peft.utils.other import get_pattern_key

    r = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), path), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), path), config.lora_alpha)
    return alpha / (math.sqrt(r) if config.use_rslora else r)


def _whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number
