"""README's first example, run as it stands in a process of its own. vllm layer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import llama

pytestmark = pytest.mark.vllm

# What the example leaves to its reader.
PRELUDE = """
import sys
path = sys.argv[1]
batches = [[1, 2, 3, 4], [5, 6, 7, 8]]

def train_step(model, batch):
    import torch
    tokens = torch.tensor([batch])
    model(tokens, labels=tokens).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad.sign()
                parameter.grad = None
"""


def test_readme_example_runs_and_reports_each_sync(tmp_path):
    llama(
        tied=True,
        hidden_size=64,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
    ).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(tmp_path)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    assert "lora_stream.sync(model, engine)" in example
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PRELUDE + example, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    assert re.findall(r"weight version +(\d+)", run.stdout) == ["1", "2"]
    assert re.findall(r"scope +(\w+)", run.stdout) == ["all", "trained"]
