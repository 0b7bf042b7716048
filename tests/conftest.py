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

# What may run side by side, with pytest-xdist: modules, but all that have an engine in the test's own process come one after the
# other in one process, because vLLM holds one at a time there. Long ones begin.
ENGINE_ELSEWHERE = ("test_server", "test_examples", "test_processes", "test_trl_drop_in", "test_bench_sync", "test_ray")


def pytest_collection_modifyitems(items):
    groups = {}
    for item in items:
        module, is_vllm = item.path.stem, item.path.parent.name == "vllm"
        group = "engine" if is_vllm and module not in ENGINE_ELSEWHERE else f"{item.path.parent.name}/{module}"
        item.add_marker(pytest.mark.xdist_group(group))
        if group == "engine":
            order = 0
        elif is_vllm:
            order = 1 + ENGINE_ELSEWHERE.index(module)
        else:
            order = 20 + ["dist", "unit", "gpu"].index(item.path.parent.name)
        groups[item] = order
    items.sort(key=groups.__getitem__)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20260801)
