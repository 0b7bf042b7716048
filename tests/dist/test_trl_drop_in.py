"""lora_stream.integrations.trl in TRL's own VLLMGeneration, sharded over gloo ranks. dist layer; tests/programs has live engines."""

import pytest
import torch

from tests import peers
from tests.models import assert_equal

pytestmark = [pytest.mark.dist, peers.needs(peers.TRL)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trl")
    script = peers.ROOT / "tests" / "dist" / "trl_ranks.py"
    peers.run(*peers.TORCHRUN, "--nproc_per_node=2", script, directory, path=(peers.TRL, peers.COMMON))
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


def test_the_engine_of_every_rank_gets_the_whole_merged_model(found):
    for rank in found:
        assert_equal(rank["colocated"], rank["unsharded"])
        assert rank["scope"] == "all"


def test_a_sleeping_engine_is_woken_for_its_weights_alone(found):
    assert found[0]["woken"] == (["weights"], False)


def test_trls_own_communicator_carries_the_merged_model_of_all_ranks(found):
    assert_equal(found[0]["nccl"], found[0]["unsharded"])
    assert found[0]["metadata is iteration"]
    assert found[0]["resets"] == 1


def test_models_without_lora_go_trls_own_way(found):
    assert found[0]["plain"] == {torch.float32}


def test_only_our_backend_needs_no_communicator(found):
    assert found[0]["communicators"]["lora_stream"] == "none asked for"
    assert "has no attribute" in found[0]["communicators"]["nccl"]
