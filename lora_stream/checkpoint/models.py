"""A model without weights, made from a config, and PEFT's adapter put into it: so that a checkpoint is read by the same code
as a live model, and no tensor is loaded before it is needed.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from lora_stream.checkpoint.adapters import AdapterSpec
from lora_stream.checkpoint.tensors import Info, read_json
from lora_stream.plan import listed

_HEADS = {
    "SEQ_CLS": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "TOKEN_CLS": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "QUESTION_ANS": "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
}


def config_of(directory: Path, *, trust_remote_code: bool = False):
    """The transformers config in a directory. Raises ValueError for one that is missing, unknown, or of quantised weights."""
    import transformers

    path = directory / "config.json"
    if not path.exists():
        raise ValueError(f"{directory}: has no config.json, expected a Hugging Face model directory")
    content = read_json(path)
    if content.get("quantization_config"):
        method = content["quantization_config"].get("quant_method", "unknown")
        raise ValueError(
            f"{path}: is of quantised weights ({method}), which cannot be merged into without being rounded anew; say with "
            "--base where the full-precision model is that they were made from"
        )
    if content.get("auto_map") and not trust_remote_code:
        raise ValueError(f"{path}: the model has code of its own; pass --trust-remote-code to run it")
    try:
        return transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: transformers {transformers.__version__} cannot read it: {error}") from error


def empty_model(
    config, *, task_type: str | None = None, where: Path | str = "", trust_remote_code: bool = False
) -> nn.Module:
    """The model on the meta device, in float32, with nothing that trains. task_type: PEFT's; a classifier is made where the config is of another."""
    import transformers

    config = copy.deepcopy(config)
    name = (config.architectures or [None])[0]
    kind = getattr(transformers, name, None) if name else None
    mapping = _HEADS.get(task_type or "")
    if mapping is not None:
        by_config = getattr(transformers, mapping)
        of_task = by_config.get(type(config), None)
        if of_task is None:
            raise ValueError(f"{where}: transformers has no model of {type(config).__name__} for {task_type}")
        if kind is None or kind not in by_config.values():
            kind = of_task
    auto_map = getattr(config, "auto_map", None) or {}
    automatic = next((each for each in auto_map if each.startswith("AutoModel")), None)
    if kind is None and (automatic is None or not trust_remote_code):
        raise ValueError(f"{where}: transformers has no architecture {config.architectures}")
    with _without_weights():
        if kind is not None:
            model = kind._from_config(config, dtype=torch.float32)
        else:
            model = getattr(transformers, automatic).from_config(config, trust_remote_code=True, dtype=torch.float32)
    model.tie_weights()
    return model.requires_grad_(False)


@contextlib.contextmanager
def _without_weights() -> Iterator[None]:
    """What is made has no memory, and no time goes into first values of it."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    with torch.device("meta"), no_init_weights():
        yield


def with_adapter(model: nn.Module, spec: AdapterSpec, targets: Sequence[str] | None = None):
    """The model as a PeftModel whose adapter has no values yet. targets: modules that have it, where the spec names none.

    Raises ValueError where PEFT does not find what the adapter is on.
    """
    from peft import get_peft_model

    given = spec.fields
    has_targets = given.get("target_modules") is not None or given.get("target_parameters")
    changes = {} if has_targets else {"target_modules": list(targets or ())}
    # The values come from files: none of an initialisation, which may look at weights that are not there.
    config = spec.config(init_lora_weights=False, inference_mode=False, base_model_name_or_path=None, **changes)
    try:
        with _without_weights():
            return get_peft_model(model, config, adapter_name=spec.name)
    except (ValueError, NotImplementedError, RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{spec.origin}: PEFT cannot put the adapter into {type(model).__name__}: {error}") from error


def fill(model: nn.Module, known: set[int], values: Mapping[str, Info]) -> None:
    """Give memory to the parameters that are not `known` by id (the base's), and to those of them that `values` name. What is
    then not loaded is NaN, and is noticed."""
    names_of = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    filled: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for own, parameter in module._parameters.items():
            if parameter is None or (id(parameter) in known and names_of[id(parameter)] not in values):
                continue
            if id(parameter) not in filled:
                empty = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
                filled[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[own] = filled[id(parameter)]


def check_scalings(model: nn.Module, spec: AdapterSpec) -> None:
    """Give every layer the scaling that it had in training, where that is known. Raises ValueError for layers or ranks that
    are others than those."""
    from lora_stream.peft import lora_layers

    if not spec.modules:
        return
    layers = {path: layer for path, layer in lora_layers(model) if spec.name in layer.scaling}
    if odd := sorted(layers.keys() ^ spec.modules.keys()):
        which = "tells of it, but the adapter is not on it" if odd[0] in spec.modules else "does not tell of it"
        raise ValueError(f"{spec.origin}: {listed(odd)}: modules {which}; the file is of another model or adapter")
    for path, layer in layers.items():
        entry = spec.modules[path]
        if layer.r[spec.name] != entry["r"]:
            raise ValueError(
                f"{spec.origin}: {path}: modules say r={entry['r']}, r and rank_pattern give {layer.r[spec.name]}; the file "
                "contradicts itself"
            )
        layer.scaling[spec.name] = float(entry["scaling"])
