"""The worker side of the `lora_stream` weight-transfer backend, driven by vLLM over RPC in every worker process.

    init    attach to the sender's memory; answer into it: what is this engine, would it load this?
    update  check ──► accept ──► read, load and finish; on any error: put back what can be, and say why

The tensors and the answers go through shared memory, the calls carry plain JSON. Failures are answers too: where an engine
has several workers, an exception out of a call makes vLLM leave the other workers' replies unread, and take each of them for
the reply to the next call from then on.
"""

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from lora_stream.plan import ParamMeta
from lora_stream.ring import Receiver
from lora_stream.vllm import reload, wire
from lora_stream.vllm.fingerprint import fingerprint, is_asleep, renew
from lora_stream.vllm.manifest import check_manifest

logger = init_logger(__name__)

_MAX_MESSAGE = 3000  # bytes of an error's text that fit into an answer


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Attach to `region`, unless that was done before, and answer the question.

    manifest: see wire.py; asks whether an update of these tensors would be taken.
    paused: the sender pauses the engine from now on (True), or has resumed it (False).
    Without either the question is what this engine is.
    """

    region: str
    question: int  # its number, for the answer
    manifest: dict | None = None
    in_place: bool = False
    paused: bool | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One update: the messages of a generation, from number `first` on."""

    region: str
    generation: int
    first: int
    deadline_s: float
    manifest: dict
    in_place: bool = False


class LoraStreamEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config, vllm_config, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._receiver: Receiver | None = None
        self._instance = secrets.token_hex(8)  # another one after a restart: the weights are those from disk again
        self._num_updates = 0
        self._unsure: set[str] = set()  # tensors that a failed update may have replaced in part
        self._paused_by_sender = False
        self._is_open = False  # between start_weight_update and finish_weight_update

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if self._receiver is None or self._receiver.name != init_info.region:
            self._receiver = None  # first, so that the memory of an old sender is not held beside the new one's
            try:
                self._receiver = Receiver(init_info.region)
            except (OSError, ValueError) as error:
                self._complain(error)
                return
            self._receiver.pin(self.device)
        answer: dict = {"question": init_info.question, "is_open": self._is_open}
        if init_info.paused is not None:
            self._paused_by_sender = init_info.paused
        elif init_info.manifest is not None:
            try:
                self._check(wire.decode(init_info.manifest), init_info.in_place)
            except ValueError as error:
                answer["refused"] = _clip(str(error))
        else:
            answer |= self._describe()
        self._receiver.post(answer)

    def _describe(self) -> dict:
        mapping = getattr(self.model, "packed_modules_mapping", None) or {}
        return {
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "fused_modules": [list(parts) for parts in mapping.values()],
            "fingerprint": [self._instance, fingerprint(self.model)],
            "num_updates": self._num_updates,
            "is_mixture": bool(self._unsure),
            "is_paused_by_sender": self._paused_by_sender,
            "num_workers": self.parallel_config.world_size_across_dp,
        }

    def _check(self, metadata: list[ParamMeta], in_place: bool) -> None:
        if is_asleep():
            raise ValueError(
                'the engine sleeps, its weights are not in memory; call wake_up(tags=["weights"]) before a sync'
            )
        check_manifest(self.model, self.vllm_config, metadata, in_place=in_place)

    def start_weight_update(self) -> None:
        """Only noted: an update is whole, from check to finish, so that nobody who dies between two calls can leave the
        model's parameters on the meta device, where a forward pass kills the engine."""
        self._is_open = True

    def receive_weights(self, update_info: UpdateInfo) -> None:
        receiver = self._receiver
        if receiver is None or receiver.name != update_info.region:
            self._is_open = self.parallel_config.world_size > 1  # an exception ends the update for vLLM
            self._complain(
                ValueError("this worker is not attached to the sender's memory; call init_weight_transfer_engine first")
            )
            return
        begin = time.perf_counter()
        generation = update_info.generation
        taken: list[str] = []
        answer: dict = {"generation": generation}
        try:
            metadata = wire.decode(update_info.manifest)
            self._check(metadata, update_info.in_place)
            receiver.accept(generation, update_info.first)
            weights = _noting(receiver.tensors(metadata, deadline_s=update_info.deadline_s), taken)
            reload.load(self.model, self.model_config, metadata, weights, in_place=update_info.in_place)
        except Exception as error:
            self._unsure.update(taken)
            refused = isinstance(error, ValueError) and not taken
            text = _clip(str(error) if refused else f"{type(error).__name__}: {error}")
            logger.error("weight update %d was %s: %s", generation, "refused" if refused else "broken off", text)
            receiver.post(answer | {"refused" if refused else "failed": text})
            receiver.abort(generation, text)
        else:
            renew(self.model)
            self._num_updates += 1
            self._unsure.difference_update(taken)
            seconds = time.perf_counter() - begin
            receiver.post(answer | {"seconds_waited": receiver.seconds_waited, "seconds": seconds})

    def finish_weight_update(self) -> None:
        """Only noted, see start_weight_update."""
        self._is_open = False

    def _complain(self, error: Exception) -> None:
        """Of what cannot be answered, since the sender's memory is not there."""
        if self.parallel_config.world_size == 1:
            raise error
        logger.error("%s", error)

    def shutdown(self) -> None:
        self._receiver = None


def _noting(weights: Iterator[tuple[str, torch.Tensor]], taken: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    holder: list[tuple[str, torch.Tensor]] = []
    for item in weights:
        taken.append(item[0])
        holder.append(item)
        del item
        yield holder.pop()  # held nowhere else: dropping it is the release


def _clip(text: str) -> str:
    return text.encode()[:_MAX_MESSAGE].decode(errors="ignore")
