"""Order, ownership and lifetime of a pass. Unit layer."""

import gc
import weakref

import pytest
import torch

import lora_stream
from lora_stream import ops
from lora_stream.merged_weights import MergedWeights
from tests.doubles import Loads
from tests.models import assert_equal, assert_matches, assert_same_state, expected, fill, llama, with_lora


@pytest.fixture
def model():
    return with_lora(llama(tied=True))


def number_of_tensors(model):
    return len(MergedWeights(model))


ENDS = {
    "exhausted": lambda stream, k: list(stream),
    "closed": lambda stream, k: ([next(stream) for _ in range(k)], stream.close()),
    "closed twice": lambda stream, k: ([next(stream) for _ in range(k)], stream.close(), stream.close()),
    "left as a context": lambda stream, k: leave_context(stream, k),
    "consumer raised": lambda stream, k: raise_at(stream, k),
    "dropped": lambda stream, k: [next(stream) for _ in range(k)],
}


def leave_context(stream, k):
    with stream:
        for _ in range(k):
            next(stream)


def raise_at(stream, k):
    def consume():
        with stream:
            for i, _ in enumerate(stream):
                if i == k:
                    raise KeyError("consumer")
            raise KeyError("consumer")

    with pytest.raises(KeyError):
        consume()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("k", [0, 1, "middle", "last"])
def test_offload_runs_once_and_the_model_is_untouched_however_the_pass_ends(model, end, k):
    """Case B05. The closing of a pass that was never asked for a tensor has nothing to undo."""
    k = {"middle": number_of_tensors(model) // 2, "last": number_of_tensors(model) - 1}.get(k, k)
    from tests.models import state

    before = state(model)
    want = dict(lora_stream.stream(model))
    loads = Loads()
    stream = lora_stream.stream(model, onload=loads.onload, offload=loads.offload)
    ENDS[end](stream, k)
    del stream
    never_asked = k == 0 and end not in ("exhausted", "consumer raised")
    assert loads.events == ([] if never_asked else ["onload", "offload"])
    assert_same_state(before, state(model))
    assert_equal(dict(lora_stream.stream(model)), want)


def test_offload_alone_runs_once_even_if_no_tensor_was_asked_for(model):
    for end in (lambda s: s.close(), lambda s: None, lambda s: list(s)):
        loads = Loads()
        stream = lora_stream.stream(model, offload=loads.offload)
        end(stream)
        del stream
        assert loads.events == ["offload"]


def test_an_onload_that_fails_is_undone_and_its_error_is_shown(model):
    loads = Loads()

    def onload():
        loads.onload()
        raise OSError("no memory")

    stream = lora_stream.stream(model, onload=onload, offload=loads.offload)
    with pytest.raises(OSError, match="no memory"):
        next(stream)
    assert loads.events == ["onload", "offload"]


def test_onload_comes_before_the_first_tensor_and_offload_after_the_last(model):
    loads = Loads()
    for _ in lora_stream.stream(model, onload=loads.onload, offload=loads.offload):
        loads.events.append("tensor")
    assert loads.events == ["onload", *["tensor"] * number_of_tensors(model), "offload"]


def test_kept_tensors_never_change_and_share_no_memory(model):
    """Cases B01 and B36: the consumer keeps everything; a step and another pass follow."""
    weights = MergedWeights(model, bucket_bytes=1000)
    kept = dict(weights)
    copies = {name: tensor.clone() for name, tensor in kept.items()}
    fill(model)
    again = dict(weights)
    assert_equal(kept, copies)
    assert any(not torch.equal(again[name], kept[name]) for name in kept)
    storages = [t.untyped_storage().data_ptr() for t in [*kept.values(), *again.values(), *model.parameters()]]
    assert len(storages) - len(set(storages)) == 0
    assert all(tensor.is_contiguous() for tensor in kept.values())


def test_wire_dtype_of_the_base_still_copies(model):
    model = with_lora(llama(dtype=torch.bfloat16))
    pointers = {p.data_ptr() for p in model.parameters()}
    assert not pointers & {tensor.data_ptr() for _, tensor in lora_stream.stream(model)}


def test_a_pass_read_late_is_of_one_moment_or_an_error(model):
    """Case B01: an optimizer step in the middle must not give a mixture."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step():
        model(torch.arange(5).unsqueeze(0)).logits.sum().backward()
        optimizer.step()

    stream = iter(MergedWeights(model, bucket_bytes=1))
    next(stream)
    step()
    with pytest.raises(RuntimeError, match=r"base_model.*: the weights were written to"):
        list(stream)
    unstarted = lora_stream.stream(model)
    step()
    with pytest.raises(RuntimeError, match="the weights were written to"):
        next(unstarted)
    assert_matches(dict(lora_stream.stream(model)), expected(model))


@pytest.mark.parametrize("scope", ["all", "trained"])
@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float32, None])
def test_metadata_equals_iteration_element_for_element(model, scope, wire_dtype):
    weights = MergedWeights(model, scope=scope, wire_dtype=wire_dtype)
    yielded = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]
    assert [tuple(meta) for meta in weights.metadata()] == yielded
    assert len(weights) == len(yielded)


def test_each_iter_is_a_fresh_pass_over_the_weights_as_they_are(model):
    """Edge case 65."""
    weights = MergedWeights(model)
    first = dict(weights)
    fill(model)
    assert_matches(dict(weights), expected(model))
    assert not torch.equal(
        dict(weights)["model.layers.0.mlp.down_proj.weight"], first["model.layers.0.mlp.down_proj.weight"]
    )
    for module in model.modules():  # what FSDP and offloading do: other memory behind the same parameter
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.data = parameter.data.clone()
    assert_matches(dict(weights), expected(model))


def test_a_model_that_changed_its_targets_is_refused_instead_of_lying_in_metadata(model):
    weights = MergedWeights(model, scope="trained")
    from peft import LoraConfig

    model.add_adapter("more", LoraConfig(r=2, target_modules=["gate_proj"]))
    model.set_adapter("more")
    with pytest.raises(ValueError, match="make a new MergedWeights"):
        iter(weights)


@pytest.mark.parametrize("bucket_bytes", [1, 4096, 10**9])
def test_any_bucket_size_gives_the_same_bits(model, bucket_bytes):
    """Case B36."""
    assert_equal(dict(MergedWeights(model, bucket_bytes=bucket_bytes)), dict(lora_stream.stream(model)))


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_a_bucket_size_that_holds_nothing_is_refused(model, bucket_bytes):
    with pytest.raises(ValueError, match="bucket_bytes must be positive"):
        MergedWeights(model, bucket_bytes=bucket_bytes)


def test_staging_holds_one_bucket_and_releases_what_the_consumer_drops(model):
    stream = iter(MergedWeights(model, bucket_bytes=4000))
    alive: list[weakref.ref] = []
    for _, tensor in stream:
        alive = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(tensor))
        assert sum(ref() is not None for ref in alive) <= 1
        del tensor
    largest = max(meta.num_bytes for meta in stream.metadata())
    assert stream.stats.peak_staging_bytes <= max(4000, largest)


def test_no_context_of_the_stream_reaches_the_consumer(model):
    stream = lora_stream.stream(model)
    for _ in stream:
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        inside = dict(lora_stream.stream(model))
        assert torch.is_inference_mode_enabled()
    assert not any(tensor.is_inference() for tensor in inside.values())
    assert_equal(inside, dict(lora_stream.stream(model)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(dict(lora_stream.stream(model)), inside)


def test_yielded_tensors_carry_no_graph(model):
    """Edge case 62."""
    assert not any(tensor.requires_grad or tensor.grad_fn for _, tensor in lora_stream.stream(model))


def test_a_dropped_stream_is_released_without_waiting_for_the_collector(model):
    gc.disable()
    try:
        loads = Loads()
        stream = lora_stream.stream(model, offload=loads.offload)
        next(stream)
        del stream
        assert loads.events == ["offload"]
    finally:
        gc.enable()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_delta_that_is_not_finite_is_refused_by_name(model, value):
    """Case B05: a NaN is not shipped to the engine."""
    layer = model.get_base_model().model.layers[1].self_attn.v_proj
    with torch.no_grad():
        layer.lora_B["default"].weight[3, 1] = value
    loads = Loads()
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj.*not finite"):
        list(lora_stream.stream(model, onload=loads.onload, offload=loads.offload))
    assert loads.events == ["onload", "offload"]


def test_statistics_of_rounding_are_kept_per_merged_tensor(model):
    stream = lora_stream.stream(model)
    sent = dict(stream)
    merged = set(stream.plan.names("merged"))
    assert stream.stats.rounding.keys() == merged
    for name in merged:
        rounding = stream.stats.rounding[name]
        assert rounding.checksum == sent[name].float().view(torch.int32).to(torch.int64).sum().item() % 2**32
        assert 0 <= rounding.unmoved <= rounding.changed <= sent[name].numel()


def test_the_kernel_is_called_once_per_bucket_for_merges_and_copies_together(model, monkeypatch):
    calls = []
    real = ops.merge_cast_grouped_
    monkeypatch.setattr(ops, "merge_cast_grouped_", lambda *args, **kw: (calls.append(len(args[0])), real(*args, **kw)))
    stream = lora_stream.stream(model)
    list(stream)
    assert len(stream.stats.rounding) == 6
    assert calls == [len(stream.stats.sent)]
