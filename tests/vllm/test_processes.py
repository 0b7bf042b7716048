"""`sync` into a vllm.LLM whose engine core and two tensor-parallel workers live in other processes. vllm layer."""

import gc
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

import lora_stream
from lora_stream.ring import TransferError
from lora_stream.vllm.channel import Channel
from lora_stream.vllm.clients import LLMClient
from lora_stream.vllm.source import LoraStreamSource
from tests.models import fill, sent, with_lora
from tests.shm import regions
from tests.vllm import live

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def llm(base):
    engine = live.make_llm_in_processes(base, "bfloat16", 2, worker_extension_cls="tests.vllm.packing.Packing")
    yield engine
    live.shut_down(engine)


def logprobs_from_disk(llm, base, model, directory):
    """Of the same engine after vLLM has loaded a checkpoint of the merged tensors by itself."""
    live.save_merged(base, sent(model), directory)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
    assert llm.reset_prefix_cache()
    return live.logprobs(llm)


def test_synced_workers_compute_bitwise_what_a_checkpoint_gives(llm, base, model, tmp_path):
    before = live.logprobs(llm)
    first = lora_stream.sync(model, llm)
    fill(model)
    second = lora_stream.sync(model, llm, weight_version="step-2")
    synced = live.logprobs(llm)
    assert synced != before
    assert (first.scope, second.scope) == ("all", "trained")
    assert second.num_bytes < first.num_bytes
    assert second.seconds_loading > 0
    (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2, detokenize=False))
    assert "step-2" in repr(output.outputs[0].weight_versions)
    assert synced == logprobs_from_disk(llm, base, model, tmp_path / "merged")


def test_slots_far_smaller_than_tensors_and_modules_give_the_same_bits(llm, model):
    """Whole tensors span slots then, and no module fits into the ring: the workers copy what they cannot keep."""
    lora_stream.sync(model, llm, full=True, allow_unmoved=True)
    want = live.logprobs(llm)
    fill(model)
    lora_stream.sync(model, llm)
    other = live.logprobs(llm)
    assert other != want
    report = lora_stream.sync(model, llm, full=True, staging_bytes=8 * 1024, allow_unmoved=True)
    assert live.logprobs(llm) == other
    assert report.peak_staging_bytes < 600 * 1024


@pytest.mark.parametrize("fail_at", [1, 5, "last"])
def test_a_source_that_fails_leaves_the_engine_on_its_old_weights_and_the_next_sync_works(llm, model, fail_at):
    lora_stream.sync(model, llm, full=True, weight_version="old", allow_unmoved=True)
    old = live.logprobs(llm)
    fill(model)
    seen = []

    def fail(meta, plan):
        seen.append(meta)
        if len(seen) == (len(plan.tasks) if fail_at == "last" else fail_at):
            raise OSError("trainer broke")

    with pytest.raises(lora_stream.SyncError, match=r"trainer broke; the engine was put back on its old weights"):
        lora_stream.sync(model, llm, on_tensor=fail, weight_version="new")
    assert live.logprobs(llm) == old
    assert llm.get_weight_version() == "old"
    assert lora_stream.sync(model, llm, weight_version="new").scope == "trained"
    assert live.logprobs(llm) != old


def test_a_non_finite_adapter_leaves_the_engine_on_its_old_weights(llm, model):
    lora_stream.sync(model, llm, full=True, allow_unmoved=True)
    old = live.logprobs(llm)
    with torch.no_grad():
        model.get_base_model().model.layers[1].mlp.down_proj.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(lora_stream.SyncError, match=r"layers\.1\.mlp\.down_proj.*not finite"):
        lora_stream.sync(model, llm)
    assert live.logprobs(llm) == old


def test_a_model_of_another_size_is_refused_by_name_untouched(llm, base, model):
    from transformers import AutoConfig

    lora_stream.sync(model, llm, full=True, allow_unmoved=True)
    old = live.logprobs(llm)
    config = AutoConfig.from_pretrained(base)
    config.intermediate_size = 96
    other = with_lora(AutoModelForCausalLM.from_config(config))
    with pytest.raises(ValueError, match=r"mlp\.gate_proj\.weight"):
        lora_stream.sync(other, llm)
    assert live.logprobs(llm) == old


def test_in_place_is_refused_by_name_where_the_engine_packs_its_weights(llm, model):
    lora_stream.sync(model, llm, full=True, allow_unmoved=True)
    old = live.logprobs(llm)
    llm.collective_rpc("compute_from_a_copy")
    try:
        with pytest.raises(
            ValueError, match=r"layers\.0\..*: cannot be written in place, the engine .*pass in_place=False"
        ):
            lora_stream.sync(model, llm, in_place=True)
    finally:
        llm.collective_rpc("compute_as_before")
    assert live.logprobs(llm) == old


def test_an_engine_that_was_reloaded_with_other_merged_targets_gets_everything(llm, base, model, tmp_path):
    """Case N13. Its norms and biases are the same as before."""
    lora_stream.sync(model, llm)
    synced = live.logprobs(llm)
    assert lora_stream.sync(model, llm, allow_unmoved=True).scope == "trained"
    other = with_lora(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16), target_modules=["o_proj", "down_proj"]
    )
    path = live.save_merged(base, sent(other, wire_dtype=torch.bfloat16), tmp_path / "other")
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
    llm.reset_prefix_cache()
    assert live.logprobs(llm) != synced
    assert lora_stream.sync(model, llm, allow_unmoved=True).scope == "all"
    assert live.logprobs(llm) == synced
    assert lora_stream.sync(model, llm, allow_unmoved=True).scope == "trained"


def test_a_busy_engine_is_refused_untouched(llm, model):
    lora_stream.sync(model, llm, full=True, allow_unmoved=True)
    old = live.logprobs(llm)
    request = llm.llm_engine.add_request(
        "busy", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=50, detokenize=False)
    )
    fill(model)
    with pytest.raises(ValueError, match="unfinished requests"):
        lora_stream.sync(model, llm)
    llm.llm_engine.abort_request([request or "busy"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert live.logprobs(llm) == old


def test_an_engine_without_the_backend_is_refused_with_what_to_set():
    from types import SimpleNamespace

    class Unconfigured:
        llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False)

        def init_weight_transfer_engine(self, request):
            raise RuntimeError("Weight transfer not configured. Please set weight_transfer_config")

    with pytest.raises(RuntimeError, match="set weight_transfer_config"):
        Channel(num_slots=2, slot_bytes=256).describe(LLMClient(Unconfigured()))


def test_vllms_own_trainer_factory_drives_the_backend(llm, base, model, tmp_path):
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from lora_stream.vllm.plugin import register
    from lora_stream.vllm.trainer import LoraStreamTrainerInitInfo

    register()
    info = LoraStreamTrainerInitInfo(rank=0, num_slots=4, slot_bytes=64 * 1024)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=LLMClient(llm), source=LoraStreamSource(model))
    trainer.send_weights("17")
    assert llm.reset_prefix_cache()
    assert llm.get_weight_version() == "17"
    merged = live.logprobs(llm)
    fill(model)
    trainer.send_weights()
    assert llm.reset_prefix_cache()
    assert live.logprobs(llm) != merged
    assert live.logprobs(llm) == logprobs_from_disk(llm, base, model, tmp_path / "merged")
    trainer.shutdown()
    # Somebody else has sent weights: what this process remembers of the engine no longer counts.
    assert lora_stream.sync(model, llm, allow_unmoved=True).scope == "all"


def test_a_foreign_source_is_copied_in_and_its_failure_is_told(llm, base, model, tmp_path):
    from vllm.distributed.weight_transfer.base import ModuleSource

    from lora_stream.vllm.trainer import LoraStreamTrainerEngine, LoraStreamTrainerInitInfo

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.25)
    source = ModuleSource(plain)
    info = LoraStreamTrainerInitInfo(rank=0, num_slots=2, slot_bytes=64 * 1024)
    trainer = LoraStreamTrainerEngine.trainer_init(info, client=LLMClient(llm), source=source)
    trainer.send_weights()
    assert llm.reset_prefix_cache()
    merged = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    live.save_merged(base, merged, tmp_path / "merged")
    sent = live.logprobs(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path / "merged")})
    assert llm.reset_prefix_cache()
    assert sent == live.logprobs(llm)

    class Lying(ModuleSource):
        def __iter__(self):
            for i, (name, tensor) in enumerate(super().__iter__()):
                yield (name, tensor) if i < 7 else (name, tensor.flatten()[:3])

    trainer.source = Lying(plain)
    with pytest.raises(ValueError, match="the source yielded"):
        trainer.send_weights()
    trainer.source = source
    trainer.send_weights()
    assert llm.reset_prefix_cache()
    assert live.logprobs(llm) == sent


def test_ranks_that_do_not_send_only_iterate(model):
    from lora_stream.vllm.trainer import LoraStreamTrainerEngine, LoraStreamTrainerInitInfo

    class Counting(LoraStreamSource):
        passes = 0

        def __iter__(self):
            Counting.passes += 1
            return super().__iter__()

    info = LoraStreamTrainerInitInfo(rank=1)
    trainer = LoraStreamTrainerEngine.trainer_init(info, client=None, source=Counting(model))
    trainer.send_weights()
    assert Counting.passes == 1


def test_a_hundred_syncs_grow_nothing(llm, model):
    workers = [pid for pid, name in live.descendants(os.getpid()) if "Worker" in name]
    assert len(workers) == 2

    def usage():
        gc.collect()
        processes = ["self", *workers]
        return (
            regions(),
            [live.num_fds(pid) for pid in processes],
            [
                sum("lora_stream" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
                for pid in processes
            ],
        ), [live.rss(pid) for pid in processes]

    for _ in range(10):
        fill(model)
        lora_stream.sync(model, llm)
    before, memory_before = usage()
    for _ in range(100):
        fill(model)
        lora_stream.sync(model, llm)
    after, memory_after = usage()
    assert after == before
    for grown, was in zip(memory_after, memory_before, strict=True):
        assert grown - was < 24 * 1024 * 1024, json.dumps([memory_before, memory_after])


def test_a_connection_that_reaches_no_worker_is_refused_and_the_next_one_works(llm, model):
    from lora_stream import engines

    lora_stream.sync(model, llm, full=True, allow_unmoved=True)
    assert engines._channels[llm].sender.num_bytes > 0
    with pytest.raises(TransferError, match=r"^0 of 2 workers attached"):
        engines._channels[llm]._connect(_NoWorkers())
    lora_stream.sync(model, llm, full=True, allow_unmoved=True)


class _NoWorkers:
    def num_workers(self):
        return 2

    def init_weight_transfer_engine(self, init_info):
        pass
