"""The two passes of a DoRA against float64, and the ops between them against their slow twin. Unit layer."""

import random

import pytest
import torch

from lora_stream import _C, dora, ops
from lora_stream.reference import round_once
from lora_stream.rounding import Place

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (1, 37), (37, 1), (3, 16), (29, 300), (300, 29), (5, 1027)]


def problem(rows, cols, rank=3, dtype=torch.float32):
    base = torch.randn(rows, cols).to(dtype)
    return base, torch.randn(rank, cols), torch.randn(rows, rank), 0.7


def exact(base, lora_A, lora_B, scaling):
    return base.double() + scaling * (lora_B.double() @ lora_A.double())


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_those_of_base_and_delta(shape, dim):
    args = problem(*shape)
    got = dora.norms(*args, dim, "float32")
    want = torch.linalg.norm(exact(*args), dim=dim, keepdim=True)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_every_dtype_is_scaled_and_rounded_once(dim, dtype, out_dtype):
    for shape in SHAPES:
        base, *pair = problem(*shape, dtype=dtype)
        scale = torch.rand((1, shape[1]) if dim == 0 else (shape[0], 1)) + 0.5
        out = torch.full((shape[0] + 2, shape[1] + 3), 7.0, dtype=out_dtype)
        statistics = dora.merge(base, tuple(pair), scale, out[1:-1, 2:-1], "float32")
        want = round_once(scale.double() * exact(base, *pair), out_dtype)
        assert (out[1:-1, 2:-1] != want).sum() <= (
            want.numel() if out_dtype == torch.float32 else 1 + want.numel() // 1000
        )
        torch.testing.assert_close(out[1:-1, 2:-1].float(), want.float(), rtol=2**-7, atol=1e-5)
        assert (out[0] == 7).all()
        assert (out[-1] == 7).all()
        assert (out[:, :2] == 7).all()
        assert (out[:, -1] == 7).all()
        assert statistics[0] == shape[0] * shape[1]


@pytest.mark.parametrize("out_dtype", DTYPES)
def test_the_op_is_its_slow_twin(out_dtype):
    for rows, cols in SHAPES:
        for by_row in (True, False):
            base = torch.randn(rows, 2 * cols)[:, :cols].to(torch.bfloat16)
            merged = base.float().contiguous()
            merged[torch.rand(rows, cols) < 0.5] += 0.3
            scale = torch.ones(rows, 1) if by_row else torch.ones(1, cols)
            scale[torch.rand_like(scale) < 0.3] = 1.2
            outs = [torch.empty(rows, cols, dtype=out_dtype) for _ in range(2)]
            found = [torch.zeros(ops.NUM_STATS, dtype=torch.float64) for _ in range(2)]
            place = random.choice([None, Place(random.getrandbits(60), 3, random.randrange(9))])
            dora.scale_cast(merged, scale, base, outs[0], found[0], place)
            dora.scale_cast_reference(merged, scale, base, outs[1], found[1], place)
            assert torch.equal(outs[0], outs[1])
            assert torch.equal(found[0][[0, 1]], found[1][[0, 1]])
            assert found[0][-1] % 2**32 == found[1][-1]
            torch.testing.assert_close(found[0][2:5], found[1][2:5], rtol=1e-5, atol=1e-9)


def test_the_bits_depend_on_neither_blocks_nor_threads_nor_the_cpus_path(monkeypatch):
    base, *pair = problem(41, 1030, dtype=torch.bfloat16)
    threads = torch.get_num_threads()

    def everything():
        rows, cols = (dora.norms(base, *pair, dim, "float32") for dim in (1, 0))
        outs = [torch.empty(41, 1030, dtype=torch.bfloat16) for _ in range(2)]
        dora.merge(base, tuple(pair), 1.3 / rows, outs[0], "float32")
        dora.merge(base, tuple(pair), 1.3 / cols, outs[1], "float32", Place(5, 3, 1))
        return [rows, cols, *outs]

    want = everything()
    try:
        for block in (1, 1030 * 7, 1 << 30):
            for count in (1, 2, 5):
                monkeypatch.setattr(dora, "BLOCK_ELEMENTS", block)
                torch.set_num_threads(count)
                for path in [name for name, is_supported in _C.cpu_paths() if is_supported]:
                    monkeypatch.setenv("LORA_STREAM_CPU", path)
                    assert all(torch.equal(a, b) for a, b in zip(everything(), want, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_values_that_are_not_finite_show_in_the_statistics():
    for value in (float("nan"), float("inf")):
        base, *pair = problem(5, 20)
        scale = torch.ones(5, 1)
        scale[3] = value
        out = torch.empty(5, 20, dtype=torch.bfloat16)
        assert not dora.merge(base, tuple(pair), scale, out, "float32")[3].isfinite()
        assert out[[0, 1, 2, 4]].isfinite().all()
        assert not out[3].isfinite().any()


def test_a_base_that_lies_transposed_is_read_right():
    base, *pair = problem(33, 44)
    turned = base.T.contiguous().T
    assert torch.equal(dora.norms(turned, *pair, 1, "float32"), dora.norms(base, *pair, 1, "float32"))
    outs = [torch.empty(33, 44, dtype=torch.bfloat16) for _ in range(2)]
    for each, out in zip((base, turned), outs, strict=True):
        dora.merge(each, tuple(pair), torch.full((33, 1), 0.9), out, "float32")
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merged": torch.zeros(4, 5).double()}, "merged must be a contiguous float32 matrix"),
        ({"merged": torch.zeros(5, 4).T}, "merged must be a contiguous float32 matrix"),
        ({"scale": torch.zeros(5, 1)}, r"scale must be float32 \[4, 1\] or \[1, 5\]"),
        ({"base": torch.zeros(4, 6)}, "matrices of merged's shape"),
        ({"out": torch.zeros(5, 4).T}, "adjacent elements"),
        ({"out": torch.zeros(4, 5).double()}, "must be float32, bfloat16 or float16"),
        ({"stats": torch.zeros(6)}, r"stats must be float64 \[6\]"),
        ({"place": [1, 2]}, "place must hold key, row and column, or nothing"),
    ],
)
def test_wrong_input_raises_with_name_and_expected(change, message):
    args = {
        "merged": torch.zeros(4, 5),
        "scale": torch.ones(4, 1),
        "base": torch.zeros(4, 5),
        "out": torch.zeros(4, 5),
        "stats": torch.zeros(6, dtype=torch.float64),
        "place": [],
    }
    torch.ops.lora_stream._scale_cast_(*args.values())
    with pytest.raises(RuntimeError, match=message):
        torch.ops.lora_stream._scale_cast_(*{**args, **change}.values())
    for merged, dim, sums, text in (
        (torch.zeros(4, 5), 2, torch.zeros(4).double(), "dim must be 0 or 1, got 2"),
        (torch.zeros(4, 5), 1, torch.zeros(5).double(), r"sums must be float64 \[4\]"),
        (torch.zeros(4, 5), 0, torch.zeros(5), r"sums must be float64 \[5\]"),
    ):
        with pytest.raises(RuntimeError, match=text):
            torch.ops.lora_stream._add_squares_(merged, dim, sums)
