"""One engine as its sender sees it: the calls that vLLM has for weight transfer, and a ring that its workers read.

    connect ──► describe ──► check ──► update          client: the calls, over whatever reaches the engine
       └─ a new ring, when the engine restarted or a worker died

Imports no vLLM: the process of a trainer need not have it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lora_stream.plan import ParamMeta
from lora_stream.ring import DEADLINE_S, NUM_SLOTS, SLOT_BYTES, PeerLostError, Sender, TransferError
from lora_stream.vllm import wire


class RefusedError(ValueError):
    """A worker would not load these tensors; it holds what it held."""


class Client(Protocol):
    """vLLM's calls for weight transfer, each blocking; vLLM's own clients have these four methods too."""

    def init_weight_transfer_engine(self, init_info: dict) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Channel:
    """A ring to all workers of an engine, made when it is first needed and remade when the engine has lost it."""

    def __init__(
        self, *, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES, deadline_s: float = DEADLINE_S
    ) -> None:
        """num_slots, slot_bytes: of the shared memory, together what is held between syncs. deadline_s: the longest
        silence of a worker, in seconds."""
        self._num_slots, self.slot_bytes, self.deadline_s = num_slots, slot_bytes, deadline_s
        self._sender: Sender | None = None
        self._region = ""

    @property
    def sender(self) -> Sender:
        assert self._sender is not None, "describe() connects"
        return self._sender

    def close(self) -> None:
        """Give the shared memory back; the engine's workers do when they next hear of a sender, or are told to."""
        self._sender = None

    def describe(self, client: Client) -> list[dict]:
        """What each worker says of itself, see worker.py. Attaches the workers first, where they are not."""
        if self._sender is not None and all(map(self._sender.lives, self._sender.receivers())):
            try:
                return self._ask(client)
            except Exception:
                pass  # the engine was restarted and knows nothing of the ring: make a new one
        self._connect(client)
        return self._ask(client)

    def check(self, client: Client, metadata: Sequence[ParamMeta], *, in_place: bool) -> None:
        """Raise RefusedError unless every worker would load exactly these tensors."""
        self._ask(client, manifest=wire.encode(metadata), in_place=in_place)

    def tell_paused(self, client: Client, paused: bool) -> None:
        """So that the next sender knows whose pause it finds, should this one die in it."""
        self._ask(client, paused=paused)

    def _ask(self, client: Client, **question) -> list[dict]:
        client.init_weight_transfer_engine({"region": self._region, **question})
        answers = [self.sender.mail(receiver) for receiver in self.sender.receivers()]
        for answer in answers:
            if "refused" in answer:
                raise RefusedError(answer["refused"])
        return answers

    def _connect(self, client: Client) -> None:
        self._sender = None
        sender = Sender(num_slots=self._num_slots, slot_bytes=self.slot_bytes, deadline_s=self.deadline_s)
        region = sender.link()
        try:
            client.init_weight_transfer_engine({"region": region})
        finally:
            sender.unlink()
        if not sender.receivers():
            raise TransferError(
                "no worker of the engine attached to the staging; start the engine with "
                'weight_transfer_config={"backend": "lora_stream"}'
            )
        self._sender, self._region = sender, region

    def update(
        self,
        client: Client,
        metadata: Sequence[ParamMeta],
        weights: Iterator[object],
        weight_version: str | None,
        *,
        in_place: bool,
    ) -> list[dict]:
        """Bring the weights into the engine; returns what each worker says of it.

        weights: an iterator that puts one tensor of `metadata` after the other into this channel's sender.
        Raises RefusedError if a worker refuses the tensors, untouched; TransferError and whatever `weights` raises if the
        update broke off, PeerLostError if the engine does not answer any more.
        """
        _start(client)
        call = _Call(client.update_weights)
        self.sender.deadline_s = self.deadline_s
        generation, first = self.sender.begin(call.raise_if_failed)
        call.begin(
            {
                "region": self._region,
                "generation": generation,
                "first": first,
                "deadline_s": self.deadline_s,
                "manifest": wire.encode(metadata),
                "in_place": in_place,
            }
        )
        try:
            self.sender.wait_accepted()
            for _ in weights:
                pass
            self.sender.wait_for(call.wait, "to load what it has got")
            call.raise_if_failed()
        except BaseException as error:
            self.sender.abort(f"{type(error).__name__}: {error}")
            # Whatever comes next for this engine must not meet the call that is ending.
            if not isinstance(error, PeerLostError):
                call.wait(self.deadline_s)
            raise self._cause(error) from error
        client.finish_weight_update(weight_version)
        return [self.sender.mail(receiver) for receiver in self.sender.receivers()]

    def _cause(self, error: BaseException) -> BaseException:
        """What a worker said of its failure is nearer to the cause than how its call came back."""
        if not isinstance(error, TransferError) or isinstance(error, PeerLostError):
            return error
        for receiver in self.sender.receivers():
            if not self.sender.lives(receiver):
                return PeerLostError(f"{self.sender.who(receiver)} died in the update ({error})")
            mail = self.sender.mail(receiver)
            if "refused" in mail:
                return RefusedError(mail["refused"])
            if "failed" in mail and "the sender gave up" not in mail["failed"]:
                return TransferError(f"{self.sender.who(receiver)}: {mail['failed']}")
        return error


def _start(client: Client) -> None:
    try:
        client.start_weight_update()
    except Exception:
        # A sender that died between start and finish has left it open; finishing it does nothing to the weights.
        client.finish_weight_update()
        client.start_weight_update()


class _CallError(TransferError):
    """The engine's update call came back with an error."""


class _Call:
    """A call in a thread of its own: it returns only when all has been sent, or never, where the engine has died."""

    def __init__(self, function: Callable[[dict], None]) -> None:
        self._function = function
        self._done = threading.Event()
        self._error: BaseException | None = None

    def begin(self, argument: dict) -> None:
        # A daemon: a call that never returns must not keep the interpreter from its exit.
        threading.Thread(target=self._run, args=(argument,), daemon=True, name="lora_stream update").start()

    def _run(self, argument: dict) -> None:
        try:
            self._function(argument)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def raise_if_failed(self) -> None:
        if self._done.is_set() and self._error is not None:
            raise _CallError(f"the engine's update call failed: {self._error}") from self._error
