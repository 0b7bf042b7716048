"""The trainer side of the `lora_stream` backend in vLLM's own form, for loops that are written against its factory.

`lora_stream.sync` does more: it pauses the engine, resets its caches, and restores it after a failure.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from lora_stream.plan import ParamMeta
from lora_stream.ring import DEADLINE_S, NUM_SLOTS, SLOT_BYTES
from lora_stream.vllm.channel import Channel
from lora_stream.vllm.source import LoraStreamSource


@dataclass
class LoraStreamTrainerInitInfo(TrainerInitInfo):
    """num_slots times slot_bytes of shared memory; deadline_s: the longest silence of a worker, in seconds; in_place: see
    ``lora_stream.sync``."""

    backend: ClassVar[str] = "lora_stream"

    num_slots: int = NUM_SLOTS
    slot_bytes: int = SLOT_BYTES
    deadline_s: float = DEADLINE_S
    in_place: bool = False


class LoraStreamTrainerEngine(TrainerWeightTransferEngine[LoraStreamTrainerInitInfo]):
    init_info_cls = LoraStreamTrainerInitInfo

    def __init__(
        self, *, client: VLLMWeightSyncClient, source: WeightSource, is_sender: bool, channel: Channel, in_place: bool
    ) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._channel, self._in_place = channel, in_place

    @classmethod
    def trainer_init(
        cls,
        init_info: LoraStreamTrainerInitInfo,
        *,
        client: VLLMWeightSyncClient,
        source: WeightSource | None = None,
    ) -> Self:
        """Connect to the engine's workers. Raises ValueError without a source, and what the client raises."""
        if source is None:
            raise ValueError("the lora_stream backend sends what a WeightSource yields: pass source=")
        channel = Channel(
            num_slots=init_info.num_slots, slot_bytes=init_info.slot_bytes, deadline_s=init_info.deadline_s
        )
        if init_info.is_sender:
            channel.describe(client)
        return cls(
            client=client, source=source, is_sender=init_info.is_sender, channel=channel, in_place=init_info.in_place
        )

    def send_weights(self, weight_version: str | None = None) -> None:
        """One round: check, start, update, finish. The engine must be idle or paused; the caller resets its caches.

        Raises what ``Channel.update`` does.
        """
        assert self.source is not None
        if not self.is_sender:
            for _ in self.source:  # its gathers are collective
                pass
            return
        metadata = [ParamMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in self.source.metadata()]
        self._channel.describe(self.client)
        if isinstance(self.source, LoraStreamSource):
            weights = self.source.stream_into(self._channel.sender)
            weights.begin()  # first: should the check fail, the ranks that only gather are not left waiting
        else:
            weights = self._channel.sender.copy_in(metadata, iter(self.source))
        try:
            self._channel.check(self.client, metadata, in_place=self._in_place)
            self._channel.update(self.client, metadata, weights, weight_version, in_place=self._in_place)
        finally:
            weights.close()

    def shutdown(self) -> None:
        self._channel.close()
