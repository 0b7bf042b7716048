"""Checkpoints of sharded trainers: written by real ranks in the documented formats, merged by one process, exported by all.
dist layer."""

import datetime
import json
import os
import shutil
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType
from transformers import AutoModelForCausalLM

import lora_stream
from lora_stream import RankError
from lora_stream.checkpoint import export, load_train_meta, merge, save_train_meta, writing
from tests.architectures import ARCHITECTURES, build
from tests.checkpoints import save_config, weights_in
from tests.dist import sharded
from tests.dist.ranks import TIMEOUT_S
from tests.models import assert_equal, expert_lora, llama, with_lora

pytestmark = pytest.mark.dist


def make(kind):
    torch.manual_seed(1130)  # the same on every rank, whatever torch has drawn
    if kind == "experts":
        _, modules, parameters = ARCHITECTURES["qwen3_moe"]
        return with_lora(build("qwen3_moe"), r=3, lora_alpha=5, target_modules=modules, target_parameters=parameters)
    if kind == "heads":
        return with_lora(llama(tied=True), target_modules=["q_proj", "embed_tokens"], modules_to_save=["norm"])
    return with_lora(llama(), r=5, lora_alpha=6.5, use_rslora=True)


def save_by_verls_format(rank, directory, kind, layout, only_lora):
    """Its model files, its config and our metadata. Returns what the stream of the live model yields."""
    model = make(kind)
    untie = kind == "heads"
    if layout == "flat":
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        wrapped = sharded.flat(model, device_mesh=mesh)
        with FullyShardedDataParallel.state_dict_type(
            wrapped, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)
        ):
            state = wrapped.state_dict()
    else:
        sharded.LAYOUTS[layout](model)
        wrapped, state = model, model.state_dict()
    if only_lora:
        state = {name: tensor for name, tensor in state.items() if "lora_" in name}
    size = dist.get_world_size()
    torch.save(state, directory / f"model_world_size_{size}_rank_{rank}.pt")
    if rank == 0:
        (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": size}))
        save_config(model, directory / "huggingface")
    save_train_meta(directory, wrapped)
    assert load_train_meta(directory).r == model.peft_config["default"].r  # on every rank, as soon as it returns
    return dict(lora_stream.stream(wrapped, untie=untie))


def expect(directory, out, want, **kwargs):
    merge(directory, out, **kwargs)
    found = weights_in(out)
    assert_equal(found, want)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", ["linear", "experts", "heads"])
def test_shards_of_any_number_of_ranks_merge_to_what_the_trainer_streams(pool, num_ranks, kind, tmp_path):
    """Uneven and empty shards too."""
    want = pool.run(num_ranks, save_by_verls_format, tmp_path, kind, "by_layer", False)[0]
    expect(tmp_path, tmp_path.parent / "merged", want, untie=kind == "heads")
    assert AutoModelForCausalLM.from_pretrained(tmp_path.parent / "merged").dtype == torch.bfloat16
    shutil.rmtree(tmp_path.parent / "merged")


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [(4, "hybrid"), (2, "ignored_adapters"), (2, "by_columns"), (2, "offloaded"), (2, "keep_gathered"), (2, "flat")],
)
def test_shards_of_other_layouts(pool, num_ranks, layout, tmp_path):
    """Two replicas, plain tensors beside sharded ones, columns, FSDP1."""
    directory = tmp_path / "actor"
    directory.mkdir()
    want = pool.run(num_ranks, save_by_verls_format, directory, "linear", layout, False)[0]
    expect(directory, tmp_path / "out", want)


def test_shards_of_the_adapter_alone_and_their_base(pool, tmp_path):
    directory = tmp_path / "actor"
    directory.mkdir()
    want = pool.run(2, save_by_verls_format, directory, "linear", "by_layer", True)[0]
    torch.manual_seed(1130)
    llama().save_pretrained(tmp_path / "base")
    expect(directory, tmp_path / "out", want, base=tmp_path / "base")
    merge(directory, tmp_path / "adapter", base=tmp_path / "base", adapter_only=True)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (5, 6.5, True)


def save_distributed(rank, directory, kind):
    model = make(kind)
    sharded.by_layer(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "step": 7}, checkpoint_id=str(directory))
    if rank == 0:
        save_config(model, directory / "huggingface")
    save_train_meta(directory, model)
    return dict(lora_stream.stream(model))


@pytest.mark.parametrize(("num_ranks", "kind"), [(3, "linear"), (2, "experts")])
def test_a_distributed_checkpoint_of_several_ranks(pool, num_ranks, kind, tmp_path):
    want = pool.run(num_ranks, save_distributed, tmp_path / "dcp", kind)[0]
    expect(tmp_path / "dcp", tmp_path / "out", want)
    next((tmp_path / "dcp").glob("__1_*.distcp")).unlink()
    with pytest.raises(ValueError, match=r"__1_0\.distcp: is missing"):
        merge(tmp_path / "dcp", tmp_path / "again")


def test_shards_that_are_missing_or_of_another_run_are_refused_by_name(pool, tmp_path):
    directory = tmp_path / "actor"
    directory.mkdir()
    pool.run(2, save_by_verls_format, directory, "linear", "by_layer", False)
    other = tmp_path / "other"
    other.mkdir()
    pool.run(2, save_by_verls_format, other, "heads", "by_layer", False)
    three = tmp_path / "three"
    three.mkdir()
    pool.run(3, save_by_verls_format, three, "linear", "by_layer", False)
    shard = directory / "model_world_size_2_rank_1.pt"

    def refused(match):
        with pytest.raises(ValueError, match=match):
            merge(directory, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    kept = shard.read_bytes()
    shard.write_bytes((other / shard.name).read_bytes())
    refused("is in only one of it and model_world_size_2_rank_0.pt; the shards are not of one save")
    shard.write_bytes((three / "model_world_size_3_rank_1.pt").read_bytes())
    refused("not of one save")
    shard.write_bytes((directory / "model_world_size_2_rank_0.pt").read_bytes())
    refused(r"rank 1 holds .* of it, expected")  # a copy of the other shard: its rows are too many
    shard.unlink()
    refused(r"model_world_size_2_rank_1\.pt: is missing; 1 of 2")
    shard.write_bytes(kept)
    config = json.loads((directory / "fsdp_config.json").read_text())
    (directory / "fsdp_config.json").write_text(json.dumps({**config, "world_size": 4}))
    refused("world_size 4, but the shards are of 2 ranks")


def cut_twice(rank, directory):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    state = {
        f"base_model.model.model.layers.{i}.self_attn.{name}": distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
        for i in range(2)
        for name in ("q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight")
    }
    torch.save(state, directory / f"model_world_size_4_rank_{rank}.pt")


def test_shards_that_are_cut_in_two_ways_are_refused(pool, tmp_path):
    pool.run(4, cut_twice, tmp_path)
    with pytest.raises(ValueError, match="only one Shard, beside Replicate, can be put together here"):
        merge(tmp_path, tmp_path.parent / "out", rank=4, lora_alpha=8)


# -- metadata ------------------------------------------------------------------------------------------------------------


def one_calls(rank, directory):
    model = with_lora(llama())
    if rank == 0:
        save_train_meta(directory / "first", model)
    if rank == 1:
        save_train_meta(directory / "second", model, is_writer=True)
    return sorted(os.listdir(directory))


def test_one_rank_may_call_alone(pool, tmp_path):
    """Nobody waits for ranks that do not call: rank 0, or whoever is told to."""
    pool.run(3, one_calls, tmp_path)
    assert load_train_meta(tmp_path / "first") == load_train_meta(tmp_path / "second")


def all_call(rank, directory, late):
    model = with_lora(llama())
    if rank == late:
        time.sleep(1)
    written = []
    real = os.replace
    os.replace = lambda *args: (written.append(args), real(*args))[1]
    try:
        save_train_meta(directory, model)
    finally:
        os.replace = real
    return len(written), load_train_meta(directory).r


@pytest.mark.parametrize("late", [0, 1])
def test_of_all_ranks_one_writes_and_the_others_return_when_it_has(pool, late, tmp_path):
    """Case B43: a single writer; no rank goes on before the file is there."""
    found = pool.run(3, all_call, tmp_path / "made", late)
    assert [count for count, _ in found] == [1, 0, 0]
    assert {r for _, r in found} == {4}
    assert os.listdir(tmp_path / "made") == ["lora_train_meta.json"]


def writer_fails(rank, directory):
    save_train_meta(directory / "file" / "inside", with_lora(llama()))


def test_a_writer_that_fails_tells_the_others(pool, tmp_path):
    (tmp_path / "file").write_text("")
    outcomes = pool.outcomes(2, writer_fails, tmp_path)
    assert isinstance(outcomes[0].error, OSError)
    assert isinstance(outcomes[1].error, RankError)
    assert "the rank that writes it could not" in outcomes[1].text
    assert max(outcome.seconds for outcome in outcomes) < TIMEOUT_S


def writes_again(rank, directory):
    """A failure, then a retry; a save, then the same once more after the directory is gone. Rank 0, which writes, is late."""
    model = with_lora(llama())
    found = []

    def save():
        if rank == 0:
            time.sleep(1)
        save_train_meta(directory / "made", model)
        found.append((directory / "made" / "lora_train_meta.json").exists())
        dist.barrier()

    if rank == 0:
        directory.mkdir(exist_ok=True)
        (directory / "made").write_text("in the way")
    dist.barrier()
    with pytest.raises((OSError, RankError)):
        save()
    dist.barrier()
    if rank == 0:
        (directory / "made").unlink()
    save()
    for _ in range(2):
        if rank == 0:
            shutil.rmtree(directory / "made")
        dist.barrier()
        save()
    return found


def test_each_writing_is_waited_for_anew(pool, tmp_path):
    """Case N05: neither a retry nor a second save to the same place goes by what the first told."""
    assert pool.run(3, writes_again, tmp_path) == [[True] * 3] * 3


def writer_stays_away(rank, directory):
    dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=2))
    if rank == 1:
        save_train_meta(directory, with_lora(llama()))


def test_a_writer_that_stays_away_is_named_within_the_timeout(pool, tmp_path):
    outcomes = pool.outcomes(2, writer_stays_away, tmp_path)
    assert "is_writer= says which does" in outcomes[1].text


# -- export --------------------------------------------------------------------------------------------------------------


def export_it(rank, directory, kind, layout, kwargs):
    model = make(kind)
    untie = kind == "heads"
    want = dict(lora_stream.stream(model, untie=untie))
    wrapped = sharded.flat(model) if layout == "flat" else model
    if layout != "flat":
        sharded.LAYOUTS[layout](model)
    report = export(wrapped, directory, untie=untie, max_shard_size="15KB", **kwargs)
    return want, report and report.to_dict()


@pytest.mark.parametrize(
    ("num_ranks", "kind", "layout"),
    [(1, "linear", "by_layer"), (2, "linear", "by_layer"), (3, "experts", "by_layer"), (2, "heads", "hybrid"), (2, "linear", "flat")],
)
def test_ranks_export_what_they_stream(pool, num_ranks, kind, layout, tmp_path):
    out = tmp_path / "out"
    (want, report), *others = pool.run(num_ranks, export_it, out, kind, layout, {})
    assert_equal(weights_in(out), want)
    assert all(other is None for _, other in others)
    assert report["files"] == sorted(path.name for path in out.iterdir())
    assert report["num_bytes"] == sum(tensor.nbytes for tensor in want.values())
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.tie_word_embeddings is False
    assert list(tmp_path.iterdir()) == [out]


def test_another_rank_may_be_the_one_that_writes(pool, tmp_path):
    found = pool.run(2, export_as, tmp_path / "out", 1)
    assert [report is not None for report in found] == [False, True]
    assert weights_in(tmp_path / "out")


def export_as(rank, directory, writer):
    model = make("linear")
    sharded.by_layer(model)
    report = export(model, directory, is_writer=rank == writer)
    return report and report.to_dict()


def export_onto(rank, directory, how):
    model = make("linear")
    if how == "not finite" and rank == 1:
        with torch.no_grad():
            model.get_base_model().model.layers[1].mlp.down_proj.lora_B["default"].weight[-1, 0] = float("nan")
    sharded.by_layer(model)
    if how == "full" and rank == 0:

        def fail(descriptor, content, at):
            raise OSError(28, "No space left on device")

        real, writing.os.pwrite = writing.os.pwrite, fail
    try:
        export(model, directory)
    finally:
        if how == "full" and rank == 0:
            writing.os.pwrite = real
        dist.barrier()  # the ranks are where they should be: the next thing that they do together works


@pytest.mark.parametrize(("how", "part"), [("used", "is there already"), ("full", "No space left"), ("not finite", "not finite")])
def test_an_export_that_fails_fails_on_all_ranks_and_leaves_nothing(pool, how, part, tmp_path):
    out = tmp_path / "out"
    if how == "used":
        out.mkdir()
        (out / "mine").write_text("")
    outcomes = pool.outcomes(2, export_onto, out, how)
    assert all(part in outcome.text for outcome in outcomes)
    assert max(outcome.seconds for outcome in outcomes) < TIMEOUT_S
    assert os.listdir(tmp_path) == (["out"] if how == "used" else [])


def test_experts_of_a_plain_module_have_no_checkpoint():
    from tests.models import MoE

    with pytest.raises(ValueError, match="has no transformers config"):
        export(expert_lora(MoE()), "/nonexistent/never")
