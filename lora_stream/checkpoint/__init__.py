"""LoRA in checkpoints: the metadata that belongs to its tensors, and merging into Hugging Face checkpoints.

    save_train_meta, load_train_meta    lora_train_meta.json beside a training's shards
    merge                               an adapter on the disk and its base, into a checkpoint
    export                              a live trainer's merged weights, into a checkpoint
    inspect                             what a directory is

Needs peft, transformers and safetensors (the extra `peft`).
"""

from lora_stream.checkpoint.exporting import export
from lora_stream.checkpoint.inspecting import Inspection, inspect
from lora_stream.checkpoint.merging import merge
from lora_stream.checkpoint.reports import CheckpointReport
from lora_stream.checkpoint.train_meta import TrainMeta, load_train_meta, save_train_meta

__all__ = [
    "CheckpointReport",
    "Inspection",
    "TrainMeta",
    "export",
    "inspect",
    "load_train_meta",
    "merge",
    "save_train_meta",
]
