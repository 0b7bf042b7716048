"""Run by torch.distributed.run with verl in the path: verl's own manager saves a checkpoint of a LoRA model, and beside it lies
what the stream of the live model yields.

    verl_ranks.py BASE OUT STRATEGY:CONTENT,... ...

STRATEGY is fsdp or fsdp2, CONTENT what verl's configuration calls so, or lora_only. All into OUT/STRATEGY:CONTENT,....
"""

import sys
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from transformers import AutoModelForCausalLM
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

import lora_stream

base, out, *wishes = sys.argv[1:]
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
for wish in wishes:
    strategy, contents = wish.split(":")
    torch.manual_seed(7)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    layers = list(model.get_base_model().model.layers)
    if strategy == "fsdp2":
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        policy = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in layers)
        options = {"device_id": torch.device("cpu"), "use_orig_params": True, "device_mesh": mesh}
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    config = {
        "save_contents": [each for each in contents.split(",") if each != "lora_only"],
        "load_contents": ["model"],
        "save_lora_only": "lora_only" in contents,
    }
    manager = FSDPCheckpointManager(model=model, checkpoint_config=OmegaConf.create(config))
    manager.save_checkpoint(str(Path(out) / wish / "actor"), global_step=1)
    streamed = dict(lora_stream.stream(model))
    if dist.get_rank() == 0:
        save_file(streamed, Path(out) / wish / "streamed.safetensors")
dist.destroy_process_group()
