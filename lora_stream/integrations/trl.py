"""TRL 1.x: GRPO and its other trainers bring LoRA policies into vLLM by us, colocated and over a server.

    from lora_stream.integrations import trl
    trl.patch()                                   # before the trainer is made

TRL merges the live model in place, sends every parameter, and unmerges, which drifts in bfloat16. After `patch()`
`VLLMGeneration.sync_weights` is a `lora_stream.sync`: the model is only read, what does not train is sent once, the engine checks
names and shapes before it loads, and `report` on the VLLMGeneration tells of the last sync.

    colocated                               into the LLM of each rank
    server, backend "lora_stream"           through shared memory on this host; the model may also be without LoRA
    server, backend "nccl"                  through TRL's own communicator, a full stream each time
"""

import sys

from torch import nn

from lora_stream.engine_sync import sync
from lora_stream.integrations.patching import Patch
from lora_stream.merged_weights import MergedWeights
from lora_stream.peft import lora_layers
from lora_stream.rounding import RoundingMode, check_rounding
from lora_stream.vllm.clients import ServerClient


def patch(*, rounding: RoundingMode = "dither", seed: int = 0) -> Patch:
    """Replace, in this process, how TRL syncs LoRA models into vLLM. Models without LoRA go TRL's own way, except to a server
    with our backend.

    rounding, seed: as in `lora_stream.sync`.

    Returns the patch: `undo()` puts TRL's methods back, and so does leaving it as a context manager. A sync raises what
    `lora_stream.sync` does; it never falls back to TRL's way by itself.
    """
    check_rounding(rounding, seed)
    from trl.generation.vllm_client import VLLMClient
    from trl.generation.vllm_generation import VLLMGeneration

    def make_init_communicator(original):
        def init_communicator(self, device=0):
            # Our backend needs no group between trainer and server, and TRL's own asks for a CUDA device.
            if _backend(self) != "lora_stream":
                original(self, device)

        return init_communicator

    def make_sync_weights(original):
        def sync_weights(self):
            backend = None if self.mode == "colocate" else _backend_for_all(self)
            if not _has_lora(self.model) and backend != "lora_stream":
                return original(self)
            return _sync_weights(self, backend, rounding=rounding, seed=seed)

        return sync_weights

    found = Patch("trl", "1.16")
    found.replace(VLLMClient, "init_communicator", make_init_communicator)
    found.replace(VLLMGeneration, "sync_weights", make_sync_weights)
    return found


def _has_lora(model: nn.Module) -> bool:
    return "peft" in sys.modules and any(True for _ in lora_layers(model))


def _backend(client) -> str | None:
    """The server's weight-transfer backend."""
    return (client.get_server_info()["weight_transfer_config"] or {}).get("backend")


def _backend_for_all(generation) -> str | None:
    """On all ranks, of which the main process alone has a client. Asked once."""
    if not hasattr(generation, "_lora_stream_backend"):
        from accelerate.utils import broadcast_object_list

        found = [_backend(generation.vllm_client) if generation.accelerator.is_main_process else None]
        broadcast_object_list(found, from_process=0)
        (generation._lora_stream_backend,) = found
    return generation._lora_stream_backend


def _sync_weights(generation, backend: str | None, **rounding) -> None:
    from trl.generation.vllm_generation import empty_cache

    model: nn.Module = generation.model
    is_main: bool = generation.accelerator.is_main_process
    if generation.mode == "colocate":
        if generation.enable_sleep_mode:
            empty_cache()  # waking up maps memory that the allocator may still cache
            generation.llm.wake_up(tags=["weights"])
            generation._llm_weights_sleeping = False
        generation.report = sync(model, generation.llm, **rounding)
    elif backend == "lora_stream":
        if is_main and not hasattr(generation, "_lora_stream_client"):
            generation._lora_stream_client = ServerClient(generation.vllm_client.base_url)
        client = generation._lora_stream_client if is_main else None
        generation.report = sync(model, client, **rounding)
    else:
        _send_by_nccl(generation, model, is_main, **rounding)


def _send_by_nccl(generation, model: nn.Module, is_main: bool, **rounding) -> None:
    """Through TRL's client; vLLM's nccl backend cannot be asked beforehand what it would take."""
    device = generation.accelerator.device
    weights = MergedWeights(model, device=device, gather="sender", is_sender=is_main, **rounding)
    if not is_main:
        for _ in weights:
            pass
        return
    metadata = [(meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape)) for meta in weights.metadata()]
    generation.vllm_client.update_named_params(metadata, iter(weights))
    generation.vllm_client.reset_prefix_cache()
