"""`lora-stream bench sync` measures what it says in live engines. programs layer; no figure is asserted."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

from lora_stream.bench.results import Group, Result, Way
from lora_stream.bench.sync import ADAPTER, MERGED, OURS, break_even

pytestmark = pytest.mark.vllm


def test_every_way_brings_the_policy_in_and_each_batch_is_timed(tmp_path):
    command = [sys.executable, "-c", "from lora_stream.cli import main; main()", "bench", "sync", "--model", "tiny"]
    command += ["--batch", "1,3", "--tokens", "6", "--repeats", "2", "--json", str(tmp_path / "s.json")]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = Result.from_dict(json.loads(done.stdout.splitlines()[-1]))
    assert found.to_dict() == json.loads((tmp_path / "s.json").read_text())
    syncs, *tokens = found.groups
    ways = {way.name: way for way in syncs.ways if not way.missing}
    assert set(ways) >= {"vLLM's loading", "ours, full", OURS, "pickled RPC", "safetensors", ADAPTER}
    assert all(len(way.seconds) == 2 and min(way.seconds) > 0 for way in ways.values())
    assert ways["ours, full"].num_bytes["left"] == 0
    assert ways[OURS].num_bytes["left"] > 0
    assert 0 < ways[ADAPTER].num_bytes["sent"] < ways[OURS].num_bytes["sent"]
    assert sum(ways[OURS].phases.values()) == pytest.approx(ways[OURS].seconds[0], rel=0.5)
    missing = next(way for way in syncs.ways if way.name == "ours, in place")
    assert missing.seconds or "packed" in missing.missing
    assert [group.name.split(":")[0] for group in tokens] == [
        f"one output token of each of {n} sequences" for n in (1, 3)
    ]
    for group in tokens:
        assert [way.name for way in group.ways] == [MERGED, ADAPTER]
        assert all(len(way.seconds) == 2 for way in group.ways)
        assert group.note


def syncs(ours, adapter):
    ways = [Way(name=OURS, seconds=[ours] * 3), Way(name=ADAPTER, seconds=[adapter] * 3)]
    return Group(name="", ceiling="", ours=OURS, ways=ways)


def tokens(merged, adapter):
    ways = [Way(name=MERGED, seconds=[merged] * 3), Way(name=ADAPTER, seconds=adapter)]
    return Group(name="", ceiling=MERGED, ours=MERGED, ways=ways)


@pytest.mark.parametrize(
    ("of_sync", "of_tokens", "said"),
    [
        ((2.0, 1.0), (0.010, [0.012] * 3), "from 500 tokens per sequence and sync on"),
        ((1.0, 2.0), (0.010, [0.012] * 3), "takes no longer than the adapter's"),
        ((2.0, 1.0), (0.010, [0.008] * 3), "as fast as merged weights here"),
        ((2.0, 1.0), (0.010, [0.009, 0.010, 0.012]), "no more per token than the spread"),
    ],
)
def test_the_break_even_is_where_the_two_ways_cost_the_same(of_sync, of_tokens, said):
    assert said in break_even(tokens(*of_tokens), syncs(*of_sync))
