"""What people's trainers have saved is merged to the stream's bits, whatever else lies in it and under whatever names. Unit layer."""

import json
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import get_peft_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lora_stream.checkpoint import inspect, merge, save_train_meta
from tests.checkpoints import assert_holds_the_stream, base_of, save_source
from tests.models import fill, llama, with_lora

KINDS = {
    "linear": {},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "dora": {"use_dora": True},
    "head": {"modules_to_save": ["lm_head"]},
}


def make(tmp_path, **config):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base, **config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name or "magnitude" in name:
                parameter.mul_(1.25)
    return model


def save_dcp(state, directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    return directory


def assert_merges(source, tmp_path, model, **kwargs):
    merge(source, tmp_path / "out", base=tmp_path / "base", dtype=torch.float32, **kwargs)
    assert_holds_the_stream(tmp_path / "out", model, wire_dtype=torch.float32)


def save_stored(model, directory, layout):
    """As accelerate stores the adapter alone. Returns where its metadata belongs."""
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    directory.mkdir()
    if layout == "sharded":
        save_dcp({"model": state}, directory / "pytorch_model_fsdp_0")
    else:
        torch.save(state, directory / "pytorch_model_fsdp.bin")
    return directory


@pytest.mark.parametrize("layout", ["sharded", "full"])
@pytest.mark.parametrize("tells", ["meta", "config", "caller"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_that_accelerate_has_stored_alone_is_merged(tmp_path, layout, tells, kind):
    """Case N01."""
    model = make(tmp_path, **KINDS[kind])
    source = save_stored(model, tmp_path / "checkpoint-5", layout)
    (source / "trainer_state.json").write_text("{}")
    given = {}
    if tells == "meta":
        save_train_meta(source, model)
    elif tells == "config":
        model.peft_config["default"].save_pretrained(source)
    else:
        given = {"rank": 4, "lora_alpha": 32}
    assert_merges(source, tmp_path, model, **given)


def test_the_directory_of_the_sharded_weights_may_be_named_itself_and_is_inspected(tmp_path):
    """Case N01."""
    model = make(tmp_path)
    source = save_stored(model, tmp_path / "checkpoint-5", "sharded") / "pytorch_model_fsdp_0"
    save_train_meta(source.parent, model)
    found = inspect(source)
    assert (found.r, found.lora_alpha) == (4, 32)
    assert set(found.targets) == {"q_proj", "v_proj", "down_proj"}
    assert not found.has_base
    assert_merges(source, tmp_path, model)


def stepped(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model(torch.arange(7)[None]).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def by_name(optimizer, model):
    """As torch's own recipe has it: {"state": {fqn: {"exp_avg": ...}}, "param_groups": ...}."""
    return get_optimizer_state_dict(model, optimizer)


LAYOUTS = {
    "beside": lambda model, optim: {"model": model, "optim": optim},
    "before": lambda model, optim: {"a_optimizer": {"optim": optim}, "model": model},
    "below app": lambda model, optim: {"app": {"model": model, "optim": optim}},
    "flattened": lambda model, optim: {
        **model,
        **{f"optimizer.{key}.{fqn}": each for fqn, of in optim["state"].items() for key, each in of.items()},
        "lr_scheduler": {"last_lr": torch.ones(2)},
        "dataloader": {"dp_rank_0": torch.arange(3)},
    },
    "unknown optimizer": lambda model, optim: {
        "model": model,
        "other": {fqn: {"shampoo": of["exp_avg"]} for fqn, of in optim["state"].items() if "lora_" in fqn},
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_and_more_that_is_saved_with_the_model_is_left(tmp_path, layout, kind):
    """Case N02."""
    if layout == "unknown optimizer" and kind == "embedding":
        pytest.skip("an embedding's lora_A has no name of its own behind the adapter's")
    model = make(tmp_path, **KINDS[kind])
    optimizer = stepped(model)
    fill(model)
    directory = save_dcp(LAYOUTS[layout](model.state_dict(), by_name(optimizer, model)), tmp_path / "dcp")
    save_train_meta(directory, model)
    assert_merges(directory, tmp_path, model)


def renamed_path(directory, module, name):
    """The metadata as another Python writes it."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta.checkpoint_id = Marker()
    content = pickle.dumps(metadata, protocol=2)
    assert b"Marker" in content
    old = f"c{Marker.__module__}\nMarker\n".encode()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, f"c{module}\n{name}\n".encode()))


class Marker:
    """Pickled as a path is."""

    def __reduce__(self):
        return Marker, ("/", "somewhere")


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
@pytest.mark.parametrize("name", ["PosixPath", "WindowsPath"])
def test_metadata_that_any_python_has_written_is_read(tmp_path, module, name):
    """Case N03: 3.13 has the paths' classes in a module of their own."""
    model = make(tmp_path)
    source = save_source("dcp", model, tmp_path / "source")
    renamed_path(source, module, name)
    assert_merges(source, tmp_path, model)


@pytest.mark.parametrize(
    ("module", "name"), [("pathlib._local", "os"), ("os", "system"), ("builtins", "getattr"), ("pathlib", "Path.home")]
)
def test_no_other_class_or_function_is_read(tmp_path, module, name):
    """Case N03."""
    source = save_source("dcp", make(tmp_path), tmp_path / "source")
    renamed_path(source, module, name)
    with pytest.raises(ValueError, match="is not allowed"):
        merge(source, tmp_path / "out", base=tmp_path / "base")


def test_members_of_enums_are_read_however_they_are_named(tmp_path):
    """Case N03: by `getattr`, as some releases of 3.11 write them."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as ENCODING

    from lora_stream.checkpoint.tensors import _member

    assert _member(ENCODING, "TORCH_PRESERVE_FORMAT") is ENCODING.TORCH_PRESERVE_FORMAT
    for kind, name in [(ENCODING, "__class__"), (ENCODING, "mro"), (shutil, "rmtree")]:
        with pytest.raises(pickle.UnpicklingError, match="is not allowed"):
            _member(kind, name)


def test_layouts_of_axolotl_and_ms_swift_are_merged_without_their_arguments(tmp_path):
    """Case N14: the adapter in the output folder, or in one of a version and a step, beside the run's own files."""
    model = make(tmp_path)
    for place in (tmp_path / "axolotl", tmp_path / "swift" / "v0-20260101-000000" / "checkpoint-30"):
        model.save_pretrained(place)
        for name in ("args.json", "additional_config.json", "trainer_state.json", "debug.log", "README.md"):
            (place / name).write_text("{}")
        (place / "tokenizer_config.json").write_text("{}")
        out = place.parent / f"{place.name}-merged"
        merge(place, out, base=tmp_path / "base", dtype=torch.float32)
        assert_holds_the_stream(out, model, wire_dtype=torch.float32)
        found = {path.name for path in out.iterdir()}
        assert found == {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"}
        assert json.loads((out / "config.json").read_text())["vocab_size"] == base_of(model).config.vocab_size
