"""What verl's engine is asked for in test_verl_drop_in.py; read by the test and by the processes it starts."""

CASES = {
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2, bfloat16": {"strategy": "fsdp2", "model_dtype": "bf16"},
    "fsdp2, offloaded": {"strategy": "fsdp2", "param_offload": True},
    "fsdp2, tied": {"strategy": "fsdp2", "tied": True},
    "fsdp2, tie broken": {"strategy": "fsdp2", "tied": True, "adapter": "lm_head"},
    "fsdp2, modules_to_save": {"strategy": "fsdp2", "adapter": "modules_to_save"},
    "fsdp2, rslora": {"strategy": "fsdp2", "adapter": "rslora"},
    "fsdp2, not merged": {"strategy": "fsdp2", "merge": False},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, offloaded": {"strategy": "fsdp", "param_offload": True},
    "fsdp, original parameters": {"strategy": "fsdp", "use_orig_params": True},
    "fsdp, tied": {"strategy": "fsdp", "tied": True},
}

ADAPTERS = {
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "modules_to_save": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "rslora": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 3}},
}
