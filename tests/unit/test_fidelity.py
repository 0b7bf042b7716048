"""What reports say of how much of an update has arrived, and the warning where too little has. Unit layer."""

import json
import logging
import math

import pytest
import torch

import lora_stream
from lora_stream import ops
from lora_stream.fidelity import Fidelity, Rounding, warn_if_low
from tests.doubles import Pieces, Recorder
from tests.kinds import KINDS
from tests.models import fill, llama, with_lora


@pytest.fixture
def small_update():
    """Deltas of about a quarter of a step."""
    model = with_lora(llama(dtype=torch.bfloat16))
    fill(model, std=0.0004)
    return model


def of_formula(model, merged):
    """captured, moved and norm ratio of each target and of all, from float64."""
    found, total = {}, torch.zeros(5, dtype=torch.float64)
    for path, layer in model.get_base_model().named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        base = layer.base_layer.weight.detach()
        lora_A, lora_B = (getattr(layer, name)["default"].weight.detach().double() for name in ("lora_A", "lora_B"))
        delta = layer.scaling["default"] * (lora_B @ lora_A)
        out, rounded = merged[f"{path}.weight"].double(), base.bfloat16().double()
        sums = [((out - base.double()) * delta).sum(), delta.square().sum(), (out - rounded).square().sum()]
        sums += [((out != rounded) & (delta != 0)).sum(), (delta != 0).sum()]
        sums = torch.stack([each.double() for each in sums])
        total += sums
        found[f"{path}.weight"] = (sums[0] / sums[1]).item()
    return found, (total[0] / total[1]).item(), (total[3] / total[4]).item(), (total[2] / total[1]).sqrt().item()


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_captured_moved_and_norms_are_those_of_the_formula_of_all_and_of_each(rounding, dtype):
    model = with_lora(llama(dtype=dtype))
    fill(model, std=0.01)
    engine = Recorder()
    report = lora_stream.sync(model, engine, rounding=rounding)
    each, captured, moved, norm_ratio = of_formula(model, engine.weights)
    assert report.fidelity.captured == pytest.approx(captured, rel=1e-4)
    assert report.fidelity.moved == pytest.approx(moved, rel=1e-6)
    assert report.fidelity.norm_ratio == pytest.approx(norm_ratio, rel=1e-4)
    assert dict(report.fidelity.by_name) == pytest.approx(each, rel=1e-3)
    values = [value for _, value in report.fidelity.by_name]
    assert values == sorted(values)
    assert report.fidelity.worst(2) == report.fidelity.by_name[:2]


def test_dither_captures_all_of_an_update_of_which_nearest_loses_most(small_update):
    dithered = [lora_stream.sync(small_update, Recorder(), seed=seed).fidelity for seed in range(40)]
    nearest = lora_stream.sync(small_update, Recorder(), rounding="nearest").fidelity
    assert nearest.captured < 0.7
    captured = torch.tensor([each.captured for each in dithered])
    assert (captured.mean() - 1).abs() < 5 * captured.std() / len(captured) ** 0.5
    assert captured.std() < 0.5
    assert min(each.moved for each in dithered) > nearest.moved
    assert min(each.norm_ratio for each in dithered) > 1  # their noise


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["linear", "dora on linear", "convolutions", "lora_bias", "trainable tokens"])
def test_a_part_after_the_other_is_summed_to_the_whole(kind):
    """However it is staged: what is reported is of the tensor."""
    torch.manual_seed(1)
    model = KINDS[kind]()
    whole = lora_stream.stream(model, rounding="dither")
    list(whole)
    stream = lora_stream.MergedWeights(model, rounding="dither").stream_into(Pieces(3))
    list(stream)
    assert stream.stats.rounding.keys() == whole.stats.rounding.keys()
    for name, found in stream.stats.rounding.items():
        want = whole.stats.rounding[name]
        assert found.projected == pytest.approx(want.projected, rel=1e-3)
        assert (found.changed, found.unmoved, found.checksum) == (want.changed, want.unmoved, want.checksum)


def test_a_report_tells_people_and_programs(small_update):
    report = lora_stream.sync(small_update, Recorder(), rounding="nearest")
    captured = report.fidelity.captured
    for text in (str(report), report.line()):
        assert f"{captured:.1%}" in text
        assert "nearest" in text
    worst, value = report.fidelity.worst()[0]
    assert f"{worst} {value:.1%}" in str(report)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["captured"] == captured
    assert found["moved"] == report.fidelity.moved
    assert found["worst"][0] == [worst, value]
    assert found["rounding"][worst]["projected"] == report.rounding[worst].projected


@pytest.mark.parametrize(("projected", "warns"), [(8.9, True), (9.1, False), (math.nan, False)])
def test_nine_tenths_are_enough(projected, warns, caplog):
    part = Rounding(changed=10, unmoved=5, kept_sq=1.0, delta_sq=10.0, projected=projected, checksum=3)
    warn_if_low({"a": part})
    assert bool(warnings_of(caplog)) == warns


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "has arrived" in record.getMessage()]


def test_nearest_warns_with_the_figure_the_worst_and_the_way_out_where_less_than_nine_tenths_arrive(
    small_update, caplog
):
    caplog.set_level(logging.WARNING, "lora_stream")
    report = lora_stream.sync(small_update, Recorder(), rounding="nearest")
    (text,) = warnings_of(caplog)
    assert f"only {100 * report.fidelity.captured:.1f} % of the adapter's update" in text
    assert report.fidelity.worst()[0][0] in text
    assert 'rounding "dither" delivers them' in text
    caplog.clear()
    list(lora_stream.stream(small_update))
    assert len(warnings_of(caplog)) == 1
    caplog.clear()
    lora_stream.sync(small_update, Recorder())
    large = with_lora(llama(dtype=torch.bfloat16))
    lora_stream.sync(large, Recorder(), rounding="nearest")
    list(lora_stream.stream(llama()))
    with lora_stream.stream(small_update) as stream:  # nobody has all of it
        next(stream)
    assert warnings_of(caplog) == []


def test_checkpoints_warn_too_and_dithered_ones_hold_what_a_sync_sends(small_update, tmp_path, caplog):
    from safetensors.torch import load_file

    small_update.get_base_model().save_pretrained(tmp_path / "unused")
    base = llama(dtype=torch.bfloat16)
    base.load_state_dict({name.replace("base_layer.", ""): value for name, value in small_update.get_base_model().state_dict().items() if "lora_" not in name})  # fmt: skip
    base.save_pretrained(tmp_path / "base")
    small_update.save_pretrained(tmp_path / "adapter")
    caplog.set_level(logging.WARNING, "lora_stream")
    merge, export = lora_stream.checkpoint.merge, lora_stream.checkpoint.export
    reports = {
        "merged": merge(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base"),
        "exported": export(small_update, tmp_path / "exported"),
    }
    assert len(warnings_of(caplog)) == 2
    for report in reports.values():
        assert report.rounding == "nearest"
        found = json.loads(json.dumps(report.to_dict()))
        assert found["captured"] == report.fidelity.captured < 0.7
        assert found["worst"]
        assert ("rounding", "nearest") in report.rows()
        assert any(label == "update captured" for label, _ in report.rows())
    caplog.clear()
    dithered = {"rounding": "dither", "seed": 4}
    merge(tmp_path / "adapter", tmp_path / "merged 4", base=tmp_path / "base", **dithered)
    report = export(small_update, tmp_path / "exported 4", **dithered)
    assert warnings_of(caplog) == []
    assert ("rounding", "dither, seed 4") in report.rows()
    engine = Recorder()
    lora_stream.sync(small_update, engine, seed=4)
    for name in ("merged 4", "exported 4"):
        tensors = load_file(tmp_path / name / "model.safetensors")
        assert tensors.keys() == engine.weights.keys()
        assert all(torch.equal(tensor, engine.weights[key]) for key, tensor in tensors.items())


def test_what_was_not_measured_and_what_has_no_delta_is_said_so():
    part = {"changed": 10, "unmoved": 5, "kept_sq": 1.0, "delta_sq": 4.0, "checksum": 3}
    unknown = Fidelity.of({"a": Rounding(**part, projected=math.nan), "b": Rounding(**part, projected=2.0)})
    assert unknown.captured is None
    assert unknown.by_name == (("b", 0.5),)
    assert (unknown.moved, unknown.norm_ratio) == (0.5, 0.5)
    assert "fidelity=True" in unknown.rows()[0][1]
    nothing = Fidelity.of({})
    assert (nothing.captured, nothing.moved, nothing.norm_ratio, nothing.by_name) == (None, 0.0, 0.0, ())
    fresh = with_lora(llama())
    fill(fresh, std=0.0)
    report = lora_stream.sync(fresh, Recorder())
    assert report.fidelity.captured is None
    assert report.fidelity.text == "there is no update"
    assert "update captured: there is no update" in report.line()


def test_on_the_host_it_is_always_measured():
    base, lora_A, lora_B = torch.randn(9, 20).bfloat16(), torch.randn(2, 20), torch.randn(9, 2)
    stats = torch.empty(1, ops.NUM_STATS, dtype=torch.float64)
    out = torch.empty(9, 20, dtype=torch.bfloat16)
    ops.merge_cast_grouped_([base], [lora_A], [lora_B], [0.1], [out], stats, fidelity=False)
    assert stats.isfinite().all()
