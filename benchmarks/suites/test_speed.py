"""The functions of `lora-stream bench` under pytest-benchmark, each beside its baseline in one group.

    python -m pytest benchmarks/suites --benchmark-group-by=group --benchmark-columns=median,iqr,rounds
    python -m pytest benchmarks/suites --benchmark-autosave;   later: --benchmark-compare

It is not part of the tests: it asserts nothing of time.
"""

import pytest
import torch

from lora_stream import ops
from lora_stream.bench import measuring, merge, models
from lora_stream.bench.stream import by_peft, bytes_alone
from lora_stream.merged_weights import stream

SHAPES = {"square": (2048, 2048), "gate": (4864, 896), "down": (896, 4864)}


@pytest.fixture(params=SHAPES)
def shape(request):
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[8, 16, 64], ids="r={}".format)
def rank(request):
    return request.param


@pytest.fixture
def turn(shape, dtype, rank, benchmark):
    """The next of buffers that the cache does not hold."""
    benchmark.group = f"merge {shape} {str(dtype).removeprefix('torch.')} r={rank}"
    rows, cols = SHAPES[shape]
    case = merge.Case(label=shape, rows=rows, cols=cols, rank=rank, dtype=dtype, threads=torch.get_num_threads())
    return measuring.rotating(merge.make_buffers(case, torch.device("cpu")))


def test_copy(benchmark, turn):
    def copy():
        b = next(turn)
        b.out.copy_(b.base)

    benchmark(copy)


def test_merge(benchmark, turn):
    def merged():
        b = next(turn)
        ops.merge_cast_(b.base, b.lora_A, b.lora_B, merge.SCALING, b.out)

    benchmark(merged)


def test_eager(benchmark, turn):
    def eager():
        b = next(turn)
        (b.base + merge.SCALING * (b.lora_B @ b.lora_A)).to(torch.bfloat16)

    benchmark(eager)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    size = models.SIZES["qwen3-0.6b"]
    return models.with_lora(models.make_model(size, 4, torch.float32, vocab=16384), 16)


def drain(items):
    for _name, tensor in items:
        del tensor


@pytest.mark.benchmark(group="stream")
def test_bytes_alone(benchmark, model):
    alone = bytes_alone(model)
    benchmark(lambda: drain(alone()))


@pytest.mark.benchmark(group="stream")
@pytest.mark.parametrize("scope", ["all", "trained"])
def test_stream(benchmark, model, scope):
    benchmark(lambda: drain(stream(model, scope=scope)))


@pytest.mark.benchmark(group="stream")
def test_peft(benchmark, model):
    benchmark(lambda: drain(by_peft(model)))
