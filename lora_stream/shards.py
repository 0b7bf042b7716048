"""Sharded parameters. The only module that knows DTensor and its relatives.

This version streams whole tensors; a sharded one is refused by name, before anything is sent.
"""

import sys

import torch
from torch import nn

_ADVICE = "gather the model first, or stream from an unsharded copy; sharded trainers are not supported yet"


def check_whole(fqn: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor of which this process holds only a part."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if dtensor is not None and isinstance(tensor, dtensor):
        raise ValueError(f"{fqn}: is a DTensor with placements {tensor.placements}; {_ADVICE}")
    if hasattr(tensor, "ds_id"):
        raise ValueError(f"{fqn}: is partitioned by DeepSpeed ZeRO-3; {_ADVICE}")


def check_unsharded_module(fqn: str, module: nn.Module) -> None:
    """Raise ValueError for an FSDP1 wrapper: what its parameters show is slices of a flat buffer."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is not None and isinstance(module, fsdp):
        raise ValueError(f"{fqn or 'the model'}: is wrapped by FSDP1 (FullyShardedDataParallel); {_ADVICE}")
