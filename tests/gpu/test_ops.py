"""The CUDA kernel on a device: against float64, and its manners. GPU layer."""

import threading

import pytest
import torch

from lora_stream import ops, reference
from lora_stream.rounding import Place

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
POISON = 7.0
# rows, cols, rank: nothing divides, edges of tiles and strips, several steps, ranks that fit into no shared memory
SHAPES = [
    (1, 1, 1),
    (3, 5, 2),
    (64, 128, 16),
    (65, 129, 13),
    (17, 136, 8),
    (0, 8, 4),
    (5, 0, 4),
    (130, 40, 0),
    (700, 24, 16),
    (1031, 771, 64),
    (300, 264, 256),
    (70, 72, 1024),
]


def problem(rows, cols, rank, base_dtype, A_dtype, B_dtype, *, delta=1.0):
    base = (torch.randn(rows, cols, device="cuda") * 0.02).to(base_dtype)
    lora_A = torch.randn(rank, cols, device="cuda").to(A_dtype)
    lora_B = torch.randn(rows, rank, device="cuda").to(B_dtype)
    return base, lora_A, lora_B, delta * 0.02 / max(1, rank) ** 0.5


def merge(base, lora_A, lora_B, scaling, dtype=torch.bfloat16, **kwargs):
    out = torch.full(base.shape, POISON, dtype=dtype, device="cuda")
    ops.merge_cast_(base, lora_A, lora_B, scaling, out, **kwargs)
    return out


def assert_within_bound(out, base, lora_A, lora_B, scaling, epsilon=2.0**-18):
    """What the docstring of merge_cast_ says."""
    scaling = torch.tensor(scaling, dtype=torch.float32).item()
    exact = base.double() + scaling * (lora_B.double() @ lora_A.double())
    magnitude = base.double().abs() + abs(scaling) * (lora_B.double().abs() @ lora_A.double().abs())
    fraction_bits = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[out.dtype]
    half_step = (exact.abs() * 2.0 ** (-fraction_bits - 1)).clamp_min(2.0**-25)
    assert ((out.double() - exact).abs() <= half_step + magnitude * epsilon).all()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_dither_takes_the_bits_of_the_slow_twin_however_the_weight_is_cut(base_dtype, out_dtype, size):
    for rows, cols, rank in SHAPES:
        base, lora_A, lora_B, scaling = problem(rows, cols, rank, base_dtype, torch.float32, torch.float32)
        args = (base.float() * size).to(base_dtype), lora_A, lora_B, scaling * size
        place = Place(1234567890123 * rank, rows, cols)
        got = merge(*args, out_dtype, rounding="dither", place=place)
        sums = merge(*args, torch.float32)
        want = reference.dither(sums, args[0].float(), out_dtype, place)
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))
        if rows > 2 and cols > 2:
            row, col = rows // 3, cols // 3
            part = args[0][row:, col:], lora_A[:, col:].contiguous(), lora_B[row:], args[3]
            place = Place(place.key, place.row + row, place.col + col)
            assert torch.equal(merge(*part, out_dtype, rounding="dither", place=place), got[row:, col:])


def test_fidelity_is_summed_up_where_it_is_asked_for():
    base, lora_A, lora_B, scaling = problem(300, 203, 5, torch.bfloat16, torch.float32, torch.float32, delta=0.01)
    out, stats = torch.empty_like(base), torch.zeros(1, ops.NUM_STATS, dtype=torch.float64, device="cuda")
    for places in (None, [Place(3)]):
        ops.merge_cast_grouped_([base], [lora_A], [lora_B], [scaling], [out], stats, places=places)
        delta = scaling * (lora_B.double() @ lora_A.double())
        want = ((out.double() - base.double()) * delta).sum()
        torch.testing.assert_close(stats[0, 4], want, rtol=1e-3, atol=0.0)
    ops.merge_cast_grouped_([base], [lora_A], [lora_B], [scaling], [out], stats, fidelity=False)
    assert stats[0, 4].isnan()
    assert stats[0, [0, 1, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("A_dtype", DTYPES)
@pytest.mark.parametrize("B_dtype", DTYPES)
def test_every_shape_and_dtype_is_merged_right(base_dtype, A_dtype, B_dtype, out_dtype):
    for rows, cols, rank in SHAPES:
        args = problem(rows, cols, rank, base_dtype, A_dtype, B_dtype)
        assert_within_bound(merge(*args, out_dtype), *args)


@pytest.mark.parametrize("pad", [0, 3, 8])
@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_every_layout_is_read_and_nothing_else_is_written(pad, start, base_dtype):
    rows, cols, rank = 201, 67, 9
    base, lora_A, lora_B, scaling = problem(rows, cols, rank, base_dtype, torch.float32, torch.bfloat16)
    storage = torch.randn(rows * (cols + pad) + start, device="cuda").to(base_dtype)
    view = storage[start:].view(rows, cols + pad)[:, :cols]
    view.copy_(base)
    whole = torch.full((rows * (cols + pad) + start,), POISON, dtype=torch.bfloat16, device="cuda")
    out = whole[start:].view(rows, cols + pad)[:, :cols]
    transposed_A, transposed_B = lora_A.t().contiguous().t(), lora_B.t().contiguous().t()
    ops.merge_cast_(view, transposed_A, transposed_B, scaling, out)
    assert torch.equal(out, merge(base, lora_A, lora_B, scaling))
    assert (whole[:start] == POISON).all()
    assert (whole[start:].view(rows, cols + pad)[:, cols:] == POISON).all()


@pytest.mark.parametrize("base_dtype", DTYPES)
@pytest.mark.parametrize("adapter_dtype", DTYPES)
@pytest.mark.parametrize(("rank", "delta"), [(16, 1.0), (64, 1.0), (256, 0.25)])
def test_9999_of_10000_elements_are_the_exact_sum_rounded_once(base_dtype, adapter_dtype, rank, delta):
    args = problem(2048, 3001, rank, base_dtype, adapter_dtype, adapter_dtype, delta=delta)
    exact = reference.merge_cast(*args, torch.bfloat16)
    assert (merge(*args) != exact).float().mean().item() <= 1e-4


@pytest.mark.parametrize("rank", [4, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_host_gets_the_same_but_for_ties(dtype, rank):
    args = problem(517, 389, rank, dtype, torch.float32, torch.float32, delta=0.1)
    on_device = merge(*args).cpu()
    on_host = torch.empty_like(on_device)
    ops.merge_cast_(*(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args), on_host)
    assert (on_device != on_host).float().mean().item() <= 1e-4
    torch.testing.assert_close(on_device, on_host, rtol=2.0**-7, atol=1e-8)


def test_precision_fast_keeps_its_bound_and_is_another_arithmetic():
    args = problem(700, 515, 64, torch.float32, torch.float32, torch.float32)
    fast = merge(*args, torch.float32, precision="fast")
    assert_within_bound(fast, *args, epsilon=2.0**-15)
    assert not torch.equal(fast, merge(*args, torch.float32))


def test_tf32_autocast_and_inference_mode_change_no_bit(monkeypatch):
    """Edge case 63."""
    args = problem(300, 264, 32, torch.float32, torch.float32, torch.float32)
    plain = merge(*args, torch.float32)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(merge(*args, torch.float32), plain)
    with torch.inference_mode():
        assert torch.equal(merge(*args, torch.float32), plain)


@pytest.mark.parametrize("adapter_dtype", DTYPES)
def test_infinities_nans_and_denormals_propagate_as_in_float32(adapter_dtype):
    base = torch.randn(100, 140, device="cuda")
    lora_A = torch.zeros(2, 140, device="cuda").to(adapter_dtype)
    lora_B = torch.ones(100, 2, device="cuda").to(adapter_dtype)
    lora_A[0] = torch.randn(140, device="cuda")
    specials = [float("inf"), -float("inf"), float("nan"), 1e-40, 6e4 if adapter_dtype == torch.float16 else 3.39e38]
    lora_A[0, 3:8] = torch.tensor(specials, device="cuda").to(adapter_dtype)
    base[0, :4] = torch.tensor([-0.0, float("inf"), float("nan"), -float("inf")], device="cuda")
    expected = base + (lora_B[:, :1].float() * lora_A[:1].float())
    torch.testing.assert_close(
        merge(base, lora_A, lora_B, 1.0, torch.float32), expected, rtol=1e-6, atol=1e-30, equal_nan=True
    )
    cast = merge(base, lora_A[:0], lora_B[:, :0], 1.0, torch.float32)
    assert torch.equal(cast.view(torch.int32)[:, 3:], base.view(torch.int32)[:, 3:])
    assert cast[0, 0].signbit()


def test_a_table_of_hundreds_of_matrices_gives_the_bits_of_one_by_one_and_right_statistics():
    shapes = [(3 + 7 * i % 300, 8 + 5 * i % 200, i % 20) for i in range(300)]
    problems = [problem(*shape, DTYPES[i % 2], DTYPES[i % 3], DTYPES[i % 3]) for i, shape in enumerate(shapes)]
    bases, lora_As, lora_Bs, scalings = (list(column) for column in zip(*problems, strict=True))
    outs = [torch.full_like(base, POISON, dtype=torch.bfloat16) for base in bases]
    stats = torch.full((300, ops.NUM_STATS), -1.0, dtype=torch.float64, device="cuda")
    ops.merge_cast_grouped_(bases, lora_As, lora_Bs, scalings, outs, stats)
    for base, A, B, scaling, out, found in zip(bases, lora_As, lora_Bs, scalings, outs, stats.tolist(), strict=True):
        assert torch.equal(out, merge(base, A, B, scaling))
        delta = torch.tensor(scaling, dtype=torch.float32).item() * (B.double() @ A.double())
        rounded = base.to(torch.bfloat16)
        kept = (out.double() - rounded.double()).square().sum().item()
        assert found[0] == (delta != 0).sum().item()
        assert found[1] == ((delta != 0) & (out == rounded)).sum().item()
        assert found[2] == pytest.approx(kept, rel=1e-3)
        assert found[3] == pytest.approx(delta.square().sum().item(), rel=1e-3)
        assert found[4] == out.float().view(torch.int32).to(torch.int64).sum().item() % 2**32


def test_out_may_be_base_itself():
    for dtype in DTYPES:
        base, lora_A, lora_B, scaling = problem(300, 203, 5, dtype, torch.float32, torch.float32)
        fresh = merge(base, lora_A, lora_B, scaling, dtype)
        ops.merge_cast_(base, lora_A, lora_B, scaling, base)
        assert torch.equal(base, fresh)


def test_pinned_host_memory_is_written_directly_and_other_host_memory_is_refused():
    args = problem(301, 264, 16, torch.bfloat16, torch.float32, torch.float32)
    out = torch.full((301, 264), POISON, dtype=torch.bfloat16).pin_memory()
    ops.merge_cast_(*args, out)
    torch.cuda.current_stream().synchronize()
    assert torch.equal(out, merge(*args).cpu())
    with pytest.raises(RuntimeError, match=r"host memory that cuda:0 cannot write to; pass .* pinned memory"):
        ops.merge_cast_(*args, torch.empty(301, 264, dtype=torch.bfloat16))


def test_work_is_enqueued_on_the_current_stream_of_the_bases_device():
    args = problem(4096, 4096, 16, torch.bfloat16, torch.float32, torch.float32)
    expected = merge(*args)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    out = torch.full((4096, 4096), POISON, dtype=torch.bfloat16, device="cuda")
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        ops.merge_cast_(*args, out)
        done = side.record_event()
    assert not done.query(), "returned before the device was there"
    assert (out[0, :8] == POISON).all(), "the other stream has not been waited for"
    done.synchronize()
    assert torch.equal(out, expected)


def test_no_launch_changes_the_current_device_or_leaves_an_error_behind():
    before = torch.cuda.current_device()
    args = problem(64, 64, 4, torch.bfloat16, torch.float32, torch.float32)
    with pytest.raises(RuntimeError):
        ops.merge_cast_(*args, torch.empty(64, 64, dtype=torch.bfloat16))
    found = []

    def elsewhere():  # a thread that has used no device yet
        found.append(merge(*args))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert torch.equal(found[0], merge(*args))
    assert torch.cuda.current_device() == before
    torch.cuda.synchronize()


def test_tensors_on_different_devices_are_refused_by_name():
    base, lora_A, lora_B, scaling = problem(8, 8, 2, torch.float32, torch.float32, torch.float32)
    out = torch.empty(8, 8, device="cuda")
    with pytest.raises(RuntimeError, match="the first base is on cuda:0 and a lora_A is on the CPU"):
        ops.merge_cast_(base, lora_A.cpu(), lora_B, scaling, out)
    with pytest.raises(RuntimeError, match=r"lora_B must have shape \[rows, rank\] = \[8, 2\], got \[8, 3\]"):
        ops.merge_cast_(base, lora_A, torch.empty(8, 3, device="cuda"), scaling, out)


def test_offsets_past_two_to_the_31_are_right():
    rows, cols = 70_000, 32_768  # 2.3 G elements
    base = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    base[-1] = 1.0
    lora_A = torch.randn(2, cols, device="cuda")
    lora_B = torch.zeros(rows, 2, device="cuda")
    lora_B[-3:] = torch.randn(3, 2, device="cuda")
    out = torch.empty_like(base)
    ops.merge_cast_(base, lora_A, lora_B, 0.5, out)
    assert_within_bound(out[-5:], base[-5:], lora_A, lora_B[-5:], 0.5)
    assert (out[:-3] == 0).all()
