"""Histories of a sharded trainer: adapters in turn, layers in turn, writes past the optimizer, failures. Cases N08 and N09.
dist layer.

Every rank plays the same history: hypothesis draws it from a fixed seed, and no choice depends on what a rank alone knows.
"""

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig

from tests.dist import sharded
from tests.histories import Double, Histories, play
from tests.models import fill, qwen2, with_lora

pytestmark = pytest.mark.dist


class NoEngine:
    """What a rank has that only takes part."""

    handle, is_asleep, is_serving = None, False, True

    def contents(self):
        return {}

    def is_same(self, before):
        return True  # its fellow sees to its own

    def assert_holds(self, want):
        pass

    def holds_base(self, model):
        return False

    def will_fail(self, failure, at):
        pass

    recover = generate = wake_up = write_any = lambda self, *args: None


class OnRanks(Histories):
    trainer_does = ("step", "switch", "freeze all", "step", "thaw", "freeze", "write", "rescale", "switch")
    engine_suffers = ("write in engine", "generate")
    can_fail = ("engine", "engine, and when restored")
    leaves_out = ("base_loaded",)

    def make_base(self):
        torch.manual_seed(3)  # alike on all ranks
        return qwen2()

    def make_engines(self, base):
        is_sender = dist.get_rank() == 0
        return [Double(dict(base.state_dict())) if is_sender else NoEngine() for _ in range(2)]

    def begin(self, which, kind):
        model = with_lora(self.models[which], target_modules=["q_proj", "v_proj"])
        model.add_adapter("other", LoraConfig(r=3, lora_alpha=7, target_modules=["o_proj", "down_proj"]))
        fill(model)
        self.models[which] = self.shard(model)

    def _switch(self, which, index):
        self.peft_model(which).set_adapter(["default", "other"][index % 2])


class OnFsdp2(OnRanks):
    def shard(self, model):
        sharded.by_layer(model)
        return model

    def peft_model(self, which):
        return self.models[which]


class OnFsdp1(OnRanks):
    def shard(self, model):
        wrapped = sharded.flat(model)
        with torch.no_grad():
            wrapped(torch.arange(5).unsqueeze(0))  # a unit must not be opened before its root was
        return wrapped

    def peft_model(self, which):
        return self.models[which].module


def play_on_a_rank(rank, machine, num_histories):
    play(machine, num_histories, stateful_step_count=30, derandomize=True)


@pytest.mark.parametrize("machine", [OnFsdp1, OnFsdp2])
def test_an_engine_holds_the_policy_of_a_sharded_trainer_after_any_history(pool, machine):
    """Cases N08 and N09."""
    pool.run(2, play_on_a_rank, machine, 8, limit_s=200)
