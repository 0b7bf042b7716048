"""Which tensors of a PEFT model become what, and what is refused. Unit layer."""

import copy

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPT2Config, GPT2LMHeadModel

import lora_stream
from lora_stream.merged_weights import MergedWeights
from tests.models import (
    SIZES,
    MoE,
    assert_equal,
    assert_matches,
    assert_same_state,
    expected,
    expert_lora,
    fill,
    llama,
    qwen2,
    state,
    with_lora,
)


def streamed(model, **kwargs):
    return dict(lora_stream.stream(model, **kwargs))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [llama, qwen2])
def test_stream_is_the_formula_for_targets_and_the_cast_base_for_the_rest(make, base, tied):
    model = with_lora(make(tied=tied, dtype=base))
    assert_matches(streamed(model), expected(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adapters_of_any_dtype_and_any_wire_dtype(dtype):
    model = with_lora(llama())
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    for wire in (torch.bfloat16, torch.float16, torch.float32):
        assert_matches(streamed(model, wire_dtype=wire), expected(model, wire))


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, {"0.self_attn.q_proj": 8.0, "1.self_attn.v_proj": 8.0}),
        ({"use_rslora": True}, {"0.self_attn.q_proj": 16.0}),
        ({"lora_alpha": 6.5}, {"0.self_attn.q_proj": 1.625}),
        ({"lora_alpha": 0}, {"0.self_attn.q_proj": 0.0}),
        (
            {"rank_pattern": {"layers.0.self_attn.q_proj": 8}, "alpha_pattern": {"q_proj": 7}},
            {"0.self_attn.q_proj": 0.875, "1.self_attn.q_proj": 1.75, "0.self_attn.v_proj": 8.0},  # case B11
        ),
    ],
)
def test_scaling_is_the_layers_own(config, scales):
    """Cases B10 and B11: rsLoRA and patterns; alpha 0 and fractions."""
    model = with_lora(llama(), **config)
    plan = lora_stream.MergedWeights(model).plan
    for layer, scale in scales.items():
        (task,) = [t for t in plan.tasks if t.meta.name == f"model.layers.{layer}.weight"]
        assert task.adapters[0].scaling == scale
    assert_matches(streamed(model), expected(model))


def test_scaling_changed_after_the_config_is_used_at_once():
    model = with_lora(llama())
    weights = lora_stream.MergedWeights(model)
    first = dict(weights)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.25)
    second = dict(weights)
    assert_matches(second, expected(model))
    assert not torch.equal(
        first["model.layers.0.self_attn.q_proj.weight"], second["model.layers.0.self_attn.q_proj.weight"]
    )


def two_adapters(**ref_config):
    model = with_lora(llama())
    model.add_adapter("ref", LoraConfig(r=3, lora_alpha=5, **{"target_modules": ["q_proj"], **ref_config}))
    fill(model)
    return model


def test_only_the_chosen_adapter_is_merged():
    """Case B16."""
    model = two_adapters()
    default = streamed(model)
    assert_matches(default, expected(model))
    assert_equal(streamed(model, adapter_name="default"), default)
    by_name = streamed(model, adapter_name="ref")
    model.set_adapter("ref")
    assert_equal(streamed(model), by_name)
    assert_matches(by_name, expected(model))
    q = "model.layers.0.self_attn.q_proj.weight"
    v = "model.layers.0.self_attn.v_proj.weight"
    assert not torch.equal(by_name[q], default[q])
    assert torch.equal(by_name[v], llama_value(model, v))


def llama_value(model, name):
    module, _, own = name.rpartition(".")
    return getattr(model.get_base_model().get_submodule(module).base_layer, own).detach().to(torch.bfloat16)


def test_several_active_adapters_are_summed():
    model = two_adapters()
    model.base_model.set_adapter(["default", "ref"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.double()
    for name in ("default", "ref"):
        exact = exact + layer.scaling[name] * (layer.lora_B[name].weight.double() @ layer.lora_A[name].weight.double())
    got = streamed(model)["model.layers.0.self_attn.q_proj.weight"]
    near = lora_stream.reference.round_once(exact.detach(), torch.bfloat16)
    assert (got != near).float().mean() < 2e-3
    torch.testing.assert_close(got, near, rtol=2.0**-7, atol=1e-6)


def test_unknown_adapter_name_is_refused_with_those_that_exist():
    with pytest.raises(ValueError, match=r"adapter_name='other'.*\['default', 'ref'\]"):
        lora_stream.stream(two_adapters(), adapter_name="other")


def test_an_adapter_name_on_a_model_without_adapters_is_refused():
    with pytest.raises(ValueError, match=r"adapter_name='policy': the model's adapters are \[\]"):
        lora_stream.stream(llama(), adapter_name="policy")


def test_modules_to_save_sends_the_trained_copy_and_never_the_original():
    """Case B17."""
    model = with_lora(llama(), modules_to_save=["lm_head", "embed_tokens"])
    base = model.get_base_model()
    with torch.no_grad():
        for wrapper in (base.lm_head, base.model.embed_tokens):
            wrapper.modules_to_save["default"].weight.add_(1.0)
        for norm in (base.model.norm, base.model.layers[1].input_layernorm):
            norm.weight.requires_grad_(True).mul_(2.0)
    got = streamed(model)
    assert len(got) == 2 * 9 + 3
    assert not [name for name in got if "modules_to_save" in name or "original" in name]
    for name, wrapper in (("lm_head", base.lm_head), ("model.embed_tokens", base.model.embed_tokens)):
        assert torch.equal(got[f"{name}.weight"], wrapper.modules_to_save["default"].weight.to(torch.bfloat16))
        assert not torch.equal(got[f"{name}.weight"], wrapper.original_module.weight.to(torch.bfloat16))
    trained = streamed(model, scope="trained")
    assert {
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
    } <= trained.keys()
    assert "model.layers.0.input_layernorm.weight" not in trained
    assert_equal(trained, {name: got[name] for name in trained})


def test_trained_scope_holds_targets_with_siblings_and_leaves_the_rest():
    model = with_lora(qwen2())
    got, everything = streamed(model, scope="trained"), streamed(model)
    per_layer = ["q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"]
    wanted = {f"model.layers.{i}.self_attn.{own}" for i in range(2) for own in per_layer}
    wanted |= {f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)}
    assert got.keys() == wanted
    assert_equal(got, {name: everything[name] for name in got})


def test_names_are_those_that_save_pretrained_writes(tmp_path):
    from safetensors import safe_open

    for tied in (False, True):
        base = qwen2(tied=tied)
        base.save_pretrained(tmp_path / str(tied))
        with safe_open(tmp_path / str(tied) / "model.safetensors", "pt") as file:
            written = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        metadata = lora_stream.MergedWeights(with_lora(base)).metadata()
        assert {meta.name: meta.shape for meta in metadata} == written


def test_injected_adapters_without_a_peft_model():
    model = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj"]), llama())
    fill(model)
    got = streamed(model)
    layer = model.model.layers[0].self_attn.q_proj
    want = lora_stream.reference.merge_cast(
        layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight, 8.0, torch.bfloat16
    )
    assert torch.equal(got["model.layers.0.self_attn.q_proj.weight"], want)


def test_a_plain_model_is_copied():
    model = llama(tied=True)
    got = streamed(model)
    assert_equal(got, {k: v.to(torch.bfloat16) for k, v in model.state_dict().items() if k != "lm_head.weight"})
    assert got.keys() == streamed(model, scope="trained").keys()  # all of it trains
    model.requires_grad_(False)
    assert not streamed(model, scope="trained")


class Odd(nn.Module):
    """Module names that look like prefixes, shared layers, buffers, a transposed weight."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(5, 7)
        self.base_layer = nn.Linear(7, 3, bias=False)
        self.again = self.base_layer
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.module.weight = nn.Parameter(torch.randn(5, 7).t())


def test_modules_named_like_prefixes_shared_layers_and_buffers_keep_their_names():
    model = Odd()
    got = streamed(model)
    assert_equal(
        got,
        {
            "module.weight": model.module.weight.detach().to(torch.bfloat16),
            "module.bias": model.module.bias.detach().to(torch.bfloat16),
            "base_layer.weight": model.base_layer.weight.detach().to(torch.bfloat16),
            "again.weight": model.base_layer.weight.detach().to(torch.bfloat16),
            "steps": model.steps,
            "mean": model.mean.to(torch.bfloat16),
        },
    )
    assert all(tensor.is_contiguous() for tensor in got.values())


def test_lora_on_a_transposed_weight_and_names_like_prefixes():
    model = get_peft_model(Odd(), LoraConfig(r=2, lora_alpha=3, target_modules=["module"]))
    fill(model)
    layer = model.base_model.model.module
    got = streamed(model)
    want = lora_stream.reference.merge_cast(
        layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight, 1.5, torch.bfloat16
    )
    assert torch.equal(got["module.weight"], want)
    assert "base_layer.weight" in got


TRANSPOSED = {
    "Embedding": (lambda: with_lora(llama(), target_modules=["embed_tokens"]), "model.embed_tokens.weight"),
    "scaled Embedding": (lambda: with_lora(gemma3(), target_modules=["embed_tokens"]), "model.embed_tokens.weight"),
    "Conv1D": (lambda: with_lora(gpt2(), target_modules=["c_attn"]), "transformer.h.0.attn.c_attn.weight"),
    "several adapters": (lambda: two_active(gpt2(), "c_attn"), "transformer.h.0.attn.c_attn.weight"),
}


def gpt2():
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=61, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config).eval()


def gemma3():
    sizes = {**SIZES, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, tie_word_embeddings=False)).eval()


def two_active(base, target):
    model = with_lora(base, target_modules=[target], r=3)
    model.add_adapter("more", LoraConfig(r=2, lora_alpha=7, target_modules=[target], fan_in_fan_out=True))
    fill(model)
    model.base_model.set_adapter(["default", "more"])
    return model


@pytest.mark.parametrize("kind", TRANSPOSED)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_weights_that_lie_as_in_by_out_get_the_transposed_delta(kind):
    make, target = TRANSPOSED[kind]
    model = make()
    layer = model.get_base_model().get_submodule(target.removesuffix(".weight"))
    parts = (layer.lora_embedding_A, layer.lora_embedding_B) if "Embedding" in kind else (layer.lora_A, layer.lora_B)
    delta = sum(
        layer.scaling[adapter] * (getattr(B, "weight", B).double() @ getattr(A, "weight", A).double()).T
        for adapter, A, B in ((name, parts[0][name], parts[1][name]) for name in layer.active_adapters)
    )
    want = (layer.base_layer.weight.double() + delta).to(torch.bfloat16)
    got = streamed(model)[target]
    assert got.shape == want.shape
    assert (got != want).sum() <= 1, "a tie"
    assert not torch.equal(got, layer.base_layer.weight.to(torch.bfloat16))


REFUSED = {
    "DoRA": (lambda: with_lora(llama(), use_dora=True), r"q_proj.*DoraLinearVariant"),
    "lora_bias": (lambda: with_lora(qwen2(), target_modules=["q_proj"], lora_bias=True), r"q_proj.*lora_bias"),
    "convolution": (
        lambda: get_peft_model(torch.nn.Sequential(torch.nn.Conv1d(4, 6, 3)), LoraConfig(target_modules=["0"])),
        r"0: peft\.tuners\.lora\.layer\.Conv1d is not supported",
    ),
    "tied head": (lambda: with_lora(llama(tied=True), target_modules=["lm_head"]), r"lm_head.*embed_tokens.*tied"),
    "tied copy": (lambda: with_lora(llama(tied=True), modules_to_save=["embed_tokens"]), r"lm_head.*tied"),
    "trainable tokens": (
        lambda: with_lora(llama(), trainable_token_indices=[1, 2]),
        r"embed_tokens.*TrainableTokensWrapper",
    ),
    "AdaLoRA": (
        lambda: get_peft_model(llama(), peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10)),
        r"adapter 'default' is of type ADALORA",
    ),
    "LoHa": (lambda: get_peft_model(llama(), peft.LoHaConfig(target_modules=["q_proj"])), "of type LOHA"),
    "IA3": (
        lambda: get_peft_model(llama(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
        "of type IA3",
    ),
    "prompt tuning": (
        lambda: get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        "of type PROMPT_TUNING",
    ),
    "injected LoHa": (
        lambda: inject_adapter_in_model(peft.LoHaConfig(target_modules=["q_proj"]), llama()),
        r"q_proj: peft\.tuners\.loha\.layer\.Linear is not supported",
    ),
    "mixed model": (
        lambda: get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]), mixed=True),
        "is a PeftMixedModel",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_another_formula_is_refused_by_name_before_anything_leaves(kind):
    make, message = REFUSED[kind]
    model = make()
    with pytest.raises(ValueError, match=message):
        lora_stream.stream(model)


def test_merged_and_disabled_adapters_are_refused_and_left_as_they_were():
    """Cases B05 and B16: a merged delta would count twice; under disable_adapter() the policy is the base."""
    model = with_lora(llama())
    model.merge_adapter()
    before = state(model)
    with pytest.raises(ValueError, match=r"q_proj: adapters \['default'\] are merged"):
        lora_stream.stream(model)
    assert_same_state(before, state(model))
    model.unmerge_adapter()
    with model.disable_adapter(), pytest.raises(ValueError, match="disabled"):
        lora_stream.stream(model)


def test_no_layer_with_the_active_adapter_is_refused():
    model = with_lora(llama())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"]))
    model.delete_adapter("default")
    for module in model.modules():
        if hasattr(module, "lora_A") and "other" in module.lora_A:
            module._active_adapter = []
    with pytest.raises(ValueError, match="no weight to merge"):
        lora_stream.stream(model)


def test_quantised_and_meta_parameters_are_refused():
    model = llama()
    model.model.norm.weight = nn.Parameter(torch.zeros(32, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"model\.norm\.weight: is a parameter of torch\.uint8; quantised"):
        lora_stream.stream(model)
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ValueError, match="is on the meta device"):
        lora_stream.stream(model)


def test_parameters_of_deepspeed_zero_3_are_refused_with_what_to_do():
    model = with_lora(llama())
    weight = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    weight.ds_id = 7  # what ZeRO-3 leaves of a parameter: a number, and no values
    weight.data = torch.empty(0)
    with pytest.raises(
        ValueError, match=r"q_proj\.base_layer\.weight: is partitioned by DeepSpeed ZeRO-3.*GatheredParameters"
    ):
        lora_stream.stream(model)


def test_models_whose_checkpoints_split_their_tensors_are_refused():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    )
    model = with_lora(Qwen3MoeForCausalLM(config), target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"experts.*checkpoints of Qwen3MoeForCausalLM hold it as"):
        lora_stream.stream(model)


def test_merged_model_computes_what_pefts_forward_computes():
    model = with_lora(llama(tied=True))
    tokens = torch.arange(11).unsqueeze(0)
    with torch.no_grad():
        want = model(tokens).logits
        plain = llama(tied=True)
        plain.load_state_dict({**plain.state_dict(), **streamed(model, wire_dtype=torch.float32)})
        plain.tie_weights()
        torch.testing.assert_close(plain(tokens).logits, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("parameters", [("gate_up_proj", "down_proj"), ("down_proj",), ("gate_up_proj",)])
def test_expert_stacks_get_each_experts_own_delta_in_their_layout(is_transposed, parameters):
    """PEFT lays A out expert by expert and B rank by rank, and wraps the module once for each parameter."""
    model = expert_lora(MoE(is_transposed=is_transposed), parameters=parameters)
    got = streamed(model)
    assert set(got) == {"router.weight", "router.bias", "experts.gate_up_proj", "experts.down_proj", "experts.bias"}
    wrappers = [m for m in model.modules() if type(m).__name__ == "ParamWrapper"]
    assert {wrapper.parameter_name for wrapper in wrappers} == set(parameters)
    for wrapper in wrappers:
        weight = wrapper.get_base_layer().get_parameter(wrapper.parameter_name)
        A, B = wrapper.lora_A["default"].weight.double(), wrapper.lora_B["default"].weight.double()
        for e in range(5):
            delta = B[:, e::5] @ A[e * 3 : (e + 1) * 3]
            want = (weight[e].double() + 5 / 3 * (delta.T if is_transposed else delta)).to(torch.bfloat16)
            assert (got[f"experts.{wrapper.parameter_name}"][e] != want).sum() <= 1, "a tie"
    for name in {"gate_up_proj", "down_proj"} - set(parameters):
        plain = next(p for fqn, p in model.named_parameters() if fqn.endswith(f".{name}"))
        assert torch.equal(got[f"experts.{name}"], plain.to(torch.bfloat16))


def test_expert_stacks_are_what_peft_computes_with_and_their_statistics_are_of_all_experts():
    model = expert_lora(MoE())
    stream = lora_stream.stream(model, wire_dtype=torch.float32)
    got = dict(stream)
    reference = {name: tensor.float() for name, tensor in MergedWeights(copy_merged(model), wire_dtype=torch.float32)}
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, reference[name], rtol=1e-5, atol=1e-5)
        if name in stream.stats.rounding:
            rounding = stream.stats.rounding[name]
            assert rounding.changed == tensor.numel()
            assert rounding.checksum == tensor.view(torch.int32).to(torch.int64).sum().item() % 2**32


def test_several_adapters_on_expert_stacks_are_summed():
    model = expert_lora(MoE())
    one = streamed(model, wire_dtype=torch.float32)["experts.down_proj"]
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=7, target_modules=[], target_parameters=parameters)
    model.add_adapter("more", config)
    fill(model)
    base = model.base_model.model.experts.get_base_layer().down_proj.detach()
    deltas = [
        streamed(model, adapter_name=a, wire_dtype=torch.float32)["experts.down_proj"] - base
        for a in ("default", "more")
    ]
    model.base_model.set_adapter(["default", "more"])
    both = streamed(model, wire_dtype=torch.float32)["experts.down_proj"]
    torch.testing.assert_close(both, base + deltas[0] + deltas[1], rtol=1e-5, atol=1e-5)
    assert not torch.equal(one, both)


def copy_merged(model):
    """By PEFT, in float32."""
    return copy.deepcopy(model).merge_and_unload()


def test_lora_on_a_router_by_its_parameter_name():
    model = get_peft_model(MoE(), LoraConfig(r=2, lora_alpha=3, target_modules=[], target_parameters=["router.weight"]))
    fill(model)
    layer = model.base_model.model.router
    want = lora_stream.reference.merge_cast(
        layer.get_base_layer().weight,
        layer.lora_A["default"].weight,
        layer.lora_B["default"].weight,
        1.5,
        torch.bfloat16,
    )
    assert torch.equal(streamed(model)["router.weight"], want)
