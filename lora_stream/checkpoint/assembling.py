"""The model of a source: without weights, PEFT's layers put into it by what the metadata tells, and the adapter's values in them.

It is then read as a live model is. Of the base nothing is loaded: what it holds is on the meta device, and known by where the
source, or a base beside it, has it.
"""

import contextlib
import gc
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from lora_stream.checkpoint import models
from lora_stream.checkpoint.adapters import CONFIG_NAME, AdapterSpec
from lora_stream.checkpoint.sources import Source, adapter_of, prefix_of
from lora_stream.checkpoint.tensors import Info, read_json
from lora_stream.peft import lora_layers, read_model
from lora_stream.plan import Task, listed


class Assembly:
    """base_directory: where the base is, by the caller or the adapter; None: nowhere else. config_directory: of the model."""

    def __init__(self, source: Source, spec: AdapterSpec, base: Path | None, trust_remote_code: bool) -> None:
        self.source, self.spec, self.trust_remote_code = source, spec, trust_remote_code
        named = Path(spec.base_name) if spec.base_name else None
        is_named_here = base is None and named is not None and (named / "config.json").exists()
        self.base_directory = named if is_named_here else base
        self.config_directory = self._config_directory(base)
        self._config = models.config_of(self.config_directory, trust_remote_code=trust_remote_code)
        self._prefix = ""
        # Base tensors that lie under another adapter's layers, which the model does not have here.
        self._under_others = {}
        if len(source.adapter_names) > 1:
            self._under_others = {_without_peft(name): name for name in source.names if adapter_of(name) is None}
        self.places: dict[tuple, list[str]] = {}  # (id of a base tensor, view) -> its names in a checkpoint
        # Of the source, without its prefix: the model says that it needs none of them.
        self.ignored: dict[str, Info] = {}
        with _no_collections():
            self.model = self._make(None)
        self._check_source()

    @property
    def base_model(self) -> nn.Module:
        return self.model.get_base_model()

    def use_loaded(self, base: nn.Module) -> None:
        """A base with its weights, in the place of the one without."""
        self.model = self._make(base)

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

    def _make(self, loaded: nn.Module | None) -> nn.Module:
        """The model with the adapter, and its values in it. loaded: the base with its weights, where it had to be loaded."""
        source, spec = self.source, self.spec
        base = loaded if loaded is not None else self._empty()
        paths = {name for name, _ in base.named_modules()}
        if not source.is_stored or spec.fields.get("target_modules") is None:
            on = source.adapted_modules(spec.name)
            self._prefix = prefix_of(on, paths, source.directory)
            targets = sorted({each.removeprefix(self._prefix) for each in on})
            changes = {}
            if spec.fields.get("modules_to_save") is None:
                saved = {each.removeprefix(self._prefix) for each in source.saved_modules(spec.name)}
                changes["modules_to_save"] = sorted(saved - set(targets)) or None
            if spec.fields.get("target_modules") is None:
                changes |= self._told_by_names(targets, base)
            spec = self.spec = replace(spec, fields={**spec.fields, **changes})
        records = read_model(base, untie=True).records
        for record in records:
            self.places.setdefault((id(record.tensor), record.view), []).append(record.name)
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
        is_stored = self.source.is_stored
        names = [name for name in self.source.names if is_stored or adapter_of(name) == self.spec.name]
        if tokens := [name for name in names if "trainable_tokens_delta" in name.split(".")]:
            raise ValueError(
                f"{self.source.directory}: {tokens[0]}: holds trained token rows, and names do not tell of which tokens; put "
                f"the adapter's {CONFIG_NAME} beside the checkpoint"
            )
        return {
            "target_modules": targets,
            "use_dora": any("lora_magnitude_vector" in name.split(".") for name in names),
            "lora_bias": any(re.search(r"\.lora_B\.([^.]+\.)?bias$", name) for name in names),
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
            trust_remote_code=self.trust_remote_code,
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
        if source.is_stored:
            # VeLoRA's projection is of its backward pass alone.
            stored = {name: each for name, each in source.names.items() if ".lora_velora_embed" not in name}
            values = {name: source.tensors.read(each) for name, each in stored.items()}
            models.fill(model, known, {name: source.tensors.infos[each] for name, each in stored.items()})
            self._load_by_peft(model, values, known)
            return
        models.fill(model, known, {})
        for fqn, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_meta:
                continue
            name = self.source_name(fqn)
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

    def source_name(self, fqn: str) -> str:
        """What a live tensor of the model is called in the source, if it is there."""
        name = self._prefix + fqn.removeprefix("base_model.model.")
        if name in self.source.names:
            return name
        return self._under_others.get(_without_peft(name), name)

    def has(self, task: Task) -> bool:
        """Whether the source holds what the task reads of the base, in numbers that can be merged into."""
        name = self.source_name(task.fqn)
        return name in self.source.names and not self.is_packed(task)

    def is_packed(self, task: Task) -> bool:
        """Whether the source holds it quantised."""
        stored = self.source.names.get(self.source_name(task.fqn))
        return (
            stored is not None
            and task.base.is_floating_point()
            and not self.source.tensors.infos[stored].dtype.is_floating_point
        )

    def read(self, task: Task) -> torch.Tensor:
        """What the source holds of the base."""
        return self.source.tensors.read(self.source.names[self.source_name(task.fqn)])

    def _check_source(self) -> None:
        """Raise ValueError for a tensor of the source that the model has no place for."""
        if self.source.is_stored:
            return  # PEFT said so
        fqns = {
            self.source_name(name)
            for named in (self.model.named_parameters, self.model.named_buffers)
            for name, _ in named(remove_duplicate=False)
        }
        tops = {name.removeprefix(self._prefix).split(".")[0] for name in fqns}
        for name in self.source.names:
            adapter = adapter_of(name)
            if name in fqns or adapter not in (None, self.spec.name) or ".lora_velora_embed" in name:
                continue
            own = name.removeprefix(self._prefix)
            is_beside = not name.startswith(self._prefix) or own.split(".")[0] not in tops
            if _is_ignored(self.base_model, own, anywhere=not is_beside):
                self.ignored[own] = self.source.tensors.infos[self.source.names[name]]
                continue
            if is_beside:
                continue  # of something else that was saved with it: an optimizer
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

    @cached_property
    def digest(self) -> str:
        """Of the adapter's values and scalings."""
        found = hashlib.sha256()
        for path, layer in lora_layers(self.model):
            found.update(f"{path} {layer.scaling.get(self.spec.name)!r}\n".encode())
        for name, parameter in self.model.named_parameters():
            if not parameter.is_meta and adapter_of(name) is not None:
                found.update(name.replace(f".{self.spec.name}", "").encode())
                found.update(parameter.detach().float().contiguous().numpy().data)
        return found.hexdigest()


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


def _without_peft(name: str) -> str:
    """Of a base tensor: its name without the layers that PEFT puts around it."""
    return ".".join(each for each in name.split(".") if each not in ("base_layer", "original_module", "token_adapter"))


def _is_ignored(model: nn.Module, name: str, *, anywhere: bool) -> bool:
    """Whether the model itself says that checkpoints may hold it and that it needs none.

    anywhere: a pattern may match inside the name. Not so beside the model's own modules, where an optimizer's states are.
    """
    find = re.search if anywhere else re.match
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(find(pattern, name) for pattern in patterns) or name.endswith("rotary_emb.inv_freq")


def _unpacked_by(name: str, source: Source) -> str | None:
    """The weight that a tensor only helps to unpack: it is named as that begins (bitsandbytes)."""
    before, found, _ = name.partition(".weight.")
    weight = f"{before}.weight"
    stored = source.names.get(weight) if found else None
    return weight if stored is not None and not source.tensors.infos[stored].dtype.is_floating_point else None
