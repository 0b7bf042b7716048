"""`sync(..., in_place=True)` on an engine that keeps its weights as they were loaded, as unquantised models on CUDA do. On the
CPU vLLM does so without oneDNN and without its kernels for AMX. In this process, and over a ring to the backend's worker
side. vllm layer."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; `make test` installs it where it can be had")

import torch
import vllm._custom_ops
import vllm.model_executor.layers.utils
from vllm.config import set_current_vllm_config

import lora_stream
from lora_stream.vllm import manifest
from lora_stream.vllm.worker import LoraStreamEngine
from tests.models import TARGETS, fill
from tests.vllm import live

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "model"
    live.save_base(torch.bfloat16, False, directory)
    return directory


@pytest.fixture(scope="module")
def llm(base):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm._custom_ops, "_supports_onednn", False)
        patch.setattr(vllm.model_executor.layers.utils, "check_cpu_sgl_kernel", lambda *args: False)
        engine = live.make_llm(base, "bfloat16")
        yield engine  # patched as long as it lives: a reload processes its weights again
        live.shut_down(engine)


class Calls:
    """vLLM's four calls, made on the backend's worker side of an engine in this process."""

    def __init__(self, llm):
        worker = llm.llm_engine.model_executor.driver_worker.worker
        self.config = worker.vllm_config
        self.engine = LoraStreamEngine(None, self.config, torch.device("cpu"), worker.model_runner.get_model())
        self.reset_prefix_cache = llm.reset_prefix_cache

    def init_weight_transfer_engine(self, init_info):
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self):
        self.engine.start_weight_update()

    def update_weights(self, update_info):
        with set_current_vllm_config(self.config):
            self.engine.receive_weights(self.engine.parse_update_info(update_info))

    def finish_weight_update(self, weight_version=None):
        self.engine.finish_weight_update()


@pytest.fixture(params=["in this process", "over a ring"])
def engine(request, llm):
    return llm if request.param == "in this process" else Calls(llm)


def engine_model(llm):
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def test_exactly_the_touched_tensors_are_written_where_they_are_with_the_same_result(llm, engine, model):
    lora_stream.sync(model, engine, full=True, allow_unmoved=True)
    fill(model)
    addresses = {name: p.data_ptr() for name, p in engine_model(llm).named_parameters()}
    report = lora_stream.sync(model, engine, in_place=True)
    assert set(report.merged) == {
        f"model.layers.{i}.{'mlp' if target == 'down_proj' else 'self_attn'}.{target}.weight"
        for i in range(2)
        for target in TARGETS
    }
    assert report.copied == ()
    assert {name: p.data_ptr() for name, p in engine_model(llm).named_parameters()} == addresses
    in_place = live.logprobs(llm)
    lora_stream.sync(model, engine, full=True, allow_unmoved=True)
    assert live.logprobs(llm) == in_place


def test_a_source_that_fails_is_undone_in_place(llm, engine, model):
    lora_stream.sync(model, engine, full=True, allow_unmoved=True)
    old = live.logprobs(llm)
    fill(model)

    def fail(meta, plan):
        if meta == plan.tasks[3].meta:
            raise OSError("trainer broke")

    with pytest.raises(lora_stream.SyncError, match=r"trainer broke; the engine was put back on its old weights"):
        lora_stream.sync(model, engine, in_place=True, on_tensor=fail)
    assert live.logprobs(llm) == old
    lora_stream.sync(model, engine, in_place=True)
    assert live.logprobs(llm) != old


def test_a_parameter_that_is_processed_after_loading_is_refused_by_name(llm, engine, model, monkeypatch):
    lora_stream.sync(model, engine, full=True, allow_unmoved=True)
    fill(model)
    layer = engine_model(llm).model.layers[1].mlp.down_proj
    monkeypatch.setattr(manifest, "_accepted", {})  # an engine is asked once

    class OtherMethod(type(layer.quant_method)):
        pass

    monkeypatch.setattr(layer, "quant_method", OtherMethod())
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.down_proj\.weight: .* processes it after loading \(OtherMethod\)"
    ):
        lora_stream.sync(model, engine, in_place=True)
    monkeypatch.undo()
    monkeypatch.setattr(manifest, "_accepted", {})
    weight = torch.zeros(1)
    monkeypatch.setattr(layer, "cpu_linear", lambda x: x + weight)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight: .* computes from a packed copy"):
        lora_stream.sync(model, engine, in_place=True)
    monkeypatch.undo()
    lora_stream.sync(model, engine, in_place=True)


def test_objects_that_load_by_themselves_are_not_told_where(model):
    class Loader:
        def load_weights(self, weights):
            raise AssertionError

    with pytest.raises(ValueError, match="in_place is for vLLM"):
        lora_stream.sync(model, Loader(), in_place=True)
