"""A model on a device: a pass, its order with other streams, and staging in pinned memory. GPU layer."""

import copy
import threading

import pytest
import torch

import lora_stream
from lora_stream.merged_weights import MergedWeights
from lora_stream.ring import Receiver, Sender
from tests.kinds import KINDS
from tests.models import llama, with_lora


@pytest.fixture
def model():
    return with_lora(llama(num_hidden_layers=4, hidden_size=128, intermediate_size=320)).to("cuda")


def on_host(model):
    return {name: tensor.clone() for name, tensor in lora_stream.stream(copy.deepcopy(model).cpu())}


def assert_alike(got, want):
    """But for ties."""
    assert list(got) == list(want)
    for name, tensor in got.items():
        assert (tensor.cpu() != want[name]).float().mean().item() <= 1e-3, name
        torch.testing.assert_close(tensor.cpu(), want[name], rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("bucket_bytes", [1, 100_000, 1 << 30])
def test_a_pass_on_the_device_yields_what_one_on_the_host_does(model, bucket_bytes):
    weights = MergedWeights(model, bucket_bytes=bucket_bytes)
    got = dict(weights)
    assert all(tensor.is_cuda for tensor in got.values())
    assert_alike(got, on_host(model))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings", "ignore:fan_in_fan_out is set", "ignore:MiCA")
def test_every_kind_on_the_device_is_what_the_host_makes(kind):
    model = KINDS[kind]()
    want = dict(lora_stream.stream(model))
    assert_alike(dict(lora_stream.stream(model.to("cuda"))), want)


def test_a_consumer_that_changes_streams_sees_finished_tensors_that_nobody_reuses(model):
    want = on_host(model)
    streams = [torch.cuda.Stream() for _ in range(3)]
    got = {}
    weights = iter(MergedWeights(model, bucket_bytes=50_000))
    for i in range(len(want)):
        with torch.cuda.stream(streams[i % 3]):
            name, tensor = next(weights)
            torch.cuda._sleep(1_000_000)
            got[name] = tensor.clone()
            del tensor
    torch.cuda.synchronize()
    assert_alike(got, want)


def test_the_pass_reads_what_the_optimizer_has_enqueued_on_the_stream_that_asked(model):
    weights = MergedWeights(model, scope="trained")
    with torch.no_grad():
        torch.cuda._sleep(50_000_000)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(3.0)
    stream = iter(weights)
    with torch.cuda.stream(torch.cuda.Stream()):
        got = {name: tensor.cpu() for name, tensor in stream}
    want = on_host(model)
    assert_alike(got, {name: want[name] for name in got})


@pytest.mark.parametrize("way", ["copy", "store"])
def test_a_model_on_the_device_goes_through_pinned_staging(model, way, monkeypatch):
    monkeypatch.setenv("LORA_STREAM_TO_HOST", way)
    want = on_host(model)
    sender = Sender(num_slots=3, slot_bytes=64 * 1024)
    receiver = Receiver(sender.link())
    sender.unlink()
    weights = MergedWeights(model)
    generation, first = sender.begin(lambda: None)
    receiver.accept(generation, first)
    got = {}

    def receive():
        for name, tensor in receiver.tensors(weights.metadata()):
            got[name] = tensor.clone()
            del tensor

    receiving = threading.Thread(target=receive)
    receiving.start()
    names = [name for name, _ in weights.stream_into(sender)]
    receiving.join()
    sender.end()
    assert names == list(want)
    assert_alike(got, want)


def test_a_nan_in_the_adapter_raises_before_its_tensor(model):
    with torch.no_grad():
        model.base_model.model.model.layers[2].self_attn.v_proj.lora_B["default"].weight[0, 0] = float("nan")
    seen = []
    with pytest.raises(ValueError, match=r"layers.2.self_attn.v_proj.*not finite"):
        seen.extend(name for name, _ in MergedWeights(model, bucket_bytes=10_000))
    torch.cuda.synchronize()


def test_an_offloaded_trainer_moves_only_what_the_scope_needs(model):
    model = model.cpu()
    devices = {}

    def onload(parameters):
        for parameter in parameters:
            parameter.data = parameter.data.to("cuda")
        devices.update({name: parameter.device.type for name, parameter in model.named_parameters()})

    def offload(parameters):
        for parameter in parameters:
            parameter.data = parameter.data.to("cpu")

    got = {
        name: tensor.cpu()
        for name, tensor in lora_stream.stream(model, scope="trained", onload=onload, offload=offload)
    }
    want = on_host(model)
    assert_alike(got, {name: want[name] for name in got})
    assert devices["base_model.model.model.embed_tokens.weight"] == "cpu"
    assert devices["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"] == "cuda"
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_an_offloaded_model_is_merged_on_the_host_and_only_merged_bytes_cross():
    model = with_lora(llama(num_hidden_layers=2, hidden_size=128))
    stream = lora_stream.stream(model, device="cuda")
    got = dict(stream)
    assert all(tensor.is_cuda for tensor in got.values())
    assert stream.stats.traffic.crossed == stream.plan.num_bytes
    assert dict(stream.stats.traffic.made_on) == {"cpu": stream.plan.num_bytes}
    assert_alike(got, on_host(model))


def test_adapters_on_the_device_come_to_their_offloaded_base():
    """Edge case 61."""
    model = with_lora(llama(num_hidden_layers=2, hidden_size=128))
    want = on_host(model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.cuda()
    assert_alike(dict(lora_stream.stream(model)), want)
    assert not any(parameter.is_cuda for name, parameter in model.named_parameters() if "lora_" not in name)


@pytest.mark.parametrize("offload", [False, True])
def test_fsdp2_on_the_device_streams_what_the_plain_model_does(tmp_path, offload):
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    model = with_lora(llama(num_hidden_layers=2, hidden_size=128))
    want = on_host(model)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cuda", (1,))
        for module in (*model.get_base_model().model.layers, model):
            fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
        assert_alike(dict(lora_stream.stream(model)), want)
    finally:
        distributed.destroy_process_group()
