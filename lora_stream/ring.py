"""The two ends of a shared-memory ring: one sender, several receivers, nobody waits for ever.

    sender:    ring.link() ─ name ─► receivers attach ─► ring.unlink()
               begin ──► wait_accepted ──► slots, written and published one after the other
    receiver:  accept ──► messages, read in place; dropping what was read releases it

Every wait has a deadline and ends at once when the other side gives up or dies; its error tells who waited for whom and for
which tensor. csrc/staging has the memory and its rules.
"""

import json
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from lora_stream import _C
from lora_stream.filling import Batch, Part
from lora_stream.packing import ALIGNMENT, Message, Piece, pack
from lora_stream.plan import ParamMeta, Plan

assert _C.RING_ALIGNMENT == ALIGNMENT

NUM_SLOTS = 8
SLOT_BYTES = 16 * 1024 * 1024
DEADLINE_S = 60.0
_SLICE_US = 50_000  # how long one sleep may be before signals and peers are looked at


class TransferError(RuntimeError):
    """A transfer through shared memory failed. The text says on which side and why."""


class PeerLostError(TransferError):
    """The other side has died, or has been silent for longer than the deadline."""


def sweep() -> int:
    """Unlink shared memory whose owner is gone; returns how many there were. Making and attaching rings does it too."""
    return _C.sweep()


class Sender:
    """The owner of a ring, and a Staging: a pass merges straight into the slots."""

    def __init__(
        self, *, num_slots: int = NUM_SLOTS, slot_bytes: int = SLOT_BYTES, deadline_s: float = DEADLINE_S
    ) -> None:
        """Reserve num_slots * slot_bytes bytes of shared memory.

        slot_bytes: a multiple of 256. deadline_s: the longest silence of a receiver, in seconds.
        Raises ValueError for wrong sizes and OSError, with what to do, where there is not so much shared memory.
        """
        self._ring = _C.Ring.create(num_slots, slot_bytes)
        weakref.finalize(self, self._ring.unlink)  # also when the interpreter ends without letting go of its objects
        if not self._ring.locked:
            _warn_unlocked(self._ring.num_bytes)
        self.deadline_s = deadline_s
        self.slot_bytes = slot_bytes
        self._slots = torch.frombuffer(self._ring, dtype=torch.uint8).view(num_slots, slot_bytes)
        self._watch: Callable[[], None] = _nothing
        self._generation = 0
        self._unpublished: list[int] = []  # slots that are being filled
        self.num_bytes: int = self._ring.num_bytes
        self.seconds_waited = 0.0  # for free slots, in this update

    def link(self) -> str:
        """Give the memory its name, by which receivers attach until unlink()."""
        return self._ring.link()

    def unlink(self) -> None:
        self._ring.unlink()

    def pin(self, device: torch.device) -> None:
        _pin(self, self._ring, device)

    def receivers(self) -> range:
        return range(self._ring.num_receivers)

    def lives(self, receiver: int) -> bool:
        return self._ring.receiver_lives(receiver)

    def mail(self, receiver: int) -> dict:
        """What the receiver last posted; read it after the call that made it post has returned."""
        return json.loads(self._ring.mail(receiver) or b"{}")

    def begin(self, watch: Callable[[], None]) -> tuple[int, int]:
        """Begin an update; returns its generation and the number of its first message.

        `watch` is called now and then while the sender waits, and may raise.
        """
        self._watch = watch
        self._unpublished.clear()
        self._generation = self._ring.begin_generation()
        self.seconds_waited = 0.0
        return self._generation, self._ring.num_published

    def end(self) -> None:
        """The update is over, however it went. The ring outlives it, what watched over it need not."""
        self._watch = _nothing

    def abort(self, reason: str) -> None:
        """Give the update up; receivers that wait are told."""
        self._ring.abort(self._generation, f"the sender gave up: {reason}")

    def wait_accepted(self) -> None:
        """Until every receiver has agreed to take the update."""
        for receiver in self.receivers():
            self._wait(
                lambda us, receiver=receiver: self._ring.wait_accepted(receiver, self._generation, us),
                lambda receiver=receiver: [receiver],
                "to accept the update",
            )

    def wait_for(self, ready: Callable[[float], bool], what: str) -> None:
        """Until `ready(seconds)`, which waits as long at most, is true, while the receivers live. Nobody else watches: what
        would raise because the engine's call is over must not, where that is what is waited for."""
        self._watch = _nothing
        self._wait(lambda us: ready(us / 1e6), self.receivers, what)

    def batches(self, plan: Plan) -> Iterator[Batch]:
        """The plan's parts in slots; announcing a batch publishes its slot."""
        for device in {task.base.device for task in plan.tasks}:
            self.pin(device)
        for message, outs, publish in self._slots_for(plan.metadata()):
            parts = [
                Part(plan.tasks[piece.index], piece.begin, piece.end, out)
                for piece, out in zip(message.pieces, outs, strict=True)
            ]
            yield Batch(parts, announce=publish)

    def copy_in(
        self, metadata: Sequence[ParamMeta], weights: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Copy tensors that somebody else made into slots; yields each again when it is in.

        Raises ValueError where the weights are not what the metadata said.
        """
        flat = None
        for message, outs, publish in self._slots_for(metadata):
            for piece, out in zip(message.pieces, outs, strict=True):
                meta = metadata[piece.index]
                if piece.begin == 0:
                    name, tensor = next(weights, (None, None))
                    got = None if tensor is None else ParamMeta(name, tensor.dtype, tuple(tensor.shape))
                    if got != meta:
                        raise ValueError(f"the source yielded {got}, but its metadata announced {meta} at this place")
                    flat = tensor.detach().reshape(-1)
                out.copy_(flat[piece.begin : piece.end].view(out.shape))
                if piece.end == flat.numel():
                    yield name, tensor
            publish()
        if (extra := next(weights, None)) is not None:
            raise ValueError(f"the source yielded {extra[0]}, which its metadata did not announce")

    def _slots_for(
        self, metadata: Sequence[ParamMeta]
    ) -> Iterator[tuple[Message, list[torch.Tensor], Callable[[], None]]]:
        """Messages, where their pieces lie, and what to call, in their order, when they do."""
        for message in pack(metadata, self.slot_bytes):
            slot = self._acquire(metadata[message.pieces[0].index].name)
            outs = [_view(self._slots[slot], metadata[piece.index], piece) for piece in message.pieces]
            yield message, outs, partial(self._publish, slot, message.num_bytes)

    def _publish(self, slot: int, num_bytes: int) -> None:
        self._ring.publish(slot, num_bytes)
        self._unpublished.remove(slot)

    def _acquire(self, name: str) -> int:
        begin = time.perf_counter()
        slot = -1

        def acquire(us: int) -> bool:
            nonlocal slot
            slot = self._ring.acquire(us, self._unpublished)
            return slot >= 0

        try:
            self._wait(acquire, lambda: [r for r in self.receivers() if self._ring.owes(r)], f"to make room for {name}")
        finally:
            self.seconds_waited += time.perf_counter() - begin
        self._unpublished.append(slot)
        return slot

    def _wait(self, ready: Callable[[int], bool], whom: Callable[[], Sequence[int]], what: str) -> None:
        give_up = time.monotonic() + self.deadline_s
        while True:
            if self._ring.is_aborted(self._generation):
                raise TransferError(_text(self._ring.abort_reason()))
            if ready(_SLICE_US):
                return
            if self._ring.is_aborted(self._generation):
                continue
            self._watch()
            for receiver in self.receivers():
                if not self.lives(receiver):
                    raise PeerLostError(f"{self.who(receiver)} died while the sender waited for it {what}")
            if time.monotonic() > give_up:
                raise PeerLostError(
                    f"the sender waited {self.deadline_s:g} s for {', '.join(map(self.who, whom()))} {what}, in vain"
                )

    def who(self, receiver: int) -> str:
        """A receiver's name for people."""
        return f"engine worker {receiver} (process {self._ring.pid(receiver)})"


class Receiver:
    """A worker's end of a ring that another process owns."""

    def __init__(self, name: str) -> None:
        """Attach to the ring of that name. Raises OSError, with what to do, where it cannot."""
        self.name = name
        self._ring = _C.Ring.attach(name)
        self.index = self._ring.receiver
        self._generation = 0
        self.seconds_waited = 0.0  # for messages, in this generation
        self._next = 0

    def pin(self, device: torch.device) -> None:
        _pin(self, self._ring, device)

    def post(self, mail: dict) -> None:
        """Leave a note for the sender, of at most 4 KiB as JSON."""
        data = json.dumps(mail, ensure_ascii=False).encode()
        assert len(data) <= _C.RING_MAIL_BYTES, f"mail of {len(data)} bytes"
        self._ring.post(data)

    def accept(self, generation: int, first: int) -> None:
        """Agree to take the update that begins with message `first`; forget what an earlier one left unread."""
        self._generation, self._next, self.seconds_waited = generation, first, 0.0
        self._ring.accept(generation, first)

    def abort(self, generation: int, reason: str) -> None:
        """Give an update up; the sender and the other receivers are told."""
        self._ring.abort(generation, f"engine worker {self.index} gave up: {reason}")

    def tensors(
        self, metadata: Sequence[ParamMeta], *, deadline_s: float = DEADLINE_S
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The update's tensors. Where the ring allows it they lie in shared memory, as long as they are held; the rest are
        copies."""
        whole: torch.Tensor | None = None
        for message in pack(metadata, self._ring.slot_bytes):
            lease = self._take(metadata[message.pieces[0].index].name, deadline_s)
            memory = (
                torch.frombuffer(lease, dtype=torch.uint8) if message.num_bytes else torch.empty(0, dtype=torch.uint8)
            )
            assert memory.numel() == message.num_bytes, "both sides pack alike"
            in_place = lease.may_keep()
            del lease  # from here on the tensors hold it
            for piece in message.pieces:
                meta = metadata[piece.index]
                tensor = _view(memory, meta, piece)
                if piece == message.pieces[-1]:
                    del memory
                numel = meta.num_bytes // meta.dtype.itemsize
                if piece.end - piece.begin < numel:
                    if piece.begin == 0:
                        whole = torch.empty(meta.shape, dtype=meta.dtype)
                    assert whole is not None
                    whole.view(-1)[piece.begin : piece.end] = tensor.view(-1)
                    tensor = whole
                    if piece.end < numel:
                        continue
                    whole = None
                elif not in_place:
                    tensor = tensor.clone()
                holder = [tensor]
                del tensor
                yield meta.name, holder.pop()  # held nowhere else: dropping it is the release

    def _take(self, name: str, deadline_s: float) -> "_C.Lease":
        begin = time.perf_counter()
        give_up = time.monotonic() + deadline_s
        while not self._ring.wait_published(self._next, _SLICE_US):
            if self._ring.is_aborted(self._generation):
                raise TransferError(_text(self._ring.abort_reason()))
            if not self._ring.sender_lives():
                raise PeerLostError(f"the sender died while engine worker {self.index} waited for {name}")
            if time.monotonic() > give_up:
                raise PeerLostError(
                    f"engine worker {self.index} waited {deadline_s:g} s for {name} to be sent, in vain"
                )
        if self._ring.is_aborted(self._generation):
            raise TransferError(_text(self._ring.abort_reason()))
        lease = self._ring.lease(self._next)
        self._next += 1
        self.seconds_waited += time.perf_counter() - begin
        return lease


def _view(memory: torch.Tensor, meta: ParamMeta, piece: Piece) -> torch.Tensor:
    """The piece's elements in memory: in the tensor's shape where it is whole, as rows where it is cut between rows."""
    num_bytes = (piece.end - piece.begin) * meta.dtype.itemsize
    flat = memory[piece.offset : piece.offset + num_bytes].view(meta.dtype)
    numel = meta.num_bytes // meta.dtype.itemsize
    if piece.end - piece.begin == numel:
        return flat.view(meta.shape)
    row = numel // meta.shape[0]
    return flat.view(-1, *meta.shape[1:]) if piece.begin % row == 0 and piece.end % row == 0 else flat


def _nothing() -> None:
    pass


def _text(reason: bytes) -> str:
    return reason.decode(errors="replace")


_has_warned = False


def _warn_unlocked(num_bytes: int) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            f"{num_bytes >> 20} MiB of staging could not be locked in memory and may be swapped out: raise `ulimit -l`",
            stacklevel=3,
        )


def _pin(owner: object, ring: "_C.Ring", device: torch.device) -> None:
    """Let the device read and write the ring directly, once; taken back when `owner` goes, before the memory does. Where
    that fails, it works all the same, by way of the driver's own buffers."""
    if device.type != "cuda" or getattr(owner, "_pinned", False):
        return
    owner._pinned = True  # type: ignore[attr-defined]
    if error := _C.pin(
        ring.address, ring.num_bytes, torch.cuda.current_device() if device.index is None else device.index
    ):
        warnings.warn(
            f"{ring.num_bytes >> 20} MiB of staging could not be pinned, so copies between it and the device are slower: "
            f"{error}",
            stacklevel=3,
        )
        return
    weakref.finalize(owner, lambda ring: _C.unpin(ring.address), ring)
