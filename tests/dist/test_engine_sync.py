"""`sync` from a sharded trainer: all ranks end alike, whichever has the engine. Engines only record; dist layer."""

import json
import logging
import os

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import lora_stream
from lora_stream import RankError, SyncError, UnmovedError, engine_side, shards
from tests.dist import sharded
from tests.doubles import Recorder
from tests.models import assert_equal, fill, llama, sent, with_lora

pytestmark = pytest.mark.dist

TRAINED, ALL = 2 * 4, 2 * 9 + 3
TRAINED_BYTES = 2 * 2 * (32 * 32 + 2 * 16 * 32 + 32 * 48)  # q, k, v and down of two layers in bfloat16


def make(layout="by_layer"):
    model = with_lora(llama())
    if layout == "flat":
        return sharded.flat(model)
    sharded.LAYOUTS[layout](model)
    return model


def step(model):
    """Every rank its own rows; what the policy is then, gathered by the stream itself."""
    fill(model)
    return sent(model)


def sync_twice(rank, layout, engines):
    model = make(layout)
    engine = Recorder() if rank in engines else None
    want = sent(model)
    first = lora_stream.sync(model, engine)
    assert first.scope == "all"
    assert len(first.merged) == 6
    if engine is not None:
        assert_equal(engine.weights, want)
    want = step(model)
    second = lora_stream.sync(model, engine)
    assert second.scope == "trained"
    assert second.weight_version == "2"
    assert second.num_bytes == sum(want[name].nbytes for name in second.merged + second.copied)
    assert second.num_bytes + second.num_bytes_left == sum(tensor.nbytes for tensor in want.values())
    if engine is not None:
        assert_equal(engine.weights, want)
        assert [len(load) for load in engine.loads] == [ALL, TRAINED]
    json.dumps(second.to_dict())
    assert "gathered" in str(second)
    assert second.rounding.keys() == set(second.merged)
    return {name: (rounding.changed, rounding.checksum) for name, rounding in second.rounding.items()}, second.made_on


@pytest.mark.parametrize("layout", ["by_layer", "hybrid", "offloaded", "flat"])
@pytest.mark.parametrize("engines", [[0], [1, 3], [0, 1, 2, 3]])
def test_every_engine_holds_the_new_policy_and_every_rank_has_the_report(pool, layout, engines):
    found = pool.run(4, sync_twice, layout, engines)
    assert all(rounding == found[0][0] for rounding, _ in found)


def test_a_report_tells_what_each_rank_made_and_where(pool):
    found = pool.run(2, sync_twice, "by_layer", [0])
    made = [made_on["cpu"] for _, made_on in found]
    assert sum(made) == TRAINED_BYTES
    assert made[0] == made[1]


def fail_and_recover(rank, fail_at, layout):
    model = make(layout)
    engine = Recorder() if rank == 1 else None
    lora_stream.sync(model, engine)
    old = sent(model)
    new = step(model)
    if engine is not None:
        engine.fail_at = fail_at
    with pytest.raises(SyncError, match=rf"at tensor {fail_at + 1} of 8: engine broke") as caught:
        lora_stream.sync(model, engine)
    if rank != 1:
        assert str(caught.value).startswith("on rank 1: sync failed")
    if layout == "flat":
        assert "may hold a mixture" in str(caught.value)
    elif engine is not None:
        assert_equal(engine.weights, old)
        assert "old weights" in str(caught.value)
    report = lora_stream.sync(model, engine)
    assert report.scope == ("all" if layout == "flat" else "trained")
    if engine is not None:
        assert_equal(engine.weights, new)


@pytest.mark.parametrize("layout", ["by_layer", "hybrid", "flat"])
@pytest.mark.parametrize("fail_at", [0, 1, 5])
def test_a_sync_that_fails_in_the_engine_fails_on_all_ranks_and_puts_back_the_old_weights(pool, layout, fail_at):
    pool.run(4, fail_and_recover, fail_at, layout)


def one_of_two_engines_fails(rank):
    model = make()
    engine = Recorder()
    lora_stream.sync(model, engine)
    old = sent(model)
    new = step(model)
    engine.fail_at = 3 if rank == 1 else None
    with pytest.raises(SyncError, match="engine broke; the engine was put back on its old weights"):
        lora_stream.sync(model, engine)
    assert_equal(engine.weights, old if rank == 1 else new)
    newer = step(model)
    lora_stream.sync(model, engine)
    assert_equal(engine.weights, newer)


def test_of_two_engines_the_one_that_failed_is_put_back_and_the_other_goes_on(pool):
    pool.run(2, one_of_two_engines_fails)


def replace_an_engine(rank):
    model = make()
    engine = Recorder()
    lora_stream.sync(model, engine)
    if rank == 1:
        engine = Recorder()
    want = step(model)
    assert lora_stream.sync(model, engine).scope == "all"
    assert_equal(engine.weights, want)
    assert lora_stream.sync(model, engine).scope == "trained"


def test_a_new_engine_on_one_rank_gets_everything_and_so_do_the_others(pool):
    pool.run(2, replace_an_engine)


def adapters_in_turn(rank, layout):
    model = with_lora(llama(), target_modules=["q_proj"])
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=5, target_modules=["down_proj"]))
    fill(model)
    if layout == "flat":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        model = sharded.flat(model)
    else:
        sharded.LAYOUTS[layout](model)
    engine = Recorder() if rank == 1 else None
    for name in ("default", "other", "default", "default"):
        report = lora_stream.sync(model, engine, adapter_name=name)
        want = sent(model, adapter_name=name)
        if engine is not None:
            assert_equal(engine.weights, want)
    assert report.num_bytes_left
    assert not any("down_proj" in name for name in report.copied), "it has been on its base since the sync before"


@pytest.mark.parametrize("layout", ["by_layer", "flat"])
def test_adapters_that_are_synced_in_turn_never_mix(pool, layout):
    """Case N08."""
    pool.run(2, adapters_in_turn, layout)


def layers_in_turn(rank, layout):
    model = llama()
    blocks = list(model.model.layers)
    if layout == "flat":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        for block in blocks:
            fully_shard(block, mesh=sharded.world())
        fully_shard(model, mesh=sharded.world())
    engine = Recorder() if rank == 0 else None

    def train_only(i):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in blocks[i].parameters() if i is not None else ():
            parameter.requires_grad_()

    def sync():
        report = lora_stream.sync(model, engine)
        want = sent(model)
        if engine is not None:
            assert_equal(engine.weights, want)
        return report

    train_only(None)
    sync()
    for i in (0, 1):
        train_only(i)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        model(torch.arange(6)[None]).logits.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        train_only(None)  # for the rollout
        assert sync().scope == "trained"
    assert not sync().copied


@pytest.mark.parametrize("layout", ["by_layer", "flat"])
def test_layers_that_train_in_turn_are_sent_though_all_is_frozen_for_the_rollout(pool, layout):
    """Case N09."""
    pool.run(2, layers_in_turn, layout)


def another_rank_fails(rank):
    """Not the engine but a rank that only takes part: the engine that got a part of the tensors is put back."""
    model = make()
    engine = Recorder() if rank == 0 else None
    lora_stream.sync(model, engine, bucket_bytes=5000)
    old = sent(model)
    new = step(model)
    merge, calls = lora_stream.ops.merge_cast_grouped_, []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no room")
        return merge(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(lora_stream.ops, "merge_cast_grouped_", failing)
        kind, text = (MemoryError, "no room") if rank == 1 else (SyncError, "rank 1 failed before .* put back")
        with pytest.raises(kind, match=text):
            lora_stream.sync(model, engine, bucket_bytes=5000)
    if engine is not None:
        assert_equal(engine.weights, old)
    lora_stream.sync(model, engine)
    if engine is not None:
        assert_equal(engine.weights, new)


def test_a_rank_that_fails_without_an_engine_ends_the_sync_and_the_engine_is_put_back(pool):
    pool.run(2, another_rank_fails)


def move_nothing(rank):
    model = make()
    engine = Recorder() if rank == 0 else None
    lora_stream.sync(model, engine)
    lora_stream.sync(model, engine)  # nothing has moved, so nothing is wrong
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and rank == 1:
                shards.local(parameter).mul_(1 + 2**-23)  # on one rank's rows only
    with pytest.raises(UnmovedError, match="none of the 6 targets has"):
        lora_stream.sync(model, engine)


def test_an_adapter_that_moved_on_one_rank_only_and_changed_nothing_is_an_error_on_all(pool):
    pool.run(2, move_nothing)


def move_a_copy(rank):
    """The head trains without an adapter, and moves on one rank only; the adapters move by less than a rounding step."""
    model = with_lora(llama(), modules_to_save=["lm_head"])
    sharded.by_layer(model)
    engine = Recorder() if rank == 0 else None
    lora_stream.sync(model, engine, rounding="nearest")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                shards.local(parameter).mul_(1 + 2**-23)
            if "lm_head.modules_to_save" in name and rank == 1:
                shards.local(parameter).add_(1.0)
    report = lora_stream.sync(model, engine, rounding="nearest")
    assert len(report.unmoved_targets) == 6


def test_a_trained_head_that_moved_on_another_rank_is_no_silence(pool):
    pool.run(2, move_a_copy)


def no_engine(rank):
    with pytest.raises(ValueError, match="no rank has an engine"):
        lora_stream.sync(make(), None)
    model = with_lora(llama())  # a replica, whose fellow sends
    report = lora_stream.sync(model, None)
    assert (report.num_bytes, report.merged) == (0, ())


def test_a_sync_without_any_engine_is_refused_where_ranks_share_a_model(pool):
    pool.run(2, no_engine)


def same_server(rank):
    model = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_side, "by_url", lambda engine: Recorder())
        with pytest.raises(ValueError, match="several ranks pass the same server .*None on the others"):
            lora_stream.sync(model, "http://127.0.0.1:8000" + "/" * rank)
        lora_stream.sync(model, f"http://127.0.0.1:800{rank}")


def test_one_server_from_several_ranks_is_refused(pool):
    pool.run(2, same_server)


def refused_by_the_engine(rank):
    model = make()
    with pytest.raises(ValueError, match="engine must be a vllm.LLM"):
        lora_stream.sync(model, object() if rank == 1 else None)
    lora_stream.sync(model, Recorder() if rank == 1 else None)


def test_an_engine_that_cannot_be_taken_is_refused_on_all_ranks(pool):
    pool.run(2, refused_by_the_engine)


def lose_a_rank(rank):
    model = make()
    engine = Recorder() if rank == 0 else None
    lora_stream.sync(model, engine, bucket_bytes=5000)
    step(model)
    if rank == 1:
        gather = lora_stream.shards.gather_bytes

        def dying(*args):
            if "adapters" in args[4]:
                os._exit(1)
            return gather(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lora_stream.shards, "gather_bytes", dying)
            lora_stream.sync(model, engine, bucket_bytes=5000)
    with pytest.raises((SyncError, RankError), match="A rank has died"):
        lora_stream.sync(model, engine, bucket_bytes=5000)


def test_when_a_rank_dies_in_a_sync_the_others_say_so_in_time(pool):
    outcomes = pool.outcomes(3, lose_a_rank, limit_s=40)
    assert outcomes[1].died
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].text


def lose_a_rank_at_the_end(rank):
    model = make()
    engine = Recorder() if rank == 0 else None
    lora_stream.sync(model, engine)
    want = step(model)
    exchange = shards.Ranks.exchange

    def dying(self, value, what):
        if "tell" in what and rank == 1:
            os._exit(1)
        return exchange(self, value, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.Ranks, "exchange", dying)
        with pytest.raises(RankError, match="went well on this rank, but of the others that is not known"):
            lora_stream.sync(model, engine)
    if engine is not None:
        assert_equal(engine.weights, want)


def test_when_a_rank_dies_after_the_last_tensor_the_others_say_what_they_know(pool):
    outcomes = pool.outcomes(2, lose_a_rank_at_the_end, limit_s=40)
    assert outcomes[1].died
    assert outcomes[0].error is None, outcomes[0].text


def log_a_sync(rank):
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append((record.levelname, record.getMessage()))

    logger = logging.getLogger("lora_stream")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(keep := Keep())
    model = make()
    try:
        lora_stream.sync(model, Recorder() if rank == 0 else None, onload=lambda: None, offload=lambda: None)
    finally:
        logger.removeHandler(keep)
        logger.setLevel(logging.NOTSET)
    infos = [text for level, text in records if level == "INFO"]
    assert len(infos) == 1
    assert infos[0].startswith("weight version 1: ")
    assert "6 tensors merged and 15 copied" in infos[0]
    debugs = [text for level, text in records if level == "DEBUG"]
    assert len(debugs) == 4
    assert all("MiB resident" in text for text in debugs)


def test_the_log_has_one_line_for_a_sync_and_memory_around_onload_and_offload(pool):
    pool.run(2, log_a_sync)
