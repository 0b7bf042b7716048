"""Read a model that PEFT has put adapters into. The only module that knows PEFT's layers.

    module tree ──► read_model ──► ModelRecords: what has an adapter, what goes as it is, what stays and why

Layers are recognised by their exact class, and a LoRA layer is read only where its formula is known to be
``base + scaling * lora_B @ lora_A``; everything else is refused by name. PEFT derives many kinds from its LoRA layer that
have another formula, so `isinstance` would merge them wrongly without a word.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

from lora_stream import fsdp1, names, shards
from lora_stream.plan import Adapter, ModelRecords, Record


def read_model(model: nn.Module, *, adapter_name: str | None = None) -> ModelRecords:
    """Records of all parameters, persistent buffers and adapters of `model`.

    model: a plain module, a PeftModel, or a module with adapters injected; wrappers at any depth are looked through.
    adapter_name: merge this adapter; None merges the active ones, summed.

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
    base_model = reader.base_model if reader.base_model is not None else names.unwrap(model)
    _drop_tied(out, names.declared_ties(base_model))
    out.records = names.checkpoint_names(base_model, out.records)
    return out


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _drop_tied(model: ModelRecords, ties: dict[str, str]) -> None:
    """Of two tied tensors keep the one that checkpoints hold; refuse a tie that the adapters have broken."""
    by_name = {record.name: record for record in model.records}
    for dropped_name, kept_name in ties.items():
        dropped, kept = by_name.get(dropped_name), by_name.get(kept_name)
        if dropped is None or kept is None:
            continue
        adapted = dropped.adapters or kept.adapters
        # Two frozen copies of one value are a tie as good as one tensor; two copies that train apart are none.
        shared = dropped.tensor is kept.tensor or (
            not (dropped.trained or kept.trained) and shards.same_values(dropped.tensor, kept.tensor)
        )
        if adapted or not shared:
            how = "an adapter on one of them" if adapted else "copies that differ or train apart"
            raise ValueError(
                f"{dropped.fqn} and {kept.fqn} are tied in this model's checkpoints but have {how}; an engine that ties "
                "them cannot hold both: untie the model (config.tie_word_embeddings=False) or leave both without adapter"
            )
        model.records.remove(dropped)
        model.left[dropped.fqn] = f"tied to {kept_name}"


@dataclass
class _Reader:
    adapter_name: str | None
    parameters: fsdp1.Parameters
    records: list[Record] = field(default_factory=list)
    consumed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    adapter_names: set[str] = field(default_factory=set)
    has_adapters: bool = False
    base_model: nn.Module | None = None  # the model under a PeftModel

    def walk(self, module: nn.Module, fqn: str, name: str, trained: bool = False) -> None:
        """fqn: where `module` is; name: where a checkpoint has it; trained: all of it may have changed."""
        if (attribute := names.wrapped_attribute(module)) is not None:
            self.walk(getattr(module, attribute), _join(fqn, attribute), name, trained)
        elif (read := self._reader_of(module, fqn)) is not None:
            read(module, fqn, name)
        else:
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
        from peft.tuners import lora
        from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        if isinstance(module, peft.PeftMixedModel):
            raise ValueError(
                f"{fqn or 'the model'}: is a PeftMixedModel; merge its adapters with PEFT, or use one kind"
            )
        if isinstance(module, peft.PeftModel):
            return self._read_peft_model
        if isinstance(module, BaseTuner):
            return self._read_tuner
        kind = shards.class_before_sharding(module)
        if kind in (lora.Linear, lora.Embedding):
            return self._read_lora
        if kind is getattr(lora, "ParamWrapper", None):
            return self._read_parameters
        if kind is ModulesToSaveWrapper:
            return self._read_modules_to_save
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            raise ValueError(
                f"{fqn}: {kind.__module__}.{kind.__name__} is not supported; supported are LoRA on torch.nn.Linear, "
                "torch.nn.Embedding, transformers' Conv1D and target_parameters, and modules_to_save. Leave this module out "
                "of target_modules, or merge with PEFT"
            )
        return None

    def _read_peft_model(self, module: nn.Module, fqn: str, name: str) -> None:
        from peft import PeftType

        for adapter, config in module.peft_config.items():
            if config.peft_type != PeftType.LORA:
                kind = getattr(config.peft_type, "value", config.peft_type)
                raise ValueError(
                    f"{fqn or 'the model'}: adapter {adapter!r} is of type {kind}, which lora_stream cannot merge; "
                    "only LORA is supported"
                )
        self.has_adapters = True
        self.walk(module.base_model, _join(fqn, "base_model"), name)

    def _read_tuner(self, module: nn.Module, fqn: str, name: str) -> None:
        self.has_adapters = True
        self.base_model = names.unwrap(module.model)
        self.walk(module.model, _join(fqn, "model"), name)

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
        self, tensor: torch.Tensor, fqn: str, name: str, trained: bool, adapters: tuple[Adapter, ...] = ()
    ) -> None:
        shards.check_supported(fqn, tensor)
        self.records.append(Record(name=name, fqn=fqn, tensor=tensor, adapters=adapters, trained=trained))

    def _leave(self, module: nn.Module, fqn: str, reason: str) -> None:
        self.left |= {_join(fqn, own): reason for own in self.fqns_under(module)}

    def _read_modules_to_save(self, wrapper: nn.Module, fqn: str, name: str) -> None:
        self._check_enabled(wrapper, fqn)
        self.adapter_names |= set(wrapper.modules_to_save)
        self.has_adapters = True
        chosen = [self.adapter_name] if self.adapter_name is not None else list(wrapper.active_adapters)
        chosen = [adapter for adapter in chosen if adapter in wrapper.modules_to_save]
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

    def _check_enabled(self, layer: nn.Module, fqn: str) -> None:
        if layer.disable_adapters:
            raise ValueError(
                f"{fqn}: its adapters are disabled, so its weights are the base's; stream outside disable_adapter()"
            )

    def fqns_under(self, module: nn.Module) -> Iterator[str]:
        """Parameters and persistent buffers, shared ones repeated."""
        for prefix, child in module.named_modules(remove_duplicate=False):
            for own_name in self.parameters.of(child):
                yield _join(prefix, own_name)
            for own_name, buffer in child._buffers.items():
                if buffer is not None and own_name not in child._non_persistent_buffers_set:
                    yield _join(prefix, own_name)

    def _read_lora(self, layer: nn.Module, fqn: str, name: str) -> None:
        """W + scaling * B [out, r] @ A [r, in], summed over the chosen adapters; W is [out, in] of a Linear, and [in, out] of
        an Embedding or a Conv1D, where the product is transposed."""
        adapters = self._read_adapters(layer, fqn, _join(name, "weight"), self._lies_transposed(layer, fqn))
        base, base_fqn = self._unwrapped(layer.base_layer, _join(fqn, "base_layer"))
        for own_name, tensor in self.parameters.of(base).items():
            merged = adapters if own_name == "weight" else ()
            self._add(tensor, _join(base_fqn, own_name), _join(name, own_name), tensor.requires_grad, merged)

    def _read_parameters(self, layer: nn.Module, fqn: str, name: str) -> None:
        """LoRA on parameters by name (target_parameters): one wrapper for each around their module."""
        adapters = {}
        wrapper = shards.class_before_sharding(layer)
        while shards.class_before_sharding(layer) is wrapper:
            target = layer.parameter_name
            has_experts = layer._param_ndim == 3
            adapters[target] = self._read_adapters(
                layer,
                fqn,
                _join(name, target),
                transposed=has_experts and not layer._did_swap_in_out_features,
                num_experts=layer.num_experts if has_experts else None,
            )
            layer, fqn = self._unwrapped(layer.base_layer, _join(fqn, "base_layer"))
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
        from peft.tuners import lora

        self._check_enabled(layer, fqn)
        is_embedding = shards.class_before_sharding(layer) is lora.Embedding
        names_A, names_B = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
        parts_A, parts_B = getattr(layer, names_A), getattr(layer, names_B)
        self.has_adapters = True
        self.adapter_names |= set(parts_A)
        if layer.merged:
            raise ValueError(
                f"{fqn}: adapters {layer.merged_adapters} are merged into the base weight; call unmerge_adapter() first "
                "(their delta would count twice)"
            )
        chosen = [self.adapter_name] if self.adapter_name is not None else list(layer.active_adapters)
        adapters = []
        for adapter in chosen:
            if adapter not in parts_A:
                continue
            self._check_plain_lora(layer, fqn, adapter)
            lora_A, lora_B = (self._adapter_tensor(parts, adapter) for parts in (parts_A, parts_B))
            for part, tensor in ((names_A, lora_A), (names_B, lora_B)):
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
                )
            )
        for container_name in layer.adapter_layer_names:
            container = getattr(layer, container_name, None)
            for adapter in container or ():
                fqns = self._part_fqns(container, container_name, adapter, fqn)
                if adapter not in chosen:
                    self.left |= dict.fromkeys(fqns, f"adapter {adapter!r} is not chosen")
                elif container_name in (names_A, names_B):
                    self.consumed |= dict.fromkeys(fqns, name)
                # What else a chosen adapter holds is part of no known formula: the account of the plan refuses it.
        return tuple(adapters)

    def _lies_transposed(self, layer: nn.Module, fqn: str) -> bool:
        """Whether the weight is [in, out]. Raises ValueError for a base that is no known kind."""
        from peft.tuners import lora

        base = names.unwrap(layer.base_layer)
        kind = shards.class_before_sharding(base)
        if shards.class_before_sharding(layer) is lora.Embedding:
            # Gemma's scales what it looks up, merged or not: its weight is an ordinary one.
            if issubclass(kind, nn.Embedding):
                return True
        elif kind is nn.Linear and not layer.fan_in_fan_out:
            return False
        elif layer.fan_in_fan_out and kind is getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None):
            return True
        raise ValueError(
            f"{fqn}: LoRA on {kind.__module__}.{kind.__name__} is not supported, only on torch.nn.Linear, "
            "torch.nn.Embedding and transformers' Conv1D; leave it out of target_modules, or merge with PEFT"
        )

    def _adapter_tensor(self, parts: nn.Module, adapter: str) -> torch.Tensor:
        """Of a ModuleDict of Linears, or of a ParameterDict."""
        part = parts._modules.get(adapter)
        return self.parameters.of(parts)[adapter] if part is None else self.parameters.of(names.unwrap(part))["weight"]

    def _part_fqns(self, container: nn.Module, container_name: str, adapter: str, fqn: str) -> list[str]:
        part = container._modules.get(adapter)
        prefix = f"{fqn}.{container_name}.{adapter}"
        return [prefix] if part is None else [_join(prefix, own) for own in self.fqns_under(part)]

    def _check_plain_lora(self, layer: nn.Module, fqn: str, adapter: str) -> None:
        variant = getattr(layer, "lora_variant", {}).get(adapter)
        if variant is not None:
            raise ValueError(
                f"{fqn}: adapter {adapter!r} is a {type(variant).__name__} (DoRA or another variant of LoRA), whose "
                "merged weight has another formula; merge it with PEFT"
            )
        if getattr(layer, "lora_bias", {}).get(adapter):
            raise ValueError(f"{fqn}: adapter {adapter!r} has a bias on lora_B (lora_bias=True), not supported")
