"""Models sharded by FSDP2: the same bits on any number of ranks, however they are cut, and what is moved for it. dist layer."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import GPT2Config, GPT2LMHeadModel

import lora_stream
from lora_stream import gathering, shards
from lora_stream.filling import Batch, Part
from lora_stream.merged_weights import MergedWeights, Stream
from lora_stream.merging import NEAREST, Traffic
from lora_stream.plan import Adapter, ModelRecords, Record, build_plan
from tests.architectures import build
from tests.dist import sharded
from tests.models import MoE, assert_equal, expert_lora, fill, llama, sent, with_lora

pytestmark = pytest.mark.dist


def looks(model):
    """What a stream must leave as it was, of this rank's part of a model."""
    return {
        name: (
            id(p),
            type(p.data),
            p.dtype,
            p.requires_grad,
            p._version,
            shards.describe(p),
            shards.local(p).clone() if isinstance(p, DTensor) else p.detach().clone(),
        )
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def assert_looks(model, before):
    for name, (*now, values) in looks(model).items():
        *then, old = before[name]
        assert now == then, name
        assert torch.equal(values, old), name


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def train(model, optimizer):
    model(torch.arange(7).unsqueeze(0)).logits.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- the same bits -------------------------------------------------------------------------------------------------------


def stream_layouts(rank):
    for name, shard in sharded.LAYOUTS.items():
        for tied in (False, True):
            torch.manual_seed(rank + 1)  # what rounding or sampling might draw must not matter
            model = with_lora(seeded_llama(tied=tied))
            seeded_fill(model)
            want = sent(model, bucket_bytes=5000)
            shard(model)
            before = looks(model)
            weights = MergedWeights(model, bucket_bytes=5000, rounding="dither")
            got = dict(weights)
            assert [(m.name, m.shape) for m in weights.metadata()] == [(k, tuple(v.shape)) for k, v in got.items()], name
            assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in got.values()), name
            assert_equal(got, want)
            assert_looks(model, before)
            trained = sent(model, scope="trained", wire_dtype=torch.float32)
            assert len(trained) == 8
            nearest = dict(lora_stream.stream(model, scope="trained"))
            assert_equal({key: tensor.to(torch.bfloat16) for key, tensor in trained.items()}, nearest)


def seeded_llama(**kwargs):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return llama(**kwargs)


def seeded_fill(model):
    with torch.random.fork_rng():
        torch.manual_seed(12)
        fill(model)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_layout_gives_the_bits_of_the_unsharded_model_and_is_left_as_it_was(pool, num_ranks):
    """Edge cases 46 to 50, 52 and 53."""
    pool.run(num_ranks, stream_layouts, limit_s=120)


def stream_mixed_dtypes(rank):
    """A bfloat16 base with float32 adapters, each in units of their own or together."""
    for layout in ("by_layer", "lora_leaves", "nested"):
        model = with_lora(llama(dtype=torch.bfloat16))
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
        want = sent(model, wire_dtype=torch.float32)
        sharded.LAYOUTS[layout](model)
        assert_equal(sent(model, wire_dtype=torch.float32), want)


def test_float32_adapters_over_a_bfloat16_base(pool):
    """Edge case 54, case B33."""
    pool.run(2, stream_mixed_dtypes)


class Small(nn.Module):
    """Fewer rows than ranks, fewer ranks of LoRA than ranks, sides that divide by nothing, nothing at all."""

    def __init__(self):
        super().__init__()
        self.few = nn.Linear(7, 3, bias=True)
        self.one = nn.Linear(5, 1)
        self.odd = nn.Linear(13, 9)
        self.column = nn.Linear(1, 5)
        self.scale = nn.Parameter(torch.randn(2))


def stream_small(rank, r):
    model = get_peft_model(Small(), LoraConfig(r=r, lora_alpha=r + 1, target_modules=["few", "one", "odd", "column"]))
    fill(model)
    want = sent(model)
    fully_shard(model, mesh=sharded.world())
    assert_equal(sent(model), want)
    assert_equal(dict(MergedWeights(model, bucket_bytes=1, rounding="dither")), want)
    assert_equal(dict(MergedWeights(model, wire_dtype=torch.float32)), dict(MergedWeights(model, wire_dtype=None)))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("r", [1, 3, 17])
def test_more_ranks_than_rows_or_than_r(pool, num_ranks, r):
    """Edge case 46."""
    pool.run(num_ranks, stream_small, r)


def stream_transposed(rank):
    models = {
        "embedding": (with_lora(llama(), target_modules=["embed_tokens", "q_proj"]), sharded.by_layer),
        "tied head in the root": (with_lora(llama(), target_modules=["lm_head", "v_proj"]), sharded.by_layer),
        "Conv1D": (
            with_lora(
                GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=61, bos_token_id=0, eos_token_id=1)),
                target_modules=["c_attn", "c_proj"],
                fan_in_fan_out=True,
            ),
            sharded.root_only,
        ),
        "embedding by columns": (with_lora(llama(), target_modules=["embed_tokens", "down_proj"]), sharded.by_columns),
    }
    for name, (model, shard) in models.items():
        want = sent(model)
        shard(model)
        got = sent(model)
        assert got.keys() == want.keys(), name
        assert_equal(got, want)


def stream_experts(rank):
    for is_transposed in (False, True):
        for place in (None, lambda p: Shard(1) if p.dim() == 3 and p.shape[1] % dist.get_world_size() == 0 else None):
            for wire_dtype in (torch.bfloat16, None):
                model = expert_lora(MoE(is_transposed=is_transposed))
                want = sent(model, wire_dtype=wire_dtype)
                fully_shard(model, mesh=sharded.world(), shard_placement_fn=place)
                stream = lora_stream.stream(model, wire_dtype=wire_dtype, rounding="dither")
                assert_equal(dict(stream), want)
                assert stream.stats.rounding.keys() == {"experts.gate_up_proj", "experts.down_proj"}
                for name, rounding in stream.stats.rounding.items():
                    values = want[name].float().view(torch.int32).to(torch.int64)
                    assert rounding.checksum == values.sum().item() % 2**32


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_expert_stacks_are_merged_on_the_local_box_whichever_way_they_are_cut(pool, num_ranks):
    pool.run(num_ranks, stream_experts)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_embedding_conv1d_and_a_head_in_the_root_whose_rows_do_not_line_up_with_lora_b(pool, num_ranks):
    pool.run(num_ranks, stream_transposed)


def name_a_sharded_root(rank):
    def make():
        torch.manual_seed(8)
        return with_lora(build("gemma3"), target_modules=r".*language_model.*q_proj")

    want = sent(make())
    model = make()  # of another model the conversion was not asked before
    base = model.get_base_model()
    for module in (*base.model.language_model.layers, base.model.language_model, base.model, base):
        fully_shard(module, mesh=sharded.world())
    assert_equal(sent(model), want)


def test_conversions_by_class_name_are_found_under_the_class_that_fully_shard_makes(pool):
    pool.run(2, name_a_sharded_root)


def stream_two_adapters(rank):
    model = with_lora(llama())
    model.add_adapter("more", LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "o_proj"]))
    model.base_model.set_adapter(["default", "more"])
    fill(model)
    want = sent(model)
    only = sent(model, adapter_name="more")
    sharded.by_layer(model)
    assert_equal(sent(model), want)
    assert_equal(sent(model, adapter_name="more"), only)


def test_several_active_adapters_are_summed_and_one_is_chosen_by_name(pool):
    pool.run(3, stream_two_adapters)


class Cut:
    """A staging that takes every tensor in pieces, as a ring with small slots does."""

    num_bytes, seconds_waited = 0, 0.0

    def __init__(self, step):
        self.step, self.got = step, {}

    def batches(self, plan):
        for task in plan.tasks:
            whole = self.got[task.meta.name] = torch.full(task.meta.shape, float("nan"), dtype=task.meta.dtype)
            for begin in range(0, whole.numel(), self.step):
                end = min(begin + self.step, whole.numel())
                yield Batch([Part(task, begin, end, whole.view(-1)[begin:end])], lambda: None)


def stream_in_pieces(rank, layout):
    model = with_lora(llama(hidden_size=36, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1))
    want = sent(model)
    sharded.LAYOUTS[layout](model)
    for step in (1000, 53, 10_000):
        staging = Cut(step)
        stream = MergedWeights(model, bucket_bytes=5000, rounding="dither").stream_into(staging)
        assert [name for name, _ in stream] == list(want)
        assert_equal(staging.got, want)
        assert stream.stats.rounding.keys() == set(stream.plan.names("merged"))


@pytest.mark.parametrize("layout", ["by_layer", "by_columns"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_pieces_of_any_size_come_from_whichever_ranks_hold_them(pool, num_ranks, layout):
    pool.run(num_ranks, stream_in_pieces, layout)


# -- tensor parallel, placements -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(10, 13), nn.Linear(13, 10), nn.LayerNorm(10)

    def forward(self, x):
        return self.norm(self.down(self.up(x)))


def stream_tensor_parallel(rank):
    torch.manual_seed(5)
    model = Block()
    want = sent(model)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert_equal(sent(model), want)
    assert type(model.up.weight.placements[0]).__name__ == "_StridedShard"
    # A merge into such a weight: plans are made of records, whoever found them.
    A, B = torch.randn(3, 10), torch.randn(13, 3)
    adapter = Adapter(name="default", lora_A=A, lora_B=B, scaling=0.7)
    spread = Adapter(name="default", lora_A=distribute_tensor(A, mesh, [Shard(0), Replicate()]), lora_B=B, scaling=0.7)
    whole = sent(model, wire_dtype=None)["up.weight"]
    for each in (adapter, spread):
        assert torch.equal(merged(model.up.weight, each), merged(whole, adapter))


def merged(base, adapter):
    """What a stream makes of one tensor."""
    record = Record(name="w", fqn="w", tensor=base, adapters=(adapter,))
    plan = build_plan(ModelRecords(records=[record], all_fqns=["w"]))
    ((_, tensor),) = Stream(plan, ranks=shards.all_ranks())
    return tensor


def test_tensor_parallel_with_fsdp_is_gathered_whole(pool):
    """Edge case 51."""
    pool.run(4, stream_tensor_parallel)


def stream_placements(rank):
    mesh = dist.init_device_mesh("cpu", (2, 2))
    flat = dist.init_device_mesh("cpu", (4,))
    torch.manual_seed(6)
    for rows, cols in ((10, 12), (3, 2), (1, 9), (4, 4)):
        W, A, B = torch.randn(rows, cols), torch.randn(3, cols), torch.randn(rows, 3)
        want = merged(W, Adapter(name="a", lora_A=A, lora_B=B, scaling=1.3))
        ways = [
            (mesh, [Replicate(), Shard(0)]),
            (mesh, [Shard(0), Replicate()]),
            (mesh, [Replicate(), Shard(1)]),
            (mesh, [Shard(0), Shard(1)]),
            (mesh, [Shard(0), Shard(0)]),
            (mesh, [Replicate(), Replicate()]),
            (flat, [Shard(0)]),
            (flat, [Shard(1)]),
            (flat, [Shard(-1)]),
            (None, None),
        ]
        spread = {
            which: [t if where is None else distribute_tensor(t, where, how) for where, how in ways]
            for which, t in (("W", W), ("A", A), ("B", B))
        }
        for i, base in enumerate(spread["W"]):
            for j in range(len(ways)):
                lora_A, lora_B = spread["A"][j], spread["B"][(i + j) % len(ways)]
                got = merged(base, Adapter(name="a", lora_A=lora_A, lora_B=lora_B, scaling=1.3))
                assert torch.equal(got, want), (rows, cols, ways[i], ways[j])


def test_any_mixture_of_placements_gives_the_same_bits(pool):
    pool.run(4, stream_placements, limit_s=120)


def stream_two_groups(rank):
    """One bucket with tensors that different ranks share."""
    mesh = dist.init_device_mesh("cpu", (2, 2))
    torch.manual_seed(7)
    ways = [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Replicate()]]
    records, want = [], {}
    for i, way in enumerate(ways):
        W, A, B = torch.randn(6, 8), torch.randn(4, 8), torch.randn(6, 4)
        adapter = Adapter(name="a", lora_A=A, lora_B=B, scaling=0.5)
        want[f"w{i}"] = merged(W, adapter)
        spread = replace(adapter, **{key: distribute_tensor(t, mesh, ways[i - 1]) for key, t in (("lora_A", A), ("lora_B", B))})
        records.append(Record(name=f"w{i}", fqn=f"w{i}", tensor=distribute_tensor(W, mesh, way), adapters=(spread,)))
    plan = build_plan(ModelRecords(records=records, all_fqns=list(want)))
    assert_equal(dict(Stream(plan, ranks=shards.all_ranks())), want)
    assert_equal(dict(Stream(plan, ranks=shards.all_ranks(), receives=rank == 2)), want if rank == 2 else {})


def test_tensors_of_one_bucket_may_be_cut_over_different_groups(pool):
    pool.run(4, stream_two_groups)


def refuse_partial(rank):
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), sharded.world(), [Partial()]))
    with pytest.raises(ValueError, match=r"weight: has placements .*Partial is a sum that was not made yet"):
        lora_stream.stream(model)


def test_partial_sums_are_refused(pool):
    pool.run(2, refuse_partial)


# -- masters -------------------------------------------------------------------------------------------------------------


def stream_after_work(rank, layout):
    model = with_lora(seeded_llama())
    seeded_fill(model)
    want = sent(model)
    sharded.LAYOUTS[layout](model)
    optimizer = optimizer_of(model)
    assert_equal(sent(model), want)  # before the first forward
    with torch.no_grad():
        model(torch.arange(5).unsqueeze(0))
    before = looks(model)
    if layout in ("mixed_precision", "keep_gathered"):
        assert model.get_base_model().lm_head.weight.dtype == torch.bfloat16, "the root shows copies"
    assert_equal(sent(model), want)
    assert_looks(model, before)
    train(model, optimizer)
    first = sent(model)
    moved = [name for name in want if not torch.equal(first[name], want[name])]
    assert moved == [name for name in want if any(target in name for target in ("q_proj", "v_proj", "down_proj"))]
    assert_equal(first, gathered_by_torch(model))
    train(model, optimizer)  # goes on after a stream
    again = sent(model)
    assert any(not torch.equal(again[name], first[name]) for name in again)


def gathered_by_torch(model):
    """The unsharded model with the sharded one's values, streamed."""
    full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    plain = with_lora(seeded_llama())
    plain.load_state_dict(full)
    return sent(plain)


@pytest.mark.parametrize("layout", ["by_layer", "mixed_precision", "keep_gathered", "offloaded"])
def test_masters_are_read_before_a_forward_after_it_and_after_a_step(pool, layout):
    """Edge case 47. Case B28, and copies in the compute dtype that a forward leaves behind."""
    pool.run(2, stream_after_work, layout)


def stream_resharded_to_a_smaller_mesh(rank):
    model = with_lora(llama())
    want = sent(model)
    sharded.by_layer(model, reshard_after_forward=2)
    optimizer = optimizer_of(model)
    with torch.no_grad():
        model(torch.arange(5).unsqueeze(0))
    assert_equal(sent(model), want)
    train(model, optimizer)


def test_parameters_resharded_to_a_smaller_mesh_are_read_from_the_whole_one(pool):
    """Edge case 48."""
    pool.run(4, stream_resharded_to_a_smaller_mesh)


# -- what is moved -------------------------------------------------------------------------------------------------------


class Counted:
    """Counts collectives, and how often torch gathers a tensor by itself."""

    def __init__(self, patch):
        self.gathers, self.full_tensors = [], 0
        gather = shards.gather_bytes

        def counting(*args):
            self.gathers.append(args[4])
            return gather(*args)

        def full_tensor(*args, **kwargs):
            self.full_tensors += 1
            raise AssertionError("gathered one by one")

        patch.setattr(gathering.shards, "gather_bytes", counting)
        patch.setattr(DTensor, "full_tensor", full_tensor)


def count_gathers(rank, layout):
    model = with_lora(llama(hidden_size=64, intermediate_size=96))
    sharded.LAYOUTS[layout](model)
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        stream = lora_stream.stream(model)
        list(stream)
        assert ["adapters" in what for what in counted.gathers] == [True, False]
        assert stream.stats.traffic.gathered <= stream.plan.num_bytes + adapter_bytes(model)
        whole = sum(task.meta.num_bytes for task in stream.plan.tasks if gathering.needs_gather(task))
        assert stream.stats.traffic.gathered >= whole * (dist.get_world_size() - 1) // dist.get_world_size()

        counted.gathers.clear()
        stream = lora_stream.stream(model, scope="trained", bucket_bytes=40_000)
        sent = dict(stream)
        buckets = len(list(stream.plan.buckets(40_000)))
        assert buckets > 1
        assert len(counted.gathers) == 2 * buckets
        trained = sum(tensor.nbytes for tensor in sent.values())
        assert stream.stats.traffic.gathered <= trained + adapter_bytes(model)
    assert sum(stream.stats.traffic.made_on.values()) <= trained // dist.get_world_size() + 4 * 64 * len(sent)


def adapter_bytes(model):
    return sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("layout", ["by_layer", "root_only", "lora_leaves", "layers_only"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_bucket_is_one_gather_of_adapters_and_one_of_wire_dtype_bytes(pool, num_ranks, layout):
    """Case B33: each parameter is gathered once, whatever its unit; and those that do not train in the trained scope never."""
    pool.run(num_ranks, count_gathers, layout)


def read_what_trains(rank):
    model = with_lora(llama())
    sharded.offloaded(model)
    touched = []
    local = shards.local
    with pytest.MonkeyPatch.context() as patch:
        stream = lora_stream.stream(
            model,
            scope="trained",
            onload=lambda parameters: touched.append(len(parameters)),
            offload=lambda parameters: touched.append(len(parameters)),
        )
        seen = set()
        patch.setattr(shards, "local", lambda tensor, *view: (seen.add(id(tensor)), local(tensor, *view))[1])
        sent = dict(stream)
    names = {id(p): name for name, p in model.named_parameters()}
    read = {names[key] for key in seen if key in names}
    assert len(sent) == 8
    targets = ("q_proj", "k_proj", "v_proj", "down_proj")
    assert read == {name for name in names.values() if any(target in name for target in targets)}
    assert touched == [len(read), len(read)]


def test_what_does_not_train_is_neither_onloaded_nor_read_nor_gathered(pool):
    pool.run(2, read_what_trains)


def onload_by_bucket(rank, fails):
    model = with_lora(llama())
    want = sent(model)
    sharded.layers_only(model)
    here = set()
    most = []

    def onload(parameters):
        here.update(map(id, parameters))
        most.append(sum(shards.local(p).nbytes for p in model.parameters() if id(p) in here))
        if fails and len(most) == 3 and rank == 1:
            raise OSError("no room on the device")

    def offload(parameters):
        assert {id(p) for p in parameters} <= here
        here.difference_update(map(id, parameters))

    weights = MergedWeights(model, bucket_bytes=5000, rounding="dither", onload=onload, offload=offload)
    if not fails:
        assert_equal(dict(weights), want)
        assert max(most) < sum(shards.local(p).nbytes for p in model.parameters()) / 2, "never as a whole"
    else:
        kind, text = (OSError, "no room") if rank == 1 else (lora_stream.RankError, "rank 1 failed")
        with pytest.raises(kind, match=text):
            list(weights)
    assert not here, "what came has gone"


@pytest.mark.parametrize("fails", [False, True])
def test_a_sharded_model_is_onloaded_bucket_by_bucket_and_all_of_it_is_offloaded(pool, fails):
    pool.run(2, onload_by_bucket, fails)


def send_over_a_device(rank, base_dtype, wire_dtype):
    """A group that can only gather on a device, of which nothing is needed here but that it is another place."""
    model = with_lora(llama(hidden_size=64, intermediate_size=96, dtype=base_dtype))
    sharded.offloaded(model)
    plan = MergedWeights(model, wire_dtype=wire_dtype).plan
    own = sum(shards.local(task.base).numel() for task in plan.tasks)
    adapters = sum(shards.local(p).nbytes for name, p in model.named_parameters() if "lora_A" in name)
    traffic = Traffic()
    gather = shards.gather_bytes

    def gather_elsewhere(flat, sizes, group, receivers, what, memory=None):
        if "adapters" in what:  # as if they had been gathered there and had come back
            return gather(torch.zeros_like(flat, device="cpu"), sizes, group, receivers, what)
        assert flat.device.type == "meta"
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "device_of", lambda group, wish: torch.device("meta"))
        patch.setattr(shards, "gather_bytes", gather_elsewhere)
        gathering.Gathering(
            plan,
            bucket_bytes=1 << 30,
            receivers={0},
            receives=False,
            arithmetic=NEAREST,
            traffic=traffic,
            loaded=lambda tensors: nullcontext(),
        ).finish()
    return traffic.crossed - adapters, own, dict(traffic.made_on)


def test_rows_go_to_a_device_merged_or_as_they_lie_whichever_is_less(pool):
    for crossed, own, made_on in pool.run(2, send_over_a_device, torch.float32, torch.bfloat16):
        assert 2 * own <= crossed < 2.2 * own + 4096, "merged on the host to half the bytes"
        assert set(made_on) == {"cpu"}
    for crossed, own, made_on in pool.run(2, send_over_a_device, torch.bfloat16, torch.float32):
        assert 2 * own <= crossed < 3 * own, "the rows, and the adapters that were gathered"
        assert set(made_on) == {"meta"}
