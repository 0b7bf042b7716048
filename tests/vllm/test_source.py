"""The stream as vLLM's WeightSource: vLLM's own nccl engines move it, over a communicator that is a queue. vllm layer."""

import queue
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  # on the CPU it puts stand-ins where vLLM's engines use CUDA streams
from vllm.distributed.weight_transfer.base import WeightSource, layerwise_groups
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine, NCCLWeightTransferEngine

from lora_stream.vllm.source import LoraStreamSource, VersionedClient
from tests.models import assert_equal, assert_matches, fill, llama, sent, with_lora

pytestmark = pytest.mark.vllm


class QueueCommunicator:
    """Both ends of a broadcast: rank 0 puts in, the other takes out, in the same order or not at all."""

    def __init__(self):
        self.sent = queue.Queue()

    def end(self, sends):
        def broadcast(tensor, src, stream=None):
            assert src == 0
            if sends:
                self.sent.put(tensor.detach().clone())
            else:
                tensor.copy_(self.sent.get(timeout=20))

        return SimpleNamespace(broadcast=broadcast)


class Worker:
    """A worker's weight-transfer calls on a model that only records, as vLLM's worker makes them."""

    def __init__(self, communicator):
        self.weights, self.versions, self.calls = {}, [], []
        config = SimpleNamespace(parallel_config=None, model_config=None)
        model = torch.nn.Module()
        model.load_weights = lambda items: self.weights.update((name, tensor.clone()) for name, tensor in items)
        self.engine = NCCLWeightTransferEngine(None, config, torch.device("cpu"), model)
        self.engine.model_update_group = communicator.end(sends=False)

    def init_weight_transfer_engine(self, init_info):
        raise AssertionError("not over a fake communicator")

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, update_info):
        self.calls.append("update")
        self.engine.receive_weights(self.engine.parse_update_info(update_info))

    def finish_weight_update(self, weight_version=None):
        self.calls.append("finish")
        self.versions.append(weight_version)


@pytest.fixture
def model():
    return with_lora(llama(tied=True))


def trainer_of(source, *, is_sender=True):
    communicator = QueueCommunicator()
    worker = Worker(communicator)
    client = VersionedClient(worker)
    trainer = NCCLTrainerWeightTransferEngine(client=client, source=source, is_sender=is_sender, packed=False)
    trainer.model_update_group = communicator.end(sends=True)
    return trainer, client, worker


def test_vllms_nccl_engines_carry_the_merged_weights_bitwise(model):
    trainer, client, worker = trainer_of(LoraStreamSource(model))
    for version in ("7", "8"):
        client.weight_version = version
        trainer.send_weights()
        assert_equal(worker.weights, sent(model))
        fill(model)
    assert worker.versions == ["7", "8"]
    assert worker.calls == ["start", "update", "finish"] * 2


def test_a_trained_source_carries_what_trains_with_its_siblings(model):
    trainer, _, worker = trainer_of(LoraStreamSource(model, scope="trained"))
    trainer.send_weights()
    want = sent(model)
    assert set(worker.weights) == {
        name for name in want if any(part in name for part in ("q_proj", "k_proj", "v_proj", "down_proj"))
    }
    assert_matches(worker.weights, {name: want[name] for name in worker.weights})


def test_ranks_that_do_not_send_never_touch_the_engine(model):
    trainer, _, worker = trainer_of(LoraStreamSource(model), is_sender=False)
    trainer.send_weights()
    assert worker.calls == []


def test_it_keeps_vllms_contract_of_a_source(model):
    source = LoraStreamSource(model)
    assert isinstance(source, WeightSource)
    announced = source.metadata()
    for _ in range(2):  # each pass is fresh
        yielded = list(source)
        assert [(m.name, m.dtype, tuple(m.shape)) for m in announced] == [
            (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in yielded
        ]
    groups = layerwise_groups([m.name for m in announced])
    batches = list(source.iter_groups())
    assert [names for names, _ in batches] == groups
    assert sum(len(tensors) for _, tensors in batches) == len(announced)


def test_an_explicit_version_wins_over_the_clients():
    seen = []
    client = VersionedClient(SimpleNamespace(finish_weight_update=seen.append))
    client.weight_version = "3"
    client.finish_weight_update()
    client.finish_weight_update("4")
    assert seen == ["3", "4"]


def test_a_source_of_an_untied_engine_with_names_of_its_own():
    model = with_lora(llama(tied=True), target_modules=["lm_head"])
    with pytest.raises(ValueError, match=r"lm_head.*tied"):
        LoraStreamSource(model)
    source = LoraStreamSource(model, untie=True, rename=lambda name: f"policy.{name}")
    assert [name for name, _ in source] == [meta.name for meta in source.metadata()]
    assert {"policy.lm_head.weight", "policy.model.embed_tokens.weight"} <= {meta.name for meta in source.metadata()}
    with torch.no_grad():
        model.get_base_model().lm_head.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        dict(source)
    assert dict(LoraStreamSource(model, untie=True, check_finite=False))["lm_head.weight"].isnan().any()
