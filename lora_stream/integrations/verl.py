"""verl 0.9: its FSDP engines stream merged LoRA weights by us, and its checkpoints keep all of the LoRA metadata.

    actor_rollout_ref.model.lora.merge=True
    actor_rollout_ref.model.external_lib=lora_stream.integrations.verl_external_lib

verl merges in place, backs the base up and restores it, and gathers in the parameters' dtype. After `patch()` the engine's
`get_per_tensor_param` returns a stream of ours instead, under the names and in the dtype that verl sends.
"""

from functools import partial

import torch

from lora_stream.checkpoint import save_train_meta
from lora_stream.checkpoint.train_meta import FILE_NAME
from lora_stream.integrations.patching import Patch
from lora_stream.merged_weights import Gather, Stream, stream
from lora_stream.rounding import RoundingMode, check_rounding


def patch(
    *, gather: Gather = "all", bucket_bytes: int | None = None, rounding: RoundingMode = "dither", seed: int = 0
) -> Patch:
    """Replace, in this process, the merged-LoRA stream of verl's FSDP and FSDP2 engines and what its checkpoint manager
    writes as `lora_train_meta.json`. Engines that do not merge, or have no LoRA, go verl's own way.

    gather: "all", every rank gets every tensor, as colocated rollouts need; "sender" where rank 0 alone sends them on
        (verl's checkpoint engines between separate machines), the other ranks take part and get nothing.
    bucket_bytes: what is merged ahead and gathered at once, as in `lora_stream.stream`.
    rounding, seed: of merged weights, as in `lora_stream.sync`; the checkpoints that verl writes are not merged.

    Returns the patch: `undo()` puts verl's methods back, and so does leaving it as a context manager. An engine's call
    raises ValueError for what cannot be merged right, and for quantisation-aware training.
    """
    check_rounding(rounding, seed)
    from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    def make_get_per_tensor_param(original):
        def get_per_tensor_param(self, layered_summon=False, base_sync_done=False, **kwargs):
            if not _merges(self):
                return original(self, layered_summon=layered_summon, base_sync_done=base_sync_done, **kwargs)
            # verl's own would move the whole shard to the device first.
            return self._merged_lora_per_tensor_param(), None

        return get_per_tensor_param

    def make_merged_lora_per_tensor_param(original):
        def _merged_lora_per_tensor_param(self):
            return _merged_weights(self, gather, bucket_bytes, rounding, seed)

        return _merged_lora_per_tensor_param

    def make_save_lora_train_meta(original):
        def _save_lora_train_meta(self, local_path, unwrap_model):
            if save_train_meta(local_path, unwrap_model, is_writer=True) is None:
                return None
            return f"{local_path}/{FILE_NAME}"

        return _save_lora_train_meta

    def make_save_checkpoint(original):
        def save_checkpoint(self, *args, **kwargs):
            if isinstance(self.engine, FSDPEngine):
                # Three fields of its configuration, which it would write over what the manager has saved.
                self.lora_train_meta = None
            return original(self, *args, **kwargs)

        return save_checkpoint

    found = Patch("verl", "0.9")
    found.replace(FSDPEngine, "_merged_lora_per_tensor_param", make_merged_lora_per_tensor_param)
    found.replace(FSDPEngine, "get_per_tensor_param", make_get_per_tensor_param)
    found.replace(FSDPCheckpointManager, "_save_lora_train_meta", make_save_lora_train_meta)
    found.replace(CheckpointHandler, "save_checkpoint", make_save_checkpoint)
    return found


def _merges(engine) -> bool:
    """Whether verl would merge a LoRA for the rollout."""
    model = getattr(engine.module, "_fsdp_wrapped_module", engine.module)
    return hasattr(model, "peft_config") and bool(engine.model_config.lora.get("merge", False))


def _merged_weights(engine, gather: Gather, bucket_bytes: int | None, rounding: RoundingMode, seed: int) -> Stream:
    from verl.utils.device import get_device_id
    from verl.utils.fsdp_utils import fsdp_version, load_fsdp_model_to_gpu, offload_fsdp_model_to_cpu

    if getattr(engine, "_qat_enabled", False):
        raise ValueError(
            "the engine trains with quantisation in the loop (qat.enable=True), and merged LoRA weights would go out "
            "unquantised; switch qat off, or model.lora.merge"
        )
    is_fsdp1 = fsdp_version(engine.module) == 1
    return stream(
        engine.module,
        # verl's state dict of a single FSDP1 rank holds plain tensors, which it sends as they are.
        wire_dtype=None if is_fsdp1 and torch.distributed.get_world_size() == 1 else torch.bfloat16,
        # FSDP1 gathers its units on the device. Shards of FSDP2 are merged where they lie, where verl would load them first.
        onload=partial(load_fsdp_model_to_gpu, engine.module) if is_fsdp1 else None,
        offload=partial(offload_fsdp_model_to_cpu, engine.module) if engine._is_offload_param else None,
        bucket_bytes=bucket_bytes,
        rounding=rounding,
        seed=seed,
        device=torch.device(get_device_id()),
        gather=gather,
    )
