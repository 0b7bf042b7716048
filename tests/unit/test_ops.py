"""The op against float64, path against path, and its refusals. Unit layer; the AVX-512 text also runs in tests/cpp."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_stream import _C, ops, reference

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
    """Edge cases 7 to 9."""
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
    """Edge cases 2 and 3."""
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
    changed, unmoved, kept_sq, delta_sq, projected, checksum = stats[0].tolist()
    delta = 2.0 * (lora_B.double() @ lora_A.double())
    assert changed == 54 * 119
    assert unmoved == ((out == base) & (delta != 0)).sum().item()
    assert 0 < unmoved < changed
    assert kept_sq == pytest.approx((out.double() - base.double()).square().sum().item(), rel=1e-4)
    assert delta_sq == pytest.approx(delta.square().sum().item(), rel=1e-4)
    assert projected == pytest.approx(((out.double() - base.double()) * delta).sum().item(), rel=1e-4)
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
    """Case B34."""
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


def test_no_matrix_of_a_group_may_write_what_another_reads_or_writes():
    def run(bases, outs, lora_As=None):
        lora_As = lora_As or [torch.randn(2, 5) for _ in bases]
        ops.merge_cast_grouped_(bases, lora_As, [torch.randn(4, 2) for _ in bases], [1.0] * len(bases), outs)

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


def test_offsets_past_two_to_the_31_are_right():
    """Edge case 60. Rows that lie a gigabyte apart: only their own pages are touched."""
    stride, cols = 2**30 + 5, 37
    memory = [torch.empty(2 * stride + cols, dtype=torch.bfloat16) for _ in range(2)]
    base, out = (each.as_strided((3, cols), (stride, 1)) for each in memory)
    base.normal_()
    lora_A, lora_B = torch.randn(5, cols), torch.randn(3, 5)
    ops.merge_cast_(base, lora_A, lora_B, 0.7, out)
    assert torch.equal(out, reference.merge_cast(base, lora_A, lora_B, 0.7, torch.bfloat16))


def test_a_larger_out_is_refused_and_not_filled_by_broadcasting():
    with pytest.raises(RuntimeError, match="out must have shape"):
        ops.merge_cast_(torch.randn(4, 1), torch.randn(2, 1), torch.randn(4, 2), 1.0, torch.empty(4, 5))


@pytest.mark.parametrize("shape", [(0, 5), (4, 0)])
def test_statistics_of_empty_matrices_are_zero(shape):
    base, stats = torch.empty(shape), torch.full((1, ops.NUM_STATS), -7.0, dtype=torch.float64)
    ops.merge_cast_grouped_(
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
    """Edge case 62."""
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


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 9),
    cols=st.integers(0, 40),
    rank=st.integers(0, 9),
    A_dtype=st.sampled_from(DTYPES),
    B_dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["contiguous", "transposed", "columns of a wider one", "offset by one"]),
)
def test_any_pair_is_laid_out_for_the_cuda_kernel_without_changing_its_product(
    rows, cols, rank, A_dtype, B_dtype, layout
):
    def make(m, n, dtype):
        if layout == "transposed":
            return torch.randn(n, m).to(dtype).t()
        if layout == "columns of a wider one":
            return torch.randn(m, n + 3).to(dtype)[:, 1 : n + 1]
        if layout == "offset by one":
            return torch.randn(m * n + 1).to(dtype)[1:].view(m, n)
        return torch.randn(m, n).to(dtype)

    lora_A, lora_B = make(rank, cols, A_dtype), make(rows, rank, B_dtype)
    A, B = ops.laid_out(lora_A, lora_B)
    assert torch.equal(A[:rank], lora_A.to(A.dtype))
    assert torch.equal(B[:, :rank], lora_B.to(B.dtype))
    assert not A[rank:].any()
    assert not B[:, rank:].any()
    assert A.shape == (B.shape[1], cols)
    assert A.dtype == B.dtype == (A_dtype if A_dtype == B_dtype else torch.float32)
    assert A.shape[0] % 2 == 0
    if A.numel() and B.numel():
        assert A.stride(1) == B.stride(1) == 1
        assert A.data_ptr() % 16 == 0
        assert A.stride(0) * A.element_size() % 16 == 0
        assert B.data_ptr() % (2 * B.element_size()) == 0
        assert B.stride(0) % 2 == 0
        # The kernel reads whole groups of eight columns of each row.
        last = A.storage_offset() + (A.shape[0] - 1) * A.stride(0) + -(-cols // 8) * 8
        assert last * A.element_size() <= A.untyped_storage().nbytes()


def test_rows_of_the_first_factor_are_filled_up_to_eight_elements_where_the_kernel_would_read_past_the_last():
    lora_A = torch.randn(4, 12)  # rows are aligned to 16 bytes as they are
    A, _ = ops.laid_out(lora_A, torch.randn(3, 4))
    assert A.stride(0) == 16
    assert A.untyped_storage().nbytes() == 4 * 16 * 4
    assert torch.equal(A, lora_A)


def test_pairs_of_the_usual_kind_are_not_copied_for_the_cuda_kernel():
    for dtype in DTYPES:
        lora_A, lora_B = torch.randn(8, 64).to(dtype), torch.randn(48, 8).to(dtype)
        A, B = ops.laid_out(lora_A, lora_B)
        assert A is lora_A
        assert B is lora_B


def test_a_build_without_the_cuda_kernel_says_how_to_build_it(monkeypatch):
    """The function that is registered for CUDA, here on CPU tensors."""
    monkeypatch.setattr(_C, "cuda_architectures", "")
    with pytest.raises(RuntimeError, match=r"no kernel for CUDA devices: install it again with LORA_STREAM_CUDA=1"):
        ops._merge_cast_cuda_(torch.zeros(4, 5), *pair(4, 5, 2), 1.0, torch.zeros(4, 5))


def test_a_base_on_the_host_beside_an_out_on_a_device_is_refused(monkeypatch):
    """The function that is registered for CUDA, which torch then calls."""
    monkeypatch.setattr(_C, "cuda_architectures", "sm_90")
    with pytest.raises(RuntimeError, match="the first base is on cpu and others are not"):
        ops._merge_cast_cuda_(torch.zeros(4, 5), *pair(4, 5, 2), 1.0, torch.zeros(4, 5))


def test_an_unknown_precision_is_refused_and_on_the_cpu_there_is_one():
    base = torch.randn(30, 40)
    lora_A, lora_B = pair(30, 40, 8)
    with pytest.raises(ValueError, match="precision must be 'float32' or 'fast', got 'tf32'"):
        ops.merge_cast_(base, lora_A, lora_B, 1.0, torch.empty(30, 40), precision="tf32")
    fast = torch.empty(30, 40, dtype=torch.bfloat16)
    ops.merge_cast_(base, lora_A, lora_B, 1.0, fast, precision="fast")
    assert torch.equal(fast, merge(base, lora_A, lora_B, 1.0, torch.bfloat16))
