"""What an engine holds is known, whatever trains now: it is never left with what the model no longer computes with. Unit layer."""

import pytest
import torch

import lora_stream
from tests.doubles import Recorder
from tests.engine_double import Engine
from tests.models import assert_equal, fill, llama, sent, with_lora


def step(parameters):
    """As an optimizer writes."""
    with torch.no_grad():
        for parameter in parameters:
            parameter += 0.05 * torch.randn_like(parameter)


def block(model, i):
    return list(model.model.layers[i].parameters())


def train_only(model, parameters):
    chosen = {id(parameter) for parameter in parameters}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)


def assert_holds(engine, model):
    assert_equal(engine.weights, sent(model))


@pytest.mark.parametrize("synced_while_thawed", [True, False])
def test_what_was_trained_without_an_adapter_is_sent_though_it_is_frozen_now(synced_while_thawed):
    """Case N09."""
    model, engine = llama(), Recorder()
    train_only(model, block(model, 0))
    lora_stream.sync(model, engine)
    for i in (1, 0, 1):
        train_only(model, block(model, i))
        if synced_while_thawed:
            lora_stream.sync(model, engine)
        step(block(model, i))
        train_only(model, [])
        report = lora_stream.sync(model, engine)
        assert_holds(engine, model)
        assert report.scope == "trained"
        assert report.num_bytes_left, "the other block was not sent"
    assert not lora_stream.sync(model, engine).copied, "nothing has moved since"


def test_one_layer_at_a_time_by_a_write_that_counts_no_version_is_sent():
    """Case N09: BAdam writes its master copies through `.data`."""
    model, engine = llama(dtype=torch.bfloat16), Recorder()
    train_only(model, [])
    lora_stream.sync(model, engine)
    for i in (0, 1):
        for parameter in block(model, i):
            parameter.data.add_(0.05 * torch.randn_like(parameter))
        lora_stream.sync(model, engine)
        assert_holds(engine, model)


def test_a_norm_that_trains_beside_an_adapter_is_sent_after_it_was_frozen():
    """Case N09."""
    model, engine = with_lora(llama()), Recorder()
    norm = model.base_model.model.model.norm.weight.requires_grad_()
    lora_stream.sync(model, engine)
    step([norm])
    norm.requires_grad_(False)
    report = lora_stream.sync(model, engine)
    assert "model.norm.weight" in report.copied
    assert_holds(engine, model)


@pytest.mark.parametrize("replace", ["assign", "setattr", "data", "copy"])
def test_a_base_weight_that_is_replaced_is_sent(replace):
    model, engine = with_lora(llama()), Recorder()
    lora_stream.sync(model, engine)
    base = model.base_model.model
    mlp, new = base.model.layers[0].mlp, torch.randn(48, 32)
    if replace == "assign":
        base.load_state_dict({"model.layers.0.mlp.up_proj.weight": new}, strict=False, assign=True)
    elif replace == "setattr":
        mlp.up_proj.weight = torch.nn.Parameter(new, requires_grad=False)
    elif replace == "data":
        mlp.up_proj.weight.data = new
    else:
        with torch.no_grad():
            mlp.up_proj.weight[3, 4] = 7.0
    report = lora_stream.sync(model, engine)
    assert "model.layers.0.mlp.up_proj.weight" in report.copied
    assert_holds(engine, model)


def test_a_weight_that_moves_elsewhere_and_back_is_not_sent_again():
    model, engine = with_lora(llama()), Recorder()
    lora_stream.sync(model, engine)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # as an offload and an onload do
    assert lora_stream.sync(model, engine).num_bytes_left


@pytest.mark.parametrize("how", ["set_adapter", "delete_adapter", "injected"])
def test_a_target_that_lost_its_adapter_goes_back_to_its_base(how):
    """Case N08 on a model that is not sharded."""
    from peft import LoraConfig

    model, engine = with_lora(llama(), target_modules=["q_proj", "o_proj"]), Recorder()
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=5, target_modules=["down_proj"]))
    fill(model)
    lora_stream.sync(model, engine)
    if how == "set_adapter":
        model.set_adapter("other")
    elif how == "delete_adapter":
        model.set_adapter("other")
        model.delete_adapter("default")
    else:
        model.base_model.set_adapter("other")
    report = lora_stream.sync(model, engine)
    assert "model.layers.0.self_attn.o_proj.weight" in report.copied
    assert_holds(engine, model)
    assert "model.layers.0.self_attn.o_proj.weight" not in lora_stream.sync(model, engine).copied


def test_a_model_whose_adapter_was_merged_and_unloaded_is_sent():
    model, engine = with_lora(llama()), Recorder()
    base = model.get_base_model()
    lora_stream.sync(base, engine)
    merged = model.merge_and_unload()
    assert merged is base
    train_only(merged, [])
    lora_stream.sync(merged, engine)
    assert_holds(engine, merged)


def test_a_second_model_in_turn_with_the_first_is_sent_whole():
    models, engine = [with_lora(llama()), with_lora(llama())], Recorder()
    for model in [*models, *models]:
        lora_stream.sync(model, engine)
        assert_holds(engine, model)


def test_an_engine_is_not_put_back_on_a_base_that_was_written_since():
    """What it held before is known nowhere then: it is marked, and says so."""
    model, engine = with_lora(llama()), Recorder()
    lora_stream.sync(model, engine)
    step([model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight])
    engine.fail_at = 3
    with pytest.raises(lora_stream.SyncError, match="mixture"):
        lora_stream.sync(model, engine)
    assert lora_stream.sync(model, engine).scope == "all"
    assert_holds(engine, model)


@pytest.mark.parametrize("change", [{"wire_dtype": torch.float32}, {"untie": True}])
def test_what_other_arguments_send_otherwise_is_sent(change):
    model, engine = with_lora(llama(tied=True)), Recorder()
    lora_stream.sync(model, engine)
    lora_stream.sync(model, engine, **change)
    assert_equal(engine.weights, sent(model, **change))


def move_less_than_a_step(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1 + 2**-22)


def test_a_sync_that_sends_a_frozen_tensor_anew_has_changed_something():
    model, engine = with_lora(llama()), Recorder()
    lora_stream.sync(model, engine, rounding="nearest")
    move_less_than_a_step(model)
    step([model.base_model.model.model.norm.weight])
    assert lora_stream.sync(model, engine, rounding="nearest").unmoved_targets
    move_less_than_a_step(model)
    with pytest.raises(lora_stream.UnmovedError):
        lora_stream.sync(model, engine, rounding="nearest")


def test_a_sync_that_mends_an_engine_has_changed_something():
    model = with_lora(llama())
    policy = sent(model)
    engine = Engine(policy)
    arguments = {"rounding": "nearest", "staging_bytes": 8 * 4096, "deadline_s": 20}
    lora_stream.sync(model, engine, **arguments)
    move_less_than_a_step(model)
    engine.write("model.layers.0.mlp.down_proj.weight")
    assert lora_stream.sync(model, engine, **arguments).scope == "all"
