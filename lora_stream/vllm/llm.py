"""The engine of `lora_stream.sync` that is a vllm.LLM in this process: the stream goes into its loaders as it is."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from vllm import LLM
from vllm.config import set_current_vllm_config

from lora_stream.merged_weights import FreshStaging
from lora_stream.plan import ParamMeta
from lora_stream.vllm import reload
from lora_stream.vllm.fingerprint import fingerprint, renew
from lora_stream.vllm.manifest import check_manifest


def is_in_this_process(llm: LLM) -> bool:
    """Whether the engine core and a worker are objects here; otherwise all there is are calls.

    With the external launcher every process of a tensor-parallel group has an LLM with a worker of its own, and loads its part.
    """
    has_executor = getattr(llm.llm_engine, "model_executor", None) is not None
    parallel = llm.llm_engine.vllm_config.parallel_config
    return has_executor and (parallel.world_size == 1 or parallel.distributed_executor_backend == "external_launcher")


class LLMEngine:
    """A vllm.LLM whose engine core and worker live in this process. It needs no weight-transfer backend."""

    is_pristine = True
    is_mixture = False
    seconds_loading = None

    def __init__(self, llm: LLM, *, in_place: bool) -> None:
        self._llm = llm
        self._in_place = in_place
        self.staging = FreshStaging()
        self.wire_dtype: torch.dtype = llm.llm_engine.vllm_config.model_config.dtype
        (packed,) = llm.collective_rpc(_packed_modules)
        self.fused_modules: Sequence[Sequence[str]] = packed

    def check(self, metadata: Sequence[ParamMeta]) -> None:
        if self._llm.llm_engine.has_unfinished_requests():
            raise ValueError("the engine has unfinished requests; finish or abort them before a sync")
        if "weights" in self._llm.llm_engine.model_executor.sleeping_tags:
            raise ValueError(
                'the engine sleeps, its weights are not in memory; call wake_up(tags=["weights"]) before a sync'
            )
        self._llm.collective_rpc(partial(_check, metadata=metadata, in_place=self._in_place))

    def fingerprint(self) -> object:
        # Somebody may have reloaded the weights from disk. After sleep(level=2) they are gone, and waking up does not bring
        # them back: what is unchanged for the trainer must be sent again then.
        (found,) = self._llm.collective_rpc(_fingerprint)
        return found

    def pause(self) -> None:
        pass  # it computes only while it is called

    def resume(self) -> None:
        pass

    def update(
        self, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], weight_version: str | None
    ) -> None:
        self._llm.collective_rpc(partial(_load, metadata=metadata, weights=weights, in_place=self._in_place))
        # vLLM keeps the old policy's prefixes otherwise, and mixes them into new answers without a word.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "the engine has the new weights but could not reset its prefix cache (requests hold its blocks); it would "
                "answer from the old policy's cache: rebuild the engine"
            )
        if weight_version is not None:
            self._llm.llm_engine.set_weight_version(weight_version)


# The functions below run in the worker, with the worker as their first argument.


def _packed_modules(worker) -> list[list[str]]:
    mapping = getattr(worker.model_runner.get_model(), "packed_modules_mapping", None) or {}
    return [list(parts) for parts in mapping.values()]


def _fingerprint(worker) -> list[str]:
    return fingerprint(worker.model_runner.get_model())


def _check(worker, metadata: Sequence[ParamMeta], in_place: bool) -> None:
    check_manifest(worker.model_runner.get_model(), worker.vllm_config, metadata, in_place=in_place)


def _load(
    worker, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], in_place: bool = False
) -> None:
    with set_current_vllm_config(worker.vllm_config):
        model = worker.model_runner.get_model()
        reload.load(model, worker.model_config, metadata, weights, in_place=in_place)
        renew(model)
    worker.model_runner.reset_lora_state()
