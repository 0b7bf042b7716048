"""A manifest as JSON: what sender and worker tell each other about the tensors that come. Imports no vLLM."""

from collections.abc import Sequence

import torch

from lora_stream.plan import ParamMeta


def encode(metadata: Sequence[ParamMeta]) -> dict[str, list]:
    return {
        "names": [meta.name for meta in metadata],
        "dtypes": [str(meta.dtype).removeprefix("torch.") for meta in metadata],
        "shapes": [list(meta.shape) for meta in metadata],
    }


def decode(manifest: dict[str, list]) -> list[ParamMeta]:
    """Raises ValueError for what encode() cannot have made."""
    names, dtypes, shapes = (manifest.get(column) for column in ("names", "dtypes", "shapes"))
    if not (isinstance(names, list) and isinstance(dtypes, list) and isinstance(shapes, list)) or not (
        len(names) == len(dtypes) == len(shapes)
    ):
        raise ValueError(f"a manifest has names, dtypes and shapes of one length, got {sorted(manifest)}")
    metadata = []
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, str(dtype_name), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name}: {dtype_name!r} is not a dtype of torch")
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError(f"{name}: {shape!r} is not a shape")
        metadata.append(ParamMeta(name, dtype, tuple(shape)))
    return metadata
