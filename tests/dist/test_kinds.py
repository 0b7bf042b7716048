"""Every kind of LoRA, and experts that checkpoints split, on models sharded over ranks: the bits of the unsharded model."""

import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import lora_stream
from lora_stream import gathering, shards
from tests.architectures import ARCHITECTURES, build
from tests.dist import sharded
from tests.kinds import KINDS
from tests.models import assert_equal, sent, with_lora

pytestmark = pytest.mark.dist

# Ties and copies that training has moved are refused under FSDP2, which gives each parameter shards of its own.
SHARDED_KINDS = [kind for kind in KINDS if not kind.startswith("tied")]


def make(kind):
    """The same on all ranks."""
    torch.manual_seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = KINDS[kind]()
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()  # FSDP2 takes no others
    return model


def adapted(name):
    torch.manual_seed(11)
    _, modules, parameters = ARCHITECTURES[name]
    return with_lora(build(name), target_modules=modules, target_parameters=parameters, task_type=None)


def root_only(model, **kwargs):
    fully_shard(model, mesh=sharded.world(), **kwargs)


def every_module(model):
    """Units as small as they can be."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)) and not isinstance(module, torch.nn.ParameterDict):
            fully_shard(module, mesh=sharded.world())


def by_columns(model):
    num = dist.get_world_size()

    def place(parameter):
        dims = [d for d in range(parameter.dim()) if d > 0 and parameter.shape[d] % num == 0]
        return Shard(dims[-1]) if dims else None

    root_only(model, shard_placement_fn=place)


def by_rows_of_experts(model):
    """Dimension 1 of what has three."""
    num = dist.get_world_size()

    def place(parameter):
        return Shard(1) if parameter.dim() == 3 and parameter.shape[1] % num == 0 else None

    root_only(model, shard_placement_fn=place)


LAYOUTS = {f.__name__: f for f in (root_only, by_columns, every_module)}


def stream_kinds(rank, layout):
    for kind in SHARDED_KINDS:
        want = sent(make(kind))
        model = make(kind)
        LAYOUTS[layout](model)
        for kwargs in ({}, {"bucket_bytes": 1}):
            try:
                assert_equal(sent(model, **kwargs), want)
            except Exception as error:
                error.add_note(f"{kind}, {layout}, {kwargs}")
                raise


@pytest.mark.parametrize(("layout", "num_ranks"), [("root_only", 3), ("by_columns", 2), ("every_module", 2)])
def test_every_kind_has_the_bits_of_the_unsharded_model(pool, layout, num_ranks):
    """Edge cases 46 and 49."""
    pool.run(num_ranks, stream_kinds, layout, limit_s=240)


def stream_flattened(rank, use_orig_params):
    """One unit, and without use_orig_params one more for each module that trains, as PEFT's policy has it. Returns what FSDP1
    does not take: it wants all of a unit to train, or nothing."""
    not_taken = []
    for kind in SHARDED_KINDS:
        want = sent(make(kind))
        model = make(kind)
        leaves = [] if use_orig_params else [m for m in model.modules() if getattr(m, "weight", None) is not None]
        units = [m for m in leaves if not list(m.children()) and m.weight.requires_grad]
        policy = CustomPolicy(lambda module, units=units: module in units)
        try:
            wrapped = FullyShardedDataParallel(
                model, device_id=torch.device("cpu"), use_orig_params=use_orig_params, auto_wrap_policy=policy
            )
        except ValueError as error:
            assert "uniform" in str(error)
            not_taken.append(kind)
            continue
        try:
            assert_equal(sent(wrapped), want)
        except Exception as error:
            error.add_note(f"{kind}, use_orig_params={use_orig_params}")
            raise
    return not_taken


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_every_kind_has_the_bits_of_the_unsharded_model_under_fsdp1(pool, use_orig_params):
    """Edge case 56."""
    not_taken, _ = pool.run(2, stream_flattened, use_orig_params, limit_s=240)
    assert not use_orig_params or not not_taken
    assert len(not_taken) < len(SHARDED_KINDS) / 2, not_taken


def stream_architectures(rank, layout, names):
    for name in names:
        want = sent(adapted(name))
        model = adapted(name)
        {**LAYOUTS, "by_rows_of_experts": by_rows_of_experts}[layout](model)
        stream = lora_stream.stream(model, rounding="dither")
        assert_equal(dict(stream), want)
        small = lora_stream.stream(model, bucket_bytes=2048, gather="sender", rounding="dither")
        got = dict(small)
        assert got == {} if rank else got.keys() == want.keys()
        if not rank:
            assert_equal(got, want)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("layout", ["root_only", "by_columns", "by_rows_of_experts"])
def test_experts_that_checkpoints_split_are_merged_where_they_lie(pool, layout, num_ranks):
    """Edge case 46: fewer experts than ranks on some, cut between experts, rows or columns."""
    pool.run(num_ranks, stream_architectures, layout, ["mixtral", "gpt_oss", "qwen3_vl_moe"], limit_s=240)


def stream_cut_twice(rank):
    """Experts over one dimension of the mesh, their rows over the other."""
    want = sent(adapted("mixtral"))
    model = adapted("mixtral")
    mesh = dist.init_device_mesh("cpu", (2, 2))
    for name, parameter in list(model.named_parameters()):
        if parameter.dim() == 3:
            module, _, own = name.rpartition(".")
            placed = distribute_tensor(parameter.detach(), mesh, [Shard(0), Shard(1)])
            setattr(model.get_submodule(module), own, torch.nn.Parameter(placed, requires_grad=False))
    gathered, alive, stacks = [], [], []
    gather = shards.gather_whole

    def gather_whole(tensor):
        whole = gather(tensor)
        alive.append(sum(stack() is not None for stack in stacks))
        gathered.append(id(tensor))
        stacks.append(weakref.ref(whole))
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "gather_whole", gather_whole)
        assert_equal(sent(model, bucket_bytes=4096), want)
    return len(gathered), len(set(gathered)), max(alive)


def test_a_stack_that_is_cut_twice_is_gathered_once_for_all_its_experts_and_then_dropped(pool):
    """One may still be there when the next comes in the same bucket."""
    for count, distinct, alive in pool.run(4, stream_cut_twice):
        assert count == distinct == 4
        assert alive <= 1


def count_adapter_gathers(rank):
    gathered = []
    gather = gathering.Gathering._gather_tensors

    def gather_tensors(self, cut, *args):
        gathered.extend(id(tensor) for tensor, _ in cut)
        return gather(self, cut, *args)

    model = adapted("mixtral")
    root_only(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering.Gathering, "_gather_tensors", gather_tensors)
        sent(model, bucket_bytes=2048)
    return len(gathered), len(set(gathered))


def test_the_adapter_of_a_stack_is_gathered_once_for_all_its_experts(pool):
    for count, distinct in pool.run(2, count_adapter_gathers):
        assert count == distinct >= 2 * 2 * 2  # A and B, of two stacks, in two layers


def stream_split_columns(rank):
    """A conversion that splits a matrix, whose rows and lora_B are cut alike."""
    import transformers.core_model_loading as loading

    def splits(model, state):
        out = {}
        for name, tensor in state.items():
            parts = tensor.chunk(2, dim=1) if "down_proj" in name else [tensor]
            out |= {f"{name}.{i}" if len(parts) > 1 else name: part.contiguous() for i, part in enumerate(parts)}
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "revert_weight_conversion", splits)
        want = sent(make("linear"))
        assert "model.layers.0.mlp.down_proj.weight.1" in want
        for layout in (root_only, by_columns):
            model = make("linear")
            layout(model)
            assert_equal(sent(model), want)


def test_matrices_that_a_checkpoint_splits_by_columns_are_merged_in_their_parts(pool):
    pool.run(2, stream_split_columns)
