"""`sync` to an engine in other processes: the order of the calls around an update, and every way in which the engine can
behave badly. Unit layer: the engine is a few threads that speak the backend's protocol; the real one is in tests/vllm."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

import lora_stream
from lora_stream.ring import Receiver
from lora_stream.vllm import wire
from tests.models import assert_equal, fill, llama, sent, with_lora


class Worker:
    """One worker: takes tensors out of the ring as worker.py does."""

    def __init__(self, instance):
        self.weights = {}
        self.receiver = None
        self.paused = False
        self.num_updates = 0
        self.is_mixture = False
        self.instance = instance

    def init(self, num_workers, is_open, region, question, manifest=None, in_place=False, paused=None, refuse=None):
        if self.receiver is None or self.receiver.name != region:
            try:
                self.receiver = Receiver(region)
            except OSError:
                return  # as a worker among several
        answer = {"question": question, "is_open": is_open}
        if paused is not None:
            self.paused = paused
        elif manifest is not None:
            answer |= {"refused": refuse} if refuse is not None else {}
        else:
            answer |= {
                "dtype": "bfloat16",
                "fused_modules": [["q_proj", "k_proj", "v_proj"]],
                "fingerprint": self.instance,
                "num_updates": self.num_updates,
                "is_mixture": self.is_mixture,
                "is_paused_by_sender": self.paused,
                "num_workers": num_workers,
            }
        self.receiver.post(answer)

    def update(self, info, fail_at, mute):
        answer = {"generation": info["generation"]}
        try:
            metadata = wire.decode(info["manifest"])
            self.receiver.accept(info["generation"], info["first"])
            for i, (name, tensor) in enumerate(self.receiver.tensors(metadata, deadline_s=info["deadline_s"])):
                if i == fail_at:
                    raise MemoryError("no room")
                self.weights[name] = tensor.clone()
                del tensor
        except Exception as error:
            self.receiver.post(answer | {"failed": str(error)})
            self.receiver.abort(info["generation"], str(error))
        else:
            self.num_updates += 1
            if not mute:
                self.receiver.post(answer | {"seconds": 0.5, "seconds_waited": 0.25})


class Engine:
    """vLLM's four calls and what is around them, and a list of what was called."""

    def __init__(self, num_workers=1):
        self.calls = []
        self.workers = [Worker(["engine", i]) for i in range(num_workers)]
        self.workers_of_one = num_workers
        self.is_still = False
        self.hang = None  # "before accepting" or "after loading"
        self.fail_at = None
        self.refuse = None
        self.silent = False
        self.mute = False
        self.gone = False
        self.broken = set()
        self.cache_is_free = True
        self.is_active = False  # as vLLM keeps account of an update

    def _call(self, name):
        self.calls.append(name)
        if name in self.broken:
            raise RuntimeError(f"{name} is broken")

    def init_weight_transfer_engine(self, init_info):
        kind = "check" if "manifest" in init_info else "tell" if init_info.get("paused") is not None else "describe"
        self._call(f"{kind} {init_info['paused']}" if kind == "tell" else kind)
        for worker in self.workers:
            worker.init(self.workers_of_one, self.is_active, **init_info, refuse=self.refuse)

    def start_weight_update(self):
        self._call("start")
        assert not self.is_active, "start_weight_update called while a weight update is already active"
        self.is_active = True

    def update_weights(self, update_info):
        self._call("update")
        assert self.is_active, "start_weight_update must be called before update_weights"
        if self.gone:
            raise ConnectionError("connection refused")
        if self.hang == "before accepting":
            time.sleep(3)
            return
        if self.silent:
            return
        threads = [
            threading.Thread(
                target=worker.update,
                args=(update_info, self.fail_at if worker is self.workers[0] else None, self.mute),
            )
            for worker in self.workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.hang == "after loading":
            time.sleep(3)

    def finish_weight_update(self, weight_version=None):
        self._call(f"finish {weight_version}")
        assert self.is_active, "finish_weight_update called without a matching start_weight_update"
        self.is_active = False

    def is_paused(self):
        return self.is_still

    def pause(self):
        self._call("pause")
        self.is_still = True

    def resume(self):
        self._call("resume")
        self.is_still = False

    def reset_prefix_cache(self):
        self._call("reset")
        return self.cache_is_free


@pytest.fixture
def model():
    return with_lora(llama(tied=True))


def sync(model, engine, **kwargs):
    return lora_stream.sync(model, engine, **{"deadline_s": 20, "staging_bytes": 8 * 4096, **kwargs})


def test_all_workers_get_the_policy_and_the_calls_come_in_order(model):
    engine = Engine(num_workers=3)
    first = sync(model, engine)
    assert not list(Path("/dev/shm").glob(f"lora_stream-{os.getpid()}-*")), "the ring has a name for attaching only"
    assert engine.calls == [
        *("describe", "check", "tell True", "pause", "start", "update", "finish 1", "reset", "resume"),
        *("tell False", "describe"),
    ]
    for worker in engine.workers:
        assert_equal(worker.weights, sent(model))
    assert first.seconds_loading == 0.25
    assert first.peak_staging_bytes >= 8 * 4096
    fill(model)
    engine.calls.clear()
    second = sync(model, engine, weight_version="step 9")
    assert engine.calls == [
        *("describe", "check", "tell True", "pause", "start", "update", "finish step 9", "reset", "resume"),
        *("tell False", "describe"),
    ]
    assert (first.scope, second.scope) == ("all", "trained")
    for worker in engine.workers:
        assert_equal(worker.weights, sent(model))


def test_an_engine_that_is_still_already_is_left_so(model):
    engine = Engine()
    engine.is_still = True
    sync(model, engine)
    assert not {"pause", "resume", "tell True"} & set(engine.calls)


def test_the_pause_of_a_sender_that_died_is_ended(model):
    engine = Engine()
    engine.is_still = True
    engine.workers[0].paused = True
    sync(model, engine)
    assert "pause" not in engine.calls
    assert engine.calls[-3:] == ["resume", "tell False", "describe"]


@pytest.mark.parametrize("left", ["an update", "a mixture", "nothing"])
def test_base_loaded_counts_only_for_an_engine_that_nobody_has_written_to(model, left):
    engine = Engine()
    engine.workers[0].num_updates = int(left == "an update")
    engine.workers[0].is_mixture = left == "a mixture"
    assert sync(model, engine, base_loaded=True).scope == ("trained" if left == "nothing" else "all")


def test_an_engine_that_was_restarted_gets_a_new_ring_and_everything(model):
    engine = Engine()
    sync(model, engine)
    engine.workers = [Worker(["restarted", 0])]
    fill(model)
    assert sync(model, engine).scope == "all"
    assert_equal(engine.workers[0].weights, sent(model))


def test_an_old_answer_is_not_taken_for_a_new_one(model):
    """The workers of a restarted engine cannot attach to the old ring, in which the old ones' answers still stand."""
    engine = Engine()
    sync(model, engine)
    old, engine.workers = engine.workers, [Worker(["restarted", 0])]
    assert old[0].receiver is not None  # it lives, as far as the ring can tell
    fill(model)
    assert sync(model, engine).scope == "all"
    assert_equal(engine.workers[0].weights, sent(model))


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("attach", [0, 1, 2])
def test_an_engine_of_which_not_all_workers_attach_is_refused(model, attach, counts):
    """Each would keep its part of the old policy, and nobody would know."""
    engine = Engine(num_workers=3)
    engine.workers = engine.workers[:attach]
    if counts:
        engine.workers_of_one = 1  # as each of several data-parallel replicas says of itself
        engine = Counting(engine)
    with pytest.raises(
        lora_stream.TransferError, match=f"^{attach} of {3 if counts else 'some'} workers attached to the staging"
    ):
        sync(model, engine)
    assert set(engine.calls) == {"describe"}
    engine.workers[:] = [Worker(["engine", i]) for i in range(3)]
    sync(model, engine)


class Counting:
    """A client that can tell how many workers there are in all."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def num_workers(self):
        return 3


def test_a_client_that_says_how_many_engines_it_reaches_must_reach_them(model):
    engine = Engine(num_workers=2)
    engine.num_engines = 2
    with pytest.raises(lora_stream.TransferError, match=r"^2 of some workers attached"):
        sync(model, engine)
    engine.workers += [Worker(["other", i]) for i in range(2)]
    sync(model, engine)


def test_a_refusal_reaches_the_caller_by_name_before_anything_is_paused(model):
    engine = Engine()
    engine.refuse = "layers.0.q_proj.weight: has another shape"
    with pytest.raises(ValueError, match=r"^layers\.0\.q_proj\.weight: has another shape$"):
        sync(model, engine)
    assert not {"pause", "start", "tell True"} & set(engine.calls)


def test_a_worker_that_fails_is_quoted_and_the_engine_put_back(model):
    engine = Engine(num_workers=2)
    sync(model, engine)
    old = {name: tensor.clone() for name, tensor in engine.workers[0].weights.items()}
    fill(model)
    engine.fail_at = 3
    start = engine.start_weight_update

    def start_again():
        start()
        if engine.calls.count("start") == 3:  # the one that restores
            engine.fail_at = None

    engine.start_weight_update = start_again
    with pytest.raises(lora_stream.SyncError, match=r"engine worker 0 .*: no room; the engine was put back on its old"):
        sync(model, engine)
    assert engine.calls[-2:] == ["resume", "tell False"]
    for worker in engine.workers:
        for name, tensor in old.items():
            assert torch.equal(worker.weights[name], tensor), name


def test_a_mixture_stays_paused_and_the_next_sync_mends_it(model):
    engine = Engine()
    engine.fail_at = 3
    with pytest.raises(lora_stream.SyncError, match="may hold a mixture"):
        sync(model, engine)
    assert engine.is_still
    assert "resume" not in engine.calls
    engine.fail_at = None
    assert sync(model, engine, base_loaded=True).scope == "all"
    assert not engine.is_still
    assert_equal(engine.workers[0].weights, sent(model))


@pytest.mark.parametrize("when", ["before accepting", "after loading"])
def test_an_engine_that_hangs_is_given_up_at_the_deadline(model, when):
    engine = Engine(num_workers=2)
    sync(model, engine)
    fill(model)
    engine.hang = when
    begun = time.monotonic()
    with pytest.raises(lora_stream.SyncError, match=r"in vain; the engine does not answer any more"):
        sync(model, engine, deadline_s=0.5)
    assert time.monotonic() - begun < 2.5
    time.sleep(3)  # its call comes back
    engine.hang, engine.is_still = None, False
    assert sync(model, engine).scope == "all", "nobody knows what it holds"


def test_an_engine_that_is_gone_is_not_asked_to_restore_anything(model):
    engine = Engine()
    sync(model, engine)
    fill(model)
    engine.gone = True
    with pytest.raises(lora_stream.SyncError, match=r"connection refused; the engine does not answer any more"):
        sync(model, engine)
    assert engine.calls.count("update") == 2


def test_a_worker_that_does_not_say_that_it_has_loaded_is_not_believed(model):
    engine = Engine(num_workers=2)
    sync(model, engine)
    fill(model)
    engine.mute = True
    with pytest.raises(lora_stream.SyncError, match=r"engine worker 0 .* does not say that it has loaded the weights"):
        sync(model, engine)


def test_an_update_that_comes_back_without_having_loaded_is_not_believed(model):
    engine = Engine()
    sync(model, engine)
    fill(model)
    engine.silent = True
    with pytest.raises(lora_stream.SyncError, match="the engine holds its old weights"):
        sync(model, engine, deadline_s=0.5)


def test_a_source_that_fails_is_the_error_not_what_the_workers_make_of_it(model):
    engine = Engine(num_workers=2)
    sync(model, engine)
    fill(model)

    def fail(meta, plan):
        if meta == plan.tasks[5].meta:
            raise OSError("disk is gone")

    with pytest.raises(lora_stream.SyncError, match=r"at tensor 6 of 8: disk is gone; the engine was put back"):
        sync(model, engine, on_tensor=fail)
    assert sync(model, engine).scope == "trained"


@pytest.mark.parametrize("broken", ["pause", "start", "finish 2", "reset", "resume"])
def test_a_call_that_fails_ends_in_an_error_that_says_what_the_engine_holds(model, broken):
    engine = Engine()
    sync(model, engine)
    fill(model)
    engine.broken = {broken}
    with pytest.raises(lora_stream.SyncError, match=f"{broken} is broken") as caught:
        sync(model, engine)
    assert any(what in str(caught.value) for what in ("old weights", "new weights", "mixture"))
    if broken in ("pause", "start"):
        assert "holds its old weights" in str(caught.value) or "is on its old weights" in str(caught.value)
    engine.broken = set()
    sync(model, engine, allow_unmoved=True)
    assert_equal(engine.workers[0].weights, sent(model))
    assert not engine.is_still


def test_a_cache_that_cannot_be_reset_is_an_error(model):
    engine = Engine()
    engine.cache_is_free = False
    with pytest.raises(lora_stream.SyncError, match="could not reset its prefix cache"):
        sync(model, engine)


def test_a_client_that_cannot_reset_the_cache_is_refused(model):
    class Calls:
        def init_weight_transfer_engine(self, init_info): ...
        def start_weight_update(self): ...
        def update_weights(self, update_info): ...
        def finish_weight_update(self, weight_version=None): ...

    with pytest.raises(ValueError, match=r"Calls has no reset_prefix_cache\(\)"):
        sync(model, Calls())


@pytest.mark.parametrize(
    ("wrong", "message"), [({"staging_bytes": 100}, "staging_bytes must be"), ({"deadline_s": 0}, "deadline_s must be")]
)
def test_impossible_settings_are_refused(model, wrong, message):
    with pytest.raises(ValueError, match=message):
        sync(model, Engine(), **wrong)


def test_the_ring_stays_with_the_engine_and_goes_with_it(model):
    from lora_stream import engines

    engine = Engine()
    sync(model, engine)
    sender = engines._channels[engine].sender
    fill(model)
    sync(model, engine)
    assert engines._channels[engine].sender is sender
    sync(model, engine, staging_bytes=8 * 8192, allow_unmoved=True)
    assert engines._channels[engine].sender is not sender
    before = len(engines._channels)
    del engine
    assert len(engines._channels) == before - 1
