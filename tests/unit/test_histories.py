"""Whatever happens between two syncs, an engine holds the policy, or the sync says that it does not. Cases N08, N09, N13 and
what nobody has reported yet. Unit layer: engine doubles; a live engine plays shorter histories in tests/vllm.

HISTORIES=200 plays 200 histories of 50 steps, that is ten thousand steps, instead of a few.
"""

import os

from tests.histories import Double, Histories, play
from tests.models import qwen2

NUM_HISTORIES = int(os.environ.get("HISTORIES", "20"))


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


def test_an_engine_holds_the_policy_after_any_history():
    play(OnDoubles, (NUM_HISTORIES + 1) // 2)


def test_an_engine_of_a_tied_model_holds_the_policy_after_any_history():
    play(OnTiedDoubles, NUM_HISTORIES // 2)
