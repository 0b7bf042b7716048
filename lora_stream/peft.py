"""Read a model that PEFT has put adapters into. The only module that knows PEFT's layers.

    module tree ──► read_model ──► ModelRecords: what has an adapter, what goes as it is, what stays and why

Layers are recognised by their exact class, and a LoRA layer is read only where its formula is known to be
``base + scaling * lora_B @ lora_A``; everything else is refused by name. PEFT derives many kinds from its LoRA layer that
have another formula, so `isinstance` would merge them wrongly without a word.
"""

import dataclasses
import itertools
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import nn

from lora_stream import fsdp1, names, shards
from lora_stream.plan import Adapter, ModelRecords, Record, Rows, listed

logger = logging.getLogger("lora_stream")


def read_model(model: nn.Module, *, adapter_name: str | None = None, untie: bool = False) -> ModelRecords:
    """Records of all parameters, persistent buffers and adapters of `model`.

    model: a plain module, a PeftModel, or a module with adapters injected; wrappers at any depth are looked through.
    adapter_name: merge this adapter; None merges the active ones, summed.
    untie: keep both of two tensors that are tied in the model's checkpoints, for an engine that does not tie them.

    Raises ValueError, naming module, kind and way out, for everything that cannot be merged right.
    """
    reader = _Reader(adapter_name, fsdp1.Parameters(model))
    reader.walk(model, fqn="", name="")
    out = ModelRecords(
        records=reader.records,
        consumed=reader.consumed,
        left=reader.left,
        all_fqns=list(reader.fqns_under(model)),
        has_adapters=reader.has_adapters,
    )
    if adapter_name is not None and adapter_name not in reader.adapter_names:
        raise ValueError(f"adapter_name={adapter_name!r}: the model's adapters are {sorted(reader.adapter_names)}")
    ties = {
        _join(place, dropped): _join(place, kept)
        for place, owner in reader.owners.items()
        for dropped, kept in names.declared_ties(owner).items()
    }
    if not untie:
        _drop_tied(out, ties)
    elif ties:
        logger.info(
            "%s and what it is tied to are sent both: the engine must not tie them (vLLM: "
            'hf_overrides={"tie_word_embeddings": False})',
            next(iter(ties)),
        )
    converted = _as_in_checkpoints(out.records, reader.owners)
    written: dict[str, list[str]] = {}
    for record in converted:
        written.setdefault(record.fqn, []).append(record.name)
    become = {record.name: listed(written[record.fqn]) for record in out.records}
    out.consumed = {fqn: become.get(name, name) for fqn, name in out.consumed.items()}
    out.records = converted
    return out


def _as_in_checkpoints(records: Sequence[Record], owners: Mapping[str, nn.Module]) -> list[Record]:
    """By the rules of the model that owns them, applied to their names below it."""
    found: list[Record] = []
    for place, own in itertools.groupby(records, lambda record: _owner_of(record.name, owners)):
        if place is None:
            found += own
            continue
        owner, below = owners[place], [replace(each, name=_below(place, each.name)) for each in own]
        below = [replace(each, float32_among=names.float32_among(owner, each.name)) for each in below]
        below = names.checkpoint_records(owner, below, base_model_of)
        found += (replace(each, name=_join(place, each.name)) for each in below)
    return found


def _owner_of(name: str, owners: Mapping[str, nn.Module]) -> str | None:
    return next((place for place in owners if not place or name.startswith(place + ".")), None)


def _below(place: str, name: str) -> str:
    return name[len(place) + 1 :] if place else name


@dataclass(frozen=True, kw_only=True)
class LiveAdapter:
    """A LoRA adapter as a model has it now."""

    name: str
    config: object  # peft.LoraConfig
    layers: dict[str, tuple[int, float]]  # path in the model without PEFT and wrappers: rank and scaling


def live_adapter(model: nn.Module, adapter_name: str | None = None) -> LiveAdapter | None:
    """adapter_name: which one; None: the active one if there is just one, else the one that is called default, else the first.

    None for a model without adapters. Raises ValueError for an adapter that it does not have, or that is no LoRA.
    """
    if "peft" not in sys.modules:
        return None
    from peft import PeftConfig, PeftType

    configs: dict[str, PeftConfig] = {}
    active: list[str] = []
    for module in model.modules():
        found = getattr(module, "peft_config", None)
        if isinstance(found, dict) and any(isinstance(each, PeftConfig) for each in found.values()):
            configs = found
            break
    layers = list(lora_layers(model))
    for _, layer in layers:
        active += [name for name in layer.active_adapters if name not in active]
    if not configs:
        return None
    if adapter_name is None:
        active = [name for name in active if name in configs]
        adapter_name = active[0] if len(active) == 1 else "default" if "default" in configs else next(iter(configs))
    if adapter_name not in configs:
        raise ValueError(f"adapter_name={adapter_name!r}: the model's adapters are {sorted(configs)}")
    config = configs[adapter_name]
    if config.peft_type != PeftType.LORA:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(f"adapter {adapter_name!r} is of type {kind}; only LORA is supported")
    found_layers = {
        path: (int(layer.r[adapter_name]), float(layer.scaling[adapter_name]))
        for path, layer in layers
        if adapter_name in layer.scaling
    }
    return LiveAdapter(name=adapter_name, config=config, layers=found_layers)


def base_model_of(model: nn.Module) -> nn.Module:
    """The model under PEFT and wrappers."""
    model = names.unwrap(model)
    if "peft" in sys.modules:
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTuner

        if isinstance(model, PeftModel):
            return base_model_of(model.base_model)
        if isinstance(model, BaseTuner):
            return base_model_of(model.model)
    return model


def lora_layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """PEFT's LoRA layers under `module`, with the paths of what they are on."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTuner

    if (attribute := names.wrapped_attribute(module)) is not None:
        yield from lora_layers(getattr(module, attribute), path)
    elif isinstance(module, PeftModel):
        yield from lora_layers(module.base_model, path)
    elif isinstance(module, BaseTuner):
        yield from lora_layers(module.model, path)
    elif isinstance(module, LoraLayer):
        parameter = getattr(module, "parameter_name", None)  # of a ParamWrapper
        yield (_join(path, parameter) if parameter else path), module
        yield from lora_layers(module.base_layer, path)
    else:
        for name, child in module._modules.items():
            if child is not None:
                yield from lora_layers(child, _join(path, name))


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _drop_tied(model: ModelRecords, ties: dict[str, str]) -> None:
    """Of two tied tensors keep the one that checkpoints hold; refuse a tie that the adapters have broken."""
    by_name = {record.name: record for record in model.records}
    for dropped_name, kept_name in ties.items():
        dropped, kept = by_name.get(dropped_name), by_name.get(kept_name)
        if dropped is None or kept is None:
            continue
        # Two frozen copies of one value are a tie as good as one tensor; two copies that train apart are none.
        shared = dropped.tensor is kept.tensor or (
            not (dropped.trained or kept.trained) and shards.same_values(dropped.tensor, kept.tensor)
        )
        if not (shared and _same_update(dropped, kept)):
            how = "copies that differ or train apart" if not shared else "adapters that differ"
            raise ValueError(
                f"{dropped.fqn} and {kept.fqn} are tied in this model's checkpoints but have {how}; an engine that ties "
                "them cannot hold both: give both one adapter (PEFT's ensure_weight_tying, with "
                "autocast_adapter_dtype=False), or none, or pass untie=True to send both, to an engine that was started "
                'untied (vLLM: hf_overrides={"tie_word_embeddings": False})'
            )
        model.records.remove(dropped)
        model.left[dropped.fqn] = f"tied to {kept_name}"


def _same_update(one: Record, other: Record) -> bool:
    """Whether the adapters of two weights change them alike: PEFT ties the pair of a head to that of an embedding, as its
    transpose. It gives each parameters of its own where it casts them, so values decide."""
    if len(one.adapters) != len(other.adapters) or len(one.rows) != len(other.rows):
        return False
    for a, b in zip(one.adapters, other.adapters, strict=True):
        parts = [*zip(_factors(a), _factors(b), strict=True)]
        if a.magnitude is not None and b.magnitude is not None:
            parts.append((a.magnitude, b.magnitude))
        elif a.magnitude is not None or b.magnitude is not None:
            return False
        if a.scaling != b.scaling or not all(shards.same_values(x, y) for x, y in parts):
            return False
    pairs = zip(one.rows, other.rows, strict=True)
    return all(a.indices == b.indices and shards.same_values(a.values, b.values) for a, b in pairs)


def _factors(adapter: Adapter) -> tuple[torch.Tensor, torch.Tensor]:
    # Of a sharded pair the transposes are cut differently, and so were trained apart.
    if shards.is_sharded(adapter.lora_A) or fsdp1.is_flattened(adapter.lora_A):
        return adapter.lora_A, adapter.lora_B
    return adapter.factors(shards.local(adapter.lora_A), shards.local(adapter.lora_B))


# Kinds that PEFT derives from LoRA and that have LoRA's own formula: they differ in how they train.
_PLAIN_VARIANTS = ("MiCALinearVariant", "MiCAEmbeddingVariant", "VeloraLinearVariant")
_DORA_VARIANTS = ("DoraLinearVariant", "DoraEmbeddingVariant")
# Fields of a LoraConfig that ask for a variant of those kinds.
_KNOWN_VARIANT_FIELDS = ("use_dora", "velora_config", "init_lora_weights")
# Initialisations that leave the base weight alone; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA take something out of it.
_INITS_BESIDE_THE_BASE = ("gaussian", "eva", "orthogonal", "mica")
# Where PEFT keeps its layers for quantised bases.
_QUANTISED_LAYERS = ("bnb", "gptq", "awq", "aqlm", "hqq", "eetq", "inc", "te", "torchao")


@dataclass
class _Reader:
    adapter_name: str | None
    parameters: fsdp1.Parameters
    records: list[Record] = field(default_factory=list)
    consumed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    adapter_names: set[str] = field(default_factory=set)
    has_adapters: bool = False
    # By name: the outermost models that say what their checkpoints hold. PEFT may be around them, or on a part of them.
    owners: dict[str, nn.Module] = field(default_factory=dict)
    configs: dict[str, object] = field(default_factory=dict)  # PEFT's, by adapter

    def walk(self, module: nn.Module, fqn: str, name: str, trained: bool = False) -> None:
        """fqn: where `module` is; name: where a checkpoint has it; trained: all of it may have changed."""
        if (attribute := names.wrapped_attribute(module)) is not None:
            self.walk(getattr(module, attribute), _join(fqn, attribute), name, trained)
        elif (read := self._reader_of(module, fqn)) is not None:
            read(module, fqn, name)
        else:
            # A model with adapters injected has PEFT's configs on it.
            self._check_configs(getattr(module, "peft_config", None), fqn)
            if _owner_of(f"{name}.", self.owners) is None and names.declares(module):
                self.owners[name] = module
            self._read_own_tensors(module, fqn, name, trained)
            for child_name, child in module._modules.items():
                if child is None:
                    continue
                self.walk(child, _join(fqn, child_name), _join(name, child_name), trained)

    def _reader_of(self, module: nn.Module, fqn: str):
        """The method for a module of PEFT's; None for one that is not."""
        if "peft" not in sys.modules:
            return None
        import peft
        from peft.tuners.lora import layer as lora
        from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper

        if isinstance(module, peft.PeftMixedModel):
            raise ValueError(
                f"{fqn or 'the model'}: is a PeftMixedModel; merge its adapters with PEFT, or use one kind"
            )
        if isinstance(module, peft.PeftModel):
            return self._read_peft_model
        if isinstance(module, BaseTuner):
            return self._read_tuner
        kind = shards.class_before_sharding(module)
        if kind in (lora.Linear, lora.Embedding, lora.Conv1d, lora.Conv2d, lora.Conv3d):
            return self._read_lora
        if kind is getattr(lora, "ParamWrapper", None):
            return self._read_parameters
        if kind is ModulesToSaveWrapper:
            return self._read_modules_to_save
        if kind is TrainableTokensWrapper:
            return self._read_trainable_tokens
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise ValueError(f"{fqn}: {kind.__module__}.{kind.__name__} is not supported; {_way_out(kind)}")
        return None

    def _read_peft_model(self, module: nn.Module, fqn: str, name: str) -> None:
        self._check_configs(module.peft_config, fqn)
        self.has_adapters = True
        self.walk(module.base_model, _join(fqn, "base_model"), name)

    def _read_tuner(self, module: nn.Module, fqn: str, name: str) -> None:
        self._check_configs(module.peft_config, fqn)
        self.has_adapters = True
        self.walk(module.model, _join(fqn, "model"), name)

    def _check_configs(self, configs: object, fqn: str) -> None:
        """Raise ValueError for a method that is not LoRA. A model may have something else of this name."""
        if "peft" not in sys.modules or not isinstance(configs, dict):
            return
        from peft import PeftConfig, PeftType

        for adapter, config in configs.items():
            if not isinstance(config, PeftConfig):
                continue
            self.configs[adapter] = config
            if config.peft_type != PeftType.LORA:
                kind = getattr(config.peft_type, "value", config.peft_type)
                raise ValueError(
                    f"{fqn or 'the model'}: adapter {adapter!r} is of type {kind}, which lora_stream cannot merge; "
                    "only LORA is supported"
                )

    def _changes_base(self, adapter: str) -> bool:
        """Whether the weight under the adapter is another than in the base checkpoint."""
        # Where there is no config nobody can tell.
        return adapter not in self.configs or changes_base(self.configs[adapter])

    def _read_own_tensors(
        self,
        module: nn.Module,
        fqn: str,
        name: str,
        trained: bool,
        adapters: Mapping[str, tuple[Adapter, ...]] = MappingProxyType({}),
    ) -> None:
        """adapters: by the parameters' own names."""
        for own_name, parameter in self.parameters.of(module).items():
            if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
                raise ValueError(
                    f"{_join(fqn, own_name)}: is a parameter of {parameter.dtype}; quantised base weights are not "
                    "supported: load the base in bfloat16 or float32"
                )
            trains = trained or parameter.requires_grad
            self._add(parameter, _join(fqn, own_name), _join(name, own_name), trains, adapters.get(own_name, ()))
        for own_name, buffer in module._buffers.items():
            if buffer is not None and own_name not in module._non_persistent_buffers_set:
                # Buffers change without a gradient (running statistics), so they always count as trained.
                self._add(buffer, _join(fqn, own_name), _join(name, own_name), True)

    def _add(
        self,
        tensor: torch.Tensor,
        fqn: str,
        name: str,
        trained: bool,
        adapters: tuple[Adapter, ...] = (),
        rows: tuple[Rows, ...] = (),
    ) -> None:
        for each in (tensor, *(rows.values for rows in rows)):
            shards.check_supported(fqn, each)
        self.records.append(Record(name=name, fqn=fqn, tensor=tensor, adapters=adapters, rows=rows, trained=trained))

    def _leave(self, module: nn.Module, fqn: str, reason: str) -> None:
        self.left |= {_join(fqn, own): reason for own in self.fqns_under(module)}

    def _read_modules_to_save(self, wrapper: nn.Module, fqn: str, name: str) -> None:
        chosen = self._chosen(wrapper, fqn, wrapper.modules_to_save)
        if len(chosen) > 1:
            raise ValueError(f"{fqn}: adapters {chosen} each have a copy of this module; choose one (adapter_name=...)")
        for adapter, copy in wrapper.modules_to_save.items():
            copy_fqn = f"{fqn}.modules_to_save.{adapter}"
            if adapter in chosen:
                self.walk(copy, copy_fqn, name, trained=True)
            else:
                self._leave(copy, copy_fqn, f"adapter {adapter!r} is not chosen")
        if chosen:
            reason = f"replaced by modules_to_save of adapter {chosen[0]!r}"
            self._leave(wrapper.original_module, _join(fqn, "original_module"), reason)
        else:
            self.walk(wrapper.original_module, _join(fqn, "original_module"), name)

    def _read_trainable_tokens(self, wrapper: nn.Module, fqn: str, name: str) -> None:
        """Rows of an embedding or a head that are trained alone, in the place of the base's."""
        layer, fqn = wrapper.token_adapter, _join(fqn, "token_adapter")
        chosen = self._chosen(wrapper, fqn, layer.trainable_tokens_delta)
        if layer.merged_adapters:
            raise ValueError(
                f"{fqn}: adapters {layer.merged_adapters} are merged into the base weight; call unmerge_adapter() first"
            )
        base, base_fqn = self._unwrapped(layer.base_layer, _join(fqn, "base_layer"))
        values = self.parameters.of(layer.trainable_tokens_delta)
        rows = tuple(
            Rows(name=adapter, indices=tuple(layer.token_indices[adapter]), values=values[adapter])
            for adapter in chosen
        )
        for own_name, tensor in self.parameters.of(base).items():
            replaced = rows if own_name == "weight" else ()
            trains = tensor.requires_grad
            self._add(tensor, _join(base_fqn, own_name), _join(name, own_name), trains, rows=replaced)
        for adapter in layer.trainable_tokens_delta:
            place = {f"{fqn}.trainable_tokens_delta.{adapter}": _join(name, "weight")}
            if adapter in chosen:
                self.consumed |= place
            else:
                self.left |= dict.fromkeys(place, f"adapter {adapter!r} is not chosen")
        self._leave(
            layer.trainable_tokens_original, _join(fqn, "trainable_tokens_original"), "the rows before training"
        )

    def _chosen(self, layer: nn.Module, fqn: str, available: Collection[str]) -> list[str]:
        """Of a layer's adapters those to merge, in PEFT's order. Raises ValueError where they are switched off."""
        self.has_adapters = True
        self.adapter_names |= set(available)
        wanted = [self.adapter_name] if self.adapter_name is not None else list(layer.active_adapters)
        chosen = [adapter for adapter in wanted if adapter in available]
        if chosen and layer.disable_adapters:
            raise ValueError(
                f"{fqn}: its adapters are disabled, so its weights are the base's; stream outside disable_adapter()"
            )
        return chosen

    def fqns_under(self, module: nn.Module) -> Iterator[str]:
        """Parameters and persistent buffers, shared ones repeated."""
        for prefix, child in module.named_modules(remove_duplicate=False):
            for own_name in self.parameters.of(child):
                yield _join(prefix, own_name)
            for own_name, buffer in child._buffers.items():
                if buffer is not None and own_name not in child._non_persistent_buffers_set:
                    yield _join(prefix, own_name)

    def _read_lora(self, layer: nn.Module, fqn: str, name: str) -> None:
        """W + scaling * B [out, r] @ A [r, in], summed over the chosen adapters; W is [out, in, ...] of a Linear or a
        convolution, and [in, out] of an Embedding or a Conv1D, where the product is transposed. A bias on lora_B is added to
        the base's, times scaling."""
        transposed = self._lies_transposed(layer, fqn)
        base, base_fqn = self._unwrapped(layer.base_layer, _join(fqn, "base_layer"))
        tensors = self.parameters.of(base)
        merged = {"weight": self._read_adapters(layer, fqn, _join(name, "weight"), transposed)}
        merged["bias"] = self._read_biases(layer, fqn, _join(name, "bias"), merged["weight"], tensors.get("bias"))
        changed = any(map(self._changes_base, [*layer.lora_A, *layer.lora_embedding_A]))
        for own_name, tensor in tensors.items():
            trains = tensor.requires_grad or (changed and own_name == "weight")
            place = (_join(base_fqn, own_name), _join(name, own_name))
            self._add(tensor, *place, trains, merged.get(own_name, ()))

    def _read_biases(
        self, layer: nn.Module, fqn: str, name: str, chosen: Sequence[Adapter], base: torch.Tensor | None
    ) -> tuple[Adapter, ...]:
        """What the chosen adapters add to the bias of their layer."""
        biases = []
        for adapter in chosen:
            part = layer.lora_B._modules.get(adapter.name)
            bias = None if part is None else self.parameters.of(names.unwrap(part)).get("bias")
            if bias is None:
                continue
            if base is None:
                raise ValueError(
                    f"{fqn}: adapter {adapter.name!r} has a bias on lora_B (lora_bias=True), but the layer has none to add it "
                    "to, nor has the engine's; train without lora_bias"
                )
            shards.check_supported(f"{fqn}.lora_B.{adapter.name}.bias", bias)
            one = torch.ones(1, 1, device=bias.device)
            biases.append(Adapter(name=adapter.name, lora_A=one, lora_B=bias, scaling=adapter.scaling))
            self.consumed |= dict.fromkeys(
                (each for each in self._part_fqns(layer.lora_B, "lora_B", adapter.name, fqn) if each.endswith(".bias")),
                name,
            )
        return tuple(biases)

    def _read_parameters(self, layer: nn.Module, fqn: str, name: str) -> None:
        """LoRA on parameters by name (target_parameters): one wrapper for each around their module."""
        wrappers = []
        kind = shards.class_before_sharding(layer)
        while shards.class_before_sharding(layer) is kind:
            wrappers.append((layer, fqn))
            layer, fqn = self._unwrapped(layer.base_layer, _join(fqn, "base_layer"))
        parameters, adapters = self.parameters.of(layer), {}
        for wrapper, wrapper_fqn in wrappers:
            target = wrapper.parameter_name
            if target not in parameters:
                raise ValueError(
                    f"{wrapper_fqn}: has LoRA on the parameter {target!r}, but there is none now; PEFT takes it away while a "
                    "forward runs: stream between the steps"
                )
            has_experts = parameters[target].dim() == 3
            adapters[target] = self._read_adapters(
                wrapper,
                wrapper_fqn,
                _join(name, target),
                # PEFT 0.18 takes all of them for [experts, in, out].
                transposed=has_experts and not getattr(wrapper, "_did_swap_in_out_features", False),
                num_experts=wrapper.num_experts if has_experts else None,
            )
        self._read_own_tensors(layer, fqn, name, trained=False, adapters=adapters)
        for child_name, child in layer._modules.items():
            if child is not None:
                self.walk(child, _join(fqn, child_name), _join(name, child_name))

    def _unwrapped(self, module: nn.Module, fqn: str) -> tuple[nn.Module, str]:
        while (attribute := names.wrapped_attribute(module)) is not None:
            module, fqn = getattr(module, attribute), _join(fqn, attribute)
        return module, fqn

    def _read_adapters(
        self, layer: nn.Module, fqn: str, name: str, transposed: bool, num_experts: int | None = None
    ) -> tuple[Adapter, ...]:
        """The chosen ones of a layer, for the tensor `name`; accounts for all that the layer has."""
        from peft.tuners.lora import layer as lora

        is_embedding = shards.class_before_sharding(layer) is lora.Embedding
        names_A, names_B = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        parts_A, parts_B = getattr(layer, names_A), getattr(layer, names_B)
        chosen = self._chosen(layer, fqn, parts_A)
        if layer.merged:
            raise ValueError(
                f"{fqn}: adapters {layer.merged_adapters} are merged into the base weight; call unmerge_adapter() first "
                "(their delta would count twice)"
            )
        adapters = []
        for adapter in chosen:
            has_magnitude = self._check_variant(layer, fqn, adapter)
            lora_A, lora_B = (self._adapter_tensor(parts, adapter) for parts in (parts_A, parts_B))
            magnitude = self._adapter_tensor(layer.lora_magnitude_vector, adapter) if has_magnitude else None
            for part, tensor in ((names_A, lora_A), (names_B, lora_B), ("lora_magnitude_vector", magnitude)):
                if tensor is not None:
                    shards.check_supported(f"{fqn}.{part}.{adapter}", tensor)
            adapters.append(
                Adapter(
                    name=adapter,
                    lora_A=lora_A,
                    lora_B=lora_B,
                    # As it is now: set_scale, rank and alpha patterns and rsLoRA are all in it, the config knows them not.
                    scaling=float(layer.scaling[adapter]),
                    transposed=transposed,
                    num_experts=num_experts,
                    magnitude=magnitude,
                )
            )
        if any(adapter.magnitude is not None for adapter in adapters) and len(adapters) > 1:
            raise ValueError(
                f"{fqn}: adapters {[adapter.name for adapter in adapters]} are active together and one is a DoRA, whose "
                "weights are no sum; choose one (adapter_name=...)"
            )
        # PEFT 0.18 does not name the magnitudes of an Embedding.
        for container_name in dict.fromkeys([*layer.adapter_layer_names, "lora_magnitude_vector"]):
            container = getattr(layer, container_name, None)
            for adapter in container or ():
                fqns = self._part_fqns(container, container_name, adapter, fqn)
                if adapter not in chosen:
                    self.left |= dict.fromkeys(fqns, f"adapter {adapter!r} is not chosen")
                elif container_name in (names_A, names_B):
                    self.consumed |= dict.fromkeys((each for each in fqns if not each.endswith(".bias")), name)
                elif container_name == "lora_magnitude_vector" and any(a.magnitude is not None for a in adapters):
                    self.consumed |= dict.fromkeys(fqns, name)
                # What else a chosen adapter holds is part of no known formula: the account of the plan refuses it.
        for adapter in getattr(layer, "lora_velora_embed", ()):
            self.left[f"{fqn}.lora_velora_embed.{adapter}"] = "VeLoRA's projection, of the backward pass alone"
        return tuple(adapters)

    def _lies_transposed(self, layer: nn.Module, fqn: str) -> bool:
        """Whether the weight is [in, out]. Raises ValueError for a base that is no known kind."""
        from peft.tuners.lora import layer as lora

        base = names.unwrap(layer.base_layer)
        kind, of = shards.class_before_sharding(base), shards.class_before_sharding(layer)
        if getattr(base, "_hf_tp_plan", None) is not None:
            raise ValueError(
                f"{fqn}: is a tensor-parallel layer of transformers ({base._hf_tp_plan}), which is not supported with LoRA; "
                "shard the model with FSDP2, or with torch's parallelize_module"
            )
        convolutions = {lora.Conv1d: nn.Conv1d, lora.Conv2d: nn.Conv2d, lora.Conv3d: nn.Conv3d}
        if of is lora.Embedding:
            # Gemma's scales what it looks up, merged or not: its weight is an ordinary one.
            if issubclass(kind, nn.Embedding):
                return True
        elif of in convolutions:
            if kind is convolutions[of] and base.groups > 1:
                raise ValueError(
                    f"{fqn}: is a convolution in {base.groups} groups, for which PEFT has no merged weight; leave it out of "
                    "target_modules"
                )
            if kind is convolutions[of]:
                return False
        elif kind is nn.Linear and not layer.fan_in_fan_out:
            return False
        elif layer.fan_in_fan_out and kind is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None):
            return True
        raise ValueError(f"{fqn}: LoRA on {kind.__module__}.{kind.__name__} is not supported; {_way_out(kind, base)}")

    def _adapter_tensor(self, parts: nn.Module, adapter: str) -> torch.Tensor:
        """Of a ModuleDict of Linears, or of a ParameterDict."""
        part = parts._modules.get(adapter)
        return self.parameters.of(parts)[adapter] if part is None else self.parameters.of(names.unwrap(part))["weight"]

    def _part_fqns(self, container: nn.Module, container_name: str, adapter: str, fqn: str) -> list[str]:
        part = container._modules.get(adapter)
        prefix = f"{fqn}.{container_name}.{adapter}"
        return [prefix] if part is None else [_join(prefix, own) for own in self.fqns_under(part)]

    def _check_variant(self, layer: nn.Module, fqn: str, adapter: str) -> bool:
        """Whether the adapter is a DoRA. Raises ValueError for a kind whose formula is not known here."""
        from peft.tuners.lora import variants

        variant = getattr(layer, "lora_variant", {}).get(adapter)
        kinds = {name: getattr(variants, name, None) for name in (*_PLAIN_VARIANTS, *_DORA_VARIANTS)}
        if variant is not None and type(variant) not in kinds.values():
            raise ValueError(
                f"{fqn}: adapter {adapter!r} is a {type(variant).__name__}, a kind of LoRA whose merged weight has another "
                "formula, or none; merge it with PEFT if that can, or serve the adapter itself"
            )
        if adapter in self.configs:
            check_formula(self.configs[adapter], f"{fqn}: adapter {adapter!r}")
        return type(variant) in [kinds[name] for name in _DORA_VARIANTS]


def check_formula(config: object, what: str) -> None:
    """Raise ValueError where a LoraConfig asks for another formula than LoRA's or DoRA's: newer PEFT may do so by fields that
    this does not know."""
    for each in dataclasses.fields(config):
        is_variant = each.metadata.get("is_lora_variant") or each.metadata.get("lora_variants")
        is_variant = is_variant or each.name == "use_qalora"  # PEFT does not mark it
        if is_variant and each.name not in _KNOWN_VARIANT_FIELDS and getattr(config, each.name):
            raise ValueError(
                f"{what} has {each.name}={getattr(config, each.name)!r}, which gives its weights another formula than "
                "LoRA's; merge it with PEFT if that can, or serve the adapter itself"
            )


def changes_base(config: object) -> bool:
    """Whether an adapter's initialisation takes something out of the weights under it."""
    init = getattr(config, "init_lora_weights", True)
    is_kasa = getattr(config, "kasa_config", None) is not None
    return is_kasa or (isinstance(init, str) and init.lower() not in _INITS_BESIDE_THE_BASE)


def _way_out(kind: type[nn.Module], base: nn.Module | None = None) -> str:
    """What to do about a layer that is not supported."""
    of_base = [] if base is None else [*base._parameters.values(), *base._buffers.values()]
    is_packed = any(tensor is not None and not tensor.is_floating_point() for tensor in of_base)
    module = kind.__module__.rpartition(".")[2]
    if is_packed or module in _QUANTISED_LAYERS or "quant" in kind.__module__.lower() or "Quant" in kind.__name__:
        return (
            "a quantised base cannot be merged into without being rounded anew: load the base in bfloat16 or float32, and "
            "train without quantisation"
        )
    if kind.__name__ == "LoraParallelLinear":
        return "tensor-parallel layers of Megatron are not: shard the model with FSDP2"
    return (
        "supported are LoRA on torch.nn.Linear, torch.nn.Embedding, convolutions without groups, transformers' Conv1D and "
        "target_parameters, modules_to_save and trainable_token_indices. Leave this module out, or merge with PEFT"
    )
