"""`lora-stream bench fidelity` on a tiny model: what its figures mean, by transformers and through a live engine. programs
layer."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import torch
from transformers import AutoModelForCausalLM

from lora_stream.bench.fidelity import ADAPTER, DITHER, NEAREST, NO_UPDATE, TWO_STEP, WAYS, Case, figures
from lora_stream.bench.results import Result
from tests.models import fill, with_lora

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def directory(directory):
    """With an adapter of small deltas, and two texts of the model's words."""
    torch.manual_seed(5)
    adapted = with_lora(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16))
    fill(adapted, std=0.0006)
    adapted.save_pretrained(directory / "adapter")
    for i in (1, 2):
        words = torch.randint(0, 1021, (400,)).tolist()
        (directory / f"{i}.txt").write_text(" ".join(f"w{word}" for word in words))
    return directory


def run(directory, *arguments):
    command = [sys.executable, "-c", "from lora_stream.cli import main; main()", "bench", "fidelity"]
    command += ["--model", directory, "--tokens", "64", *arguments]
    command += ["--text", f"one={directory / '1.txt'}", "--text", f"two={directory / '2.txt'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = Result.from_dict(json.loads(done.stdout.splitlines()[-1]))
    for group in found.groups:
        assert [way.name for way in group.ways] == list(WAYS)
    return [{way.name: way.figures for way in group.ways} for group in found.groups], found, done.stderr


def test_every_case_text_and_dtype_is_measured_shown_and_drawn(directory, tmp_path):
    kept = ["--json", tmp_path / "f.json", "--plot", tmp_path / "f.png"]
    cases = ["--training", "2:1e-3:4:q_proj+v_proj", "--deltas", "1e-4"]
    found, result, shown = run(directory, *cases, *kept)
    assert len(found) == 2 * 2 * 2
    assert result.to_dict() == json.loads((tmp_path / "f.json").read_text())
    assert (tmp_path / "f.png").stat().st_size > 10_000
    assert "gain" in shown
    for ways, group in zip(found, result.groups, strict=True):
        assert ways[NO_UPDATE]["gain"] == 0
        assert ways[NEAREST]["captured"] < ways[DITHER]["captured"]
        assert ways[NEAREST]["moved"] < ways[DITHER]["moved"]
        if "computed in float32" in group.name:
            assert ways[ADAPTER]["KL"] == 0
            assert ways[ADAPTER]["gain"] == pytest.approx(1)
    of_size = [group for group in result.groups if "one sign step of 0.0001" in group.name]
    assert len(of_size) == 4
    assert {group.note for group in of_size} == {"delta/weight 0.0001 (norms)"}


def test_of_an_adapter_dither_captures_what_nearest_and_pefts_merge_do_not(directory):
    (first, second), *_ = run(directory, "--adapter", directory / "adapter", "--compute", "float32")
    for ways in (first, second):
        assert ways[NEAREST]["captured"] < 0.8
        assert abs(ways[DITHER]["captured"] - 1) < 0.1
        assert ways[DITHER]["KL"] > 0
        assert ways[TWO_STEP]["captured"] < ways[DITHER]["captured"]


def test_a_live_engine_tells_the_same_by_its_prompt_logprobs(directory):
    found, result, _ = run(directory, "--adapter", directory / "adapter", "--engine", "vllm")
    assert len(found) == 2
    assert all("vLLM, bfloat16" in group.name for group in result.groups)
    for ways in found:
        assert ways[DITHER]["captured"] > ways[NEAREST]["captured"]
        assert 0 < ways[DITHER]["KL"] < 0.1
        assert ways[NO_UPDATE]["gain"] == 0
        assert all(figures["mean |dp|"] > 0 for figures in ways.values())


def test_figures_are_those_of_the_definitions():
    torch.manual_seed(0)
    base, exact = (torch.randn(7, 11).log_softmax(-1) for _ in range(2))
    targets = torch.arange(7)
    half = base + 0.5 * (exact - base)  # of the logprobs, so also of the text's
    assert figures(exact, base, base, half, targets)["gain"] == pytest.approx(0.5)
    assert figures(exact, base, base, exact, targets) == {"KL": 0.0, "mean |dp|": 0.0, "gain": pytest.approx(1)}
    noise = 0.1 * torch.randn(7, 11)  # of an engine's arithmetic, alike with both policies
    assert figures(exact, base, base + noise, exact + noise, targets)["gain"] == pytest.approx(1)
    found = figures(exact, base, base, base, targets)
    p, q = exact.double().exp(), base.double().exp()
    assert found["KL"] == pytest.approx((p * (p / q).log()).sum(-1).mean().item())
    assert found["mean |dp|"] == pytest.approx((p - q)[targets, targets].abs().mean().item())
    # An engine that tells of all tokens is as good as the logits; of some, the rest counts as one.
    told = [dict(enumerate(row)) for row in base.tolist()]
    assert figures(exact, base, told, told, targets)["KL"] == pytest.approx(found["KL"], rel=1e-5)
    some = [{token: row[token] for token in sorted({i, (i + 1) % 11})} for i, row in enumerate(base.tolist())]
    assert 0 < figures(exact, base, some, some, targets)["KL"] < found["KL"]


@pytest.mark.parametrize("text", ["30", "30:x:16:q_proj", "30:1e-5:16", "30:1e-5:16:q_proj:v_proj", "-3:1e-5:4:q_proj"])
def test_a_training_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="must be STEPS:LEARNING_RATE:R:TARGETS"):
        Case.parse(text)


def test_the_engine_is_started_for_the_largest_rank_of_an_adapters_layers(tmp_path):
    config = {"r": 8, "rank_pattern": {"q_proj": 96}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert Case(directory=tmp_path).largest_rank == 96
    assert Case(r=32, size=1e-4).largest_rank == 32


def test_a_text_that_is_too_short_is_refused_with_what_is_needed(directory):
    command = [sys.executable, "-c", "from lora_stream.cli import main; main()", "bench", "fidelity"]
    command += ["--model", directory, "--tokens", "500", "--text", f"one={directory / '1.txt'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert re.search(r"text 'one' has \d+ tokens, 2500 are needed", " ".join(done.stderr.split()))
