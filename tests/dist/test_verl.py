"""verl's own checkpoint manager writes, we merge; its own merger reads our metadata. dist layer.

verl pins another transformers than vLLM wants, so the two lie in a directory of their own, `.venv/peers/verl`, which only the
processes here have in their path.
"""

import json

import pytest
from safetensors.torch import load_file

from lora_stream.checkpoint import load_train_meta, merge, save_train_meta
from tests import peers
from tests.checkpoints import weights_in
from tests.models import assert_equal, qwen2, with_lora

pytestmark = [pytest.mark.dist, peers.needs(peers.VERL)]


def run(*arguments):
    peers.run(*arguments, path=(peers.VERL, peers.COMMON))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What verl's manager saves on two ranks, by strategy: model shards, the whole model beside them, or the adapter alone."""
    directory = tmp_path_factory.mktemp("verl")
    qwen2(tied=True).save_pretrained(directory / "base")
    script = peers.ROOT / "tests" / "dist" / "verl_ranks.py"
    run(*peers.TORCHRUN, "--nproc_per_node=2", script, directory / "base", directory, "fsdp2:model,hf_model", "fsdp2:model,lora_only", "fsdp:model")
    return directory


@pytest.mark.parametrize("what", ["fsdp2:model,hf_model", "fsdp:model"])
def test_shards_of_verl_merge_to_what_the_trainer_streamed(saved, what, tmp_path):
    """Case B08: with verl's own metadata, of three fields."""
    report = merge(saved / what / "actor", tmp_path / "out")
    assert (report.r, report.lora_alpha) == (4, 6)
    assert_equal(weights_in(tmp_path / "out"), load_file(saved / what / "streamed.safetensors"))


def test_the_whole_model_that_verl_saves_with_an_adapter_in_it_merges_too(saved, tmp_path):
    what = "fsdp2:model,hf_model"
    merge(saved / what / "actor" / "huggingface", tmp_path / "out")
    assert_equal(weights_in(tmp_path / "out"), load_file(saved / what / "streamed.safetensors"))


def test_adapters_that_verl_saves_alone_merge_into_their_base(saved, tmp_path):
    what = "fsdp2:model,lora_only"
    merge(saved / what / "actor", tmp_path / "out", base=saved / "base", with_adapter=True)
    assert_equal(weights_in(tmp_path / "out"), load_file(saved / what / "streamed.safetensors"))
    config = json.loads((tmp_path / "out" / "lora_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)


def test_verls_merger_takes_our_metadata(saved, tmp_path):
    """Case B08: r and task arrive, and of an alpha that is no integer the one that our file rounds to."""
    for path in (saved / "fsdp2:model,hf_model" / "actor").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "lora_train_meta.json").unlink()
    save_train_meta(tmp_path, with_lora(qwen2(tied=True), r=4, lora_alpha=6.5))
    assert load_train_meta(tmp_path).lora_alpha == 6.5
    out = tmp_path / "out"
    run("-m", "verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", tmp_path, "--target_dir", out)
    config = json.loads((out / "lora_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 6, "CAUSAL_LM")
