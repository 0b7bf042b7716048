"""Ranks that disagree, stop, fail, die or stay away: all get out, with an error that says why or a finished pass. dist layer.

Case B30. A collective here gives up after TIMEOUT_S.
"""

import gc
import os
import signal
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lora_stream
from lora_stream import RankError, gathering, ops, shards
from lora_stream.merged_weights import MergedWeights
from tests.dist import sharded
from tests.dist.ranks import TIMEOUT_S
from tests.doubles import Loads, Recorder
from tests.models import assert_equal, fill, llama, with_lora

pytestmark = pytest.mark.dist

NUM_TENSORS = 21
BUCKET_BYTES = 5000


def make(**kwargs):
    """A model sharded over all ranks, and what it must yield."""
    model = with_lora(llama())
    want = dict(lora_stream.stream(model))
    sharded.by_layer(model, **kwargs)
    return model, want


def weights_of(model, **kwargs):
    return MergedWeights(model, bucket_bytes=BUCKET_BYTES, **kwargs)


def assert_next_works(model, want):
    assert_equal(dict(weights_of(model)), want)


# -- a rank that stops early ---------------------------------------------------------------------------------------------



def stop_early(rank, way, num_taken):
    model, want = make()
    loads = Loads()
    stream = iter(weights_of(model, onload=loads.onload, offload=loads.offload))
    if rank == 0:
        WAYS[way](stream, num_taken)
        del stream
    else:
        assert_equal(dict(stream), want)
    assert loads.events == ["onload", "offload"]
    assert_next_works(model, want)


def close(stream, num_taken):
    for _ in range(num_taken):
        next(stream)
    stream.close()
    stream.close()


def leave(stream, num_taken):
    with stream:
        for _ in range(num_taken):
            next(stream)


def drop(stream, num_taken):
    for _ in range(num_taken):
        next(stream)


def raise_in_the_consumer(stream, num_taken):
    def consume():
        with stream:
            for i, _ in enumerate(stream):
                if i == num_taken - 1:
                    raise KeyError("consumer")

    with pytest.raises(KeyError):
        consume()


def interrupt(stream, num_taken):
    """Ctrl-C in the consumer, at any point of it."""
    with pytest.raises(KeyboardInterrupt), stream:
        for i, _ in enumerate(stream):
            if i == num_taken - 1:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)


WAYS = {f.__name__: f for f in (close, leave, drop, raise_in_the_consumer, interrupt)}


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_stops_early_takes_part_for_the_others_until_they_have_all(pool, way):
    """Case B30."""
    for num_taken in (1, 3, NUM_TENSORS - 1):
        pool.run(2, stop_early, way, num_taken)


def sleep_between(rank):
    model, want = make()
    got = {}
    for name, tensor in weights_of(model):
        got[name] = tensor
        if rank == 0 and len(got) <= 2:
            time.sleep(1.5)
    assert_equal(got, want)


def test_a_slow_consumer_holds_nobody_up_for_good(pool):
    pool.run(3, sleep_between)


def interrupted_in_a_gather(rank):
    """An interrupt that comes while a bucket is gathered: between its two collectives it would leave the others."""
    model, want = make()
    gather = shards.gather_bytes
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            calls = []

            def interrupting(*args):
                calls.append(args)
                if len(calls) == 3:  # the adapters of the second bucket
                    os.kill(os.getpid(), signal.SIGINT)
                return gather(*args)

            patch.setattr(gathering.shards, "gather_bytes", interrupting)
            with pytest.raises(KeyboardInterrupt):
                list(weights_of(model))
        else:
            try:
                list(weights_of(model))
            except RankError as error:
                assert "rank 0 failed before it could send its part of" in str(error)
    assert_next_works(model, want)


def test_an_interrupt_inside_a_gather_waits_for_its_end(pool):
    pool.run(2, interrupted_in_a_gather)


def never_begun(rank):
    """Asking for metadata is no pass: nobody waits for it, not even where a forward has left the root gathered."""
    model, want = make()
    with torch.no_grad():
        model(torch.arange(5).unsqueeze(0))
    if rank == 0:
        stream = lora_stream.stream(model)
        assert len(stream.metadata()) == NUM_TENSORS
        del stream
        weights_of(model).metadata()
    assert_next_works(model, want)


def test_a_pass_that_was_never_begun_needs_no_other_rank(pool):
    pool.run(2, never_begun)


def read_in_a_thread(rank):
    model, want = make()
    got = {}
    thread = threading.Thread(target=lambda: got.update(weights_of(model)))
    thread.start()
    thread.join()
    assert_equal(got, want)


def test_a_pass_may_be_read_in_another_thread(pool):
    pool.run(2, read_in_a_thread)


# -- ranks that fail -----------------------------------------------------------------------------------------------------


def one_refuses(rank, entry):
    model, want = make()
    with torch.no_grad():
        model(torch.arange(5).unsqueeze(0))  # leaves the root gathered
    if rank == 1:
        model.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match="adapters are disabled") as caught:
        ENTRIES[entry](model)
    if rank != 1:
        assert str(caught.value).startswith("rank 1 could not")
    model.base_model.enable_adapter_layers()
    assert_next_works(model, want)


def sync_to_rank_0(model):
    return lora_stream.sync(model, Recorder() if dist.get_rank() == 0 else None)



ENTRIES = {
    "stream": lambda model: list(lora_stream.stream(model)),
    "MergedWeights": lambda model: list(MergedWeights(model)),
    "sync": sync_to_rank_0,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_one_rank_refuses_is_refused_by_all_with_its_reason(pool, entry):
    """Edge case 55."""
    pool.run(3, one_refuses, entry)


def refuse_a_later_pass(rank):
    model, want = make()
    weights = weights_of(model)
    if rank == 0:
        model.base_model.disable_adapter_layers()
    with pytest.raises(ValueError, match="adapters are disabled"):
        list(weights)
    model.base_model.enable_adapter_layers()
    assert_equal(dict(weights), want)


def test_a_refusal_of_a_later_pass_reaches_all(pool):
    pool.run(2, refuse_a_later_pass)


def change_targets(rank):
    model, _ = make()
    weights = weights_of(model, scope="trained")
    if rank == 1:
        model.add_adapter("more", LoraConfig(r=2, target_modules=["gate_proj"]))
        model.set_adapter("more")
    with pytest.raises(ValueError, match="make a new MergedWeights"):
        list(weights)
    model.set_adapter("default")
    assert len(dict(weights)) == 8


def test_a_model_that_changed_its_targets_on_one_rank_is_refused_on_all(pool):
    pool.run(2, change_targets)


def disagree(rank, about):
    model, want = make()
    kwargs = {}
    if about == "scaling" and rank == 1:
        model.base_model.set_adapter("default")
        layer = model.get_base_model().model.layers[1].mlp.down_proj
        before = dict(layer.scaling)
        layer.scaling["default"] = 0.25
    if about == "bucket" and rank == 1:
        kwargs = {"bucket_bytes": 4096}
    if about == "dtype" and rank == 1:
        kwargs = {"wire_dtype": torch.float32}
    if about == "scope" and rank == 1:
        kwargs = {"scope": "trained"}
    if about == "seed":
        kwargs = {"rounding": "dither", "seed": rank}
    if about == "rounding" and rank == 1:
        kwargs = {"rounding": "dither"}
    with pytest.raises(RankError, match=ABOUT[about]):
        list(lora_stream.stream(model, **kwargs))
    if about == "scaling" and rank == 1:
        layer.scaling.update(before)
    assert_next_works(model, want)


ABOUT = {
    "scaling": r"different things: rank 0 has .*layers\.1\.mlp\.down_proj.* times 8\.0.*; rank 1 has .* times 0\.25",
    "bucket": r"rank 0 has buckets of \d+ bytes; rank 1 has buckets of 4096 bytes",
    "dtype": r"rank 0 has .*embed_tokens.*bfloat16.*; rank 1 has .*float32",
    "seed": r"rank 0 has rounding 'dither' with seed 0, .*; rank 1 has rounding 'dither' with seed 1",
    "rounding": r"rank 0 has rounding 'nearest' with .*; rank 1 has rounding 'dither' with",
    "scope": r"rank 0 has .*embed_tokens.*; rank 1 has .*q_proj",
}


@pytest.mark.parametrize("about", ABOUT)
def test_ranks_that_would_stream_different_things_are_told_the_first_difference(pool, about):
    pool.run(2, disagree, about)


def stay_away(rank):
    model, _ = make()
    if rank == 0:
        with pytest.raises(RankError, match=r"every rank of the trainer must call stream, sync or iter together"):
            list(lora_stream.stream(model))
    else:
        time.sleep(TIMEOUT_S + 1)


def test_a_rank_that_calls_alone_is_told_that_all_must(pool):
    """Case B30."""
    outcomes = pool.outcomes(2, stay_away)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes
    assert outcomes[0].seconds < TIMEOUT_S + 4


def die(rank, num_taken):
    model, _ = make()
    stream = iter(weights_of(model))
    if rank == 1:
        for _ in range(num_taken):
            next(stream)
        os._exit(1)
    loads = Loads()
    stream = iter(weights_of(model, offload=loads.offload))
    with pytest.raises(RankError, match=r"could not gather .*(base_model|layers).* A rank has died"):
        list(stream)
    assert loads.events == ["offload"]


def test_when_a_rank_dies_the_others_fail_and_say_at_which_tensor(pool):
    outcomes = pool.outcomes(3, die, 4, limit_s=TIMEOUT_S + 10)
    assert outcomes[1].died
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].text
        assert outcomes[rank].seconds < TIMEOUT_S + 2


def fail_in_a_merge(rank):
    model, want = make()
    merge = ops.merge_cast_grouped_
    calls = []

    def failing(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError("no room for the merge")
        return merge(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(ops, "merge_cast_grouped_", failing)
        got = {}
        kind, text = (MemoryError, "no room") if rank == 1 else (RankError, "rank 1 failed before it could send its part")
        with pytest.raises(kind, match=text):
            for name, tensor in weights_of(model):
                got[name] = tensor
    assert 0 < len(got) < NUM_TENSORS
    assert_equal(got, {name: want[name] for name in got})  # nothing of the bucket that failed
    assert_next_works(model, want)


def test_a_rank_that_fails_to_merge_tells_the_others_in_the_gather_that_they_wait_for(pool):
    pool.run(3, fail_in_a_merge)


def not_finite(rank):
    model, _ = make()
    lora_B = shards.local(model.get_base_model().model.layers[1].self_attn.v_proj.lora_B["default"].weight)
    if rank == 1:
        lora_B[0, 1] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj.*not finite"):
        list(weights_of(model))
    if rank == 1:
        lora_B[0, 1] = 0.0
    list(weights_of(model))


def copy_not_finite(rank, layout):
    model = with_lora(llama())
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.up_proj.weight[-1, -1] = float("inf")  # the last rank's
    if layout == "flat":
        model = sharded.flat(model)
    else:
        sharded.LAYOUTS[layout](model)
    with pytest.raises(ValueError, match=r"layers\.1\..*mlp\.up_proj.*not finite"):
        list(lora_stream.stream(model))
    sent = dict(lora_stream.stream(model, check_finite=False))
    assert not sent["model.layers.1.mlp.up_proj.weight"].isfinite().all()


@pytest.mark.parametrize("layout", ["by_layer", "by_columns", "flat"])
def test_a_copy_that_is_not_finite_on_one_ranks_part_is_refused_on_all_that_receive_it(pool, layout):
    """Case N10: of buckets that were gathered."""
    pool.run(2, copy_not_finite, layout)


def test_a_delta_that_is_not_finite_on_one_ranks_rows_is_refused_on_all_that_receive_it(pool):
    pool.run(2, not_finite)


def step_in_between(rank):
    model, _ = make()
    stream = iter(weights_of(model))
    next(stream)
    if rank == 0:
        for parameter in model.parameters():
            if parameter.requires_grad:
                with torch.no_grad():
                    parameter.add_(1.0)
        with pytest.raises(RuntimeError, match="were written to"):
            list(stream)
    else:
        with pytest.raises(RankError, match="rank 0 failed"):
            list(stream)


def test_weights_that_change_during_a_pass_on_one_rank_end_it_on_all(pool):
    pool.run(2, step_in_between)


# -- who receives --------------------------------------------------------------------------------------------------------


def to_senders(rank, senders, layout):
    model = with_lora(llama())
    want = dict(lora_stream.stream(model))
    sharded.LAYOUTS[layout](model)
    kwargs = {} if senders == [0] else {"is_sender": rank in senders}
    stream = lora_stream.stream(model, gather="sender", bucket_bytes=BUCKET_BYTES, **kwargs)
    got = dict(stream)
    assert_equal(got, want if rank in senders else {})
    if rank not in senders:
        whole = sum(tensor.nbytes for tensor in want.values())
        assert stream.stats.traffic.gathered < whole / 4, "adapters only"
        assert stream.stats.peak_staging_bytes == 0
    return stream.stats.traffic.made_on.get("cpu", 0), stream.stats.traffic.gathered


@pytest.mark.parametrize("layout", ["by_layer", "hybrid", "ignored_base", "layers_only"])
@pytest.mark.parametrize("senders", [[0], [3], [0, 2], [1, 2, 3]])
def test_each_sender_gets_everything_and_the_others_nothing(pool, senders, layout):
    found = pool.run(4, to_senders, senders, layout)
    if layout == "hybrid" and senders == [0]:  # (0, 1) and (2, 3) hold the same: the second replica has nothing to do
        assert found[2:] == [(0, 0), (0, 0)]
        assert all(made > 0 < gathered for made, gathered in found[:2])


def to_nobody(rank):
    model, want = make()
    with pytest.raises(ValueError, match="pass is_sender=True on the ranks that send"):
        list(lora_stream.stream(model, gather="sender", is_sender=False))
    assert_next_works(model, want)
    replica = with_lora(llama())
    assert list(lora_stream.stream(replica, gather="sender", is_sender=False)) == []


def test_a_pass_that_nobody_receives_is_refused(pool):
    pool.run(2, to_nobody)


def interrupted_while_agreeing(rank):
    model, want = make()
    exchange = shards.Ranks.exchange

    def interrupting(self, value, what):
        found = exchange(self, value, what)
        os.kill(os.getpid(), signal.SIGINT)
        return found

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(shards.Ranks, "exchange", interrupting)
        with pytest.raises(KeyboardInterrupt if rank == 0 else RankError):
            list(weights_of(model))
    assert_next_works(model, want)


def test_an_interrupt_right_after_the_ranks_agreed_leaves_nobody_waiting(pool):
    pool.run(2, interrupted_while_agreeing)


def on_a_part_of_the_world(rank):
    """Ranks 1 and 2 of three hold the model; rank 0 has nothing to do with it."""
    mesh = dist.DeviceMesh("cpu", [1, 2])
    if rank == 0:
        return
    model = with_lora(llama())
    want = dict(lora_stream.stream(model))
    sharded.by_layer(model, mesh=mesh)
    assert_equal(dict(weights_of(model)), want)
    assert_equal(dict(weights_of(model, gather="sender")), want if rank == 1 else {})


def test_a_model_may_be_sharded_over_a_part_of_the_world(pool):
    pool.run(3, on_a_part_of_the_world)


@pytest.mark.parametrize(("kwargs", "text"), [({"gather": "some"}, 'gather must be "all" or "sender"')])
def test_an_unknown_way_to_gather_is_refused(kwargs, text):
    with pytest.raises(ValueError, match=text):
        lora_stream.stream(with_lora(llama()), **kwargs)


# -- memory --------------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """Bytes of the memory that torch's operations made and that still exists, and the most there was."""

    def __init__(self, model):
        super().__init__()
        self.now = self.peak = 0
        self._known = {shards.local(p).untyped_storage()._cdata for p in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return out

    def _free(self, key, num_bytes):
        self._known.discard(key)
        self.now -= num_bytes


def peak_of_a_pass(rank, gather, vocab_size, bucket_bytes):
    model = with_lora(llama(hidden_size=64, intermediate_size=160, vocab_size=vocab_size))
    sharded.by_layer(model)
    weights = MergedWeights(model, bucket_bytes=bucket_bytes, gather=gather)
    with Alive(model) as alive:
        for item in weights:
            del item
    for _ in range(100):  # gloo's threads let go of what they have sent a moment later
        time.sleep(0.01 * (alive.now > 4096))
    assert alive.now <= 4096, "all of it was given back"
    sizes = [meta.num_bytes for meta in weights.metadata()]
    assert sum(sizes) > 2.5 * bucket_bytes, "the bound says something"
    return alive.peak, max(sizes)


@pytest.mark.parametrize("gather", ["all", "sender"])
@pytest.mark.parametrize(("vocab_size", "bucket_bytes"), [(503, 32 * 1024), (61, 64 * 1024)])
def test_memory_is_a_bucket_and_what_is_handed_over(pool, gather, vocab_size, bucket_bytes):
    """Within the two buckets and the largest tensor that are promised. A tensor that is larger than a bucket is one."""
    found = pool.run(2, peak_of_a_pass, gather, vocab_size, bucket_bytes)
    for rank, (peak, largest) in enumerate(found):
        bucket = max(bucket_bytes, largest)
        if gather == "all" or rank == 0:
            assert bucket < peak <= 1.1 * bucket + largest + 8192
        else:
            assert peak < 0.7 * bucket, "its own rows and the adapters, no whole bucket"


def a_hundred_passes(rank):
    model, _ = make()
    weights = weights_of(model)

    def resident():
        gc.collect()
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(20):
        list(weights)
    before, objects = resident(), len(gc.get_objects())
    for _ in range(100):
        fill(model)
        list(weights)
    assert resident() - before < 4 << 20
    assert len(gc.get_objects()) - objects < 2000


def test_a_hundred_passes_grow_nothing(pool):
    pool.run(2, a_hundred_passes)
