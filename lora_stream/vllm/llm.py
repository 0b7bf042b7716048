"""The engine of `lora_stream.sync` that is a vllm.LLM in this process."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from vllm import LLM
from vllm.config import set_current_vllm_config

from lora_stream.plan import ParamMeta
from lora_stream.vllm import reload, transport
from lora_stream.vllm.manifest import check_manifest
from lora_stream.vllm.worker import LoraStreamEngine, UpdateInfo


class LLMEngine:
    """A vllm.LLM whose engine core and worker live in this process.

    With ``weight_transfer_config={"backend": "lora_stream"}`` the weights go through vLLM's own start, update and
    finish; without, through ``load_weights`` in the same brackets.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        if getattr(llm.llm_engine, "model_executor", None) is None:
            raise ValueError(
                "the engine core of this vllm.LLM runs in another process, which is not supported yet; set "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM is imported"
            )
        config = llm.llm_engine.vllm_config
        if config.parallel_config.world_size > 1:
            raise ValueError(
                f"this vllm.LLM has {config.parallel_config.world_size} workers; only one, in this process, is supported "
                "yet: set tensor_parallel_size=1 and pipeline_parallel_size=1"
            )
        self.wire_dtype: torch.dtype = config.model_config.dtype
        (packed,) = llm.collective_rpc(_packed_modules)
        self.fused_modules: Sequence[Sequence[str]] = packed

    def check(self, metadata: Sequence[ParamMeta]) -> None:
        if self._llm.llm_engine.has_unfinished_requests():
            raise ValueError("the engine has unfinished requests; finish or abort them before a sync")
        if "weights" in self._llm.llm_engine.model_executor.sleeping_tags:
            raise ValueError(
                'the engine sleeps, its weights are not in memory; call wake_up(tags=["weights"]) before a sync'
            )
        self._llm.collective_rpc(partial(_check, metadata=metadata))

    def fingerprint(self) -> object:
        # After sleep(level=2) the weights are gone, and waking up does not bring them back: what is unchanged for the
        # trainer must be sent again then.
        (found,) = self._llm.collective_rpc(_fingerprint)
        return found

    def update(
        self, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], weight_version: str | None
    ) -> None:
        (has_backend,) = self._llm.collective_rpc(_has_backend)
        if has_backend:
            self._update_by_backend(metadata, weights)
        else:
            self._llm.collective_rpc(partial(_load, metadata=metadata, weights=weights))
        # vLLM keeps the old policy's prefixes otherwise, and mixes them into new answers without a word.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "the engine has the new weights but could not reset its prefix cache (requests hold its blocks); it would "
                "answer from the old policy's cache: rebuild the engine"
            )
        if weight_version is not None:
            self._llm.llm_engine.set_weight_version(weight_version)

    def _update_by_backend(self, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        ticket = transport.put(weights)
        try:
            self._llm.init_weight_transfer_engine({"init_info": {}})
            self._llm.start_weight_update()
            self._llm.update_weights({"update_info": UpdateInfo.fields_of(ticket, list(metadata))})
            self._llm.finish_weight_update()
        finally:
            transport.withdraw(ticket)


# The functions below run in the worker, with the worker as their first argument.


def _packed_modules(worker) -> list[list[str]]:
    mapping = getattr(worker.model_runner.get_model(), "packed_modules_mapping", None) or {}
    return [list(parts) for parts in mapping.values()]


def _fingerprint(worker) -> list[int]:
    """Of norms and biases, which are small: sums of their values' bit patterns."""
    parameters = [p for p in worker.model_runner.get_model().parameters() if p.ndim == 1]
    sums = [p.detach().float().view(torch.int32).sum(dtype=torch.int64) for p in parameters]
    return torch.stack(sums).tolist() if sums else []


def _has_backend(worker) -> bool:
    return isinstance(worker.weight_transfer_engine, LoraStreamEngine)


def _check(worker, metadata: Sequence[ParamMeta]) -> None:
    check_manifest(worker.model_runner.get_model(), worker.vllm_config, metadata)


def _load(worker, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        try:
            reload.start(model)
            reload.load(model, metadata, weights)
            reload.finish(model, worker.model_config)
        except BaseException:
            reload.abort(model)
            raise
    worker.model_runner.reset_lora_state()
