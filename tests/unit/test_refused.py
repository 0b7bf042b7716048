"""What has no merged weight, or one by another formula, is refused: by module, kind and way out, before a tensor leaves. Unit
layer."""

import dataclasses

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners import lora
from peft.tuners.lora import config as lora_config
from peft.tuners.lora import layer as lora_layer
from torch import nn

import lora_stream
from tests.doubles import Recorder
from tests.models import MoE, assert_equal, assert_same_state, expert_lora, llama, state, with_lora

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),
    pytest.mark.filterwarnings("ignore:Adapter .* was active which is now deleted"),
]


def other(kind, **config):
    config = {"target_modules": ["q_proj"], **config}
    return lambda: get_peft_model(llama(), getattr(peft, kind)(**config))


def attention():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2)

    return get_peft_model(Attends(), LoraConfig(target_modules=["attn"]))


def unknown_variant():
    """As a PEFT of tomorrow may bring it."""

    class TomorrowLinearVariant(lora_layer.LoraVariant):
        pass

    model = with_lora(llama())
    layer = model.get_base_model().model.layers[1].mlp.down_proj
    layer.lora_variant["default"] = TomorrowLinearVariant()
    return model


def unknown_field():
    @dataclasses.dataclass
    class TomorrowConfig(LoraConfig):
        use_tomorrow: bool = dataclasses.field(default=False, metadata={"is_lora_variant": True})

    config = TomorrowConfig(r=2, target_modules=["q_proj"])
    model = get_peft_model(llama(), config)
    config.use_tomorrow = True
    return model


def layer_of(class_name, module_name):
    """A layer of a package that needs a GPU: PEFT's own class where it has one by this name, and no more than the name."""

    def make():
        kind = type(class_name, (nn.Module, lora_layer.LoraLayer), {"__module__": module_name})
        layer = kind.__new__(kind)
        nn.Module.__init__(layer)
        model = with_lora(llama())
        model.get_base_model().model.layers[0].self_attn.o_proj = layer
        return model

    return make


def base_of(class_name, module_name, dtype=torch.uint8):
    """LoRA's own layer around a module of another package."""

    def make():
        kind = type(class_name, (nn.Linear,), {"__module__": module_name})
        model = with_lora(llama(), target_modules=["q_proj", "o_proj"])
        layer = model.get_base_model().model.layers[0].self_attn.o_proj
        layer.base_layer.__class__ = kind
        layer.base_layer.weight = nn.Parameter(layer.base_layer.weight.to(dtype), requires_grad=False)
        return model

    return make


def parametrized():
    model = with_lora(llama())
    base = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    torch.nn.utils.parametrize.register_parametrization(base, "weight", nn.Identity())
    return model


def tensor_parallel():
    model = with_lora(llama())
    model.get_base_model().model.layers[0].self_attn.q_proj.base_layer._hf_tp_plan = "colwise"
    return model


def in_a_forward():
    """PEFT takes the parameter away, and puts one that is computed in its place."""
    model = expert_lora(MoE())
    experts = model.base_model.model.experts.get_base_layer()
    torch.nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", nn.Identity())
    return model


def grouped():
    return get_peft_model(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2)), LoraConfig(r=2, target_modules=["0"]))


def arrow():
    """It routes between other adapters, token by token."""
    model = with_lora(llama(), target_modules=["q_proj"])
    routing = lora_config.ArrowConfig(top_k=1)
    routing.task_adapter_names, routing.gks_adapter_names = ["default"], []
    model.add_adapter("router", LoraConfig(r=4, target_modules=["q_proj"], arrow_config=routing))
    model.set_adapter("router")
    return model


def meta_adapter():
    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]), low_cpu_mem_usage=True)


QUANTISED = "quantised base cannot be merged into.*load the base in bfloat16"
# Name -> (model, what the message must say).
REFUSED = {
    # other methods
    "AdaLoRA": (other("AdaLoraConfig", total_step=10), "adapter 'default' is of type ADALORA"),
    "LoHa": (other("LoHaConfig"), "of type LOHA"),
    "LoKr": (other("LoKrConfig"), "of type LOKR"),
    "IA3": (other("IA3Config", target_modules=["k_proj"], feedforward_modules=[]), "of type IA3"),
    "VeRA": (other("VeraConfig"), "of type VERA"),
    "OFT": (other("OFTConfig", oft_block_size=4), "of type OFT"),
    "HRA": (other("HRAConfig"), "of type HRA"),
    "VBLoRA": (other("VBLoRAConfig", vector_length=8, num_vectors=8, topk=2), "of type VBLORA"),
    "FourierFT": (other("FourierFTConfig", n_frequency=10), "of type FOURIERFT"),
    "LN tuning": (other("LNTuningConfig", target_modules=["norm"]), "of type LN_TUNING"),
    "trainable tokens alone": (
        other("TrainableTokensConfig", target_modules=["embed_tokens"], token_indices=[1]),
        "of type TRAINABLE_TOKENS",
    ),
    "prompt tuning": (
        lambda: get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        "of type PROMPT_TUNING",
    ),
    "prefix tuning": (
        lambda: get_peft_model(llama(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        "of type PREFIX_TUNING",
    ),
    "injected LoHa": (
        lambda: inject_adapter_in_model(peft.LoHaConfig(target_modules=["q_proj"]), llama()),
        "of type LOHA",
    ),
    "mixed model": (
        lambda: get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]), mixed=True),
        "is a PeftMixedModel",
    ),
    # other formulas
    "KaSA": (
        lambda: with_lora(llama(), kasa_config=lora_config.KasaConfig()),
        r"q_proj: adapter 'default' is a KasaLinearVariant",
    ),
    "BdLoRA": (
        lambda: with_lora(
            llama(),
            r=4,
            use_bdlora=lora_config.BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2),
            target_modules=["q_proj"],
        ),
        r"q_proj: adapter 'default' is a BdLoraLinearVariant",
    ),
    "aLoRA": (
        lambda: with_lora(llama(), alora_invocation_tokens=[1, 2]),
        r"q_proj: adapter 'default' is a ALoraLinearVariant.*serve the adapter itself",
    ),
    "Arrow": (arrow, r"q_proj: adapter 'router' is a ArrowLinearVariant"),
    "MonteCLoRA": (
        lambda: with_lora(llama(), monteclora_config=lora_config.MontecloraConfig()),
        r"q_proj: adapter 'default' is a MontecloraLinearVariant",
    ),
    "a variant of tomorrow": (unknown_variant, r"layers\.1\.mlp\.down_proj: .* is a TomorrowLinearVariant"),
    "a field of tomorrow": (unknown_field, r"q_proj: adapter 'default' has use_tomorrow=True"),
    "DoRA on convolutions": (
        lambda: get_peft_model(nn.Sequential(nn.Conv2d(4, 6, 3)), LoraConfig(target_modules=["0"], use_dora=True)),
        r"0: adapter 'default' is a DoraConv2dVariant",
    ),
    # layers
    "attention": (
        attention,
        r"attn: peft\.tuners\.lora\.layer\.MultiheadAttention is not supported.*Leave this module out",
    ),
    "grouped convolution": (grouped, r"0: is a convolution in 2 groups.*leave it out"),
    "GPTQ": (layer_of("GPTQLoraLinear", "peft.tuners.lora.gptq"), rf"o_proj: .*GPTQLoraLinear is not.*{QUANTISED}"),
    "AWQ": (layer_of("AwqLoraLinear", "peft.tuners.lora.awq"), rf"AwqLoraLinear.*{QUANTISED}"),
    "AQLM": (layer_of("AqlmLoraLinear", "peft.tuners.lora.aqlm"), rf"AqlmLoraLinear.*{QUANTISED}"),
    "HQQ": (layer_of("HqqLoraLinear", "peft.tuners.lora.hqq"), rf"HqqLoraLinear.*{QUANTISED}"),
    "EETQ": (layer_of("EetqLoraLinear", "peft.tuners.lora.eetq"), rf"EetqLoraLinear.*{QUANTISED}"),
    "INC": (layer_of("IncLoraLinear", "peft.tuners.lora.inc"), rf"IncLoraLinear.*{QUANTISED}"),
    "torchao": (layer_of("TorchaoLoraLinear", "peft.tuners.lora.torchao"), rf"TorchaoLoraLinear.*{QUANTISED}"),
    "Transformer Engine": (layer_of("TeLinear", "peft.tuners.lora.te"), rf"TeLinear.*{QUANTISED}"),
    "bitsandbytes 8 bit": (layer_of("Linear8bitLt", "peft.tuners.lora.bnb"), rf"Linear8bitLt.*{QUANTISED}"),
    "bitsandbytes 4 bit": (layer_of("Linear4bit", "peft.tuners.lora.bnb"), rf"Linear4bit.*{QUANTISED}"),
    "Megatron": (
        layer_of("LoraParallelLinear", "peft.tuners.lora.tp_layer"),
        r"o_proj: .*LoraParallelLinear is not supported; tensor-parallel.*FSDP2",
    ),
    "a packed base": (base_of("Linear4bit", "bitsandbytes.nn.modules"), rf"o_proj: LoRA on bitsandbytes.*{QUANTISED}"),
    "quantisation-aware training": (
        base_of("FakeQuantizedLinear", "torchao.quantization.qat.linear", torch.float32),
        rf"o_proj: LoRA on torchao\.quantization\.qat\.linear\.FakeQuantizedLinear.*{QUANTISED}",
    ),
    "a base that is computed": (parametrized, r"q_proj: LoRA on .*ParametrizedLinear is not supported"),
    "tensor parallelism of transformers": (tensor_parallel, r"q_proj: is a tensor-parallel layer.*colwise.*FSDP2"),
    "experts while a forward runs": (
        in_a_forward,
        r"experts.*'gate_up_proj', but there is none now.*between the steps",
    ),
    # weights
    "lora_bias without a bias": (
        lambda: with_lora(llama(), target_modules=["q_proj"], lora_bias=True),
        r"q_proj: adapter 'default' has a bias on lora_B.*train without lora_bias",
    ),
    "adapter on meta": (meta_adapter, r"q_proj.*lora_A of adapter 'default' is on the meta device.*load the adapter"),
    "tied head": (
        lambda: with_lora(llama(tied=True), target_modules=["lm_head"]),
        r"lm_head.*embed_tokens.*tied.*untie=True",
    ),
    "tied embedding": (
        lambda: with_lora(llama(tied=True), target_modules=["embed_tokens"]),
        r"lm_head.*embed_tokens.*tied.*untie=True",
    ),
    "tied both": (
        lambda: with_lora(llama(tied=True), target_modules=["embed_tokens", "lm_head"]),
        r"lm_head.*embed_tokens.*tied.*adapters that differ.*ensure_weight_tying",
    ),
    "tied copy": (lambda: with_lora(llama(tied=True), modules_to_save=["embed_tokens"]), r"lm_head.*tied.*copies"),
    "tied tokens": (
        lambda: with_lora(llama(tied=True), trainable_token_indices={"embed_tokens": [1], "lm_head": [2]}),
        r"lm_head.*tied.*adapters that differ",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_merged_right_is_refused_by_name_before_anything_leaves(kind):
    """Edge cases 13, 14, 16, 23 to 25, 36, 57 and 64; cases B13 and B22."""
    make, message = REFUSED[kind]
    model = make()
    with pytest.raises(ValueError, match=message):
        lora_stream.stream(model)
    engine = Recorder()
    with pytest.raises(ValueError, match=message):
        lora_stream.sync(model, engine)
    assert not engine.weights


def test_every_method_of_peft_but_lora_is_refused_by_its_type():
    """Also those that this PEFT has and no test builds: the list is of what is allowed."""
    model = with_lora(llama())
    config = model.peft_config["default"]
    for kind in peft.PeftType:
        if kind != peft.PeftType.LORA:
            config.peft_type = kind
            with pytest.raises(ValueError, match=f"adapter 'default' is of type {kind.value}"):
                lora_stream.stream(model)


def test_every_layer_of_pefts_lora_is_known_or_refused():
    """A class that a later PEFT derives from LoRA's layer must not pass for it."""

    class Derived(lora.Linear):
        pass

    model = with_lora(llama())
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.__class__ = Derived
    with pytest.raises(ValueError, match=r"q_proj: .*Derived is not supported"):
        lora_stream.stream(model)


def test_tensors_of_an_adapter_that_nobody_knows_are_no_remainder():
    model = with_lora(llama())
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.lora_novel = nn.ParameterDict({"default": nn.Parameter(torch.ones(3))})
    layer.adapter_layer_names = (*layer.adapter_layer_names, "lora_novel")
    with pytest.raises(ValueError, match=r"q_proj\.lora_novel\.default: found in the model"):
        lora_stream.stream(model)


def test_merged_and_disabled_adapters_are_refused_and_left_as_they_were():
    """Edge cases 28 and 29; cases B05 and B16: a merged delta would count twice; under disable_adapter() the policy is the
    base."""
    for make, layer in (
        (lambda: with_lora(llama()), "q_proj"),
        (lambda: with_lora(llama(), trainable_token_indices=[1]), "embed_tokens"),
        (lambda: expert_lora(MoE()), "experts"),
    ):
        model = make()
        model.merge_adapter()
        before = state(model)
        with pytest.raises(ValueError, match=rf"{layer}.*adapters \['default'\] are merged"):
            lora_stream.stream(model)
        assert_same_state(before, state(model))
        model.unmerge_adapter()
        with model.disable_adapter(), pytest.raises(ValueError, match="disabled"):
            lora_stream.stream(model)
        dict(lora_stream.stream(model))


def test_no_layer_with_the_active_adapter_is_refused():
    """Edge case 27: a layer without the active adapter is its base; a model without any is a mistake."""
    model = with_lora(llama())
    model.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"]))
    model.delete_adapter("default")
    for module in model.modules():
        if hasattr(module, "lora_A") and "other" in module.lora_A:
            module._active_adapter = []
    with pytest.raises(ValueError, match="no weight to merge"):
        lora_stream.stream(model)


def test_quantised_and_meta_parameters_are_refused():
    """Edge case 57."""
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


def test_an_adapter_added_or_deleted_between_passes_is_seen():
    """Edge case 31."""
    model = with_lora(llama())
    weights = lora_stream.MergedWeights(model, scope="trained")
    first = dict(weights)
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=3, target_modules=["o_proj"]))
    assert_equal(dict(weights), first)  # it is not active
    model.set_adapter("other")
    with pytest.raises(ValueError, match="have changed since; make a new MergedWeights"):
        iter(weights)
    model.delete_adapter("other")
    assert_equal(dict(weights), first)
