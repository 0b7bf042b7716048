"""Models sharded by FSDP1, which cuts its flat parameters anywhere. dist layer.

On CPU tensors it wants device_id=torch.device("cpu"). A unit must not be opened before its root ever was: it takes itself for
the root then, and FSDP1 fails an assertion at every later opening, on some ranks before others, which hang.
"""

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

import lora_stream
from lora_stream.merged_weights import MergedWeights
from tests.dist import sharded
from tests.models import assert_equal, assert_matches, llama, sent, with_lora

pytestmark = pytest.mark.dist

LAYOUTS = {
    "blocks": {},
    "root only": {"blocks": False},
    "trained leaves": {"leaves": True},
    "trained leaves, flat parameters only": {"leaves": True, "use_orig_params": False},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
}


def flat_values(model):
    return [
        (module._handle.flat_param.detach().clone(), module._handle.flat_param._version)
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None
    ]


def stream_all(rank, layout, tied):
    model = with_lora(llama(tied=tied))
    want = sent(model)
    trained = {name: want[name] for name, _ in lora_stream.stream(model, scope="trained")}
    wrapped = sharded.flat(model, **LAYOUTS[layout])
    before = flat_values(wrapped)
    weights = MergedWeights(wrapped, rounding="dither")
    assert_equal(sent(wrapped, scope="trained"), trained)  # opens no unit in vain, the root included
    assert [(m.name, m.shape) for m in weights.metadata()] == [(name, tuple(t.shape)) for name, t in want.items()]
    assert_equal(dict(weights), want)
    with torch.no_grad():
        wrapped(torch.arange(5).unsqueeze(0))
    assert_equal(dict(weights), want)  # masters, also where the forward has left copies
    for (values, version), (values_now, version_now) in zip(before, flat_values(wrapped), strict=True):
        assert torch.equal(values, values_now)
        assert version == version_now
    if tied and not wrapped._handle.uses_sharded_strategy:
        return  # torch 2.13 cannot open such a root any more once it was trained
    train(wrapped)
    again = dict(weights)
    moved = {name for name in want if not torch.equal(again[name], want[name])}
    assert moved == {name for name in want if any(target in name for target in ("q_proj", "v_proj", "down_proj"))}
    nearest = dict(MergedWeights(wrapped))
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        assert_matches(nearest, {**want, **expected_of(model)})


def train(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model(torch.arange(7).unsqueeze(0)).logits.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def expected_of(model):
    from lora_stream.reference import merge_cast

    out = {}
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            A, B = (fsdp1_unwrapped(part["default"]).weight for part in (module.lora_A, module.lora_B))
            clean = name.replace("_fsdp_wrapped_module.", "")
            out[f"{clean}.weight"] = merge_cast(module.base_layer.weight, A, B, 8.0, torch.bfloat16).detach()
    return out


def fsdp1_unwrapped(module):
    return getattr(module, "_fsdp_wrapped_module", module)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_to_wrap_gives_the_bits_of_the_unsharded_model_and_nothing_is_written(pool, layout, num_ranks):
    """Edge case 56, case B34."""
    for tied in (False, True):
        pool.run(num_ranks, stream_all, layout, tied)


def open_units(rank):
    model = sharded.flat(with_lora(llama()), leaves=True)
    opened = []
    summon = FullyShardedDataParallel.summon_full_params

    def recording(module, recurse, writeback):
        assert not writeback
        opened.append((type(module.module).__name__, recurse))
        return summon(module, recurse=recurse, writeback=writeback)

    root, block = ("PeftModelForCausalLM", False), ("LlamaDecoderLayer", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullyShardedDataParallel, "summon_full_params", recording)
        list(lora_stream.stream(model, bucket_bytes=1000))
        assert opened == [root, block, block, root]
        opened.clear()
        weights = MergedWeights(model, scope="trained")
        weights.metadata()
        assert opened == []
        assert len(list(weights)) == 8
        assert opened == [block, block]


def test_a_block_is_opened_once_in_a_pass_and_metadata_opens_none(pool):
    pool.run(2, open_units)


def stop_early(rank):
    model = sharded.flat(with_lora(llama()))
    want = sent(model)
    stream = lora_stream.stream(model, rounding="dither")
    if rank == 1:
        next(stream)
        stream.close()
    else:
        assert_equal(dict(stream), want)
    assert sent(model, gather="sender").keys() == (want.keys() if rank == 0 else set())
    assert_equal(sent(model), want)


def test_a_rank_that_stops_early_takes_part_for_the_others(pool):
    pool.run(2, stop_early)


def step_in_between(rank, layout):
    model = sharded.flat(with_lora(llama()), **LAYOUTS[layout])
    stream = lora_stream.stream(model, scope="trained")
    next(stream)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    with pytest.raises(RuntimeError, match="were written to"):
        list(stream)
    list(lora_stream.stream(model))


@pytest.mark.parametrize("layout", ["blocks", "trained leaves, flat parameters only"])
def test_a_step_in_the_middle_of_a_pass_is_an_error(pool, layout):
    pool.run(2, step_in_between, layout)
