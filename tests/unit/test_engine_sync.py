"""What `sync` sends, when, and what it says; against engines that only record. Unit layer; live vLLM is in tests/vllm."""

import json

import pytest
import torch
from peft import LoraConfig

import lora_stream
from tests.doubles import Recorder
from tests.models import assert_equal, assert_matches, assert_same_state, expected, fill, llama, sent, state, with_lora


@pytest.fixture
def model():
    return with_lora(llama(tied=True))


TRAINED = 2 * 4  # q, k, v and down of two layers
ALL = 2 * 9 + 2


def test_first_sync_sends_everything_and_later_ones_what_trains(model):
    engine = Recorder()
    first = lora_stream.sync(model, engine)
    assert len(engine.loads[0]) == ALL
    assert first.scope == "all"
    assert_equal(engine.weights, sent(model))
    fill(model)
    second = lora_stream.sync(model, engine)
    assert len(engine.loads[1]) == TRAINED
    assert second.scope == "trained"
    assert_equal(engine.weights, sent(model))
    lora_stream.sync(model, engine, full=True, allow_unmoved=True)
    assert len(engine.loads[2]) == ALL


def test_base_loaded_spares_the_first_full_sync(model):
    engine = Recorder()
    lora_stream.sync(model, engine, base_loaded=True)
    assert len(engine.loads[0]) == TRAINED


def test_adapters_may_change_dtype_between_syncs(model):
    engine = Recorder()
    lora_stream.sync(model, engine)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    lora_stream.sync(model, engine)
    assert_equal(engine.weights, sent(model))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    lora_stream.sync(model, engine)  # the same values: nothing has moved, so no error either


def test_each_engine_is_known_by_itself(model):
    one, two = Recorder(), Recorder()
    lora_stream.sync(model, one)
    lora_stream.sync(model, two)
    assert len(two.loads[0]) == ALL


def test_another_model_on_a_known_engine_gets_a_full_sync(model):
    engine = Recorder()
    lora_stream.sync(model, engine)
    other = with_lora(llama(tied=True))
    lora_stream.sync(other, engine, base_loaded=True)
    assert len(engine.loads[1]) == ALL
    assert_equal(engine.weights, sent(other))


def test_switching_to_an_adapter_with_other_targets_restores_the_old_targets(model):
    engine = Recorder()
    lora_stream.sync(model, engine)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["gate_proj"]))
    fill(model)
    model.set_adapter("other")
    lora_stream.sync(model, engine)
    assert_equal(engine.weights, sent(model))


def test_live_model_is_untouched_by_a_sync(model):
    before = state(model)
    lora_stream.sync(model, Recorder())
    assert_same_state(before, state(model))


def test_report_counts_and_names_everything(model):
    engine = Recorder()
    lora_stream.sync(model, engine)
    fill(model)
    report = lora_stream.sync(model, engine, weight_version="step-7")
    assert report.weight_version == "step-7"
    assert len(report.merged) == 6
    assert len(report.copied) == 2
    assert len(report.consumed) == 12
    total = len(report.merged) + len(report.copied) + len(report.left) + len(report.consumed)
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert total == len(names)
    assert set(report.left) | set(report.consumed) <= set(names)
    assert report.num_bytes == sum(t.numel() * 2 for n, t in engine.weights.items() if n in engine.loads[1])
    everything = sum(t.numel() * 2 for t in engine.weights.values())
    assert report.num_bytes + report.num_bytes_left == everything
    assert set(report.seconds) == {"plan", "check", "merge", "transfer", "engine", "total"}
    assert 0 < report.seconds["merge"] <= report.seconds["total"]
    assert report.peak_staging_bytes == report.num_bytes
    text = str(report)
    assert "step-7" in text
    assert "6 tensors" in text
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded["merged"] == list(report.merged)
    assert loaded["rounding"][report.merged[0]]["changed"] > 0


def test_rounding_figures_are_those_of_the_formula(model):
    fill(model, std=0.01)
    report = lora_stream.sync(model, Recorder(), rounding="nearest")
    changed = unmoved = kept_sq = delta_sq = projected = 0
    for name, merged in expected(model).items():
        if name not in report.merged:
            continue
        layer = model.get_base_model().get_submodule(name.removesuffix(".weight"))
        base = layer.base_layer.weight.detach()
        delta = layer.scaling["default"] * (
            layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
        )
        rounded = base.to(torch.bfloat16)
        changed += (delta != 0).sum().item()
        unmoved += ((delta != 0) & (merged == rounded)).sum().item()
        kept_sq += (merged.double() - rounded.double()).square().sum().item()
        delta_sq += delta.square().sum().item()
        projected += ((merged.double() - base.double()) * delta).sum().item()
    assert report.fidelity.moved == pytest.approx(1 - unmoved / changed, rel=1e-2)
    assert 0.01 < report.fidelity.moved < 0.99
    assert report.fidelity.norm_ratio == pytest.approx((kept_sq / delta_sq) ** 0.5, rel=1e-2)
    assert report.fidelity.captured == pytest.approx(projected / delta_sq, rel=1e-2)


def test_an_adapter_that_moved_and_changed_nothing_is_an_error():
    """Contract 10: the update is far below a rounding step of every weight."""
    model = with_lora(llama(dtype=torch.bfloat16))
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.fill_(1.0)
    fill(model, std=1e-5)
    engine = Recorder()
    with pytest.raises(lora_stream.UnmovedError, match=r"none of the 6 targets has.*round by dither") as error:
        lora_stream.sync(model, engine, rounding="nearest")
    assert len(error.value.report.unmoved_targets) == 6
    assert error.value.report.fidelity.moved == 0.0
    assert error.value.report.fidelity.captured == 0.0
    assert "UNMOVED" in str(error.value.report)
    fill(model, std=1e-5)
    with pytest.raises(lora_stream.UnmovedError):
        lora_stream.sync(model, engine, rounding="nearest")
    fill(model, std=1e-5)
    assert len(lora_stream.sync(model, engine, rounding="nearest", allow_unmoved=True).unmoved_targets) == 6
    fill(model, std=0.2)
    assert lora_stream.sync(model, engine, rounding="nearest").unmoved_targets == ()


def test_what_trains_without_an_adapter_counts_as_movement_only_when_it_moves():
    model = with_lora(llama(dtype=torch.bfloat16))
    norm = model.get_base_model().model.norm
    norm.weight.requires_grad_(True)
    fill(model, std=1e-6)
    engine = Recorder()
    lora_stream.sync(model, engine)
    fill(model, std=1e-6)
    with torch.no_grad():
        norm.weight.add_(1.0)
    lora_stream.sync(model, engine)
    fill(model, std=1e-6)
    with pytest.raises(lora_stream.UnmovedError):
        lora_stream.sync(model, engine)


def test_an_adapter_that_did_not_move_is_no_error(model):
    engine = Recorder()
    lora_stream.sync(model, engine)
    assert lora_stream.sync(model, engine).unmoved_targets == ()
    fresh = with_lora(llama())
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert lora_stream.sync(fresh, Recorder()).unmoved_targets == ()


@pytest.mark.parametrize("fail_at", [1, "middle", "last"])
def test_a_failed_sync_puts_the_old_weights_back_and_the_next_one_works(model, fail_at):
    fail_at = {"middle": TRAINED // 2, "last": TRAINED - 1}.get(fail_at, fail_at)
    engine = Recorder()
    lora_stream.sync(model, engine)
    old = sent(model)
    fill(model)
    engine.fail_at = fail_at
    with pytest.raises(lora_stream.SyncError, match=r"engine broke; the engine was put back on its old weights"):
        lora_stream.sync(model, engine)
    assert_matches(engine.weights, old)
    lora_stream.sync(model, engine)
    assert len(engine.loads[-1]) == TRAINED
    assert_equal(engine.weights, sent(model))


def test_a_failed_first_sync_over_the_base_puts_the_base_back(model):
    engine = Recorder()
    engine.weights = {k: v.to(torch.bfloat16) for k, v in llama_like(model).items()}
    before = {k: v.clone() for k, v in engine.weights.items()}
    engine.fail_at = 5
    with pytest.raises(lora_stream.SyncError, match="put back on its old weights"):
        lora_stream.sync(model, engine, base_loaded=True)
    assert_matches(engine.weights, before)


def llama_like(model):
    base = {
        k.replace(".base_layer.", "."): v for k, v in model.get_base_model().state_dict().items() if "lora_" not in k
    }
    base.pop("lm_head.weight")
    return base


def test_after_a_failed_sync_over_unknown_weights_the_next_one_is_full(model):
    engine = Recorder()
    engine.fail_at = 3
    with pytest.raises(lora_stream.SyncError, match="must get a full sync, as the next one will be"):
        lora_stream.sync(model, engine)
    lora_stream.sync(model, engine, base_loaded=True)
    assert len(engine.loads[-1]) == ALL
    assert_equal(engine.weights, sent(model))


def test_failing_before_the_first_tensor_leaves_the_engine_as_it_was(model):
    engine = Recorder()
    lora_stream.sync(model, engine)
    fill(model)
    engine.fail_at = 0
    with pytest.raises(lora_stream.SyncError):
        lora_stream.sync(model, engine)
    fill(model)
    lora_stream.sync(model, engine)
    assert len(engine.loads[-1]) == TRAINED


def test_an_engine_that_stops_early_is_an_error(model):
    class Lazy:
        def load_weights(self, weights):
            next(weights)

    with pytest.raises(lora_stream.SyncError, match=f"took only 1 of {ALL} tensors"):
        lora_stream.sync(model, Lazy())


def test_a_keyboard_interrupt_passes_through_and_the_next_sync_works(model):
    engine = Recorder()
    lora_stream.sync(model, engine)
    fill(model)
    calls = []

    def interrupt(meta, plan):
        calls.append(meta)
        if len(calls) == 3:
            raise KeyboardInterrupt

    offloads = []
    with pytest.raises(KeyboardInterrupt):
        lora_stream.sync(model, engine, on_tensor=interrupt, offload=lambda: offloads.append(1))
    assert offloads == [1, 1]  # of the interrupted pass and of the one that restores
    lora_stream.sync(model, engine)
    assert_equal(engine.weights, sent(model))


def test_offload_runs_once_per_pass_in_success_failure_and_restoring(model):
    engine, calls = Recorder(), []
    loads = {"onload": lambda: calls.append("on"), "offload": lambda: calls.append("off")}
    lora_stream.sync(model, engine, **loads)
    assert calls == ["on", "off"]
    fill(model)
    engine.fail_at = 2
    with pytest.raises(lora_stream.SyncError):
        lora_stream.sync(model, engine, **loads)
    # The failed pass, and the one that merges the old weights once more: it needs the model loaded too.
    assert calls == ["on", "off"] * 3


def test_what_is_no_engine_is_refused(model):
    with pytest.raises(ValueError, match=r"engine must be a vllm\.LLM, .* or have a method load_weights"):
        lora_stream.sync(model, object())


def test_progress_is_told_of_every_tensor(model):
    seen = []
    report = lora_stream.sync(
        model, Recorder(), on_tensor=lambda meta, plan: seen.append((meta.num_bytes, plan.num_bytes))
    )
    assert sum(size for size, _ in seen) == report.num_bytes == seen[0][1]
