"""A live vLLM engine in this process, one after the other for each set-up."""

import pytest

# By name, so that this file imports no vLLM: without it the tests are skipped, each file with the reason.
SETUPS = ["bfloat16, tied", "float32, untied, biases"]


@pytest.fixture(scope="session", params=SETUPS)
def setup(request, tmp_path_factory):
    from tests.vllm import live

    started = live.start(request.param, tmp_path_factory.mktemp("base"))
    yield started
    live.shut_down(started.llm)
