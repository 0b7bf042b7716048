"""Names, shapes, dtypes and values of architectures whose checkpoints look unlike the live model. Unit layer."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import lora_stream
from tests import oracle
from tests.architectures import ARCHITECTURES, build, qwen3_moe
from tests.doubles import Recorder, in_pieces
from tests.models import assert_equal, assert_matches, llama, with_lora

TOKENS = torch.arange(3, 14).unsqueeze(0)


def adapted(name, dtype=torch.float32):
    _, modules, parameters = ARCHITECTURES[name]
    return with_lora(build(name, dtype), target_modules=modules, target_parameters=parameters, task_type=None)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_is_the_formula_in_the_form_of_the_checkpoint(name):
    """Edge cases 18 to 22 and 44."""
    model = adapted(name)
    assert_matches(dict(lora_stream.stream(model)), oracle.expected(model))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_shapes_and_dtypes_are_those_that_save_pretrained_writes(name, tmp_path):
    """Edge case 44: of the merged base in the wire dtype, as transformers would load it."""
    model = adapted(name)
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(tmp_path / "float32")
    config = AutoConfig.from_pretrained(tmp_path / "float32")
    loaded = type(merged).from_pretrained(tmp_path / "float32", dtype=torch.bfloat16, config=config)
    loaded.save_pretrained(tmp_path / "bfloat16")
    want = load_file(tmp_path / "bfloat16" / "model.safetensors")
    weights = lora_stream.MergedWeights(model)
    assert {meta.name: (meta.dtype, meta.shape) for meta in weights.metadata()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in want.items()
    }
    as_they_are = {meta.name: meta.dtype for meta in lora_stream.MergedWeights(model, wire_dtype=None).metadata()}
    assert set(as_they_are.values()) == {torch.float32}


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "vl" not in name and name != "gemma3"])
def test_a_checkpoint_of_the_stream_computes_what_pefts_forward_computes(name, tmp_path):
    model = adapted(name)
    save_file(dict(lora_stream.stream(model, wire_dtype=torch.float32)), tmp_path / "model.safetensors")
    model.get_base_model().config.save_pretrained(tmp_path)
    loaded = type(model.get_base_model()).from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        got, want = loaded(TOKENS).logits, model(TOKENS).logits
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("moe_intermediate_size", [24, 48, 16])
def test_experts_are_told_by_their_layers_and_not_by_their_sizes(moe_intermediate_size):
    """Case B26: narrower than hidden, wider, and square, where a transpose would fit as well."""
    torch.manual_seed(0)
    model = with_lora(
        qwen3_moe(moe_intermediate_size), target_modules=[], target_parameters=ARCHITECTURES["qwen3_moe"][2]
    )
    plan = lora_stream.MergedWeights(model).plan
    experts = [task for task in plan.tasks if ".experts." in task.meta.name]
    assert len(experts) == 2 * 4 * 3
    assert all(task.fate == "merged" for task in experts)
    assert_matches(dict(lora_stream.stream(model)), oracle.expected(model))


def test_one_expert_and_one_target_of_two():
    """Edge cases 18 and 20."""
    for parameters in (["experts.gate_up_proj"], ["experts.down_proj"]):
        for num_experts in (1, 3):
            model = with_lora(
                qwen3_moe(num_experts=num_experts, num_experts_per_tok=1),
                target_modules=["q_proj"],
                target_parameters=parameters,
                r=2,
            )
            assert_matches(dict(lora_stream.stream(model)), oracle.expected(model))


def test_experts_are_merged_straight_into_their_own_memory():
    """No stack of all experts is made: a bucket of one expert's size is enough."""
    model = adapted("mixtral")
    weights = lora_stream.MergedWeights(model, bucket_bytes=1)
    stream = iter(weights)
    assert_equal(dict(stream), dict(lora_stream.stream(model)))
    assert stream.stats.peak_staging_bytes == max(meta.num_bytes for meta in weights.metadata())


def test_the_account_names_a_split_tensor_once():
    plan = lora_stream.MergedWeights(adapted("mixtral")).plan
    fqns = [fqn for fqn in plan.account if fqn.endswith("layers.0.mlp.experts.base_layer.base_layer.gate_up_proj")]
    (fqn,) = fqns
    assert plan.account[fqn] == ("merged", "model.layers.0.block_sparse_moe.experts.0.w1.weight and 7 more")


def test_experts_of_a_layer_travel_together_in_the_trained_scope():
    model = with_lora(build("qwen3_moe"), target_modules=[], target_parameters=["experts.down_proj"])
    names = lora_stream.MergedWeights(model, scope="trained").plan.names("copied")
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names
    assert not [name for name in names if "self_attn" in name]


def test_a_conversion_that_turns_matrices_is_followed(monkeypatch):
    """As some models' experts are published; merged straight into the form of the checkpoint, in pieces too."""
    import transformers.core_model_loading as loading

    revert = loading.revert_weight_conversion

    def turns(model, state):
        written = revert(model, state)
        return {name: t.transpose(-1, -2).contiguous() if ".experts." in name else t for name, t in written.items()}

    for name in ("llama4", "mixtral"):
        model = adapted(name)
        want = oracle.expected(model)
        want = {each: t.transpose(-1, -2) if ".experts." in each else t for each, t in want.items()}
        with monkeypatch.context() as patch:
            patch.setattr(loading, "revert_weight_conversion", turns)
            fresh = adapted(name)
            fresh.load_state_dict(model.state_dict())
            assert_matches(dict(lora_stream.stream(fresh)), want)
            assert_matches(in_pieces(fresh, 3), want)


def test_a_conversion_that_joins_tensors_is_refused_by_name(monkeypatch):
    import transformers.core_model_loading as loading

    def joins(model, state):
        first, second, *rest = state.items()
        return {"joined.weight": torch.cat([first[1], second[1]]), **dict(rest)}

    monkeypatch.setattr(loading, "revert_weight_conversion", joins)
    with pytest.raises(ValueError, match=r"joined\.weight: checkpoints of LlamaForCausalLM hold it joined"):
        lora_stream.stream(with_lora(llama()))


def test_a_conversion_that_reorders_elements_or_forgets_a_tensor_is_refused_by_name(monkeypatch):
    import transformers.core_model_loading as loading

    def reorders(model, state):
        return {name: t.reshape(2, -1).T.reshape(t.shape) if t.dim() > 1 else t for name, t in state.items()}

    def forgets(model, state):
        return {name: tensor for name, tensor in state.items() if "norm" not in name}

    def halves(model, state):
        return {name: tensor[: len(tensor) // 2] for name, tensor in state.items()}

    def fails(model, state):
        raise KeyError("no such layer")

    for convert, message in (
        (reorders, r"cannot be told|another order"),
        (forgets, r"norm.weight: checkpoints of LlamaForCausalLM do not hold it"),
        (halves, r"embed_tokens\.weight: a checkpoint would hold only 960 of its 1952 elements"),
        (fails, r"checkpoint names of LlamaForCausalLM cannot be told.*no such layer"),
    ):
        monkeypatch.setattr(loading, "revert_weight_conversion", convert)
        with pytest.raises(ValueError, match=message):
            lora_stream.stream(with_lora(llama()))


def test_sides_of_one_element_are_told_apart():
    """Depthwise convolutions have them: [channels, 1, kernel]."""
    model = llama()
    for i, shape in enumerate([(5, 1, 3), (1, 1, 4), (3, 1), (1, 3), (1,), (2, 1, 1, 2)]):
        model.model.register_parameter(f"odd_{i}", torch.nn.Parameter(torch.randn(shape)))
    got = dict(lora_stream.stream(with_lora(model)))
    assert all(
        torch.equal(got[f"model.odd_{i}"], getattr(model.model, f"odd_{i}").detach().bfloat16()) for i in range(6)
    )


def test_the_conversion_is_asked_once_for_a_model(monkeypatch):
    import transformers.core_model_loading as loading

    calls = []
    revert = loading.revert_weight_conversion
    monkeypatch.setattr(loading, "revert_weight_conversion", lambda *args: calls.append(1) or revert(*args))
    weights = lora_stream.MergedWeights(adapted("mixtral"))
    for _ in range(3):
        dict(weights)
    assert len(calls) == 1


def test_engines_with_ideas_of_their_own_get_the_names_that_they_want():
    model = adapted("mixtral")
    plain = lora_stream.MergedWeights(model, scope="trained")
    renamed = lora_stream.MergedWeights(model, scope="trained", rename=lambda name: f"policy.{name}")
    assert [meta.name for meta in renamed.metadata()] == [f"policy.{meta.name}" for meta in plain.metadata()]
    assert_equal(dict(renamed), {f"policy.{name}": tensor for name, tensor in plain})
    with pytest.raises(ValueError, match=r"both have the checkpoint name 'same'; rename= must keep them apart"):
        lora_stream.stream(model, rename=lambda name: "same")


def test_a_failed_sync_with_other_names_puts_the_stacked_siblings_back_as_well():
    model, engine = with_lora(llama(), target_modules=["q_proj"]), Recorder()
    lora_stream.sync(model, engine, rename=str.upper)
    held = {name: tensor.clone() for name, tensor in engine.weights.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(2)
    engine.fail_at = 1
    with pytest.raises(lora_stream.SyncError, match="put back on its old weights"):
        lora_stream.sync(model, engine, rename=str.upper)
    assert engine.weights.keys() == held.keys()
    assert all(torch.equal(engine.weights[name], held[name]) for name in held)
    restored = engine.loads[-1]
    assert {name.split(".")[-2] for name in restored} == {"Q_PROJ", "K_PROJ", "V_PROJ"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_checkpoint_keeps_in_float32_stays_so_and_the_rest_does_not(dtype):
    """Case B07: integer buffers as they are, floating ones in the wire dtype, a router's bias in float32 by declaration."""
    model = adapted("deepseek_v3", dtype)
    base = model.get_base_model()
    base.model.register_buffer("steps", torch.tensor([2**40 + 1]))
    base.model.register_buffer("scale", torch.tensor([1.0 + 2**-20]))
    got = dict(lora_stream.stream(model))
    kept = {name for name, tensor in got.items() if tensor.dtype == torch.float32}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {bias} <= kept <= {bias, "model.layers.1.mlp.gate.weight"}  # newer transformers keep both
    assert torch.equal(got[bias], base.model.layers[1].mlp.gate.e_score_correction_bias.float())
    assert got["model.steps"].tolist() == [2**40 + 1]
    assert got["model.scale"].dtype == torch.bfloat16
    as_it_is = dict(lora_stream.stream(model, wire_dtype=None))
    assert as_it_is["model.scale"].item() == torch.tensor(1.0 + 2**-20).item()
    assert as_it_is["model.layers.0.input_layernorm.weight"].dtype == dtype


def test_weights_that_only_float16_is_too_narrow_for_stay_beside_that():
    base = build("gpt_oss")
    base.model.register_parameter("abnormal", torch.nn.Parameter(torch.randn(3)))  # "norm" is declared, as a whole name
    model = with_lora(base, target_modules=["q_proj"])
    kept = {
        meta.name
        for meta in lora_stream.MergedWeights(model, wire_dtype=torch.float16).metadata()
        if meta.dtype == torch.float32
    }
    assert "model.norm.weight" in kept
    assert "model.abnormal" not in kept
    assert not any("proj" in name for name in kept)
    assert {meta.dtype for meta in lora_stream.MergedWeights(model).metadata()} == {torch.bfloat16}


def test_the_report_accounts_for_every_tensor():
    model = adapted("mixtral")
    report = lora_stream.sync(model, Recorder())
    assert report.account == lora_stream.MergedWeights(model).plan.account
    live = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert live <= report.account.keys()
    assert json.loads(json.dumps(report.to_dict()))["account"] == {k: list(v) for k, v in report.account.items()}
