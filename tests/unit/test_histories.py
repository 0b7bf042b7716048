"""Whatever happens between two syncs, an engine holds the policy, or the sync says that it does not. Cases N08, N09, N13 and
what nobody has reported yet. Unit layer: engine doubles; a live engine plays shorter histories in tests/vllm.

HISTORIES=200 plays 200 histories of 50 steps, that is ten thousand steps, instead of a few.
"""

import os

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.engine_double import Engine
from tests.histories import Histories
from tests.models import assert_equal, qwen2

# A failure is looked at as it was found: to shrink one takes longer than to read it.
PHASES = (Phase.generate, Phase.shrink) if "SHRINK" in os.environ else (Phase.generate,)
NUM_HISTORIES = int(os.environ.get("HISTORIES", "20"))
CALLS = ("describe", "check", "tell", "start", "pause", "finish", "reset", "resume")


class Double:
    """An engine double as the histories see an engine."""

    def __init__(self, checkpoint):
        self.handle = Engine(checkpoint)
        for name in ("generate", "restart", "sleep", "wake_up"):
            setattr(self, name, getattr(self.handle, name))
        self.reload_another = self.handle.reload
        self.receive_another = self.handle.receive
        self.was_touched = False

    def write_any(self, index):
        names = sorted(self.handle.weights.places)
        self.handle.write(names[index % len(names)])

    @property
    def is_asleep(self):
        return self.handle.sleep_level > 0

    @property
    def is_serving(self):
        return not self.handle.is_still and not self.handle.is_open and not self.handle.has_prefixes

    def contents(self):
        return self.handle.weights.all()

    def is_same(self, before):
        return all(torch.equal(tensor, before[name]) for name, tensor in self.contents().items())

    def assert_holds(self, want):
        assert_equal(self.contents(), want)

    def holds_base(self, model):
        """Whether a user may say so."""
        contents, base = self.contents(), dict(_base_of(model))
        return all(torch.equal(tensor, base[name].to(torch.bfloat16)) for name, tensor in contents.items())

    def will_fail(self, failure, at):
        if failure == "a call":
            self.handle.fails[CALLS[at % len(CALLS)]] = 1 + at // len(CALLS) % 2
        else:
            self.handle.fail_at.extend([at, 1] if failure.endswith("restored") else [at])

    def recover(self):
        self.handle.fail_at.clear()
        self.handle.fails.clear()
        if self.handle.is_still and not self.handle.is_paused_by_sender:
            self.handle.is_still = False


def _base_of(model):
    """Names and values of what lies under the adapters."""
    for name, tensor in model.state_dict().items():
        if not any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_")):
            name = name.removeprefix("llm.").removeprefix("base_model.model.")
            for wrapper in (".token_adapter", ".base_layer", ".original_module"):
                name = name.replace(wrapper, "")
            yield name, tensor


class OnDoubles(Histories):
    is_tied = False

    def make_base(self):
        return qwen2(tied=self.is_tied).requires_grad_(False)

    def make_engines(self, base):
        checkpoint = dict(base.state_dict())
        if self.is_tied:
            del checkpoint["lm_head.weight"]
        return [Double(checkpoint), Double(checkpoint)]


class OnTiedDoubles(OnDoubles):
    is_tied = True


def play(machine, num_histories):
    machine.counts.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_histories,
            stateful_step_count=50,
            deadline=None,
            database=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(
        f"{machine.__name__}: {num_histories} histories; "
        + ", ".join(f"{v} {k}" for k, v in sorted(machine.counts.items()))
    )


def test_an_engine_holds_the_policy_after_any_history():
    play(OnDoubles, (NUM_HISTORIES + 1) // 2)


def test_an_engine_of_a_tied_model_holds_the_policy_after_any_history():
    play(OnTiedDoubles, NUM_HISTORIES // 2)
