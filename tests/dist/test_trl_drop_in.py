"""lora_stream.integrations.trl in TRL's own VLLMGeneration, sharded over gloo ranks. dist layer; tests/vllm has live engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models import assert_matches

ROOT = Path(__file__).parents[2]
PEERS = Path(sys.prefix) / "peers"
TRL = PEERS / "trl"

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not TRL.exists(), reason=f"TRL is not installed in {TRL}, see the Makefile"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trl")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "tests" / "dist" / "trl_ranks.py"), str(directory)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{TRL}:{PEERS}/common"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def test_the_engine_of_every_rank_gets_the_whole_merged_model(found):
    for rank in found:
        assert_matches(rank["colocated"], rank["formula"])
        assert rank["scope"] == "all"


def test_a_sleeping_engine_is_woken_for_its_weights_alone(found):
    assert found[0]["woken"] == (["weights"], False)


def test_trls_own_communicator_carries_the_merged_model_of_all_ranks(found):
    assert_matches(found[0]["nccl"], found[0]["formula"])
    assert found[0]["metadata is iteration"]
    assert found[0]["resets"] == 1


def test_models_without_lora_go_trls_own_way(found):
    assert found[0]["plain"] == {torch.float32}


def test_only_our_backend_needs_no_communicator(found):
    """TRL's own asks the server for its size, and the stand-in has none."""
    assert "has no attribute" in found[0]["communicator"]
