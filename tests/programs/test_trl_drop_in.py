"""lora_stream.integrations.trl in TRL's own GRPO trainer, as it is installed, with live engines. programs layer."""

import json

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lora_stream
from tests import peers
from tests.vllm import live

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def base_with_tokenizer(base):
    """TRL wants a tokenizer: a word for each token."""
    live.save_tokenizer(base, live.SIZES["vocab_size"])
    return base


def run(where, base, out):
    script = peers.ROOT / "tests" / "programs" / "trl_run.py"
    peers.run(script, where, base, out, path=(peers.TRL, peers.COMMON), timeout=400)
    return json.loads((out / "facts.json").read_text())


def check(facts):
    assert facts["steps"] == 2
    assert facts["syncs"][0] == "all"
    assert set(facts["syncs"][1:]) == {"trained"}
    assert facts["merged"] == 6
    assert facts["moved"]
    assert facts["same model"]
    assert facts["is TRL's own again"]


@peers.needs(peers.TRL)
def test_a_colocated_engine_ends_on_the_policy_that_grpo_trained(base_with_tokenizer, tmp_path):
    check(run("colocate", base_with_tokenizer, tmp_path))
    merged = load_file(tmp_path / "merged.safetensors")
    directory = live.save_merged(base_with_tokenizer, merged, tmp_path / "merged")
    from_disk = live.logprobs_in_a_process(directory, torch.bfloat16)
    assert json.loads((tmp_path / "logprobs.json").read_text()) == json.loads(json.dumps(from_disk))


@peers.needs(peers.TRL)
def test_a_server_ends_on_the_policy_that_grpo_trained(base_with_tokenizer, tmp_path):
    """Through shared memory: TRL's own communicator would ask for a CUDA device."""
    server = live.Server(base_with_tokenizer, tmp_path / "server.log").wait_until_up()
    try:
        before = server.answers()
        check(run(server.url, base_with_tokenizer, tmp_path))
        after = server.answers()
        directory = live.save_merged(
            base_with_tokenizer, load_file(tmp_path / "merged.safetensors"), tmp_path / "merged"
        )
        lora_stream.sync(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16), server.url, full=True)
        assert after != before
        assert after == server.answers()
    finally:
        server.stop()


def test_every_process_of_a_tensor_parallel_group_brings_its_part_of_the_engine_up_to_date(base, tmp_path):
    """TRL's colocated engines are started so, with the external launcher."""

    def run_ranks(directory, out, *arguments):
        out.mkdir()
        script = peers.ROOT / "tests" / "programs" / "external_launcher.py"
        peers.run(*peers.TORCHRUN, "--nproc_per_node=2", script, directory, out, *arguments)
        one, other = [(out / f"logprobs-{rank}.json").read_text() for rank in range(2)]
        assert one == other
        return one

    synced = run_ranks(base, tmp_path / "synced", "sync")
    merged = load_file(tmp_path / "synced" / "merged.safetensors")
    assert synced == run_ranks(live.save_merged(base, merged, tmp_path / "merged"), tmp_path / "from disk")
