"""Histories with a live vLLM: what it computes is compared with what it computes after it has loaded a fresh stream from disk.
Cases N09 and N13. vllm layer; tests/unit has many more on engine doubles."""

import shutil
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import torch

from tests.histories import Histories, play
from tests.vllm.live import logprobs, save_merged

pytestmark = pytest.mark.vllm


class Live:
    """A live engine as the histories see an engine."""

    is_asleep, is_serving = False, True

    def __init__(self, setup):
        self.handle, self._setup = setup.llm, setup
        self._num_checks = 0

    def contents(self):
        return logprobs(self.handle)

    def is_same(self, before):
        return self.contents() == before

    def assert_holds(self, want):
        """Every third time: a reload is something that the next sync sees. Returns whether there was one."""
        self._num_checks += 1
        if self._num_checks % 3:
            return False
        found = self.contents()
        self.reload_another(want)
        assert self.contents() == found
        return True

    def reload_another(self, checkpoint):
        with tempfile.TemporaryDirectory() as directory:
            path = save_merged(self._setup.directory, checkpoint, Path(directory) / "merged")
            self.handle.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
            shutil.rmtree(path)
        self.handle.reset_prefix_cache()

    def generate(self):
        self.contents()

    def sleep(self, level):
        self.handle.sleep(level=1)
        self.is_asleep = True

    def wake_up(self):
        if self.is_asleep:
            self.handle.wake_up()
        self.is_asleep = False

    def write_any(self, index):
        model = self.handle.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        parameters = [parameter for parameter in model.parameters() if parameter.numel()]
        with torch.no_grad():
            parameters[index % len(parameters)].mul_(1.5)
        self.handle.reset_prefix_cache()

    def holds_base(self, model):
        return False

    def recover(self):
        pass


@pytest.fixture
def machine(setup):
    class OnLive(Histories):
        engine_suffers = ("write in engine", "reload", "generate")
        can_fail = ("trainer", "interrupt", "not finite")
        leaves_out = ("in_place",)
        wire_dtype = setup.dtype

        def make_base(self):
            return setup.base().requires_grad_(False)

        def make_engines(self, base):
            return [Live(setup)]

    return OnLive


def test_a_live_engine_computes_with_the_policy_after_any_history(machine):
    play(machine, 5, stateful_step_count=15)
