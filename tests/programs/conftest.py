"""programs layer: whole programs in processes of their own, which start engines."""

import pytest
import torch

from tests.vllm.conftest import base

__all__ = ["base", "directory"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny model with random weights, and a tokenizer with a word for each token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.vllm import live

    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(5)
    live.save_tokenizer(directory, 1021)
    LlamaForCausalLM(LlamaConfig(**live.SIZES)).to(torch.bfloat16).save_pretrained(directory)
    return directory
