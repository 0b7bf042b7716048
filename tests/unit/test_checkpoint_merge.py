"""A merge from files writes what the stream of the live model yields, whatever the files. Unit layer."""

import gc
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lora_stream.checkpoint import export, merge, merging, save_train_meta, writing
from tests.architectures import ARCHITECTURES, build
from tests.checkpoints import FORMS, assert_holds_the_stream, base_of, save_source, weights_in
from tests.kinds import KINDS, TOKENS, gpt2
from tests.models import fill, llama, qwen2, with_lora

# Kinds whose adapter alone belongs to another base than the one that it was made from.
RESIDUAL = ("pissa", "olora", "corda")
NO_CHECKPOINT = ("convolutions", "convolutions with lora_bias", "module to save with buffers", "no transformers model")
MODELS = [kind for kind in KINDS if kind not in NO_CHECKPOINT]


# A process that has imported everything already.
FORK = multiprocessing.get_context("fork")


def merge_alone(directory, **kwargs):
    torch.set_num_threads(1)  # the threads of the process that was forked are not there
    merge(directory / "adapter", directory / "out", base=directory / "base", **kwargs)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No network is ever tried, not even in vain."""
    tried = []

    def connect(self, address):
        if self.family != socket.AF_UNIX:
            tried.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: tried.append(args) or [])
    yield
    assert tried == []


def made(kind: str):
    torch.manual_seed(20261130)
    return KINDS[kind]()


def save_base(kind: str, directory: Path) -> Path:
    """The base as it was before the adapter; of those that change it, as it is."""
    if kind == "layer replication":
        torch.manual_seed(20261130)
        base = llama()
    else:
        base = made(kind)
        base = base.unload() if hasattr(base, "unload") else base
    base.save_pretrained(directory)
    return directory


# Two forms tell all names as they are read; the two others differ from verl's in the files alone.
SOME = ("linear", "dora on embedding", "modules_to_save", "trainable tokens", "tied pair")
SOME_SPLIT = ("qwen3_moe", "gemma3")


def each_in_forms(names, some):
    pairs = [(name, form) for name in names for form in FORMS if form in ("peft", "verl") or name in some]
    return [pair for pair in pairs if pair != ("injected", "peft")]  # PEFT saves only its own models


@pytest.mark.parametrize(("kind", "form"), each_in_forms(MODELS, SOME))
def test_a_merge_equals_the_stream_bit_for_bit(kind, form, tmp_path):
    """Cases B07, B10, B11, B13, B17, edge cases 5, 32, 34: every kind of LoRA in every form of checkpoint."""
    model = made(kind)
    if form == "peft" and kind in RESIDUAL:
        model.peft_config["default"].init_lora_weights = True  # as PEFT tells to, beside a base that is the residual
    source = save_source(form, model, tmp_path / "source")
    base = save_base(kind, tmp_path / "base") if form == "peft" else None
    report = merge(source, tmp_path / "out", base=base)
    assert_holds_the_stream(tmp_path / "out", model, adapter_name="default")
    assert report.merged > 0
    assert report.changed > 0


@pytest.mark.parametrize(("architecture", "form"), each_in_forms(ARCHITECTURES, SOME_SPLIT))
def test_a_merge_equals_the_stream_for_models_that_checkpoints_split_and_rename(architecture, form, tmp_path):
    """Edge case 44, case B26."""
    _, modules, parameters = ARCHITECTURES[architecture]
    base = build(architecture)
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(r=3, lora_alpha=5, target_modules=modules, target_parameters=parameters)
    model = get_peft_model(base, config)
    fill(model)
    source = save_source(form, model, tmp_path / "source")
    merge(source, tmp_path / "out", base=tmp_path / "base" if form == "peft" else None)
    assert_holds_the_stream(tmp_path / "out", model)


@pytest.mark.parametrize(
    "kind",
    [
        "linear",
        "rslora and patterns",
        "conv1d module",
        "embedding",
        "dora on linear with bias",
        "lora_bias",
        "modules_to_save",
        "trainable tokens of a tied model",
        "layer replication",
        "tied copy",
    ],
)
@pytest.mark.parametrize("form", ["peft", "verl"])
def test_the_reloaded_model_computes_what_the_trained_one_did(kind, form, tmp_path):
    model = made(kind)
    source = save_source(form, model, tmp_path / "source")
    base = save_base(kind, tmp_path / "base") if form == "peft" else None
    merge(source, tmp_path / "out", base=base, dtype=torch.float32)
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert merged.dtype == torch.float32
    with torch.no_grad():
        assert torch.allclose(merged(TOKENS).logits, model(TOKENS).logits, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("use_rslora", [True, False])
def test_alpha_and_rslora_arrive_in_every_form(form, use_rslora, tmp_path):
    """Cases B10, B11: scalings that are no whole numbers, and those of single modules."""
    config = {
        "use_rslora": use_rslora,
        "rank_pattern": {"layers.0.self_attn.q_proj": 8},
        "alpha_pattern": {"q_proj": 7},
    }
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base, lora_alpha=6.5, **config)
    source = save_source(form, model, tmp_path / "source")
    report = merge(source, tmp_path / "out", base=tmp_path / "base" if form == "peft" else None)
    assert_holds_the_stream(tmp_path / "out", model)
    assert report.lora_alpha == 6.5


def test_scalings_that_were_changed_live_are_those_that_are_merged(tmp_path):
    """Edge case 6: set_scale is in no config, but in the metadata."""
    model = with_lora(llama())
    for name, module in model.named_modules():
        if name.endswith("layers.1.self_attn.v_proj"):
            module.set_scale("default", 0.37)
    source = save_source("verl", model, tmp_path / "source")
    merge(source, tmp_path / "out", with_adapter=True)
    assert_holds_the_stream(tmp_path / "out", model)
    # The adapter that is written says so by a pattern, which is all that PEFT has.
    model.unload().save_pretrained(tmp_path / "base")
    merge(tmp_path / "out" / "lora_adapter", tmp_path / "again", base=tmp_path / "base")
    first, again = weights_in(tmp_path / "out"), weights_in(tmp_path / "again")
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("form", ["peft", "verl", "dcp", "full"])
def test_of_several_adapters_the_chosen_one_is_merged_and_no_other_leaks(form, tmp_path):
    """Case B16: another adapter's pairs and copies."""
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base, target_modules=["q_proj"])
    model.add_adapter("ref", LoraConfig(r=2, lora_alpha=7, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    fill(model)
    with torch.no_grad():
        base_of(model).lm_head.modules_to_save["ref"].weight.add_(1)
    for adapter in ("default", "ref"):
        source = save_source(form, model, tmp_path / adapter / "source", adapter=adapter)
        chosen = {} if form == "peft" else {"adapter_name": adapter}
        merge(source, tmp_path / adapter / "out", base=tmp_path / "base", **chosen)
        found = assert_holds_the_stream(tmp_path / adapter / "out", model, adapter_name=adapter)
        assert torch.equal(
            found["lm_head.weight"], load_file(tmp_path / "base/model.safetensors")["lm_head.weight"].bfloat16()
        ) == (adapter == "default")


def test_verls_own_file_of_three_fields_is_enough_for_what_verl_trains(tmp_path, caplog):
    """Case B08. The modules are read off the names, the scaling is lora_alpha / r."""
    model = with_lora(qwen2(), r=4, lora_alpha=6, modules_to_save=["lm_head"])
    source = save_source("verl", model, tmp_path / "source", meta=False)
    (source / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"}))
    merge(source, tmp_path / "out")
    assert_holds_the_stream(tmp_path / "out", model)
    assert "no more than r, lora_alpha and task_type" in caplog.text


@pytest.mark.parametrize("form", ["verl", "dcp", "full"])
def test_what_no_file_tells_can_be_given(form, tmp_path):
    """Case B08: no metadata at all."""
    model = with_lora(llama(), r=4, lora_alpha=6.5, use_rslora=True)
    source = save_source(form, model, tmp_path / "source", meta=False)
    with pytest.raises(ValueError, match="--rank and --lora-alpha"):
        merge(source, tmp_path / "out")
    merge(source, tmp_path / "out", rank=4, lora_alpha=6.5, use_rslora=True)
    assert_holds_the_stream(tmp_path / "out", model)


@pytest.mark.parametrize("form", ["verl", "dcp"])
def test_an_adapter_alone_is_merged_into_the_base_that_is_named(form, tmp_path):
    """What verl's save_lora_only leaves: no base, and no embedding of it."""
    base = qwen2(tied=True)
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base)
    whole = model.state_dict
    model.state_dict = lambda: {name: tensor for name, tensor in whole().items() if "lora_" in name}
    source = save_source(form, model, tmp_path / "source")
    del model.state_dict
    with pytest.raises(ValueError, match=r"is not there; say with --base where the base model is"):
        merge(source, tmp_path / "out")
    merge(source, tmp_path / "out", base=tmp_path / "base")
    assert_holds_the_stream(tmp_path / "out", model)


@pytest.mark.parametrize("wrapper", ["compiled", "checkpointed", "under other names"])
def test_names_may_have_a_prefix_and_wrappers(wrapper, tmp_path):
    """Edge case 41: torch's private segments, and whatever stood around the model."""
    model = with_lora(llama())
    state = model.state_dict()
    renamed = {
        "compiled": lambda name: f"_orig_mod.{name}",
        "checkpointed": lambda name: name.replace("layers.0.", "layers.0._checkpoint_wrapped_module."),
        "under other names": lambda name: f"actor.policy.{name}",
    }[wrapper]
    source = save_source("verl", model, tmp_path / "source")
    torch.save({renamed(name): tensor for name, tensor in state.items()}, source / "model_world_size_1_rank_0.pt")
    merge(source, tmp_path / "out")
    assert_holds_the_stream(tmp_path / "out", model)


# -- what is written -----------------------------------------------------------------------------------------------------


@pytest.fixture
def linear(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base)
    model.save_pretrained(tmp_path / "adapter")
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_and_config_have_the_dtype_that_was_asked_for(dtype, linear, tmp_path):
    """Case B07: float32 masters do not make a float32 checkpoint, nor one that says so."""
    base = tmp_path / "base" / "config.json"
    for key in ("dtype", "torch_dtype"):
        content = json.loads(base.read_text())
        content.pop("dtype", None)
        content.pop("torch_dtype", None)
        base.write_text(json.dumps({**content, key: "float32"}))
        out = tmp_path / f"out-{key}"
        report = merge(tmp_path / "adapter", out, base=tmp_path / "base", dtype=dtype)
        found = assert_holds_the_stream(out, linear, wire_dtype=dtype)
        assert {tensor.dtype for tensor in found.values()} == {dtype}
        assert json.loads((out / "config.json").read_text())[key] == str(dtype).removeprefix("torch.")
        assert report.num_bytes == sum(tensor.nbytes for tensor in found.values())
        assert AutoModelForCausalLM.from_pretrained(out).dtype == dtype


def test_buffers_keep_their_dtype_and_what_stays_in_float32_does(tmp_path):
    """Case B07: integers, and the router's bias of DeepSeek."""
    base = build("deepseek_v3")
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=3, lora_alpha=5, target_modules=["q_b_proj"]))
    fill(model)
    model.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    found = assert_holds_the_stream(tmp_path / "out", model)
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32


def test_files_are_cut_at_the_size_that_was_asked_for_and_the_index_is_right(linear, tmp_path):
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", max_shard_size="9KB")
    found = assert_holds_the_stream(tmp_path / "out", linear)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 9000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_a_file_of_mixed_dtypes_has_every_tensor_at_a_multiple_of_its_element(tmp_path):
    from lora_stream.checkpoint.writing import Weights
    from lora_stream.plan import ParamMeta

    tensors = {
        "byte": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(5).bfloat16(),
        "double": torch.randn(3, dtype=torch.float64),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False]),
        "float": torch.randn(2, 3),
    }
    metas = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    weights = Weights(tmp_path, metas, max_shard_bytes=10**9, metadata={})
    for name, tensor in reversed(tensors.items()):
        weights.write(name, tensor)
    weights.finish()
    found = load_file(tmp_path / "model.safetensors")
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    content = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    assert (8 + size) % 8 == 0
    header = json.loads(content[8 : 8 + size])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name


def test_tokenizer_processor_code_and_license_go_along_and_nothing_of_the_training(linear, tmp_path):
    """Case N14."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    carried = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "preprocessor_config.json", "LICENSE"]
    carried += [
        "modeling_own.py",
        "parts_of_it.py",
        "README.md",
        "own.tiktoken",
        "chat_template.jinja",
        "merges.txt",
        "additional_chat_templates/tool.jinja",
    ]
    (base / "additional_chat_templates").mkdir()
    for name in carried:
        (base / name).write_text(f"of the base: {name}")
    for name in ("pytorch_model.bin.index.json", "optimizer.pt", "trainer_state.json", "model.onnx", "train.py"):
        (base / name).write_text("{}")
    (base / "modeling_own.py").write_text("from .parts_of_it import Part")
    (base / "preprocessor_config.json").write_text('{"auto_map": {"AutoProcessor": "modeling_own.Own"}}')
    for name in ("args.json", "train_results.json", "credentials.json", "README.md", "notes.txt", "run.py"):
        for directory in (base, adapter):
            if not (directory / name).exists():
                (directory / name).write_text("{}")
    (adapter / "tokenizer.json").write_text("with the tokens that training has added")
    os.rename(base / "merges.txt", tmp_path / "blob")
    (base / "merges.txt").symlink_to(tmp_path / "blob")  # as in a cache of downloads
    merge(adapter, tmp_path / "out", base=base)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {*carried, "config.json", "generation_config.json", "model.safetensors"}
    assert (tmp_path / "out/tokenizer.json").read_text() == "with the tokens that training has added"
    assert not (tmp_path / "out/merges.txt").is_symlink()


def test_a_model_that_was_made_from_a_config_takes_nothing_of_the_current_directory_along(tmp_path, monkeypatch):
    """Case N14."""
    for name in ("config.json", "train.py", "credentials.json", "tokenizer.json", "LICENSE"):
        (tmp_path / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    export(with_lora(llama()), tmp_path / "out")
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {"config.json", "generation_config.json", "model.safetensors"}


def test_files_that_transformers_finds_invalid_do_not_stop_the_weights(tmp_path, caplog):
    model = with_lora(llama())
    generation = base_of(model).generation_config
    generation.temperature, generation.do_sample = 0.5, False  # which transformers does not save

    class Tokenizer:
        def save_pretrained(self, directory):
            raise ValueError("its template is no template")

    export(model, tmp_path / "out", dtype=torch.float32, processing_class=Tokenizer())
    assert_holds_the_stream(tmp_path / "out", model, wire_dtype=torch.float32)
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["temperature"] == 0.5
    assert "Tokenizer cannot save its files (its template is no template)" in caplog.text


@pytest.mark.parametrize("write", ["merge", "export"])
@pytest.mark.parametrize("there", ["empty", "used", "link"])
def test_an_empty_directory_that_is_there_is_filled_from_within(linear, tmp_path, monkeypatch, write, there):
    """Case N06: it may be a mount point, to which nothing can be renamed and beside which there may be no room."""
    out = tmp_path / "out"
    (tmp_path / "place").mkdir()
    if there == "link":
        out.symlink_to(tmp_path / "place")
    else:
        out.mkdir()
        (out / "lost+found").mkdir()
    if there == "used":
        (out / "other").write_text("")
    rename = os.rename
    inode = out.stat().st_ino

    def refuse_the_mount(source, target):
        if Path(target) == out:
            raise OSError(16, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse_the_mount)

    def run():
        if write == "merge":
            merge(tmp_path / "adapter", out, base=tmp_path / "base")
        else:
            export(with_lora(llama()), out)

    if there == "used":
        with pytest.raises(FileExistsError, match="is there already"):
            run()
        assert {path.name for path in out.iterdir()} == {"lost+found", "other"}
        return
    run()
    assert out.stat().st_ino == inode
    files = {path.name for path in out.iterdir()} - {"lost+found"}
    assert {"config.json", "model.safetensors"} <= files
    assert not any("partial" in name for name in files)
    with pytest.raises(FileExistsError):
        run()


def test_fields_of_the_config_that_transformers_does_not_know_are_kept(linear, tmp_path):
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "of_some_engine": {"a": 1}}))
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["of_some_engine"] == {"a": 1}


@pytest.mark.parametrize("form", ["peft", "verl"])
def test_a_trained_classifier_and_its_labels_are_in_the_merged_model(form, tmp_path):
    """Case B24: a head that the base does not have, five labels where the config knows of none."""
    llama().save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5)
    model = with_lora(classifier, task_type="SEQ_CLS", modules_to_save=["score"])
    with torch.no_grad():
        base_of(model).score.modules_to_save["default"].weight.add_(0.1)
    model.eval()
    source = save_source(form, model, tmp_path / "source")
    report = merge(source, tmp_path / "out", base=tmp_path / "base", dtype=torch.float32)
    merged, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (merged.config.num_labels, merged.config.architectures) == (5, ["LlamaForSequenceClassification"])
    assert torch.equal(merged.score.weight, base_of(model).score.modules_to_save["default"].weight)
    merged.config.pad_token_id = model.config.pad_token_id = 0
    with torch.no_grad():
        assert torch.allclose(merged(TOKENS).logits, model(TOKENS).logits, atol=2e-5)
    left_out = {"lm_head.weight": "of a head that the merged model does not have"}
    assert report.left_out == (left_out if form == "peft" else {})


@pytest.mark.parametrize("tied", [True, False])
def test_trained_heads_and_embeddings_of_a_new_size_arrive_with_it(tied, tmp_path):
    """Case B24: tokens were added, embedding and head are trained whole."""
    base = llama(tied=tied)
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(67)
    saved = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    model = with_lora(base, modules_to_save=saved, ensure_weight_tying=tied)
    with torch.no_grad():
        base_of(model).get_input_embeddings().modules_to_save["default"].weight.add_(0.25)
    model.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    found = assert_holds_the_stream(tmp_path / "out", model)
    assert found["model.embed_tokens.weight"].shape[0] == 67
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (67, tied)


def test_a_tie_that_the_adapter_has_broken_is_written_untied_when_asked(tmp_path):
    """Case B22, edge case 36: the config's flag says what the files hold."""
    base = llama(tied=True)
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base, target_modules=["q_proj", "embed_tokens"])
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="tied in this model's checkpoints"):
        merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert not (tmp_path / "out").exists()
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", untie=True)
    found = assert_holds_the_stream(tmp_path / "out", model, untie=True)
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert not AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.tie_word_embeddings


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_bases_of_one_file_or_several_pickled_or_not(suffix, is_cut, linear, tmp_path):
    state = load_file(tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "model.safetensors").unlink()
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    save = save_file if suffix == "safetensors" else torch.save
    if is_cut:
        names = sorted(state)
        halves = [names[:7], names[7:]]
        files = [f"{stem}-{i + 1:05d}-of-00002.{suffix}" for i in range(2)]
        for file, part in zip(files, halves, strict=True):
            save({name: state[name].clone() for name in part}, tmp_path / "base" / file)
        weight_map = {name: file for file, part in zip(files, halves, strict=True) for name in part}
        (tmp_path / "base" / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        save(state, tmp_path / "base" / f"{stem}.{suffix}")
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert_holds_the_stream(tmp_path / "out", linear)


@pytest.mark.parametrize("is_zipped", [True, False])
def test_an_adapter_that_is_pickled(is_zipped, linear, tmp_path):
    """As PEFT saved before safetensors, and torch before its zip files."""
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save(state, tmp_path / "adapter" / "adapter_model.bin", _use_new_zipfile_serialization=is_zipped)
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert_holds_the_stream(tmp_path / "out", linear)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_of_a_test"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own_is_merged_when_it_may_run_and_takes_its_code_along(linear, tmp_path):
    base = tmp_path / "base"
    config = json.loads((base / "config.json").read_text())
    auto_map = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    own = {"model_type": "own_of_a_test", "architectures": ["OwnForCausalLM"], "auto_map": auto_map}
    (base / "config.json").write_text(json.dumps({**config, **own}))
    (base / "own_code.py").write_text(OWN_CODE)
    merge(tmp_path / "adapter", tmp_path / "out", base=base, trust_remote_code=True)
    assert_holds_the_stream(tmp_path / "out", linear)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(merged).__name__ == "OwnForCausalLM"


def test_a_base_with_names_of_old_is_loaded_by_transformers(tmp_path, caplog):
    """GPT-2 was published without the prefix that it is saved with today."""
    base = gpt2()
    base.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "model.safetensors"
    state = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file(state, path, metadata={"format": "pt"})
    model = with_lora(base, target_modules=["c_attn"], fan_in_fan_out=True)
    model.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert_holds_the_stream(tmp_path / "out", model)
    assert "takes the memory of the base" in caplog.text


@pytest.mark.parametrize(
    "kind", ["linear", "rslora and patterns", "dora on linear", "lora_bias", "modules_to_save", "trainable tokens"]
)
def test_the_adapter_alone_is_written_as_peft_loads_it(kind, tmp_path):
    """Cases B08, B46, B47: the config names base, task, r and alpha, and PEFT computes with it what training did."""
    model = made(kind)
    base = save_base(kind, tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(base)
    source = save_source("verl", model, tmp_path / "source")
    merge(source, tmp_path / "out", adapter_only=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["task_type"]) == (str(base), "CAUSAL_LM")
    assert (config["r"], config["lora_alpha"]) == (
        model.peft_config["default"].r,
        model.peft_config["default"].lora_alpha,
    )
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    with torch.no_grad():
        assert torch.allclose(loaded(TOKENS).logits, model.eval()(TOKENS).logits, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", ["peft", "verl"])
def test_the_adapter_keeps_its_dtype(form, dtype, linear, tmp_path):
    for name, parameter in linear.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    source = save_source(form, linear, tmp_path / "source")
    merge(source, tmp_path / "out", base=tmp_path / "base", with_adapter=True)
    assert_holds_the_stream(tmp_path / "out", linear)
    written = load_file(tmp_path / "out" / "lora_adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    expected = get_peft_model_state_dict(linear)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


# -- memory, time and interruptions --------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_model(tmp_path):
    """Peaks of two merges, the second of a base four times as large: what grows is less than a third of what was added."""
    code = """
import sys, torch, resource
from lora_stream.checkpoint import merge
from lora_stream.checkpoint import merging, tensors, writing
merging.BUCKET_BYTES = writing._WAITING_BYTES = tensors.Safetensors.open_bytes = 1 << 20
import peft, transformers
from pathlib import Path
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])
merge(sys.argv[1] + "/adapter", sys.argv[1] + "/warm", base=sys.argv[1] + "/base")
Path("/proc/self/clear_refs").write_text("5")
before = peak()
merge(sys.argv[2] + "/adapter", sys.argv[2] + "/out", base=sys.argv[2] + "/base")
print(peak() - before)
"""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    for name, layers in (("small", 4), ("large", 40)):
        base = llama(**sizes, num_hidden_layers=layers)
        base.save_pretrained(tmp_path / name / "base", max_shard_size="20MB")
        with_lora(base, target_modules=["q_proj"]).save_pretrained(tmp_path / name / "adapter")
    paths = [str(tmp_path / name) for name in ("small", "large")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True)
    size = sum(path.stat().st_size for path in (tmp_path / "large" / "base").glob("*.safetensors")) >> 10
    assert size > 150_000
    assert int(done.stdout) < size / 3


def test_a_merge_that_is_killed_leaves_no_checkpoint(tmp_path):
    """Case B43: kill -9 in the middle of the weights; what is left is beside it and the next merge is not disturbed."""
    base = llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    base.save_pretrained(tmp_path / "base")
    model = with_lora(base)
    model.save_pretrained(tmp_path / "adapter")
    ours, theirs = FORK.Pipe()

    def progress(done, total):
        theirs.send(done)
        time.sleep(60)

    process = FORK.Process(target=merge_alone, args=(tmp_path,), kwargs={"progress": progress})
    process.start()
    assert ours.poll(60)
    assert ours.recv() > 0
    process.kill()
    process.join()
    assert not (tmp_path / "out").exists()
    (left,) = tmp_path.glob(".out.*.partial")
    assert not (left / "model.safetensors.index.json").exists()
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert_holds_the_stream(tmp_path / "out", model)


def test_of_two_merges_into_one_directory_one_wins_whole_and_the_other_is_told(linear, tmp_path):
    """Case B43."""
    barrier, results = FORK.Barrier(2), FORK.Queue()

    def attempt():
        barrier.wait()
        try:
            merge_alone(tmp_path, progress=lambda done, total: time.sleep(0.05))  # both are at it before one is done
            results.put("merged")
        except FileExistsError:
            results.put("told")

    processes = [FORK.Process(target=attempt) for _ in range(2)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=60) for _ in processes) == ["merged", "told"]
    for process in processes:
        process.join()
    assert_holds_the_stream(tmp_path / "out", linear)
    assert list(tmp_path.glob(".out.*")) == []


def test_a_disk_that_is_slow_gets_what_was_merged_and_not_what_came_after(linear, tmp_path, monkeypatch):
    """Buckets are used again: not before what is in them was written."""
    real = os.pwrite
    monkeypatch.setattr(writing.os, "pwrite", lambda *args: (time.sleep(0.01), real(*args))[1])
    monkeypatch.setattr(merging, "BUCKET_BYTES", 4096)
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
    assert_holds_the_stream(tmp_path / "out", linear)


def test_progress_counts_every_byte_once(linear, tmp_path):
    seen = []
    merge(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base", progress=lambda *each: seen.append(each))
    report_bytes = sum(tensor.nbytes for tensor in weights_in(tmp_path / "out").values())
    assert [total for _, total in seen] == [report_bytes] * len(seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == report_bytes


def test_a_second_model_has_nothing_of_the_first(tmp_path):
    """No state is kept between merges in one process, nor is the collector left switched off."""
    for i in range(2):
        base = llama()
        base.save_pretrained(tmp_path / f"base{i}")
        model = with_lora(base)
        model.save_pretrained(tmp_path / f"adapter{i}")
        merge(tmp_path / f"adapter{i}", tmp_path / f"out{i}", base=tmp_path / f"base{i}")
        assert_holds_the_stream(tmp_path / f"out{i}", model)
        assert gc.isenabled()


def test_the_base_that_the_adapter_names_is_found(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = with_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    model.save_pretrained(tmp_path / "adapter")
    report = merge(tmp_path / "adapter", tmp_path / "out")
    assert report.base == str(tmp_path / "base")
    assert_holds_the_stream(tmp_path / "out", model)
    assert save_train_meta(tmp_path / "meta", model).base_model_name_or_path == str(tmp_path / "base")
