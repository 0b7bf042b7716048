"""Run by torch.distributed.run: every process has a part of one tensor-parallel engine, as TRL's colocated ones have.

    external_launcher.py BASE OUT [sync]

With sync a trainer of every process brings its policy in first, and the first one leaves OUT/merged.safetensors. Each writes
OUT/logprobs-RANK.json.
"""

import json
import os
import sys
from pathlib import Path

import tests.conftest  # noqa: F401  the engine's environment, before anything imports vLLM

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import lora_stream
from tests.models import sent, with_lora
from tests.vllm import live

base, out, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
llm = live.make_llm(
    Path(base), "bfloat16", tensor_parallel_size=2, distributed_executor_backend="external_launcher", seed=0
)
if "sync" in sys.argv:
    torch.manual_seed(0)
    model = with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval())
    lora_stream.sync(model, llm)
    if rank == 0:
        save_file(sent(model), out / "merged.safetensors")
(out / f"logprobs-{rank}.json").write_text(json.dumps(live.logprobs(llm)))
