"""Names under wrappers that need a process group. dist layer: gloo, here with a group of one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lora_stream
from tests.models import assert_equal, llama, with_lora

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_changes_neither_names_nor_bits():
    model = with_lora(llama(tied=True))
    want = dict(lora_stream.stream(model))
    assert_equal(dict(lora_stream.stream(DistributedDataParallel(model))), want)
    assert_equal(dict(lora_stream.stream(torch.compile(DistributedDataParallel(model)))), want)


def test_sharded_models_are_refused_by_name_until_they_are_supported():
    model = with_lora(llama())
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj.*is a DTensor with placements"):
        lora_stream.stream(model)
    model = with_lora(llama())
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(ValueError, match="is wrapped by FSDP1"):
        lora_stream.stream(wrapped)
