"""A live vLLM engine in this process, one after the other for each set-up; and what the other engines are started on."""

import pytest

# By name, so that this file imports no vLLM: without it the tests are skipped, each file with the reason.
SETUPS = ["bfloat16, tied", "float32, untied, biases"]


@pytest.fixture(scope="session", params=SETUPS)
def setup(request, tmp_path_factory):
    from tests.vllm import live

    started = live.start(request.param, tmp_path_factory.mktemp("base"))
    yield started
    live.shut_down(started.llm)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The checkpoint of a random bfloat16 model with tied embeddings."""
    import torch

    from tests.vllm import live

    directory = tmp_path_factory.mktemp("base") / "model"
    live.save_base(torch.bfloat16, True, directory)
    return directory


@pytest.fixture
def model(base):
    """That model in a trainer, with LoRA."""
    import torch
    from transformers import AutoModelForCausalLM

    from tests.models import with_lora

    return with_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval())
