"""A device that runs ahead of the host: what is enqueued when, what is waited for, who is told. Unit layer.

No device is needed: the CPU plays one. What is enqueued on it is done only when somebody waits for it.
"""

import gc
from itertools import pairwise

import pytest
import torch

import lora_stream
from lora_stream import filling, merged_weights, ops
from lora_stream.filling import Batch
from lora_stream.merged_weights import FreshStaging, MergedWeights
from tests.models import assert_matches, expected, llama, with_lora


class Queue:
    """Stands for torch.Stream."""

    device = torch.device("cpu")

    def __init__(self, name, log):
        self.name, self.log, self.work, self.done = name, log, [], 0

    def enqueue(self, what, work):
        self.log.append(f"enqueue {what} on {self.name}")
        self.work.append(work)

    def record_event(self):
        return Event(self, len(self.work))

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.queue.name}")
        self.work.append(event.run)

    def __enter__(self):
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_):
        self.log.append(f"leave {self.name}")


class Event:
    """Stands for torch.Event."""

    def __init__(self, queue, count):
        self.queue, self.count = queue, count

    def run(self):
        while self.queue.done < self.count:
            self.queue.done += 1
            self.queue.work[self.queue.done - 1]()

    def synchronize(self):
        self.run()
        self.queue.log.append(f"host waits for {self.queue.name}")


class Device:
    def __init__(self, monkeypatch):
        self.log = []
        self.current = self.main = Queue("main", self.log)
        self.copying = Queue("copying", self.log)
        self.recorded = []
        self.pinned = set()
        merge = ops.merge_cast_grouped_

        def enqueue_merge(bases, lora_As, lora_Bs, scalings, outs, stats, **kw):
            self.current.enqueue(
                f"{len(bases)} merges", lambda: merge(bases, lora_As, lora_Bs, scalings, outs, stats, **kw)
            )

        for module in (filling, merged_weights):
            monkeypatch.setattr(module, "queue_of", lambda device: self.current)
        monkeypatch.setattr(filling, "_copy_queue_of", lambda device: self.copying)
        monkeypatch.setattr(filling, "_is_pinned", lambda tensor: tensor.data_ptr() in self.pinned)
        monkeypatch.setattr(filling, "_bring_to_host", lambda tensor: tensor)
        monkeypatch.setattr(ops, "merge_cast_grouped_", enqueue_merge)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, queue: self.recorded.append((tensor, queue)))


class LoggedStaging(FreshStaging):
    def __init__(self, device, bucket_bytes):
        super().__init__(bucket_bytes)
        self.log = device.log

    def batches(self, plan):
        for i, batch in enumerate(super().batches(plan)):
            self.log.append(f"batch {i}")
            yield Batch(batch.parts, lambda i=i: self.log.append(f"announce {i}"))


@pytest.fixture
def model():
    return with_lora(llama(num_hidden_layers=3))


@pytest.fixture
def device(monkeypatch, model):
    return Device(monkeypatch)


def pass_over(model, device, **kwargs):
    weights = MergedWeights(model, scope="trained", bucket_bytes=6000, **kwargs)
    return weights.stream_into(LoggedStaging(device, 6000))


def test_one_batch_is_merged_while_the_one_before_is_handed_over(model, device):
    want = expected(model)
    got = {}
    for name, tensor in pass_over(model, device):
        device.log.append("tensor")
        got[name] = tensor.clone()
    assert_matches(got, {name: want[name] for name in got})
    log = [entry for entry in device.log if entry.startswith(("batch", "tensor", "announce"))]
    batches = sum(entry.startswith("batch") for entry in log)
    assert batches >= 3
    for i in range(batches - 1):
        handed_over = log[log.index(f"batch {i + 1}") : log.index(f"announce {i}")]
        assert "tensor" in handed_over, "the next batch was enqueued before"
        assert f"batch {i + 2}" not in handed_over, "but no more than one"


def test_a_batch_is_announced_when_the_device_has_filled_it_and_all_of_it_was_handed_over(model, device):
    """Else a sync that fails would not know all that a worker may have got."""
    stream = pass_over(model, device)
    for _ in stream:
        device.log.append("tensor")
    log = [entry for entry in device.log if entry.startswith(("host waits", "tensor", "announce"))]
    events = [entry if entry.startswith("announce") else entry.split()[0] for entry in log]
    assert events[:2] == ["host", "tensor"]
    for before, after in pairwise(events):
        if after == "tensor":
            assert before in ("host", "tensor"), "nothing is announced between the tensors of a batch"
        if after.startswith("announce"):
            assert before == "tensor"
    assert len([entry for entry in events if entry == "tensor"]) == len(stream.stats.sent)


def test_a_consumer_on_another_queue_is_ordered_after_the_merge_and_keeps_the_memory(model, device):
    """vLLM's packed transfer asks for tensors under one side stream after the other."""
    stream = pass_over(model, device)
    _, first = next(stream)
    assert device.recorded == []
    device.current = other = Queue("other", device.log)
    _, second = next(stream)
    assert any(tensor is second and queue is other for tensor, queue in device.recorded)
    assert "other waits for main" in device.log
    del first


def test_what_the_device_made_is_copied_to_the_host_by_a_queue_of_its_own(model, device, monkeypatch):
    monkeypatch.setattr(filling, "_is_near", lambda out, device: False)
    want = expected(model)
    got = {name: tensor.clone() for name, tensor in pass_over(model, device)}
    assert "copying waits for main" in device.log
    assert device.log.index("enter copying") < device.log.index("leave copying")
    # The copies of this stand-in are not deferred, so the values are not asserted: that they wait for the merge is.
    assert set(got) <= set(want)
    assert any(queue is device.copying for _, queue in device.recorded), "its memory is not reused before"


@pytest.mark.parametrize("way", ["copy", "store"])
def test_kernels_write_into_pinned_memory_themselves_where_that_is_asked_for(model, device, monkeypatch, way):
    monkeypatch.setenv("LORA_STREAM_TO_HOST", way)
    monkeypatch.setattr(filling, "_is_near", lambda out, device: False)
    monkeypatch.setattr(filling, "_is_pinned", lambda tensor: True)
    got = {name: tensor.clone() for name, tensor in pass_over(model, device)}
    assert ("enter copying" in device.log) == (way == "copy")
    if way == "store":
        want = expected(model)
        assert_matches(got, {name: want[name] for name in got})


def test_an_unknown_way_to_the_host_is_refused(monkeypatch):
    monkeypatch.setenv("LORA_STREAM_TO_HOST", "dma")
    with pytest.raises(ValueError, match="LORA_STREAM_TO_HOST must be copy or store, got 'dma'"):
        filling.writes_to_host()


def test_a_delta_that_is_not_finite_raises_before_a_tensor_of_its_batch_and_nothing_is_left_running(model, device):
    with torch.no_grad():
        model.base_model.model.model.layers[1].self_attn.v_proj.lora_B["default"].weight[0, 0] = float("nan")
    seen = []
    weights = pass_over(model, device, offload=lambda: device.log.append("offload"))
    with pytest.raises(ValueError, match=r"layers.1.self_attn.v_proj.*not finite"):
        seen.extend(name for name, _ in weights)
    assert seen
    assert not any("layers.1.self_attn.v_proj" in name for name in seen)
    assert device.main.done == len(device.main.work), "what was enqueued ahead has ended"
    assert device.log[-1] == "offload"


def test_a_pass_that_is_closed_early_waits_for_what_it_has_enqueued_ahead(model, device):
    stream = pass_over(model, device, offload=lambda: device.log.append("offload"))
    next(stream)
    assert device.main.done < len(device.main.work)
    stream.close()
    assert device.main.done == len(device.main.work)
    assert device.log[-1] == "offload"


def test_a_device_gets_larger_batches_than_the_host(model, device, monkeypatch):
    """It merges a small one before the next is prepared."""
    monkeypatch.setattr(merged_weights, "BUCKET_BYTES", 1)
    monkeypatch.setattr(merged_weights, "DEVICE_BUCKET_BYTES", 1 << 30)
    list(MergedWeights(model, scope="trained"))
    assert len([entry for entry in device.log if entry.startswith("enqueue")]) == 1


def test_two_batches_at_most_are_alive(model, device):
    stream = pass_over(model, device)
    for _ in stream:
        gc.collect()
    assert stream.stats.peak_staging_bytes <= 2 * 6000
    assert stream.stats.peak_staging_bytes > 6000


def test_onload_gets_the_parameters_that_the_pass_reads_and_no_others(model):
    """So that a trainer that has offloaded its weights moves only what the scope needs."""
    moved = {}
    calls = []

    def onload(parameters):
        calls.append("onload")
        moved.update({id(parameter): parameter for parameter in parameters})

    def offload(parameters):
        calls.append("offload")
        assert {id(parameter) for parameter in parameters} == set(moved)

    weights = MergedWeights(model, scope="trained", onload=onload, offload=offload)
    names = [name for name, _ in weights]
    assert calls == ["onload", "offload"]
    touched = {name for name, parameter in model.named_parameters() if id(parameter) in moved}
    untouched = {name for name, _ in model.named_parameters()} - touched
    assert len(touched) == len(moved), "they are the model's own parameters"
    assert all("lora_" in name or name.endswith(("base_layer.weight", "proj.weight")) for name in touched)
    assert {"base_model.model.model.embed_tokens.weight", "base_model.model.model.norm.weight"} <= untouched
    assert {name for name in touched if "lora_" in name} == {n for n, _ in model.named_parameters() if "lora_" in n}
    assert len([name for name in touched if "lora_" not in name]) == len(names)
    list(lora_stream.stream(model, onload=calls.clear, offload=lambda *, note="x": calls.append(note)))
    assert calls == ["x"], "callables without an argument are called without one"


# -- host and device: the meta device stands for one that keeps nothing ---------------------------------------------------


@pytest.fixture
def far_device(monkeypatch):
    for module in (filling, merged_weights):
        monkeypatch.setattr(module, "queue_of", lambda device: None)
    return torch.device("meta")


def crossed(model, **kwargs):
    stream = lora_stream.stream(model, **kwargs)
    tensors = dict(stream)
    return stream, tensors, stream.stats.traffic


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_of_an_offloaded_base_only_merged_bytes_go_to_a_device(far_device, base):
    """Edge case 61."""
    stream, tensors, traffic = crossed(with_lora(llama(dtype=base)), device=far_device)
    assert {tensor.device for tensor in tensors.values()} == {far_device}
    assert traffic.crossed == stream.plan.num_bytes
    assert traffic.made_on == {"cpu": stream.plan.num_bytes}


def test_an_offloaded_base_goes_over_as_it_lies_where_that_is_less(far_device, monkeypatch):
    monkeypatch.setattr(filling.Filling, "wait", lambda self: [])  # statistics of nothing
    model = with_lora(llama(dtype=torch.bfloat16))
    stream, tensors, traffic = crossed(model, wire_dtype=torch.float32, device=far_device)
    assert {tensor.device for tensor in tensors.values()} == {far_device}
    adapters = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
    assert traffic.crossed == stream.plan.num_bytes // 2 + adapters
    assert traffic.made_on == {"meta": stream.plan.num_bytes}


def test_a_base_on_the_host_with_its_consumer_there_never_leaves_it(model):
    stream, _, traffic = crossed(model)
    assert traffic.crossed == 0
    assert traffic.made_on == {"cpu": stream.plan.num_bytes}


def test_an_offload_that_nobody_waited_for_has_arrived_before_the_host_reads_it(model, monkeypatch):
    """Pinned memory: the copy to it is enqueued on the device, and the host reads whatever lies there by then."""
    wanted = {name: tensor.clone() for name, tensor in lora_stream.stream(model)}
    queue = Queue("main", [])
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *args: queue)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor, *args: True)
    for parameter in model.parameters():
        arriving = parameter.detach().clone()
        parameter.data.fill_(float("nan"))
        queue.enqueue("offload", lambda to=parameter.data, values=arriving: to.copy_(values))
    got = dict(lora_stream.stream(model))
    assert queue.log.count("host waits for main") == 1
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
