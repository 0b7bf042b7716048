"""The worker side of the `lora_stream` weight-transfer backend, driven by vLLM: start, update, finish."""

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from lora_stream.plan import ParamMeta
from lora_stream.vllm import reload, transport
from lora_stream.vllm.manifest import check_manifest


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on within one process."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update: plain JSON, the tensors themselves go through the transport."""

    ticket: str
    names: list[str]
    dtypes: list[str]  # "bfloat16", ...
    shapes: list[list[int]]

    @classmethod
    def fields_of(cls, ticket: str, metadata: list[ParamMeta]) -> dict:
        return {
            "ticket": ticket,
            "names": [meta.name for meta in metadata],
            "dtypes": [str(meta.dtype).removeprefix("torch.") for meta in metadata],
            "shapes": [list(meta.shape) for meta in metadata],
        }

    def metadata(self) -> list[ParamMeta]:
        columns = zip(self.names, self.dtypes, self.shapes, strict=True)
        return [ParamMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in columns]


class LoraStreamEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        # The check needs the model as it serves: so the reload itself begins with the first update, when it is known what
        # will come.
        self._loading = False

    def receive_weights(self, update_info: UpdateInfo) -> None:
        metadata = update_info.metadata()
        weights = transport.take(update_info.ticket)
        check_manifest(self.model, self.vllm_config, metadata)
        try:
            reload.start(self.model)
            reload.load(self.model, metadata, weights)
        except BaseException:
            reload.abort(self.model)
            raise
        self._loading = True

    def finish_weight_update(self) -> None:
        if not self._loading:
            return
        try:
            reload.finish(self.model, self.model_config)
        except BaseException:
            reload.abort(self.model)
            raise

    def shutdown(self) -> None:
        pass
