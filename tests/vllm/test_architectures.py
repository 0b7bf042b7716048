"""Each architecture's stream in vLLM's own model class: what a reload of it makes is what vLLM makes of the merged checkpoint.
vllm layer; models alone, without an engine around them."""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import torch
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

import lora_stream
from lora_stream.vllm import reload
from lora_stream.vllm.manifest import check_manifest
from tests import architectures
from tests.models import llama, with_lora

pytestmark = pytest.mark.vllm

TEXT_MODELS = ["mixtral", "qwen2_moe", "qwen3_moe", "llama4", "deepseek_v3", "gemma3_text"]
VISION_MODELS = ["gemma3", "qwen2_5_vl", "qwen3_vl"]

SIZES = {  # what vLLM's kernels for the CPU take
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": 64,
}


@contextlib.contextmanager
def without_an_engine():
    """What an engine sets up before it makes a model."""
    assert not model_parallel_is_initialized(), "an engine lives in this process"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's CPU worker does
        patch.setattr(architectures, "TEXT", {**architectures.TEXT, **SIZES})
        patch.setitem(architectures.MROPE, "mrope_section", [4, 6, 6])
        yield
        if model_parallel_is_initialized():
            cleanup_dist_env_and_memory()


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory):
    with without_an_engine():
        yield tmp_path_factory.mktemp("store") / "store"


def in_vllm(directory, store, **overrides):
    """vLLM's model of a checkpoint, and its config."""
    arguments = EngineArgs(model=str(directory), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True)
    arguments.hf_overrides = overrides
    arguments.max_model_len, arguments.max_num_seqs = 64, 2
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel(1, 1)
        return get_model(vllm_config=config), config


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def published(name, directory):
    """A model, from a checkpoint as those of its kind are published."""
    base = architectures.build(name, torch.bfloat16)
    base.save_pretrained(directory)
    if name == "gemma3":  # a model that was made of nothing does not know this prefix
        tensors = load_file(directory / "model.safetensors")
        tensors = {each.replace("vision_tower.", "vision_tower.vision_model.", 1): t for each, t in tensors.items()}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        base = type(base).from_pretrained(directory, dtype=torch.bfloat16).eval()
    return base


def adapted(name, base):
    _, modules, parameters = architectures.ARCHITECTURES[name]
    return with_lora(base, target_modules=modules, target_parameters=parameters, task_type=None)


def load(model, config, weights):
    check_manifest(model, config, weights.metadata())
    with set_current_vllm_config(config):
        reload.load(model, config.model_config, weights.metadata(), iter(weights))


def check_reload(name, directory, store):
    """Twice, and then only what trains, since a reload may go wrong in what the one before it left."""
    base = published(name, directory / "base")
    model, config = in_vllm(directory / "base", store)
    trainer = adapted(name, base)
    for scope in ("all", "all", "trained"):
        with torch.no_grad():
            for fqn, parameter in trainer.named_parameters():
                if "lora_" in fqn:
                    parameter.mul_(0.5)
        live = {fqn: p.detach().clone() for fqn, p in trainer.named_parameters()}
        load(model, config, lora_stream.MergedWeights(trainer, scope=scope))
        assert all(torch.equal(p, live[fqn]) for fqn, p in trainer.named_parameters()), "vLLM wrote to the trainer"
    shutil.copytree(directory / "base", directory / "merged")
    save_file(dict(lora_stream.stream(trainer)), directory / "merged" / "model.safetensors", metadata={"format": "pt"})
    want = weights_of(in_vllm(directory / "merged", store)[0])
    got = weights_of(model)
    assert got.keys() == want.keys()
    assert [fqn for fqn in want if not torch.equal(got[fqn], want[fqn])] == []


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_reload_makes_what_vllm_makes_of_the_merged_checkpoint(name, tmp_path, store):
    """Edge cases 44 and 45."""
    check_reload(name, tmp_path, store)


def check_vision_models(directory):
    with without_an_engine():
        check_refusal_of_turned_experts(directory / "turned", directory / "store")
        for name in VISION_MODELS:
            check_reload(name, directory / name, directory / "store")


def check_refusal_of_turned_experts(directory, store):
    """transformers 5.19 saves these experts as it holds them, and not as they are published, which is what vLLM takes."""
    base = published("qwen3_vl_moe", directory)
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model, config = in_vllm(directory, store)
    metadata = lora_stream.MergedWeights(adapted("qwen3_vl_moe", base)).metadata()
    with pytest.raises(ValueError, match=r"experts\.\w+: the engine cannot load it with shape \(4, "):
        check_manifest(model, config, metadata)


def test_a_reload_of_a_vision_model_makes_what_vllm_makes_of_the_merged_checkpoint(tmp_path):
    """In a process of its own: no torchvision loads beside vLLM's CPU build, and a stand-in must not stay."""
    code = (
        "import sys, pathlib, tests.conftest; from tests.vllm.test_architectures import check_vision_models\n"
        "check_vision_models(pathlib.Path(sys.argv[1]))\n"
        "print('SAME')"
    )
    stubs = [] if importlib.util.find_spec("torchvision") else [str(Path(__file__).parent / "stubs")]
    path = os.pathsep.join([*stubs, str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "SAME" in run.stdout, run.stderr[-3000:]


def test_an_untied_engine_holds_a_head_and_an_embedding_that_adapters_have_parted(tmp_path, store):
    """Case B22: what the trainer computes with, where a tied engine could not hold it."""
    base = llama(tied=True, dtype=torch.bfloat16, **{k: v for k, v in SIZES.items() if k != "head_dim"})
    base.save_pretrained(tmp_path / "base")
    model, config = in_vllm(tmp_path / "base", store, tie_word_embeddings=False)
    trainer = with_lora(base, target_modules=["lm_head", "q_proj"])
    weights = lora_stream.MergedWeights(trainer, untie=True)
    load(model, config, weights)
    shutil.copytree(tmp_path / "base", tmp_path / "merged")
    save_file(dict(weights), tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    got, want = weights_of(model), weights_of(in_vllm(tmp_path / "merged", store, tie_word_embeddings=False)[0])
    assert [fqn for fqn in want if not torch.equal(got[fqn], want[fqn])] == []
    assert not torch.equal(got["lm_head.weight"], got["model.embed_tokens.weight"])
    tied, config = in_vllm(tmp_path / "base", store)
    with pytest.raises(ValueError, match=r"lm_head\.weight: is tied to.*tie_word_embeddings"):
        check_manifest(tied, config, weights.metadata())


def test_an_expert_less_is_refused_by_name(tmp_path, store):
    base = architectures.build("mixtral", torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model, config = in_vllm(tmp_path / "base", store)
    metadata = lora_stream.MergedWeights(adapted("mixtral", base)).metadata()
    missing = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    with pytest.raises(ValueError, match=r"layers\.1\.block_sparse_moe\.experts\.routed_experts: .*fill only"):
        check_manifest(model, config, [meta for meta in metadata if meta.name != missing])


def test_weights_that_vllms_reload_does_not_see_are_refused_by_name(tmp_path, store):
    """vLLM 0.32 writes gpt-oss's sinks and experts past its own reload, which would lose them without a word."""
    base = architectures.build("gpt_oss", torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model, config = in_vllm(tmp_path / "base", store)
    metadata = lora_stream.MergedWeights(adapted("gpt_oss", base)).metadata()
    with pytest.raises(
        ValueError, match=r"no parameter of the engine's GptOssForCausalLM takes it.*past vLLM's reload"
    ):
        check_manifest(model, config, metadata)


def test_a_router_bias_comes_in_float32_and_a_weight_in_float32_is_refused(tmp_path, store):
    base = architectures.build("deepseek_v3", torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model, config = in_vllm(tmp_path / "base", store)
    weights = lora_stream.MergedWeights(adapted("deepseek_v3", base))
    assert {meta.dtype for meta in weights.metadata()} == {torch.bfloat16, torch.float32}
    load(model, config, weights)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(model.get_parameter(name), base.model.layers[1].mlp.gate.e_score_correction_bias.float())
    wide = [meta._replace(dtype=torch.float32) if "norm" in meta.name else meta for meta in weights.metadata()]
    with pytest.raises(ValueError, match=r"norm\.weight: comes as torch\.float32.*wire_dtype=torch\.bfloat16"):
        check_manifest(model, config, wide)
