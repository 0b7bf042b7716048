"""Merged LoRA weights, streamed from a trainer into a rollout engine. See README.md."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_stream.engine_side import SyncError
    from lora_stream.engine_sync import UnmovedError, sync
    from lora_stream.merged_weights import MergedWeights, Stream, stream
    from lora_stream.plan import ParamMeta, Plan
    from lora_stream.report import SyncReport
    from lora_stream.ring import PeerLostError, TransferError
    from lora_stream.shards import RankError
    from lora_stream.vllm.clients import RayClient, ServerClient

_HOMES = {
    "MergedWeights": "merged_weights",
    "ParamMeta": "plan",
    "PeerLostError": "ring",
    "Plan": "plan",
    "RankError": "shards",
    "RayClient": "vllm.clients",
    "ServerClient": "vllm.clients",
    "Stream": "merged_weights",
    "SyncError": "engine_side",
    "SyncReport": "report",
    "TransferError": "ring",
    "UnmovedError": "engine_sync",
    "stream": "merged_weights",
    "sync": "engine_sync",
}
__all__ = [
    "MergedWeights",
    "ParamMeta",
    "PeerLostError",
    "Plan",
    "RankError",
    "RayClient",
    "ServerClient",
    "Stream",
    "SyncError",
    "SyncReport",
    "TransferError",
    "UnmovedError",
    "stream",
    "sync",
]


def __getattr__(name: str):
    # Names are looked up at their first use, so that importing the package does no work.
    from importlib import import_module

    if name == "checkpoint":
        return import_module("lora_stream.checkpoint")
    if name not in _HOMES:
        raise AttributeError(f"module 'lora_stream' has no attribute {name!r}")
    return getattr(import_module(f"lora_stream.{_HOMES[name]}"), name)
