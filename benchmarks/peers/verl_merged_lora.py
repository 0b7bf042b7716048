"""verl's way, as installed: FSDPEngine._merged_lora_per_tensor_param, which backs up the base, merges in place, gathers each
tensor in the parameters' dtype, casts, and restores."""

from types import SimpleNamespace

import torch

if not torch.cuda.is_available():
    import verl_cpu  # noqa: F401  before verl looks for a device

from verl.utils.fsdp_utils import fsdp_version
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

NAME = "verl"


def ways(model):
    if fsdp_version(model) == 0:
        raise ValueError("it streams models that FSDP has sharded; use --ranks")
    # All that the function reads of its engine.
    engine = SimpleNamespace(module=model, _is_offload_param=False)
    return {NAME: lambda: FSDPEngine._merged_lora_per_tensor_param(engine)}
