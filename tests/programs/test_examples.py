"""The examples run, in short form, on a tiny model with random weights. programs layer."""

import json
import re

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")


from tests import peers

pytestmark = pytest.mark.vllm


def run(name, *arguments, launcher=(), path=()):
    in_processes = {} if name == "grpo_loop.py" else {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    script = peers.ROOT / "examples" / name
    return peers.run(*launcher, script, *arguments, path=path, timeout=400, **in_processes)


def test_the_grpo_loop_keeps_engine_and_trainer_on_one_policy_and_shows_when_they_are_not(directory):
    """At a learning rate that moves the policy far with every step."""
    short = ["--model", directory, "--steps", 3, "--prompts", 2, "--samples", 4, "--tokens", 6, "--learning-rate", 0.03]
    steps = json.loads(run("grpo_loop.py", *short).splitlines()[-1])["steps"]
    broken = json.loads(run("grpo_loop.py", *short, "--break-sync").splitlines()[-1])["steps"]
    assert {**steps[0], "captured": None} == broken[0]
    assert min(step["corr"] for step in steps) > 0.99
    assert broken[-1]["corr"] < 0.9
    assert broken[-1]["diff"] > 10 * max(step["diff"] for step in steps)


def test_the_grpo_loop_takes_the_other_ways_into_the_engine_too(directory):
    short = ["--model", directory, "--steps", 2, "--prompts", 1, "--samples", 4, "--tokens", 6, "--learning-rate", 0.03]
    for way in ("nearest", "adapter"):
        found = json.loads(run("grpo_loop.py", *short, "--way", way).splitlines()[-1])
        assert found["way"] == way
        assert min(step["corr"] for step in found["steps"]) > 0.99
        assert (found["steps"][0]["captured"] is None) == (way == "adapter")


def test_two_fsdp2_ranks_sync_into_the_engine_of_the_first(directory):
    launcher = [*peers.TORCHRUN, "--nproc_per_node=2"]
    shown = run("fsdp2_to_vllm.py", "--model", directory, "--steps", 2, launcher=launcher)
    assert len(re.findall(r"step \d, rank \d: loss .* scope trained, 14 tensors merged", shown)) == 4
    assert shown.count("the engine answers") == 2


def test_a_trainer_syncs_into_a_server_in_another_process(directory):
    shown = run("http_server.py", "--model", directory, "--steps", 2)
    assert len(re.findall(r"step \d: loss .* tensors merged", shown)) == 2
    assert "{'weight_version': 'step 1'}" in shown


@peers.needs(peers.COMMON / "ray")
def test_ray_actors_sync_through_vllms_own_client(directory):
    shown = run("ray_actors.py", "--model", directory, "--steps", 2, path=(peers.COMMON,))
    assert "before: ('default'," in shown
    assert re.findall(r"step (\d): loss [\d.]+, version and answer \('step (\d)'", shown) == [("0", "0"), ("1", "1")]
