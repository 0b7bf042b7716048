"""One engine as its sender sees it: the calls that vLLM has for weight transfer, and a ring that its workers read.

    connect ──► describe ──► check ──► update          client: the calls, over whatever reaches the engine
       └─ a new ring, when the engine restarted or a worker died

Imports no vLLM: the process of a trainer need not have it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
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
        self._num_questions = 0
        self._is_open = False

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
        return self._connect(client)

    def check(self, client: Client, metadata: Sequence[ParamMeta], *, in_place: bool) -> None:
        """Raise RefusedError unless every worker would load exactly these tensors."""
        self._ask(client, manifest=wire.encode(metadata), in_place=in_place)

    def tell_paused(self, client: Client, paused: bool) -> None:
        """So that the next sender knows whose pause it finds, should this one die in it."""
        self._ask(client, paused=paused)

    def _connect(self, client: Client) -> list[dict]:
        self._sender = None  # its memory goes first
        self._sender = Sender(num_slots=self._num_slots, slot_bytes=self.slot_bytes, deadline_s=self.deadline_s)
        self._region = self._sender.link()
        try:
            workers = self._ask(client)
            _check_all_attached(workers, client)
        except BaseException:
            self._sender = None
            raise
        finally:
            if self._sender is not None:
                self._sender.unlink()
        return workers

    def _ask(self, client: Client, **question) -> list[dict]:
        self._num_questions += 1
        client.init_weight_transfer_engine({"region": self._region, "question": self._num_questions, **question})
        answers = [self.sender.mail(receiver) for receiver in self.sender.receivers()]
        for receiver, answer in enumerate(answers):
            if answer.get("question") != self._num_questions:
                raise TransferError(f"{self.sender.who(receiver)} has not answered; its log may say why")
            if "refused" in answer:
                raise RefusedError(answer["refused"])
        self._is_open = any(answer["is_open"] for answer in answers)
        return answers

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
        sender = self.sender
        if (
            self._is_open
        ):  # a sender that died has left it so, or a call that failed; finishing does nothing to the weights
            self._finish(client)
        client.start_weight_update()
        self._is_open = True
        call = _Call(client.update_weights)
        sender.deadline_s = self.deadline_s
        generation, first = sender.begin(call.raise_if_over)
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
            sender.wait_accepted()
            for _ in weights:
                pass
            sender.wait_for(call.wait, "to load what it has got")
            call.raise_if_failed()
            self._check_loaded(generation)
        except BaseException as error:
            sender.abort(f"{type(error).__name__}: {error}")
            self._raise_if_lost(error)
            # Whatever comes next for this engine must not meet the call that is ending; and its workers have answered then.
            if not call.wait(self.deadline_s):
                raise PeerLostError(
                    f"the engine's update call did not come back within {self.deadline_s:g} s of {error}"
                ) from error
            if call.succeeded:
                self._finish(client)
            else:
                self._is_open = False  # an error out of the call has ended the update for vLLM
            self._raise_cause(error, generation)
            raise
        finally:
            sender.end()
        self._finish(client, weight_version)
        return [sender.mail(receiver) for receiver in sender.receivers()]

    def _finish(self, client: Client, weight_version: str | None = None) -> None:
        client.finish_weight_update(weight_version)
        self._is_open = False

    def _check_loaded(self, generation: int) -> None:
        for receiver in self.sender.receivers():
            mail = self.sender.mail(receiver)
            if mail.get("generation") != generation or "seconds" not in mail:
                raise TransferError(f"{self.sender.who(receiver)} does not say that it has loaded the weights")

    def _raise_if_lost(self, error: BaseException) -> None:
        if isinstance(error, PeerLostError):
            raise error
        if isinstance(error, TransferError):
            if isinstance(error.__cause__, ConnectionError):
                raise PeerLostError(str(error)) from error
            for receiver in self.sender.receivers():
                if not self.sender.lives(receiver):
                    raise PeerLostError(f"{self.sender.who(receiver)} died in the update ({error})") from error

    def _raise_cause(self, error: BaseException, generation: int) -> None:
        """What a worker said of its failure is nearer to the cause than how the sender met it."""
        if not isinstance(error, TransferError):
            return
        for receiver in self.sender.receivers():
            mail = self.sender.mail(receiver)
            if mail.get("generation") != generation:
                continue
            if "refused" in mail:
                raise RefusedError(mail["refused"]) from error
            if "failed" in mail and "gave up" not in mail["failed"]:  # it is not the echo of another's failure
                raise TransferError(f"{self.sender.who(receiver)}: {mail['failed']}") from error


def _check_all_attached(workers: Sequence[dict], client: Client) -> None:
    """Each of an engine's workers must have attached: one that has not would keep its part of the old policy."""
    if hasattr(client, "num_workers"):
        expected = client.num_workers()
        complete = len(workers) == expected
    else:  # then at least no engine may be there in part
        expected = "some"
        num_engines = sum(Fraction(1, worker["num_workers"]) for worker in workers)
        complete = num_engines.denominator == 1 and num_engines >= getattr(client, "num_engines", 1)
    if not complete:
        raise TransferError(
            f"{len(workers)} of {expected} workers attached to the staging; the log of the others may say why. All must run on "
            'this host, as this user, with the same /dev/shm, and with weight_transfer_config={"backend": "lora_stream"}'
        )


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

    @property
    def succeeded(self) -> bool:
        return self._done.is_set() and self._error is None

    def raise_if_failed(self) -> None:
        if self._done.is_set() and self._error is not None:
            raise _CallError(f"the engine's update call failed: {self._error}") from self._error

    def raise_if_over(self) -> None:
        self.raise_if_failed()
        if self._done.is_set():
            raise _CallError("the engine's update call came back before it had taken everything")
