"""The stream as vLLM's `WeightSource`, for vLLM's own transports: its `nccl` and `ipc` trainer engines.

    client = VersionedClient(HTTPVLLMWeightSyncClient(url))
    trainer = WeightTransferTrainerFactory.trainer_init(
        NCCLTrainerInitInfo(...), client=client, source=LoraStreamSource(model))
    client.weight_version = "17"
    trainer.send_weights()

Around it the caller pauses the engine, resets its caches and resumes it, as `lora_stream.sync` does by itself.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient, WeightSource

from lora_stream.merged_weights import Gather, MergedWeights, Staging, Stream
from lora_stream.plan import FUSED_MODULES, Scope
from lora_stream.rounding import RoundingMode


class LoraStreamSource(WeightSource):
    """The merged weights of a model; each ``iter()`` is a fresh pass over them as they are then.

    scope "trained" announces and yields merged targets and whatever else trains, closed over what vLLM stacks with them.
    Such a source does not describe a whole model, so backends that plan over one (`sharded_rdt`) must not get it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wire_dtype: torch.dtype | None = torch.bfloat16,
        scope: Scope = "all",
        adapter_name: str | None = None,
        rounding: RoundingMode = "dither",
        seed: int = 0,
        untie: bool = False,
        rename: Callable[[str], str] | None = None,
        check_finite: bool = True,
        fused_modules: Sequence[Sequence[str]] = FUSED_MODULES,
        gather: Gather = "all",
        is_sender: bool | None = None,
    ) -> None:
        """The arguments and the errors are those of ``MergedWeights``; what goes to an engine is dithered by default. Of a sharded model every rank makes one; with
        gather="sender" those that do not send iterate over nothing, and take part in the gathers by it."""
        self._weights = MergedWeights(
            model,
            wire_dtype=wire_dtype,
            scope=scope,
            adapter_name=adapter_name,
            rounding=rounding,
            seed=seed,
            untie=untie,
            rename=rename,
            check_finite=check_finite,
            fused_modules=fused_modules,
            gather=gather,
            is_sender=is_sender,
        )

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self._weights.metadata()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights)

    def stream_into(self, staging: Staging) -> Stream:
        """A pass that merges straight into a staging's memory, for the trainer engine of the `lora_stream` backend."""
        return self._weights.stream_into(staging)


class VersionedClient:
    """A client whose next update gets `weight_version`. vLLM's `nccl` and `ipc` trainer engines set none, and the engine
    would go on reporting the old one with its outputs."""

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self._client = client
        self.weight_version: str | None = None

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._client.start_weight_update()

    def update_weights(self, update_info) -> None:
        self._client.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.finish_weight_update(self.weight_version if weight_version is None else weight_version)
