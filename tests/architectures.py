"""Tiny random models of the architectures whose checkpoints look unlike the live model, and what to adapt in them."""

import torch
import transformers

from tests.models import SIZES

TEXT = {
    **SIZES,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def mixtral():
    config = transformers.MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(
        **TEXT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
    )
    return transformers.Qwen2MoeForCausalLM(config)


def qwen3_moe(moe_intermediate_size: int = 24, **kwargs):
    config = transformers.Qwen3MoeConfig(
        **{**TEXT, "num_experts": 4, "num_experts_per_tok": 2, **kwargs}, moe_intermediate_size=moe_intermediate_size
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss():
    config = transformers.GptOssConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2)
    return transformers.GptOssForCausalLM(config)


def llama4():
    config = transformers.Llama4TextConfig(
        **TEXT, intermediate_size_mlp=40, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=1
    )
    return transformers.Llama4ForCausalLM(config)


def deepseek_v3():
    """Its router's bias stays in float32."""
    sizes = {key: value for key, value in TEXT.items() if key != "head_dim"}
    config = transformers.DeepseekV3Config(
        **{**sizes, "num_key_value_heads": 4},
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        topk_method="noaux_tc",
        v_head_dim=8,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.normal_()
    return model


def gemma3_text():
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**TEXT, "tie_word_embeddings": True}))


def gemma3():
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.Gemma3Config(
        text_config={**TEXT, "tie_word_embeddings": True},
        vision_config={**vision, "image_size": 28, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _qwen_vision(**kwargs):
    sizes = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
    return {**sizes, "patch_size": 4, **kwargs}


def qwen2_5_vl():
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config=_qwen_vision(fullatt_block_indexes=[0], window_size=16),
        tie_word_embeddings=False,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl():
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config=_qwen_vision(deepstack_visual_indexes=[0], num_position_embeddings=16),
        tie_word_embeddings=False,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe():
    config = transformers.Qwen3VLMoeConfig(
        text_config={
            **TEXT,
            "rope_parameters": MROPE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        vision_config=_qwen_vision(deepstack_visual_indexes=[0], num_position_embeddings=16),
        tie_word_embeddings=False,
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


# Name -> (how to build it, target_modules, target_parameters).
ARCHITECTURES = {
    "mixtral": (mixtral, ATTENTION, EXPERTS),
    "qwen2_moe": (qwen2_moe, ATTENTION, [*EXPERTS, "mlp.gate.weight"]),
    "qwen3_moe": (qwen3_moe, ATTENTION, EXPERTS),
    "gpt_oss": (gpt_oss, ATTENTION, EXPERTS),
    "llama4": (llama4, ATTENTION, EXPERTS),
    "deepseek_v3": (deepseek_v3, ["q_b_proj", "o_proj"], EXPERTS),
    "gemma3_text": (gemma3_text, [*ATTENTION, "down_proj"], None),
    "gemma3": (gemma3, r".*(q_proj|v_proj|fc1)", None),
    "qwen2_5_vl": (qwen2_5_vl, r".*(q_proj|v_proj|attn.qkv|down_proj)", None),
    "qwen3_vl": (qwen3_vl, r".*(q_proj|v_proj|attn.qkv|down_proj|patch_embed.proj)", None),
    "qwen3_vl_moe": (qwen3_vl_moe, ATTENTION, EXPERTS),
}


def build(name: str, dtype: torch.dtype = torch.float32):
    """A model with values in all parameters: transformers starts some at zero or one, where a mistake does not show."""
    make, _, _ = ARCHITECTURES[name]
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.to(dtype).eval()
