"""TRL's way, as installed: VLLMGeneration._iter_named_params, which merges in place, hands over each live or gathered tensor in the
parameters' dtype, and unmerges. It casts nothing and, where nothing is sharded, copies nothing: that is left to the engine."""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

NAME = "TRL"


def ways(model):
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if is_sharded:  # accelerate finds the process group that is there, but wants to have been launched with it
        rank, num_ranks = str(torch.distributed.get_rank()), str(torch.distributed.get_world_size())
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ |= {**launched, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if is_sharded else None
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    generation = object.__new__(VLLMGeneration)  # its constructor starts an engine
    generation.model, generation.accelerator = model, accelerator
    generation._dist = DistributedBackend(accelerator)
    return {NAME: torch.no_grad()(generation._iter_named_params)}
