"""A model with an adapter, saved in each form that a merge takes, and what the merged checkpoint must hold."""

import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import lora_stream
from lora_stream.checkpoint import save_train_meta

FORMS = ("peft", "verl", "dcp", "full")


def base_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def save_config(model, directory: Path) -> None:
    config = base_of(model).config
    config.architectures = [type(base_of(model)).__name__]
    config.save_pretrained(directory)


def save_source(form: str, model, directory: Path, *, adapter: str = "default", meta: bool = True) -> Path:
    """Returns what a merge is given."""
    directory.mkdir(parents=True)
    state = model.state_dict()
    if form == "peft":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(directory, selected_adapters=[adapter])
        return directory if adapter == "default" else directory / adapter
    save_config(model, directory / "huggingface")
    if meta:
        save_train_meta(directory, model, adapter_name=adapter)
    if form == "verl":
        torch.save(state, directory / "model_world_size_1_rank_0.pt")
        (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    elif form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = {"model": state, "optimizer": {"lr": 0.1, "momentum": torch.ones(3)}}
            dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    else:
        whole = {name: tensor.clone().contiguous() for name, tensor in state.items()}
        save_file(whole, directory / "huggingface" / "model.safetensors")
        return directory / "huggingface"
    return directory


def weights_in(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by its index where it has one. Raises for a tensor that it does not name."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return load_file(directory / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {}
    for file in sorted(set(weight_map.values())):
        part = load_file(directory / file)
        assert {name for name, where in weight_map.items() if where == file} == part.keys()
        found |= part
    assert {path.name for path in directory.glob("*.safetensors")} == set(weight_map.values())
    return found


def assert_holds_the_stream(directory: Path, model, **kwargs) -> dict[str, torch.Tensor]:
    """Bit for bit what a stream of the live model yields."""
    found, expected = weights_in(directory), dict(lora_stream.stream(model, **kwargs))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    return found
