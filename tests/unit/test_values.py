"""Whatever leaves is finite, unless it was asked for; and whatever is written counts as written. Unit layer."""

import pytest
import torch

import lora_stream
from lora_stream import ops
from tests.doubles import Recorder, in_pieces
from tests.models import expected, llama, with_lora

INF, NAN = float("inf"), float("nan")


def poison(tensor, value=NAN):
    with torch.no_grad():
        tensor.view(-1)[tensor.numel() // 2] = value


def in_delta(model):
    poison(model.base_model.model.model.layers[1].mlp.down_proj.lora_B["default"].weight)
    return "layers.1.mlp.down_proj"


def in_merged_base(model):
    poison(model.base_model.model.model.layers[1].mlp.down_proj.base_layer.weight, -INF)
    return "layers.1.mlp.down_proj"


def in_norm(model):
    poison(model.base_model.model.model.norm.weight, INF)
    return "model.norm.weight"


def in_frozen_base(model):
    poison(model.base_model.model.model.embed_tokens.weight)
    return "embed_tokens.weight"


def in_head_to_save(model):
    poison(model.base_model.model.lm_head.modules_to_save["default"].weight)
    return "lm_head.modules_to_save.default.weight"


def in_buffer(model):
    model.base_model.model.model.register_buffer("range", torch.ones(3, dtype=torch.float64))
    poison(model.base_model.model.model.range, INF)
    return "model.range"


PLACES = [in_delta, in_merged_base, in_norm, in_frozen_base, in_head_to_save, in_buffer]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_what_is_not_finite_is_refused_by_name_before_a_tensor_of_its_batch(place, rounding):
    """Case N10; edge case 58."""
    model = with_lora(llama(), modules_to_save=["lm_head"])
    name = place(model)
    got = []
    with pytest.raises(ValueError, match=f"{name}.*not finite") as caught:
        got += (each for each, _ in lora_stream.stream(model, rounding=rounding))
    assert "check_finite=False" in str(caught.value)
    assert got == []
    sent = dict(lora_stream.stream(model, rounding=rounding, check_finite=False))
    assert sum(not tensor.isfinite().all() for tensor in sent.values()) == 1


@pytest.mark.parametrize("place", [in_delta, in_norm])
def test_an_engine_gets_nothing_of_a_policy_that_is_not_finite(place):
    """Case N10."""
    model, engine = with_lora(llama()), Recorder()
    lora_stream.sync(model, engine)
    before = dict(engine.weights)
    name = place(model)
    with pytest.raises(lora_stream.SyncError, match=f"{name}.*not finite"):
        lora_stream.sync(model, engine, full=True)
    assert all(torch.equal(engine.weights[each], before[each]) for each in before)


def test_a_model_without_adapters_is_looked_through():
    """Case N10."""
    model = llama()
    poison(model.lm_head.weight)
    with pytest.raises(ValueError, match=r"lm_head\.weight: it is not finite as torch.bfloat16"):
        list(lora_stream.stream(model))


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_a_merge_and_a_copy_that_overflow_float16_are_refused(rounding):
    """Case N10. The delta is finite, and so is the base."""
    model = with_lora(llama())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight.fill_(65000.0)
        layer.lora_A["default"].weight.fill_(10.0)
        layer.lora_B["default"].weight.fill_(10.0)
    with pytest.raises(ValueError, match=r"q_proj.*not finite as torch\.float16"):
        list(lora_stream.stream(model, wire_dtype=torch.float16, rounding=rounding))
    model = with_lora(llama())
    poison(model.base_model.model.model.norm.weight, 1e6)
    with pytest.raises(ValueError, match=r"norm\.weight.*not finite as torch\.float16"):
        list(lora_stream.stream(model, wire_dtype=torch.float16, rounding=rounding))
    list(lora_stream.stream(model, rounding=rounding))


def test_token_rows_are_looked_through_as_they_are_sent_and_the_rows_below_them_are_not():
    """Case N10."""
    model = with_lora(llama(), trainable_token_indices={"embed_tokens": [3, 5]})
    embedding = model.base_model.model.model.embed_tokens
    poison(embedding.original_module.weight[3], NAN)
    list(lora_stream.stream(model))
    with torch.no_grad():
        embedding.token_adapter.trainable_tokens_delta["default"][1, 2] = 1e6
    list(lora_stream.stream(model))
    with pytest.raises(ValueError, match=r"embed_tokens.*not finite as torch\.float16"):
        list(lora_stream.stream(model, wire_dtype=torch.float16))


def test_tensors_that_are_sent_in_pieces_are_looked_through_piece_by_piece():
    """Case N10."""
    model = with_lora(llama())
    poison(model.base_model.model.model.embed_tokens.weight)
    with pytest.raises(ValueError, match=r"embed_tokens.*not finite"):
        in_pieces(model, 5)


def test_statistics_say_not_finite_only_where_that_was_written():
    base, out = torch.randn(9, 37), torch.empty(9, 37, dtype=torch.float16)
    lora_A, lora_B = torch.randn(3, 37), torch.randn(9, 3)
    stats = torch.empty(1, ops.NUM_STATS, dtype=torch.float64)
    for value, is_finite in [(1.0, True), (65000.0, True), (70000.0, False), (INF, False), (NAN, False)]:
        base[4, 17] = value
        ops.merge_cast_grouped_([base], [lora_A * 1e-3], [lora_B], [1.0], [out], stats)
        assert bool(out.isfinite().all()) == is_finite
        assert stats[0, 2].isnan() == (not is_finite)


# -- writes count --------------------------------------------------------------------------------------------------------


def operands():
    return torch.randn(5, 7), torch.randn(2, 7), torch.randn(5, 2), 1.5, torch.zeros(5, 7)


def test_a_merge_counts_as_a_write():
    base, lora_A, lora_B, scaling, out = operands()
    stats = torch.zeros(1, ops.NUM_STATS, dtype=torch.float64)
    versions = [tensor._version for tensor in (base, lora_A, lora_B, out, stats)]
    with torch.no_grad():
        ops.merge_cast_(base, lora_A, lora_B, scaling, out)
        ops.merge_cast_grouped_([base], [lora_A], [lora_B], [scaling], [out], stats)
    grown = [tensor._version for tensor in (base, lora_A, lora_B, out, stats)]
    assert [b - a for a, b in zip(versions, grown, strict=True)] == [0, 0, 0, 2, 1]
    view = out[1:4]
    ops.merge_cast_(base[1:4], lora_A, lora_B[1:4], scaling, view)
    assert out._version == view._version == grown[3] + 1


def test_backward_notices_that_what_it_saved_was_merged_over():
    base, lora_A, lora_B, scaling, out = operands()
    loss = (out * torch.ones(5, 7, requires_grad=True)).sum()
    with torch.no_grad():
        ops.merge_cast_(base, lora_A, lora_B, scaling, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_of_inference_mode_are_merged_in_and_out_of_it():
    with torch.inference_mode():
        made = operands()
        ops.merge_cast_(*made)
    first = made[-1].clone()
    ops.merge_cast_(*made)
    assert torch.equal(made[-1], first)


def test_a_stream_whose_base_is_merged_in_its_middle_raises():
    model = with_lora(llama())
    want = expected(model)
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    weight, lora_A, lora_B = (
        each.weight.detach() for each in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"])
    )
    stream = lora_stream.stream(model, bucket_bytes=1)
    name, tensor = next(stream)
    assert torch.equal(tensor, want[name])
    ops.merge_cast_(weight, lora_A, lora_B, 8.0, weight)
    with pytest.raises(RuntimeError, match="mix two policies"):
        list(stream)
