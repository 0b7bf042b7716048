"""`sync` into a vLLM API server by its URL, with the trainer in this process, in one that is killed, or sharded. vllm layer."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import httpx
import torch
from transformers import AutoModelForCausalLM

import lora_stream
from lora_stream.engines import _servers
from tests.dist import sharded
from tests.dist.ranks import Pool
from tests.models import fill, sent, with_lora
from tests.shm import regions
from tests.vllm import live

pytestmark = pytest.mark.vllm

DEADLINE_S = 20.0
SMALL = 64 * 1024  # bytes of staging: an update takes many turns of the ring


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    started = live.Server(base, tmp_path_factory.mktemp("log") / "server.log").wait_until_up()
    yield started
    started.stop()


def as_new_process(url):
    """Forget what this process knows of the engine."""
    _servers.pop(url, None)


def test_synced_server_computes_bitwise_what_an_engine_from_disk_does(server, base, model, tmp_path):
    before = server.answers()
    first = lora_stream.sync(model, server.url)
    fill(model)
    second = lora_stream.sync(model, server.url, weight_version="step-2")
    assert (first.scope, second.scope) == ("all", "trained")
    synced = server.answers()
    assert synced != before
    assert httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "step-2"}
    assert not regions()
    merged = live.save_merged(base, sent(model), tmp_path / "merged")
    from_disk = live.Server(merged, tmp_path / "log").wait_until_up()
    try:
        assert from_disk.answers() == synced
    finally:
        from_disk.stop()


def test_a_request_in_flight_survives_and_tells_which_versions_answered_it(server, model):
    lora_stream.sync(model, server.url, full=True, weight_version="old", allow_unmoved=True)
    fill(model)
    found = []
    request = threading.Thread(target=lambda: found.append(server.generate([5, 6, 7], max_tokens=400)))
    request.start()
    time.sleep(0.5)
    lora_stream.sync(model, server.url, weight_version="new")
    assert not found, "the request was over before the sync"
    request.join(120)
    assert len(found[0]["token_ids"]) == 400
    old, new = found[0]["weight_versions"]
    assert (old["version"], new["version"]) == ("old", "new")
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], 400)
    assert 0 < new["start"] < 400
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": False}


def test_a_pause_that_is_not_ours_stays(server, model):
    httpx.post(f"{server.url}/pause", params={"mode": "keep"})
    lora_stream.sync(model, server.url, full=True, allow_unmoved=True)
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}
    httpx.post(f"{server.url}/resume")
    want = server.answers()
    lora_stream.sync(model, server.url, allow_unmoved=True)
    assert server.answers() == want


def test_a_source_that_fails_leaves_the_server_running_on_its_old_weights(server, model):
    lora_stream.sync(model, server.url, full=True, weight_version="old", allow_unmoved=True)
    old = server.answers()
    fill(model)

    def fail(meta, plan):
        if meta == plan.tasks[4].meta:
            raise OSError("trainer broke")

    with pytest.raises(lora_stream.SyncError, match=r"trainer broke; the engine was put back on its old weights"):
        lora_stream.sync(model, server.url, on_tensor=fail, weight_version="new")
    assert server.answers() == old
    assert httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "old"}


def test_a_mixture_that_cannot_be_mended_stays_paused_until_the_full_sync_comes(server, model):
    as_new_process(server.url)

    def fail(meta, plan):
        if meta == plan.tasks[4].meta:
            raise OSError("trainer broke")

    with pytest.raises(lora_stream.SyncError, match=r"may hold a mixture .* it must get a full sync.* stays paused"):
        lora_stream.sync(model, server.url, on_tensor=fail)
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}
    as_new_process(server.url)
    report = lora_stream.sync(model, server.url, base_loaded=True)
    assert report.scope == "all"
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": False}


def test_another_model_is_refused_by_name_and_the_server_goes_on(server, base, model):
    from transformers import AutoConfig

    lora_stream.sync(model, server.url, full=True, allow_unmoved=True)
    old = server.answers()
    config = AutoConfig.from_pretrained(base)
    config.intermediate_size = 96
    other = with_lora(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight"):
        lora_stream.sync(other, server.url)
    assert server.answers() == old


def test_what_the_server_says_of_an_error_is_shown(server):
    client = lora_stream.ServerClient(server.url)
    client.start_weight_update()
    update = {"region": "lora_stream-0-0", "generation": 1, "first": 0, "deadline_s": 1.0, "manifest": {}}
    with pytest.raises(RuntimeError, match=r"/update_weights: 500: .*not attached to the sender's memory"):
        client.update_weights(update)
    with pytest.raises(RuntimeError, match=r"/init_weight_transfer_engine: 500: .*cannot open the sender's region"):
        client.init_weight_transfer_engine({"region": "lora_stream-0-0", "question": 1})


def test_a_hundred_syncs_grow_nothing(server, model):
    worker = server.worker()

    def usage():
        gc.collect()
        processes = ["self", worker]
        return (regions(), [live.num_fds(pid) for pid in processes]), [live.rss(pid) for pid in processes]

    for _ in range(10):
        fill(model)
        lora_stream.sync(model, server.url)
    before, memory_before = usage()
    for _ in range(100):
        fill(model)
        lora_stream.sync(model, server.url)
    after, memory_after = usage()
    assert after == before
    for grown, was in zip(memory_after, memory_before, strict=True):
        assert grown - was < 24 * 1024 * 1024, (memory_before, memory_after)


# -- processes that are killed --

TRAINER = """
import os, signal, sys
import torch
from transformers import AutoModelForCausalLM
import lora_stream
from tests.models import with_lora

directory, url, point = sys.argv[1:]
model = with_lora(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16))

def die(meta, plan):
    if meta == plan.tasks[{"first": 0, "middle": len(plan.tasks) // 2, "last": -1}[point]].meta:
        print("DYING", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

lora_stream.sync(model, url, full=True, on_tensor=die, staging_bytes=64 * 1024)
"""


@pytest.mark.parametrize("point", ["first", "middle", "last"])
def test_a_killed_trainer_leaves_the_server_to_the_next_one(server, base, model, point):
    lora_stream.sync(model, server.url, full=True, allow_unmoved=True)
    want = server.answers()
    worker = server.worker()
    memory = live.rss(worker)
    reported = server.log.read_text().count("the sender died while engine worker 0 waited for")
    command = [sys.executable, "-c", TRAINER, str(base), server.url, point]
    died = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert "DYING" in died.stdout
    give_up = time.monotonic() + DEADLINE_S
    while server.log.read_text().count("the sender died while engine worker 0 waited for") == reported:
        assert time.monotonic() < give_up, "the worker did not notice in time"
        time.sleep(0.1)
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": True}, "a mixture must not answer"
    as_new_process(server.url)
    report = lora_stream.sync(model, server.url, base_loaded=True, deadline_s=DEADLINE_S)
    assert report.scope == "all", "base_loaded must not count for an engine that holds a mixture"
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": False}
    assert server.answers() == want
    assert not regions()
    assert live.rss(worker) - memory < 32 * 1024 * 1024


@pytest.fixture(scope="module")
def port():
    """Each engine starts where the last one was killed: a URL that this process knows."""
    return live.free_port()


@pytest.fixture(scope="module")
def same_model(base):
    return with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval())


@pytest.mark.parametrize(("victim", "point"), [("server", "first"), ("worker", "middle"), ("server", "last")])
def test_a_killed_engine_is_noticed_at_once_and_a_new_one_in_its_place_gets_all(
    base, same_model, tmp_path, port, victim, point
):
    model = same_model
    server = live.Server(base, tmp_path / "log", port=port).wait_until_up()
    try:
        before = server.answers()
        assert lora_stream.sync(model, server.url, deadline_s=DEADLINE_S, base_loaded=True).scope == (
            "trained"
            if (victim, point) == ("server", "first")
            else "all"  # the first engine has the base from its disk
        )
        assert server.answers() != before
        fill(model)

        def kill(meta, plan):
            if meta == plan.tasks[{"first": 0, "middle": len(plan.tasks) // 2, "last": -1}[point]].meta:
                os.kill(server.worker() if victim == "worker" else server.process.pid, signal.SIGKILL)

        rss = live.rss()
        begun = time.monotonic()
        with pytest.raises(lora_stream.SyncError) as caught:
            lora_stream.sync(model, server.url, full=True, on_tensor=kill, deadline_s=DEADLINE_S, staging_bytes=SMALL)
        print("SECONDS", point, victim, time.monotonic() - begun, caught.value)
        assert time.monotonic() - begun < 2 * DEADLINE_S
        assert "the engine does not answer any more: start it anew, the next sync will be a full one" in str(
            caught.value
        )
        assert not regions()
        assert live.rss() - rss < 32 * 1024 * 1024
    finally:
        server.stop()


# -- a sharded trainer ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool():
    pool = Pool()
    yield pool
    pool.close()


def make_trainer(base):
    torch.manual_seed(9)
    return with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval())


@torch.no_grad()
def halve(model):
    """A step that is the same on a whole model and on any part of it."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.mul_(-0.5)


def feed(rank, base, url):
    model = make_trainer(base)
    sharded.by_layer(model)
    engine = url if rank == 0 else None
    first = lora_stream.sync(model, engine, bucket_bytes=100_000)
    halve(model)
    second = lora_stream.sync(model, engine, bucket_bytes=100_000)
    halve(model)

    def fail(meta, plan):
        if meta == plan.tasks[4].meta:
            raise OSError("trainer broke")

    with pytest.raises(lora_stream.SyncError, match="trainer broke; the engine was put back on its old weights"):
        lora_stream.sync(model, engine, bucket_bytes=100_000, on_tensor=fail)
    assert first.num_bytes_gathered > second.num_bytes_gathered > 0
    return first.scope, second.scope, second.weight_version


def test_two_fsdp2_ranks_feed_the_server_and_a_failed_sync_puts_it_back(server, base, pool):
    assert pool.run(2, feed, base, server.url, limit_s=120) == [("all", "trained", "2")] * 2
    fed = server.answers()
    model = make_trainer(base)
    halve(model)
    lora_stream.sync(model, server.url, full=True)
    assert server.answers() == fed
    halve(model)
    lora_stream.sync(model, server.url)
    assert server.answers() != fed
