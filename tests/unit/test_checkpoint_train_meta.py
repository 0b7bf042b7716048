"""The metadata of a LoRA is never lost, never half written, and the same for everybody. Unit layer."""

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, TaskType, VeraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lora_stream.checkpoint import TrainMeta, load_train_meta, save_train_meta
from tests.architectures import ARCHITECTURES, build
from tests.kinds import KINDS
from tests.models import llama, with_lora

NAME = "lora_train_meta.json"
LINEAR = [f"self_attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]


def content_of(directory):
    return json.loads((directory / NAME).read_text())


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_of_adapter_comes_back_as_it_was_saved(kind, tmp_path):
    model = KINDS[kind]()
    saved = save_train_meta(tmp_path / "made" / "here", model)
    assert load_train_meta(tmp_path / "made" / "here") == saved
    assert load_train_meta(tmp_path / "made" / "here" / NAME) == saved
    config = model.peft_config[saved.adapter_name]
    assert (saved.r, saved.lora_alpha, saved.use_dora) == (config.r, config.lora_alpha, config.use_dora)
    assert saved.modules
    assert os.listdir(tmp_path / "made" / "here") == [NAME]


def test_verl_finds_the_three_fields_it_reads_in_the_types_it_wants(tmp_path):
    """Case B08. What verl 0.9's merger does with the file is run itself in tests/dist/test_verl.py."""
    save_train_meta(tmp_path, with_lora(llama(), r=4, lora_alpha=16, task_type=TaskType.CAUSAL_LM))
    content = content_of(tmp_path)
    assert [(content[key], type(content[key])) for key in ("r", "lora_alpha", "task_type")] == [
        (4, int),
        (16, int),
        ("CAUSAL_LM", str),
    ]


@pytest.mark.parametrize(("alpha", "whole"), [(6.5, 6), (0.25, 1), (7.5, 8), (16.0, 16), (16, 16)])
def test_an_alpha_that_is_no_integer_is_kept_beside_one_that_is(alpha, whole, tmp_path, caplog):
    """Case B08: verl's int() would make 6 of 6.5 and 0 of 0.25."""
    save_train_meta(tmp_path, with_lora(llama(), lora_alpha=alpha))
    content = content_of(tmp_path)
    assert (content["lora_alpha"], content["lora_alpha_exact"]) == (whole, alpha)
    assert isinstance(content["lora_alpha"], int)
    assert load_train_meta(tmp_path).lora_alpha == alpha
    assert ("readers that take integers only" in caplog.text) == (alpha != whole)


def test_scalings_and_ranks_are_those_of_the_layers_now(tmp_path):
    """Cases B10, B11, edge case 6: patterns, rsLoRA, and what was changed after the config."""
    config = {"use_rslora": True, "rank_pattern": {"layers.0.self_attn.q_proj": 9}, "alpha_pattern": {"q_proj": 7}}
    model = with_lora(llama(), r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], **config)
    for name, module in model.named_modules():
        if name.endswith("layers.1.self_attn.v_proj"):
            module.set_scale("default", 0.5)
    meta = save_train_meta(tmp_path, model)
    assert meta.modules == {
        "model.layers.0.self_attn.q_proj": {"r": 9, "scaling": 7 / 3},
        "model.layers.0.self_attn.v_proj": {"r": 4, "scaling": 16.0},
        "model.layers.1.self_attn.q_proj": {"r": 4, "scaling": 3.5},
        "model.layers.1.self_attn.v_proj": {"r": 4, "scaling": 8.0},
    }
    assert (meta.use_rslora, meta.rank_pattern, meta.alpha_pattern) == (
        True,
        config["rank_pattern"],
        config["alpha_pattern"],
    )


def test_experts_are_told_by_the_names_of_their_parameters(tmp_path):
    _, modules, parameters = ARCHITECTURES["qwen3_moe"]
    meta = save_train_meta(
        tmp_path, with_lora(build("qwen3_moe"), target_modules=modules, target_parameters=parameters)
    )
    assert meta.target_parameters == sorted(parameters)
    assert meta.modules.keys() >= {
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.1.self_attn.q_proj",
    }


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (["v_proj", "q_proj"], ["q_proj", "v_proj"]),
        (r".*\.(q|v)_proj", r".*\.(q|v)_proj"),
        ("all-linear", sorted(f"model.layers.{i}.{module}" for i in range(2) for module in LINEAR)),
    ],
)
def test_targets_are_resolved_and_sorted_and_an_expression_stays_one(targets, found, tmp_path):
    """Case B47."""
    model = with_lora(llama(), target_modules=targets, exclude_modules=["o_proj_of_another", "b"])
    assert save_train_meta(tmp_path, model).target_modules == found
    assert content_of(tmp_path)["target_modules"] == found
    assert content_of(tmp_path)["exclude_modules"] == ["b", "o_proj_of_another"]


@pytest.mark.parametrize("task", ["SEQ_CLS", TaskType.SEQ_CLS, None])
def test_enums_are_written_by_value(task, tmp_path):
    """Case B47: not 'TaskType.SEQ_CLS'."""
    save_train_meta(tmp_path, with_lora(llama(), task_type=task))
    assert content_of(tmp_path)["task_type"] == ("CAUSAL_LM" if task is None else "SEQ_CLS")


def test_the_bytes_are_the_same_for_every_hash_seed(tmp_path):
    """Case B47: sets have no order."""
    code = """
import sys
from tests.models import llama, with_lora
from lora_stream.checkpoint import save_train_meta
model = with_lora(llama(), target_modules=["v_proj", "q_proj", "down_proj", "o_proj"], modules_to_save=["lm_head", "norm"])
save_train_meta(sys.argv[1], model)
"""
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / seed)], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    assert [run.wait() for run in runs] == [0, 0]
    assert (tmp_path / "1" / NAME).read_bytes() == (tmp_path / "2" / NAME).read_bytes()


@pytest.mark.parametrize("wrapper", ["compiled", "checkpointed", "parallel", "injected"])
def test_wrappers_are_looked_through(wrapper, tmp_path):
    """Edge cases 41, 43."""
    plain = save_train_meta(tmp_path / "plain", with_lora(llama()))
    model = with_lora(llama())
    base = model.get_base_model()
    if wrapper == "checkpointed":
        base.model.layers[0] = checkpoint_wrapper(base.model.layers[0])
        base.model.layers[1].mlp.down_proj = checkpoint_wrapper(base.model.layers[1].mlp.down_proj)
    elif wrapper == "injected":
        model = llama()
        config = dataclasses.replace(with_lora(llama()).peft_config["default"], base_model_name_or_path=None)
        inject_adapter_in_model(config, model)
    wrapped = {
        "compiled": lambda: torch.compile(model),
        "parallel": lambda: nn.DataParallel(model),
    }.get(wrapper, lambda: model)()
    found = save_train_meta(tmp_path / "wrapped", wrapped)
    same = dataclasses.replace(found, base_model_name_or_path=plain.base_model_name_or_path)
    assert same == plain


def test_nothing_is_written_without_an_adapter_or_a_rank(tmp_path):
    for model in (llama(), nn.Linear(2, 2)):
        assert save_train_meta(tmp_path / "a", model) is None
    model = with_lora(llama())
    model.peft_config["default"].r = 0
    assert save_train_meta(tmp_path / "a", model) is None
    assert not (tmp_path / "a").exists()


def test_alpha_is_r_when_unset_and_never_zero(tmp_path):
    model = with_lora(llama(), r=5)
    model.peft_config["default"].lora_alpha = None
    assert save_train_meta(tmp_path, model).lora_alpha == 5
    for bad in (0, 0.0, float("nan"), float("inf")):
        model.peft_config["default"].lora_alpha = bad
        with pytest.raises(ValueError, match="lora_alpha must be a number other than 0"):
            save_train_meta(tmp_path, model)
    assert load_train_meta(tmp_path).lora_alpha == 5  # what was there is still there


def test_which_adapter_is_said_or_is_the_one_that_is_active(tmp_path):
    """Case B16, edge case 30."""
    model = with_lora(llama())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.add_adapter("ref-2", LoraConfig(r=2, lora_alpha=9, target_modules=["k_proj"]))
    assert save_train_meta(tmp_path, model).adapter_name == "default"
    found = save_train_meta(tmp_path, model, adapter_name="ref-2")
    assert (found.adapter_name, found.r, set(found.modules)) == (
        "ref-2",
        2,
        {"model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.k_proj"},
    )
    model.set_adapter("ref-2")
    assert save_train_meta(tmp_path, model).adapter_name == "ref-2"
    model.base_model.set_adapter(["default", "ref-2"])
    assert save_train_meta(tmp_path, model).adapter_name == "default"
    with pytest.raises(ValueError, match=r"the model's adapters are \['default', 'ref-2'\]"):
        save_train_meta(tmp_path, model, adapter_name="other")


def test_other_methods_are_refused_by_name(tmp_path):
    """Edge case 24."""
    model = get_peft_model(llama(), VeraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="is of type VERA"):
        save_train_meta(tmp_path, model)


def test_a_file_that_is_not_there_says_how_to_give_the_values(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is missing; give .* --rank and --lora-alpha"):
        load_train_meta(tmp_path)


def test_verls_own_file_is_read(tmp_path, caplog):
    (tmp_path / NAME).write_text('{"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}')
    assert load_train_meta(tmp_path) == TrainMeta(r=8, lora_alpha=16, format_version=None)
    (tmp_path / NAME).write_text('{"r": 8, "lora_alpha": 16, "of_another": 1}')
    assert load_train_meta(tmp_path) == TrainMeta(r=8, lora_alpha=16, format_version=None)
    assert "of_another" in caplog.text


# -- any metadata at all -------------------------------------------------------------------------------------------------

names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)
alphas = st.one_of(st.integers(1, 10**6), st.floats(1e-3, 1e6, allow_nan=False))
metas = st.builds(
    TrainMeta,
    r=st.integers(1, 10**4),
    lora_alpha=alphas,
    task_type=st.sampled_from([each.value for each in TaskType]),
    adapter_name=names,
    base_model_name_or_path=st.none() | names,
    use_rslora=st.booleans(),
    use_dora=st.booleans(),
    rank_pattern=st.dictionaries(names, st.integers(1, 64), max_size=3),
    alpha_pattern=st.dictionaries(names, alphas, max_size=3),
    target_modules=st.none() | names | st.lists(names, max_size=3),
    modules_to_save=st.none() | st.lists(names, max_size=3),
    trainable_token_indices=st.none() | st.lists(st.integers(0, 99), max_size=3),
    layer_replication=st.none() | st.just([[0, 2], [1, 3]]),
    modules=st.dictionaries(
        names,
        st.fixed_dictionaries({"r": st.integers(1, 64), "scaling": st.floats(-1e3, 1e3, allow_nan=False)}),
        max_size=3,
    ),
)


@settings(max_examples=150, deadline=None)
@given(metas)
def test_any_metadata_survives_the_file(tmp_path_factory, meta):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(meta.to_json()))
    assert load_train_meta(path) == meta
    written = json.loads(path.read_text())
    assert isinstance(written["lora_alpha"], int)
    assert written["lora_alpha"] >= 1


@settings(max_examples=150, deadline=None)
@given(metas, st.data())
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path_factory, meta, data):
    """A file that was cut off anywhere is refused."""
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    text = json.dumps(meta.to_json()).encode()
    path.write_bytes(text[: data.draw(st.integers(0, len(text) - 1), label="cut at")])
    with pytest.raises(ValueError, match="--rank and --lora-alpha"):
        load_train_meta(path)


# -- many writers --------------------------------------------------------------------------------------------------------


def hammer(directory, r):
    model = with_lora(llama(), r=r, lora_alpha=7)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        save_train_meta(directory, model)


def test_writers_that_hammer_one_directory_never_show_half_a_file(tmp_path):
    """Case B43: three processes write, a reader loops, one writer is killed in the middle: old or new, never a part."""
    directory = tmp_path / "checkpoint"
    writers = [multiprocessing.get_context("fork").Process(target=hammer, args=(directory, r)) for r in (3, 4, 5)]
    try:
        for writer in writers:
            writer.start()
        while not (directory / NAME).exists():
            time.sleep(0.01)
        seen = set()
        for i in range(1500):
            meta = load_train_meta(directory)
            assert {entry["r"] for entry in meta.modules.values()} == {meta.r}  # of one writer, all of it
            seen.add(meta.r)
            if i == 500:
                writers[0].kill()
        assert len(seen) > 1
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    # What a killed writer left has another name, and whoever finishes leaves nothing.
    assert load_train_meta(directory).r in seen
    left = set(os.listdir(directory)) - {NAME}
    assert all(name.startswith(f".{NAME}.") and name.endswith(".partial") for name in left)
    for name in left:
        (directory / name).unlink()
    save_train_meta(directory, with_lora(llama()))
    assert os.listdir(directory) == [NAME]


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    save_train_meta(tmp_path, with_lora(llama(), r=3))

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        save_train_meta(tmp_path, with_lora(llama(), r=4))
    assert load_train_meta(tmp_path).r == 3
    assert os.listdir(tmp_path) == [NAME]


def test_the_file_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    """Else a loss of power leaves an empty file of the right name."""
    happened = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (happened.append(name), real(*args))[1])
    save_train_meta(tmp_path, with_lora(llama()))
    assert happened == ["fsync", "replace", "fsync"]
    (tmp_path / "other").touch()
    assert (tmp_path / NAME).stat().st_mode == (tmp_path / "other").stat().st_mode
