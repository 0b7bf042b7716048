"""Ways to shard a model, as trainers do. Each takes a PEFT model, on every rank, and shards it in place."""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import Shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def layers(model):
    return model.get_base_model().model.layers


def world():
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def by_layer(model, **kwargs):
    kwargs = {"mesh": world(), **kwargs}
    for layer in layers(model):
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)


def root_only(model):
    fully_shard(model, mesh=world())


def layers_only(model):
    """Embedding, head and the last norm stay plain."""
    for layer in layers(model):
        fully_shard(layer, mesh=world())


def mlp_only(model):
    for layer in layers(model):
        fully_shard(layer.mlp, mesh=world())


def lora_leaves(model):
    """Each adapter matrix in a unit of its own, as those must be that have another dtype; PEFT's layers too."""
    for name, module in model.named_modules():
        if name.endswith((".lora_A.default", ".lora_B.default")):
            fully_shard(module, mesh=world())
    by_layer(model)


def nested(model):
    for layer in layers(model):
        fully_shard(layer.self_attn, mesh=world())
        fully_shard(layer.mlp.down_proj, mesh=world())
    by_layer(model)


def base_model_itself(model):
    """The class of the model that names and conversions go by is changed."""
    for layer in layers(model):
        fully_shard(layer, mesh=world())
    fully_shard(model.get_base_model(), mesh=world())


def ignored_adapters(model):
    ignored = {p for name, p in model.named_parameters() if "lora_" in name}
    by_layer(model, ignored_params=ignored)


def ignored_base(model):
    ignored = {p for name, p in model.named_parameters() if "base_layer" in name or "norm" in name}
    by_layer(model, ignored_params=ignored)


def by_columns(model):
    """Shard(1) for matrices; what has one dimension only is cut there."""

    def place(parameter):
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % dist.get_world_size() == 0 else None

    by_layer(model, shard_placement_fn=place)


def keep_gathered(model):
    by_layer(model, reshard_after_forward=False, mp_policy=BF16)


def mixed_precision(model):
    by_layer(model, mp_policy=BF16)


def offloaded(model):
    by_layer(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def hybrid(model):
    """HSDP: two replicas, where there are ranks for them."""
    num = dist.get_world_size()
    shape = (2, num // 2) if num % 2 == 0 else (1, num)
    by_layer(model, mesh=dist.init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")))


LAYOUTS = {
    f.__name__: f
    for f in (
        by_layer,
        root_only,
        layers_only,
        mlp_only,
        lora_leaves,
        nested,
        base_model_itself,
        ignored_adapters,
        ignored_base,
        by_columns,
        keep_gathered,
        mixed_precision,
        offloaded,
        hybrid,
    )
}


def flat(model, *, use_orig_params=True, blocks=True, leaves=False, **kwargs):
    """FSDP1. leaves: each module that trains in a unit of its own, as PEFT's policy wraps them."""
    block = type(layers(model)[0])

    def is_unit(module):
        trains = not list(module.children()) and getattr(getattr(module, "weight", None), "requires_grad", False)
        return (blocks and type(module) is block) or (leaves and trains)

    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=is_unit),
        **kwargs,
    )
