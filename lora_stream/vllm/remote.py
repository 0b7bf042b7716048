"""The engine of `lora_stream.sync` that lives in other processes: its client's calls, and a ring to its workers."""

from collections.abc import Iterator, Sequence

import torch

from lora_stream.plan import ParamMeta
from lora_stream.ring import Sender
from lora_stream.vllm.channel import Channel
from lora_stream.vllm.clients import EngineClient


class RemoteEngine:
    """As it is at one sync; the channel stays for the next."""

    def __init__(self, client: EngineClient, channel: Channel, *, in_place: bool) -> None:
        self._client, self._channel, self._in_place = client, channel, in_place
        workers = channel.describe(client)
        self.wire_dtype: torch.dtype = getattr(torch, workers[0]["dtype"])
        self.fused_modules: Sequence[Sequence[str]] = workers[0]["fused_modules"]
        self.is_pristine = all(worker["num_updates"] == 0 for worker in workers)
        self.is_mixture = any(worker["is_mixture"] for worker in workers)
        self.seconds_loading: float | None = None
        self._fingerprint: object = [worker["fingerprint"] for worker in workers]
        # A sender that died in its sync has left the engine paused: that pause is ours to end.
        self._must_resume = any(worker["is_paused_by_sender"] for worker in workers)

    @property
    def staging(self) -> Sender:
        return self._channel.sender

    def check(self, metadata: Sequence[ParamMeta]) -> None:
        self._client.is_still()  # raises where the engine must be idle and is not; asked again at the pause
        self._channel.check(self._client, metadata, in_place=self._in_place)

    def fingerprint(self) -> object:
        if self._fingerprint is None:
            self._fingerprint = [worker["fingerprint"] for worker in self._channel.describe(self._client)]
        return self._fingerprint

    def pause(self) -> None:
        if not self._client.is_still():
            self._channel.tell_paused(self._client, True)  # first: it must be known also if this process dies next
            self._must_resume = True
            self._client.pause()

    def resume(self) -> None:
        if self._must_resume:
            self._client.resume()
            self._channel.tell_paused(self._client, False)
            self._must_resume = False

    def update(
        self, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]], weight_version: str | None
    ) -> None:
        self._fingerprint = None
        workers = self._channel.update(self._client, metadata, weights, weight_version, in_place=self._in_place)
        self.seconds_loading = max(worker["seconds"] - worker["seconds_waited"] for worker in workers)
        # vLLM keeps the old policy's prefixes otherwise, and mixes them into new answers without a word.
        if not self._client.reset_prefix_cache():
            raise RuntimeError(
                "the engine has the new weights but could not reset its prefix cache (requests hold its blocks); it would "
                "answer from the old policy's cache"
            )
