"""The plan is a pure function over records: no model, no kernel. Unit layer."""

import pytest
import torch

from lora_stream.plan import Adapter, ModelRecords, ParamMeta, Record, build_plan


def adapter(rows=4, cols=6, rank=2, **change):
    parts = {"lora_A": torch.zeros(rank, cols), "lora_B": torch.zeros(rows, rank), **change}
    return Adapter(name="default", scaling=2.0, **parts)


def record(name, *, tensor=None, adapters=(), trained=False, fqn=None):
    tensor = torch.zeros(4, 6) if tensor is None else tensor
    return Record(name=name, fqn=fqn or f"live.{name}", tensor=tensor, adapters=tuple(adapters), trained=trained)


def model_of(*records, has_adapters=None, **fields):
    found = any(r.adapters for r in records) if has_adapters is None else has_adapters
    consumed, left = fields.get("consumed", {}), fields.get("left", {})
    extra = fields.get("extra", [])
    fqns = [r.fqn for r in records] + list(consumed) + list(left) + extra
    return ModelRecords(records=list(records), consumed=consumed, left=left, all_fqns=fqns, has_adapters=found)


LAYER = [
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
]


def names(plan):
    return [meta.name for meta in plan.metadata()]


@pytest.mark.parametrize("target", ["q_proj", "k_proj", "v_proj"])
def test_trained_scope_never_sends_a_part_of_q_k_v(target):
    records = [record(n, adapters=[adapter()] if target in n else ()) for n in LAYER]
    plan = build_plan(model_of(*records), scope="trained")
    assert names(plan) == LAYER[:3]
    assert plan.names("merged") == tuple(n for n in LAYER[:3] if target in n)
    assert plan.names("left") == tuple(f"live.{n}" for n in LAYER[3:])


def test_trained_scope_closes_gate_up_biases_experts_and_what_the_engine_adds():
    expert = "model.layers.0.mlp.experts.{}.{}.weight"
    all_names = [
        LAYER[4],
        LAYER[5],
        "model.layers.0.self_attn.q_proj.bias",
        *LAYER[:3],
        expert.format(0, "down_proj"),
        expert.format(1, "gate_proj"),
        "model.layers.0.odd.left.weight",
        "model.layers.0.odd.right.weight",
        "model.norm.weight",
    ]
    touched = {LAYER[4], LAYER[0], expert.format(1, "gate_proj"), "model.layers.0.odd.left.weight"}
    records = [record(n, adapters=[adapter()] if n in touched else ()) for n in all_names]
    plan = build_plan(
        model_of(*records),
        scope="trained",
        fused_modules=[("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj"), ("left", "right")],
    )
    assert sorted(names(plan)) == sorted(n for n in all_names if n != "model.norm.weight")


def test_order_is_by_layer_with_fused_siblings_adjacent_however_the_model_lists_them():
    shuffled = [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
    ]
    plan = build_plan(model_of(*[record(n) for n in shuffled]))
    assert names(plan) == [
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.norm.weight",
    ]


def test_every_tensor_of_the_model_has_exactly_one_fate():
    records = [record(n, adapters=[adapter()] if "q_proj" in n else ()) for n in LAYER]
    model = model_of(*records, consumed={"live.A": LAYER[0]}, left={"live.head": "tied to embedding"})
    plan = build_plan(model, scope="trained")
    assert plan.account.keys() == set(model.all_fqns)
    assert plan.account["live.A"] == ("consumed", LAYER[0])
    assert plan.account["live.head"] == ("left", "tied to embedding")
    assert plan.account[f"live.{LAYER[0]}"] == ("merged", LAYER[0])
    assert plan.account[f"live.{LAYER[1]}"] == ("copied", LAYER[1])
    assert plan.account[f"live.{LAYER[3]}"] == ("left", "unchanged base weight")


def test_a_tensor_that_no_fate_fits_refuses_the_plan_by_name():
    with pytest.raises(ValueError, match=r"live\.lora_diag: found in the model"):
        build_plan(model_of(record("a.weight"), extra=["live.lora_diag"]))


def test_adapters_without_a_target_are_refused():
    with pytest.raises(ValueError, match="no weight to merge"):
        build_plan(model_of(record("a.weight"), has_adapters=True))


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"x\.two and x\.one both have the checkpoint name 'a\.weight'"):
        build_plan(model_of(record("a.weight", fqn="x.one"), record("a.weight", fqn="x.two")))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            record("a.weight", adapters=[adapter(rank=2, lora_A=torch.zeros(3, 6))]),
            r"lora_B of adapter 'default' must have shape \(4, 3\), got \(4, 2\)",
        ),
        (
            record("a.weight", adapters=[adapter(cols=5)]),
            r"lora_A of adapter 'default' must have shape \(2, 6\), got \(2, 5\)",
        ),
        (
            record("a.weight", tensor=torch.zeros(4, 6, dtype=torch.float64), adapters=[adapter()]),
            "cannot merge into torch.float64",
        ),
        (
            record("a.weight", adapters=[adapter(lora_A=torch.zeros(2, 6, dtype=torch.int8))]),
            "lora_A .* must be one of",
        ),
        (record("a.weight", tensor=torch.zeros(4, 6, device="meta")), "is on the meta device"),
        (
            record("a.weight", adapters=[adapter(lora_A=torch.zeros(2, 6, device="meta"))]),
            "lora_A .* is on the meta device",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused_with_name_expected_and_got(broken, message):
    with pytest.raises(ValueError, match=message) as error:
        build_plan(model_of(broken))
    assert "live.a.weight" in str(error.value)


def test_floats_take_the_wire_dtype_and_integers_keep_theirs():
    model = model_of(record("w", tensor=torch.zeros(3)), record("steps", tensor=torch.zeros((), dtype=torch.int64)))
    assert build_plan(model).metadata() == [ParamMeta("w", torch.bfloat16, (3,)), ParamMeta("steps", torch.int64, ())]
    assert build_plan(model, wire_dtype=None).metadata()[0].dtype == torch.float32
    with pytest.raises(ValueError, match="wire_dtype must be"):
        build_plan(model, wire_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("bucket_bytes", [1, 48, 100, 10**9])
def test_buckets_hold_every_task_in_order_and_stay_in_their_size(bucket_bytes):
    plan = build_plan(model_of(*[record(n) for n in LAYER]))  # 48 bytes each
    buckets = list(plan.buckets(bucket_bytes))
    assert [task for bucket in buckets for task in bucket] == list(plan.tasks)
    assert all(len(b) == 1 or sum(t.meta.num_bytes for t in b) <= bucket_bytes for b in buckets)


def test_unknown_scope_is_refused():
    with pytest.raises(ValueError, match="scope must be"):
        build_plan(model_of(record("a")), scope="some")
