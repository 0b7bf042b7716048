"""Shared by all layers: unit (no process group, no engine), vllm (a live engine in this process), gpu.

The engine's environment is set here, before anything imports vLLM: it reads some of it at its first import.
"""

import os

for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; otherwise most of the machine's memory
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "160",  # wide enough for tables, whatever runs the tests
    # Trainers, engines and other tests share the cores: idle OpenMP threads of the one would spin on the other's time.
    "OMP_WAIT_POLICY": "passive",
}.items():
    os.environ.setdefault(_name, _value)

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20260801)
