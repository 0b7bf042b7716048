"""The config.json of what was merged: the base's, with what the merge has changed."""

import json
from collections.abc import Iterator

import torch


def config_json(
    content: dict, model_config, *, dtype: torch.dtype | None, architecture: str, tied: bool | None
) -> bytes:
    """content: the base's, as it lies on the disk, so that nothing is lost that transformers does not know. model_config: of the
    model that was merged, whose sizes and labels are right. tied: None leaves the flag."""
    content = json.loads(json.dumps(content))
    content["architectures"] = [architecture]
    is_stated = False
    for part in _parts(content):
        for key in ("dtype", "torch_dtype"):
            if dtype is not None and isinstance(part.get(key), str):
                part[key] = _word(dtype)
                is_stated = is_stated or part is content
        if tied is not None and (part is content or "tie_word_embeddings" in part):
            part["tie_word_embeddings"] = tied
    if dtype is not None and not is_stated:
        content["dtype"] = _word(dtype)
    text = model_config.get_text_config()
    within = content if text is model_config else next(_parts_named(content, model_config, text), content)
    for key in ("vocab_size", "num_hidden_layers"):
        if key in within and getattr(text, key, None) is not None:
            within[key] = getattr(text, key)
    if "ForSequenceClassification" in architecture or "ForTokenClassification" in architecture:
        id2label = model_config.id2label
        if len(content.get("id2label") or {}) != len(id2label):
            content["id2label"] = {str(key): label for key, label in id2label.items()}
            content["label2id"] = {label: key for key, label in id2label.items()}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def live_config_json(model_config, **changes) -> bytes:
    """Of a live model: as transformers writes it, then changed as above."""
    content = json.loads(model_config.to_json_string(use_diff=True))
    return config_json(content, model_config, **changes)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(content: dict) -> Iterator[dict]:
    """The config and those in it, of a model of several."""
    yield content
    for key, value in content.items():
        if key.endswith("_config") and isinstance(value, dict):
            yield from _parts(value)


def _parts_named(content: dict, model_config, text) -> Iterator[dict]:
    for key, value in content.items():
        if getattr(model_config, key, None) is text and isinstance(value, dict):
            yield value
