"""What nvcc made of the CUDA kernel, read from the built extension. Unit layer; skipped where it was built without."""

import importlib.util
from pathlib import Path

import pytest

from lora_stream import _C

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cuda_code.py"
spec = importlib.util.spec_from_file_location("cuda_code", SCRIPT)
cuda_code = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda_code)

pytestmark = [
    pytest.mark.skipif(not _C.cuda_architectures, reason="built without the CUDA kernel (no nvcc)"),
    pytest.mark.skipif(cuda_code.cuobjdump() is None, reason="needs cuobjdump, from a CUDA toolkit or triton"),
]


@pytest.fixture(scope="module")
def records():
    return cuda_code.read(Path(_C.__file__), cuda_code.cuobjdump())


def test_every_kernel_is_there_for_every_architecture(records):
    machine = [name for name in _C.cuda_architectures.split() if name.startswith("sm_")]
    kernels = {(r["operands"], r["base_bytes"], r["statistics"]) for r in records}
    assert len(kernels) == len(cuda_code.OPERANDS) * 2 * len(cuda_code.STATISTICS)
    assert len(records) == len(kernels) * len(machine)
    assert {r["architecture"] for r in records} == set(machine)


def test_no_kernel_spills_and_the_aligned_path_moves_16_bytes_at_a_time(records):
    assert {(r["architecture"], r["operands"]): found for r in records if (found := cuda_code.faults(r))} == {}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spills": 2}, "spills 2, expected 0"),
        ({"stack": 8}, "stack 8, expected 0"),
        ({"registers": 160}, "160 registers, more than 128"),
        ({"base_loads_16": 7}, "base_loads_16 7"),
        ({"out_stores_16": 4}, "out_stores_16 4"),
        ({"multiplications": 16}, "multiplications 16"),
    ],
)
def test_code_that_is_worse_is_a_fault(records, change, fault):
    assert any(fault in found for found in cuda_code.faults({**records[0], **change}))
