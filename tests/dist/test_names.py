"""Names under wrappers that need a process group. dist layer."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lora_stream
from tests.models import assert_equal, llama, sent, with_lora

pytestmark = pytest.mark.dist


def stream_under_ddp(rank):
    """One rank streams, and no other is needed for it."""
    model = with_lora(llama(tied=True))
    want = sent(model)
    wrapped = DistributedDataParallel(model)
    if rank == 0:
        assert_equal(sent(wrapped), want)
        assert_equal(sent(torch.compile(wrapped)), want)


def test_ddp_changes_neither_names_nor_bits_and_one_replica_streams_alone(pool):
    pool.run(2, stream_under_ddp)
