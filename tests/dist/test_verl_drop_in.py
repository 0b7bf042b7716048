"""lora_stream.integrations.verl in verl's own FSDP engines, as they are installed, on gloo ranks. dist layer."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lora_stream.checkpoint import load_train_meta
from tests import oracle, peers
from tests.dist.verl_cases import ADAPTERS, CASES
from tests.models import STEP, assert_equal, assert_matches, qwen2, sent, with_lora

pytestmark = [pytest.mark.dist, peers.needs(peers.VERL)]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def work(request, tmp_path_factory):
    """What verl_engines.py leaves of all cases."""
    directory = tmp_path_factory.mktemp("verl")
    for name, case in CASES.items():
        base = qwen2(tied=case.get("tied", False))
        base.save_pretrained(directory / name / "base")
        if "adapter" in case:
            with_lora(base, lora_alpha=6, **ADAPTERS[case["adapter"]]).save_pretrained(directory / name / "adapter")
    script = (peers.ROOT / "tests" / "dist" / "verl_engines.py", directory, *CASES)
    peers.run(*peers.TORCHRUN, f"--nproc_per_node={request.param}", *script, path=(peers.VERL, peers.COMMON))
    return directory


def facts_of(work, name):
    return json.loads((work / name / "facts.json").read_text())


def held(work, name):
    """The model that the engine held, unsharded."""
    case = CASES[name]
    dtype = torch.bfloat16 if case.get("model_dtype") == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(work / name / "base", dtype=dtype)
    if "adapter" in case:
        model = PeftModel.from_pretrained(model, work / name / "adapter")
    else:
        targets = ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM"))
    whole = torch.load(work / name / "whole.pt")
    missing, unexpected = model.to(dtype).load_state_dict(whole, strict=False)
    assert not unexpected
    assert not [key for key in missing if "lora_" in key or "q_proj" in key]
    return model


def is_plain(work, name):
    """verl sends the tensors of a single FSDP1 rank as they are."""
    ranks = len(list((work / name / "saved" / "global_step_1").glob("model_world_size_*")))
    return CASES[name]["strategy"] == "fsdp" and ranks == 1


MERGED = [name for name in CASES if name not in ("fsdp2, not merged", "fsdp2, tie broken")]


@pytest.mark.parametrize("name", MERGED)
def test_the_patched_engine_streams_the_formula_dithered_as_a_stream_of_the_unsharded_model(work, name):
    got, model = load_file(work / name / "ours.safetensors"), held(work, name)
    wire_dtype = None if is_plain(work, name) else torch.bfloat16
    assert_equal(got, sent(model, wire_dtype=wire_dtype))
    for tensor_name, tensor in oracle.expected(model, torch.float32).items():
        step = STEP[got[tensor_name].dtype]
        torch.testing.assert_close(got[tensor_name].float(), tensor.float(), rtol=step, atol=step / 16, msg=tensor_name)
    assert facts_of(work, name)["peft_config"]["ours"] is None


# Where verl's own stream has the right names and merges everything.
RIGHT = [name for name in MERGED if name != "fsdp2, modules_to_save"]


@pytest.mark.parametrize("name", RIGHT)
def test_names_dtypes_and_values_are_verls_own_within_its_rounding(work, name):
    ours, verls = (load_file(work / name / f"{label}.safetensors") for label in ("ours", "verl"))
    if CASES[name].get("tied"):
        del verls["lm_head.weight"]  # which verl sends beside the embedding that it is
    assert ours.keys() == verls.keys()
    # verl adds in the parameters' dtype, and then rounds to the wire's; what is dithered is less than a step off.
    step = 3 * STEP[torch.bfloat16] if "bfloat16" in name else 2 * STEP[torch.bfloat16]
    for tensor_name, tensor in verls.items():
        assert ours[tensor_name].dtype == tensor.dtype, tensor_name
        torch.testing.assert_close(ours[tensor_name], tensor, rtol=step, atol=step / 4, msg=tensor_name)


def test_modules_to_save_arrive_under_their_names_which_verls_own_do_not(work):
    name = "fsdp2, modules_to_save"
    ours, verls = (load_file(work / name / f"{label}.safetensors") for label in ("ours", "verl"))
    assert "lm_head.weight" in ours
    assert "lm_head.weight" not in verls


def test_a_tie_that_the_adapter_breaks_is_refused_where_verl_sends_it_unmerged(work):
    name = "fsdp2, tie broken"
    assert "lm_head" in facts_of(work, name)["refused"]
    assert not (work / name / "ours.safetensors").exists()
    base = load_file(work / name / "base" / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(load_file(work / name / "verl.safetensors")["lm_head.weight"], base)


def test_engines_that_do_not_merge_go_verls_own_way(work):
    facts = facts_of(work, "fsdp2, not merged")
    assert facts["peft_config"]["ours"]["r"] == 4
    ours, verls = (load_file(work / "fsdp2, not merged" / f"{label}.safetensors") for label in ("ours", "verl"))
    assert all("lora_" in key for key in ours)
    assert ours.keys() == verls.keys()


def test_shards_stay_where_they_are_where_verl_would_stage_them(work):
    calls = facts_of(work, "fsdp2, offloaded")["calls"]
    assert calls["verl"]["load_fsdp_model_to_gpu"] == 1
    assert calls["ours"] == {"offload_fsdp_model_to_cpu": 1}


def test_fsdp1_is_loaded_and_offloaded_once_by_the_streams_lifetime(work):
    calls = facts_of(work, "fsdp, offloaded")["calls"]
    assert calls["ours"] == {"load_fsdp_model_to_gpu": 1, "offload_fsdp_model_to_cpu": 1}
    assert "offload_fsdp_model_to_cpu" not in facts_of(work, "fsdp")["calls"]["ours"]


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_as_it_was_and_undoing_the_patch_brings_verls_own_back(work, name):
    facts = facts_of(work, name)
    assert facts["same model"]
    assert facts["is verl's own again"]


@pytest.mark.parametrize("name", MERGED)
def test_quantisation_aware_training_is_refused(work, name):
    assert "qat.enable=True" in facts_of(work, name)["qat"]


def test_the_setting_of_the_recipe_patches_every_worker(work):
    assert {path.read_text() for path in work.glob("external_lib_*")} == {"lora_stream.integrations.verl"}


@pytest.mark.parametrize("name", ["fsdp2", "fsdp", "fsdp2, rslora"])
def test_checkpoints_carry_the_complete_metadata(work, name):
    """Not the three fields that verl's manager knows, nor those that its handler writes over them."""
    meta = load_train_meta(work / name / "saved" / "global_step_1")
    assert (meta.r, meta.lora_alpha) == (4, 6)
    if "rslora" in name:
        assert meta.use_rslora
        assert meta.rank_pattern == {"q_proj": 3}
