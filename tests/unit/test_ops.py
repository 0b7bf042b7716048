"""The op against float64, path against path, and its refusals. Unit layer; the AVX-512 text also runs in tests/cpp."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_stream import _C, eager, ops, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PATHS = [name for name, supported in _C.cpu_paths() if supported]


def merge(base, lora_A, lora_B, scaling, dtype):
    out = torch.full(base.shape, float("nan"), dtype=dtype)
    ops.merge_cast_(base, lora_A, lora_B, scaling, out)
    return out


def pair(rows, cols, rank, dtype=torch.float32, std=0.2):
    return (torch.randn(rank, cols) * std).to(dtype), (torch.randn(rows, rank) * std).to(dtype)


def assert_close_to_exact(out, base, lora_A, lora_B, scaling):
    """The docstring's bound: half a step of the output, and 2**-18 of the magnitudes that were added."""
    exact = base.double() + scaling * (lora_B.double() @ lora_A.double())
    magnitude = base.double().abs() + abs(scaling) * (lora_B.double().abs() @ lora_A.double().abs())
    fraction_bits = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[out.dtype]
    half_step = (exact.abs() * 2.0 ** (-fraction_bits - 1)).clamp_min(2.0**-25)
    assert ((out.double() - exact).abs() <= half_step + magnitude * 2.0**-18).all()


@st.composite
def problems(draw):
    rows, cols = draw(st.integers(0, 70)), draw(st.integers(0, 300))
    rank = draw(st.sampled_from([0, 1, 2, 3, 8, 17, 32, 33, 64, 100]))
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(4)]
    layout = draw(st.sampled_from(["contiguous", "row stride", "offset", "transposed pair"]))
    return rows, cols, rank, dtypes, layout, draw(st.integers(0, 2**31))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_any_shape_rank_dtype_and_layout_is_merged_right_and_alike_on_every_path(problem):
    rows, cols, rank, (base_dtype, A_dtype, B_dtype, out_dtype), layout, seed = problem
    generator = torch.Generator().manual_seed(seed)
    pad = {"row stride": 3, "offset": 0}.get(layout, 0)
    start = 1 if layout == "offset" else 0
    storage = torch.randn(rows * (cols + pad) + start, generator=generator).to(base_dtype)
    base = storage[start:].view(rows, cols + pad)[:, :cols]
    if layout == "transposed pair":
        lora_A = torch.randn(cols, rank, generator=generator).to(A_dtype).t()
        lora_B = torch.randn(rank, rows, generator=generator).to(B_dtype).t()
    else:
        lora_A = torch.randn(rank, cols, generator=generator).to(A_dtype)
        lora_B = torch.randn(rows, rank, generator=generator).to(B_dtype)
    scaling = 0.37
    with pytest.MonkeyPatch.context() as patch:
        outs = []
        for path in PATHS:
            patch.setenv("LORA_STREAM_CPU", path)
            whole = torch.full((rows, cols + 2 * pad), 7.0, dtype=out_dtype)
            ops.merge_cast_(base, lora_A, lora_B, scaling, whole[:, :cols])
            assert (whole[:, cols:] == 7.0).all(), "wrote between the rows"
            outs.append(whole[:, :cols])
    for out in outs[1:]:
        assert torch.equal(out, outs[0])
    assert_close_to_exact(outs[0], base, lora_A, lora_B, torch.tensor(scaling).item())


@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("adapter_dtype", DTYPES)
@pytest.mark.parametrize(("rank", "delta_over_weight"), [(4, 1.0), (16, 1.0), (64, 1.0), (256, 0.25)])
def test_9999_of_10000_elements_are_the_exact_sum_rounded_once(base_dtype, adapter_dtype, rank, delta_over_weight):
    base = (torch.randn(1031, 771) * 0.02).to(base_dtype)
    scaling = 1.75
    lora_A = torch.randn(rank, 771).to(adapter_dtype)
    lora_B = (torch.randn(1031, rank) * (0.02 * delta_over_weight / rank**0.5 / scaling)).to(adapter_dtype)
    out = merge(base, lora_A, lora_B, scaling, torch.bfloat16)
    exact = reference.merge_cast(base, lora_A, lora_B, scaling, torch.bfloat16)
    other = out != exact
    assert other.float().mean().item() <= 1e-4
    # The rest sits at ties, one step of bfloat16 away; or near zero, where the terms cancel and float32 itself ends.
    step = exact.double().abs() * 2.0**-7
    assert ((out.double() - exact.double()).abs() <= step.clamp_min(1e-8))[other].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_delta_gives_the_base_rounded_bit_for_bit(dtype):
    base = torch.randn(37, 53).to(dtype)
    lora_A, _ = pair(37, 53, 8)
    for B in (torch.zeros(37, 8), torch.randn(37, 8)):
        scaling = 3.0 if not B.any() else 0.0
        assert torch.equal(merge(base, lora_A, B, scaling, torch.bfloat16), base.to(torch.bfloat16))
    cast = merge(base, torch.empty(0, 53), torch.empty(37, 0), 1.0, torch.bfloat16)
    assert torch.equal(cast.view(torch.int16), base.to(torch.bfloat16).view(torch.int16))


def test_minus_zero_nan_infinity_and_denormals_propagate_as_float32_would():
    base = torch.tensor([[-0.0, float("nan"), float("inf"), -float("inf"), 1e-40, 3.4e38]])
    cast = merge(base, torch.empty(0, 6), torch.empty(1, 0), 1.0, torch.bfloat16)
    torch.testing.assert_close(cast, base.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    assert cast[0, 0].signbit()
    lora_A = torch.tensor([[1.0, 1.0, 1.0, float("inf"), 1e-40, 1e37]])
    out = merge(base, lora_A, torch.tensor([[1.0]]), 1.0, torch.bfloat16)
    torch.testing.assert_close(out, (base + lora_A).to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)
    assert out.isnan().tolist() == [[False, True, False, True, False, False]]
    assert out[0, 2].isposinf()
    assert out[0, 5].isposinf()  # 3.41e38 is past the middle between bfloat16's largest value and the next step
    assert out[0, 4] != 0


def test_out_may_be_base_itself():
    base = torch.randn(40, 70).to(torch.bfloat16)
    lora_A, lora_B = pair(40, 70, 5)
    fresh = merge(base, lora_A, lora_B, 0.5, torch.bfloat16)
    ops.merge_cast_(base, lora_A, lora_B, 0.5, base)
    assert torch.equal(base, fresh)


def test_large_output_that_is_streamed_past_the_cache_has_the_same_bits():
    base = torch.randn(1500, 2048)
    lora_A, lora_B = pair(1500, 2048, 6)
    out = merge(base, lora_A, lora_B, 0.5, torch.bfloat16)
    rows = [merge(base[i : i + 1], lora_A, lora_B[i : i + 1], 0.5, torch.bfloat16) for i in range(0, 1500, 97)]
    assert torch.equal(out[::97], torch.cat(rows))


@pytest.mark.parametrize("threads", [1, 2])
def test_grouped_gives_the_bits_of_one_by_one(threads):
    shapes = [(3, 5, 2), (0, 4, 2), (70, 33, 16), (1, 1, 1), (200, 64, 0), (31, 300, 40)]
    bases = [torch.randn(m, n) for m, n, _ in shapes]
    pairs = [pair(m, n, r) for m, n, r in shapes]
    scalings = [0.1 * (i + 1) for i in range(len(shapes))]
    outs = [torch.full(base.shape, float("nan"), dtype=torch.bfloat16) for base in bases]
    stats = torch.full((len(shapes), ops.NUM_STATS), -1.0, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ops.merge_cast_grouped_(bases, [A for A, _ in pairs], [B for _, B in pairs], scalings, outs, stats)
    finally:
        torch.set_num_threads(before)
    for base, (A, B), s, out in zip(bases, pairs, scalings, outs, strict=True):
        assert torch.equal(out, merge(base, A, B, s, torch.bfloat16))
    assert (stats >= 0).all()


def test_statistics_are_what_rounding_did():
    base = torch.randn(61, 119).to(torch.bfloat16)
    lora_A, lora_B = pair(61, 119, 4, std=0.02)
    lora_B[:7] = 0  # rows without a delta
    out = torch.empty(61, 119, dtype=torch.bfloat16)
    stats = torch.empty(1, ops.NUM_STATS, dtype=torch.float64)
    ops.merge_cast_grouped_([base], [lora_A], [lora_B], [2.0], [out], stats)
    changed, unmoved, kept_sq, delta_sq, checksum = stats[0].tolist()
    delta = 2.0 * (lora_B.double() @ lora_A.double())
    assert changed == 54 * 119
    assert unmoved == ((out == base) & (delta != 0)).sum().item()
    assert 0 < unmoved < changed
    assert kept_sq == pytest.approx((out.double() - base.double()).square().sum().item(), rel=1e-4)
    assert delta_sq == pytest.approx(delta.square().sum().item(), rel=1e-4)
    assert checksum == out.float().view(torch.int32).to(torch.int64).sum().item() % 2**32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": torch.zeros(4)}, r"base must be a matrix \[rows, cols\], got \[4\]"),
        ({"lora_A": torch.zeros(2, 6)}, r"lora_A must have shape \[rank, cols\] = \[2, 5\], got \[2, 6\]"),
        ({"lora_B": torch.zeros(4, 3)}, r"lora_B must have shape \[rows, rank\] = \[4, 2\], got \[4, 3\]"),
        ({"lora_B": torch.zeros(8)}, r"lora_B must have shape"),
        ({"out": torch.zeros(5, 4)}, r"out must have shape \[rows, cols\] = \[4, 5\], got \[5, 4\]"),
        ({"out": torch.zeros(4, 5, dtype=torch.float64)}, "out must be float32, bfloat16 or float16, got Double"),
        ({"base": torch.zeros(4, 5, dtype=torch.int8)}, "base must be float32, bfloat16 or float16, got Char"),
        ({"base": torch.zeros(5, 4).t()}, r"base must have adjacent elements in a row .* call .contiguous\(\) first"),
        ({"out": torch.zeros(5, 4).t()}, "out must have adjacent elements in a row"),
        ({"out": torch.zeros(1, 5).expand(4, 5)}, "out must not overlap itself"),
        ({"lora_A": torch.zeros(2, 5, device="meta")}, "all tensors must be on one device, got"),
    ],
)
def test_wrong_input_raises_with_name_expected_and_got(change, message):
    args = {
        "base": torch.zeros(4, 5),
        "lora_A": torch.zeros(2, 5),
        "lora_B": torch.zeros(4, 2),
        "scaling": 1.0,
        "out": torch.zeros(4, 5),
        **change,
    }
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        ops.merge_cast_(**args)


def test_memory_that_is_read_and_written_at_once_is_refused():
    storage = torch.zeros(100)
    base, out = storage[:20].view(4, 5), storage[5:25].view(4, 5)
    with pytest.raises(RuntimeError, match="out overlaps base"):
        ops.merge_cast_(base, torch.zeros(2, 5), torch.zeros(4, 2), 1.0, out)
    with pytest.raises(RuntimeError, match="out overlaps lora_A or lora_B"):
        ops.merge_cast_(torch.zeros(4, 5), storage[:10].view(2, 5), torch.zeros(4, 2), 1.0, storage[:20].view(4, 5))


@pytest.mark.parametrize("module", [ops, eager])
def test_no_matrix_of_a_group_may_write_what_another_reads_or_writes(module):
    def run(bases, outs, lora_As=None):
        lora_As = lora_As or [torch.randn(2, 5) for _ in bases]
        module.merge_cast_grouped_(bases, lora_As, [torch.randn(4, 2) for _ in bases], [1.0] * len(bases), outs)

    def fresh():
        return torch.randn(4, 5)

    shared = torch.randn(8, 5)
    with pytest.raises(RuntimeError, match="outs 0 and 1 overlap"):
        run([fresh(), fresh()], [shared[:4], shared[3:7]])
    with pytest.raises(RuntimeError, match="out 0 overlaps base 2"):
        run([fresh(), fresh(), shared[2:6]], [shared[:4], fresh(), fresh()])
    with pytest.raises(RuntimeError, match="out 1 overlaps lora_A 0"):
        run([fresh(), fresh()], [fresh(), shared[:4]], lora_As=[shared[2:4], torch.randn(2, 5)])
    with pytest.raises(RuntimeError, match="overlaps base"):
        run([shared[:4]], [shared[1:5]])
    halves = [shared[:4], shared[4:]]  # adjacent is not overlapping, and a matrix may replace its own base
    run(halves, halves)
    run([fresh(), fresh()], halves)


@pytest.mark.parametrize("module", [ops, eager])
def test_a_larger_out_is_refused_and_not_filled_by_broadcasting(module):
    with pytest.raises(RuntimeError, match="out must have shape"):
        module.merge_cast_(torch.randn(4, 1), torch.randn(2, 1), torch.randn(4, 2), 1.0, torch.empty(4, 5))


@pytest.mark.parametrize("module", [ops, eager])
@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
def test_statistics_of_empty_matrices_are_zero(module, shape):
    base, stats = torch.empty(shape), torch.full((1, ops.NUM_STATS), -7.0, dtype=torch.float64)
    module.merge_cast_grouped_(
        [base], [torch.randn(2, shape[1])], [torch.randn(shape[0], 2)], [1.0], [base.clone()], stats
    )
    assert stats.tolist() == [[0.0] * ops.NUM_STATS]


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(RuntimeError, match="must have one length, got 1 bases, 0 lora_As"):
        ops.merge_cast_grouped_([torch.zeros(1, 1)], [], [], [], [])


def test_unknown_cpu_path_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("LORA_STREAM_CPU", "sse9")
    with pytest.raises(RuntimeError, match=r"LORA_STREAM_CPU=sse9: expected one of .*portable"):
        _C.cpu_path()
    unsupported = [name for name, supported in _C.cpu_paths() if not supported]
    for name in unsupported:
        monkeypatch.setenv("LORA_STREAM_CPU", name)
        with pytest.raises(RuntimeError, match="lacks the instructions"):
            _C.cpu_path()


def test_ops_pass_opcheck():
    base, out = torch.randn(6, 9), torch.empty(6, 9, dtype=torch.bfloat16)
    lora_A, lora_B = pair(6, 9, 3)
    torch.library.opcheck(torch.ops.lora_stream.merge_cast_.default, (base, lora_A, lora_B, 0.5, out))
    stats = torch.zeros(1, ops.NUM_STATS, dtype=torch.float64)
    grouped = torch.ops.lora_stream.merge_cast_grouped_.default
    torch.library.opcheck(grouped, ([base], [lora_A], [lora_B], [0.5], [out]), {"stats": stats})
    torch.library.opcheck(grouped, ([base], [lora_A], [lora_B], [0.5], [out]))


def test_op_works_under_torch_compile_without_a_graph_break():
    base, out = torch.randn(6, 9), torch.empty(6, 9, dtype=torch.bfloat16)
    lora_A, lora_B = pair(6, 9, 3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(base, lora_A, lora_B, out):
        ops.merge_cast_(base * 2, lora_A, lora_B, 0.5, out)
        return out + 1

    result = compiled(base, lora_A, lora_B, out)
    assert torch.equal(out, merge(base * 2, lora_A, lora_B, 0.5, torch.bfloat16))
    assert torch.equal(result, out + 1)


def test_autocast_inference_mode_and_gradients_change_no_bit():
    base = torch.randn(30, 40).requires_grad_()
    lora_A, lora_B = (t.requires_grad_() for t in pair(30, 40, 4))
    plain = merge(base.detach(), lora_A.detach(), lora_B.detach(), 0.5, torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(merge(base, lora_A, lora_B, 0.5, torch.bfloat16), plain)
    with torch.inference_mode():
        assert torch.equal(merge(base, lora_A, lora_B, 0.5, torch.bfloat16), plain)


def test_reference_rounds_once_where_two_roundings_differ():
    # A hair above the middle between two bfloat16 values: float32 drops the hair, and the tie then goes to even.
    exact = torch.tensor(
        [1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-8 - 2.0**-40, -(1.0 + 2.0**-8 + 2.0**-40)], dtype=torch.float64
    )
    assert reference.round_once(exact, torch.bfloat16).tolist() == [1.0 + 2.0**-7, 1.0, -(1.0 + 2.0**-7)]
    assert exact.float().to(torch.bfloat16).tolist() == [1.0, 1.0, -1.0]


@pytest.mark.parametrize("rank", [0, 1, 40])
@pytest.mark.parametrize("base_dtype", DTYPES)
def test_devices_without_a_kernel_get_the_same_by_torch(base_dtype, rank, monkeypatch):
    """The function that is registered for CUDA, here on CPU tensors; several blocks of rows."""
    monkeypatch.setattr(eager, "_BLOCK_BYTES", 8 * 119 * 20)
    base = torch.randn(61, 119).to(base_dtype)
    lora_A, lora_B = pair(61, 119, rank, std=0.05)
    outs = [torch.empty(61, 119, dtype=torch.bfloat16) for _ in range(2)]
    stats = [torch.full((1, ops.NUM_STATS), -1.0, dtype=torch.float64) for _ in range(2)]
    for module, out, found in zip((ops, eager), outs, stats, strict=True):
        module.merge_cast_grouped_([base], [lora_A], [lora_B], [1.75], [out], found)
    assert (outs[0] != outs[1]).sum() <= 2
    torch.testing.assert_close(outs[0], outs[1], rtol=2.0**-7, atol=1e-8)
    torch.testing.assert_close(stats[0][:, :4], stats[1][:, :4], rtol=1e-3, atol=1e-12)
    if torch.equal(outs[0], outs[1]):
        assert stats[0][0, 4] == stats[1][0, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_are_merged_right_with_one_warning():
    base = torch.randn(61, 119, device="cuda")
    lora_A, lora_B = (t.cuda() for t in pair(61, 119, 8))
    out = torch.empty(61, 119, dtype=torch.bfloat16, device="cuda")
    with pytest.warns(UserWarning, match="no kernel for cuda"):
        ops.merge_cast_(base, lora_A, lora_B, 1.75, out)
    assert_close_to_exact(out.cpu(), base.cpu(), lora_A.cpu(), lora_B.cpu(), 1.75)
