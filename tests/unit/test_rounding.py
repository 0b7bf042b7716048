"""Dithering: unbiased, independent, exact where it can be, the same bits however a weight is cut. Unit layer."""

import json
import math
import random

import pytest
import torch

import lora_stream
from lora_stream import _C, ops, reference
from lora_stream.rounding import Place
from tests.architectures import ARCHITECTURES, build
from tests.doubles import Pieces, Recorder
from tests.kinds import KINDS
from tests.models import assert_equal, fill, llama, sent, with_lora

HALVES = [torch.bfloat16, torch.float16]
HERE = Place(7)
PATHS = [name for name, supported in _C.cpu_paths() if supported]


def bits(tensor):
    return tensor.contiguous().view(torch.int16)


def dithered(base, lora_A, lora_B, scaling=1.0, dtype=torch.bfloat16, place=HERE):
    out = torch.empty(base.shape, dtype=dtype)
    ops.merge_cast_(base, lora_A, lora_B, scaling, out, rounding="dither", place=place)
    return out


def sums(base, lora_A, lora_B, scaling=1.0):
    out = torch.empty(base.shape)
    ops.merge_cast_(base, lora_A, lora_B, scaling, out)
    return out


def added(base, amount, dtype=torch.bfloat16, place=HERE):
    """base + amount, as a merge of rank 1 makes it, dithered. Both [rows, cols], one amount for each column."""
    return dithered(base, amount[:1].contiguous(), torch.ones(base.shape[0], 1), dtype=dtype, place=place)


def neighbours(x, dtype):
    """The two values of dtype around each float32 number, the smaller one first, from torch's own rounding."""
    near = x.to(dtype)
    towards = torch.where(near.float() <= x, math.inf, -math.inf).to(dtype)
    other = torch.where(near.float() == x, near, torch.nextafter(near, towards))
    return torch.minimum(near.float(), other.float()), torch.maximum(near.float(), other.float())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("base_dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-39, 1e6])
def test_every_element_is_a_neighbour_of_the_float32_sum_and_what_the_slow_twin_says(dtype, base_dtype, size):
    for rows, cols, rank in ((1, 1, 1), (37, 301, 5), (64, 48, 16), (5, 1000, 40)):
        base = (torch.randn(rows, cols) * 0.02 * size).to(base_dtype)
        pair = torch.randn(rank, cols), torch.randn(rows, rank)
        pair[1][0] = 0  # a row without a delta
        place = Place(random.getrandbits(62) - 2**61, random.randrange(100), random.randrange(100))
        got = dithered(base, *pair, 1e-3 * size, dtype, place)
        exact = sums(base, *pair, 1e-3 * size)
        low, high = neighbours(exact, dtype)
        is_finite = high.isfinite() & low.isfinite()
        assert ((got.float() == low) | (got.float() == high))[is_finite].all()
        assert torch.equal(bits(got), bits(reference.dither(exact, base.float(), dtype, place)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("magnitude", [1.0, 0.02, 3e-5, 1e-7])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_expectation_is_the_exact_sum(dtype, magnitude, sign):
    """Within five standard errors, over positions and seeds, for fractions of a step all over it."""
    step = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    rows, cols = 400, 240
    base = torch.full((rows, cols), sign * magnitude).to(dtype)
    value = base[0, 0].float().item()
    ulp = max(step * 2.0 ** math.floor(math.log2(abs(value))), 2.0**-24 if dtype == torch.float16 else 0.0)
    fractions = torch.linspace(0.01, 0.99, cols).expand(rows, cols)
    want = sums(base, (fractions * ulp * sign)[:1].contiguous(), torch.ones(rows, 1)).double()
    errors = [added(base, fractions * ulp * sign, dtype, Place(seed)).double() - want for seed in range(25)]
    error = torch.stack(errors) / ulp  # [seeds, rows, cols]
    spread = (fractions * (1 - fractions)).sqrt()[0].double()
    num = len(errors) * rows
    assert (error.mean((0, 1)) / (spread / num**0.5)).abs().max() < 5
    total = error.mean() / (fractions * (1 - fractions)).mean().sqrt() * (num * cols) ** 0.5
    assert abs(total) < 5
    # As noisy as independent draws are, and not more.
    torch.testing.assert_close(error.square().mean((0, 1)), spread.square(), rtol=0.1, atol=0.003)


def noise(place, rows=512, cols=512):
    """Uniform in [-1/2, 1/2)."""
    return reference.random_bits(place, rows, cols) / 2**16 - 0.5 + 2**-17


@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_positions_rows_columns_seeds_and_parameters_are_independent(seed):
    place = Place.in_parameter(seed, "model.layers.0.self_attn.q_proj.weight")
    u = noise(place)
    shifts = [(i, j) for i in range(4) for j in range(-3, 4) if i > 0 or j > 0]
    pairs = [(u, u.roll((-i, -j), (0, 1))) for i, j in shifts]
    others = [Place.in_parameter(seed + 1, "model.layers.0.self_attn.q_proj.weight")]
    others += [Place.in_parameter(seed, f"model.layers.{i}.self_attn.q_proj.weight") for i in (1, 2)]
    pairs += [(u, noise(other)) for other in others]
    for a, b in pairs:
        correlation = (a * b).mean() * 12 * u.numel() ** 0.5
        assert abs(correlation) < 5
        joint = torch.histogramdd(torch.stack([a.flatten(), b.flatten()], 1), bins=16, range=[-0.5, 0.5, -0.5, 0.5])
        expected = u.numel() / 256
        chi_sq = ((joint.hist - expected) ** 2 / expected).sum()
        assert abs(chi_sq - 255) < 5 * (2 * 255) ** 0.5
    for dim in (0, 1):  # sums of rows and of columns
        assert (u.mean(dim).std() * (12 * 512) ** 0.5 - 1).abs() < 0.2


def test_the_noise_adds_up_in_no_direction():
    """Its largest singular value is that of independent numbers: what it does to an activation is small whatever that is."""
    u = noise(Place.in_parameter(0, "a.weight"), 700, 500)
    largest = torch.linalg.matrix_norm(u.float(), 2)
    assert largest < 1.05 * (700**0.5 + 500**0.5) / 12**0.5


@pytest.mark.parametrize("dtype", HALVES)
def test_representable_sums_stay_exact(dtype):
    base = torch.randint(-200, 200, (50, 90)).to(dtype) / 64
    amount = torch.randint(-50, 50, (1, 90)).float() / 64
    for seed in range(5):
        assert torch.equal(added(base, amount, dtype, Place(seed)).float(), base.float() + amount)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("base_dtype", [torch.float32, *HALVES])
def test_a_zero_delta_gives_the_base_as_a_cast_does_bit_for_bit(dtype, base_dtype):
    base = torch.randn(40, 70).to(base_dtype)
    base[0, :4] = torch.tensor([0.0, -0.0, 1e-40, -1e-7])
    lora_A, lora_B = torch.randn(3, 70), torch.zeros(40, 3)
    want = base.to(dtype)
    assert torch.equal(dithered(base, lora_A, lora_B, dtype=dtype), want)
    assert torch.equal(dithered(base, lora_A, torch.randn(40, 3), scaling=0.0, dtype=dtype), want)
    assert torch.equal(bits(dithered(base, lora_A[:0], lora_B[:, :0], dtype=dtype)), bits(want))


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_rounded_to_infinity_and_what_is_infinite_or_nan_stays_so(path, monkeypatch):
    monkeypatch.setenv("LORA_STREAM_CPU", path)
    cols = 48  # whole vectors, and a tail
    for dtype, largest in ((torch.bfloat16, 3.3895313892515355e38), (torch.float16, 65504.0)):
        beyond = torch.nextafter(torch.tensor(largest), torch.tensor(math.inf)).item()
        end = torch.finfo(torch.float32).max if dtype == torch.bfloat16 else 65535.99
        for x, want in (
            (largest, {largest}),
            (beyond, {largest}),
            (end, {largest}),
            (torch.nextafter(torch.tensor(largest), torch.tensor(0.0)).item(), {largest, None}),
            (math.inf, {math.inf}),
            *([(65536.0, {math.inf}), (1e30, {math.inf})] if dtype == torch.float16 else []),
        ):
            for sign in (1, -1):
                # As the base alone it would be rounded to nearest.
                lora_A, lora_B = torch.full((1, cols), sign * x), torch.ones(3, 1)
                got = {
                    value
                    for seed in range(20)
                    for value in (sign * dithered(torch.zeros(3, cols), lora_A, lora_B, dtype=dtype, place=Place(seed)))
                    .flatten()
                    .tolist()
                }
                allowed = {value for value in want if value is not None}
                assert allowed <= got
                if None in want:  # the neighbour below, most rarely
                    assert got <= {largest, torch.nextafter(torch.tensor(largest, dtype=dtype), torch.zeros((), dtype=dtype)).item()}  # fmt: skip
                else:
                    assert got == allowed
        nan = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
        base = nan.repeat(3, cols // 4)
        assert dithered(base, torch.ones(1, cols), torch.ones(3, 1), dtype=dtype).isnan().all()


def test_denormals_are_dithered_too():
    tiny = torch.full((200, 64), 2.0**-133).bfloat16()  # bfloat16's least
    got = added(tiny, torch.full((1, 64), 2.0**-134 * 0.5)).float() / 2.0**-133
    assert set(got.unique().tolist()) == {1.0, 2.0}
    assert (got - 1).mean().item() == pytest.approx(0.25, abs=0.03)
    tiny = torch.full((200, 64), 2.0**-24).half()
    got = added(tiny, torch.full((1, 64), 2.0**-26), torch.float16).float() / 2.0**-24
    assert (got - 1).mean().item() == pytest.approx(0.25, abs=0.03)
    nothing = added(torch.zeros(200, 64).half(), torch.full((1, 64), 2.0**-60), torch.float16)
    assert not nothing.any()


def test_an_element_moves_once_as_its_delta_grows_and_stays_moved():
    base = (torch.randn(60, 80) * 0.05).bfloat16()
    lora_A, lora_B = torch.randn(4, 80), torch.randn(60, 4)
    direction = torch.sign(lora_B @ lora_A)
    before = base.float()
    moves = torch.zeros(60, 80)
    for scaling in torch.linspace(1e-6, 3e-5, 60).tolist():
        now = dithered(base, lora_A, lora_B, scaling).float()
        assert ((now - before) * direction >= 0).all()  # never back
        moves += now != before
        before = now
    small = (3e-5 * (lora_B @ lora_A)).abs() < 2.0**-9 * base.float().abs()  # less than half a step
    assert moves[small].max() == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_processor_and_cut_gives_the_same_bits(path, threads, monkeypatch):
    base = torch.randn(70, 530).bfloat16()
    lora_A, lora_B = torch.randn(6, 530) * 1e-3, torch.randn(70, 6)
    want = dithered(base, lora_A, lora_B)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        monkeypatch.setenv("LORA_STREAM_CPU", path)
        for _ in range(12):
            row, col = random.randrange(70), random.randrange(530)
            part = dithered(base[row:, col:], lora_A[:, col:], lora_B[row:], place=Place(7, row, col))
            assert torch.equal(part, want[row:, col:])
    finally:
        torch.set_num_threads(before)


def place_of(name, seed=0):
    return Place.in_parameter(seed, name)


def expected(model, seed=0, **kwargs):
    """From the float32 sums, dithered by the slow twin at each tensor's own place."""
    plan = lora_stream.MergedWeights(model, **kwargs).plan
    exact = dict(lora_stream.stream(model, wire_dtype=torch.float32, **kwargs))
    base = {task.meta.name: task.base if task.view is None else task.view.of(task.base) for task in plan.tasks}
    want = dict(lora_stream.stream(model, **kwargs))
    for task in plan.tasks:
        if not task.adapters:
            continue
        name, live = task.meta.name, base[task.meta.name].detach().float()
        is_of_experts = len(task.meta.shape) == 3 and task.adapters[0].num_experts is not None
        flat = [x.reshape(-1, x.shape[-1]) if is_of_experts else x.reshape(x.shape[0], -1) for x in (exact[name], live)]
        want[name] = reference.dither(*flat, torch.bfloat16, place_of(name, seed)).reshape(task.meta.shape)
    return want


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_dithered_by_its_checkpoint_name_and_position_however_it_is_staged(kind):
    torch.manual_seed(3)
    model = KINDS[kind]()
    want = expected(model)
    assert_equal(sent(model), want)
    assert_equal(sent(model, bucket_bytes=1), want)
    pieces = Pieces(3)
    for _ in lora_stream.MergedWeights(model, rounding="dither").stream_into(pieces):
        pass
    assert_equal(pieces.tensors, want)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "llama4", "deepseek_v3", "qwen3_vl_moe", "qwen3_vl"])
def test_experts_and_views_are_dithered_by_their_own_names(name):
    torch.manual_seed(3)
    _, modules, parameters = ARCHITECTURES[name]
    model = with_lora(build(name), target_modules=modules, target_parameters=parameters, task_type=None)
    want = expected(model)
    assert_equal(sent(model), want)
    pieces = Pieces(1)
    for _ in lora_stream.MergedWeights(model, rounding="dither").stream_into(pieces):
        pass
    assert_equal(pieces.tensors, want)


def test_the_same_policy_is_sent_alike_and_another_seed_differs():
    model = with_lora(llama(dtype=torch.bfloat16))
    fill(model, std=0.01)
    first, again, other = sent(model), sent(model), sent(model, seed=1)
    assert_equal(first, again)
    merged = lora_stream.MergedWeights(model).plan.names("merged")
    differ = [(first[name] != other[name]).float().mean().item() for name in merged]
    assert min(differ) > 0.01
    assert_equal(other, expected(model, seed=1))
    renamed = sent(model, rename=lambda name: f"policy.{name}")
    assert_equal({name.removeprefix("policy."): tensor for name, tensor in renamed.items()}, first)
    assert_equal(
        sent(model, scope="trained"), {name: first[name] for name, _ in lora_stream.stream(model, scope="trained")}
    )


def test_float32_on_the_wire_is_not_dithered():
    model = with_lora(llama())
    assert_equal(sent(model, wire_dtype=torch.float32), dict(lora_stream.stream(model, wire_dtype=torch.float32)))


def test_a_sync_dithers_and_says_so_and_a_stream_a_merge_and_the_op_round_to_nearest():
    model = with_lora(llama(dtype=torch.bfloat16))
    fill(model, std=0.01)
    engine = Recorder()
    report = lora_stream.sync(model, engine)
    assert_equal(engine.weights, sent(model))
    assert (report.rounding_mode, report.seed) == ("dither", 0)
    assert "dither, seed 0" in report.line()
    assert "dither, seed 0" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["rounding_mode"] == "dither"
    nearest = lora_stream.sync(model, engine, rounding="nearest")
    assert_equal(engine.weights, {**engine.weights, **dict(lora_stream.stream(model, rounding="nearest"))})
    assert nearest.how_rounded == "nearest"
    lora_stream.sync(model, engine, seed=5)
    assert_equal(engine.weights, {**engine.weights, **sent(model, seed=5)})
    base, lora_A, lora_B = torch.randn(9, 9).bfloat16(), torch.randn(2, 9), torch.randn(9, 2)
    out = torch.empty(9, 9, dtype=torch.bfloat16)
    ops.merge_cast_(base, lora_A, lora_B, 0.3, out)
    assert torch.equal(out, sums(base, lora_A, lora_B, 0.3).bfloat16())


def test_an_engine_is_put_back_on_the_bits_that_it_had():
    """By the rounding of the sync before, whatever the failed one used."""
    model = with_lora(llama(dtype=torch.bfloat16))
    fill(model, std=0.01)
    for rounding in ({"seed": 3}, {"rounding": "nearest"}, {}):
        engine = Recorder()
        lora_stream.sync(model, engine, **rounding)
        old = dict(engine.weights)
        fill(model, std=0.02)
        engine.fail_at = 3
        with pytest.raises(lora_stream.SyncError, match="put back on its old weights"):
            lora_stream.sync(model, engine, rounding="dither", seed=9)
        assert_equal(engine.weights, old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounding": "stochastic"}, "rounding must be 'nearest' or 'dither', got 'stochastic'"),
        ({"seed": 0.5}, "seed must be a whole number, got 0.5"),
        ({"seed": True}, "seed must be a whole number, got True"),
    ],
)
def test_another_rounding_or_seed_is_refused_before_anything_happens(change, message, tmp_path):
    model = with_lora(llama())
    engine = Recorder()
    for call in (
        lambda: lora_stream.stream(model, **change),
        lambda: lora_stream.MergedWeights(model, **change),
        lambda: lora_stream.sync(model, engine, **change),
        lambda: lora_stream.checkpoint.export(model, tmp_path / "out", **change),
        lambda: lora_stream.checkpoint.merge(tmp_path / "source", tmp_path / "out", **change),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert engine.loads == []
    assert not (tmp_path / "out").exists()
    matrix = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="rounding must be"):
        ops.merge_cast_(matrix, matrix, matrix, 1.0, matrix.clone(), rounding="down")


def test_places_that_are_not_one_for_each_matrix_are_refused():
    matrix, out = torch.zeros(2, 2), torch.zeros(2, 2)
    for places in ([Place(1), Place(2)], [(1, 2)]):
        with pytest.raises(RuntimeError, match="places must hold key, row and column of each of the 1 matrices"):
            ops.merge_cast_grouped_([matrix], [matrix], [matrix], [1.0], [out], places=places)
