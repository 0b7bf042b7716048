"""The two ends of a ring: what arrives, how waits end, and that nothing is left behind. Unit layer; a receiver is a thread
or a process. The rules inside are tested in tests/cpp/test_ring.cpp."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lora_stream import _C
from lora_stream import ring as ring_module
from lora_stream.merged_weights import MergedWeights
from lora_stream.plan import ParamMeta
from lora_stream.ring import PeerLostError, Receiver, Sender, TransferError, sweep
from tests.models import llama, with_lora
from tests.shm import regions

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = set(regions())
    yield
    assert set(regions()) <= before


def connect(num_receivers=1, **kwargs):
    sender = Sender(**{"num_slots": 4, "slot_bytes": 1024, "deadline_s": 20, **kwargs})
    name = sender.link()
    receivers = [Receiver(name) for _ in range(num_receivers)]
    sender.unlink()
    return sender, receivers


def begin(sender, receivers, watch=lambda: None):
    generation, first = sender.begin(watch)
    for receiver in receivers:
        receiver.accept(generation, first)
    sender.wait_accepted()
    return generation


class Reader(threading.Thread):
    """Takes everything as an engine does: keeps `module` tensors before it lets go of them."""

    def __init__(self, receiver, metadata, module=1, pause=0.0, deadline_s=20.0):
        super().__init__(daemon=True)
        self.receiver, self.metadata, self.module = receiver, metadata, module
        self.pause, self.deadline_s = pause, deadline_s
        self.got, self.error = [], None
        self.start()

    def run(self):
        held = []
        try:
            for name, tensor in self.receiver.tensors(self.metadata, deadline_s=self.deadline_s):
                held.append((name, tensor))
                del tensor
                time.sleep(self.pause)
                if len(held) == self.module:
                    self.got += [(name, tensor.clone()) for name, tensor in held]
                    held.clear()
            self.got += [(name, tensor.clone()) for name, tensor in held]
        except Exception as error:
            self.error = error

    def result(self):
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.got


def some_tensors():
    shapes = [(3, 5), (200, 7), (), (0, 4), (1, 2000), (64,), (31, 33), (5, 1), (3000,)]
    dtypes = [torch.bfloat16, torch.float32, torch.int64, torch.float16]
    return [(f"t{i}", torch.randn(shape).mul(50).to(dtypes[i % len(dtypes)])) for i, shape in enumerate(shapes * 3)]


def metadata_of(tensors):
    return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]


def assert_same(got, want):
    assert [name for name, _ in got] == [name for name, _ in want]
    for (name, tensor), (_, expected) in zip(got, want, strict=True):
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("num_slots", [2, 3, 8])
def test_one_slot_is_filled_while_the_one_before_is_not_yet_published(num_slots):
    """As a device does, which runs a batch ahead."""
    sender, (receiver,) = connect(num_slots=num_slots)
    tensors = [(f"t{i}", torch.randn(200)) for i in range(12)]  # one fills a slot
    for _ in range(2):
        begin(sender, [receiver])
        reader = Reader(receiver, metadata_of(tensors))
        publish_last = None
        for (_, outs, publish), (_, tensor) in zip(sender._slots_for(metadata_of(tensors)), tensors, strict=True):
            outs[0].copy_(tensor)
            if publish_last is not None:
                publish_last()
            publish_last = publish
        publish_last()
        assert_same(reader.result(), tensors)
    # An update that was given up leaves no slot out of use.
    begin(sender, [receiver])
    next(sender._slots_for(metadata_of(tensors)))
    sender.abort("a test")
    begin(sender, [receiver])
    reader = Reader(receiver, metadata_of(tensors))
    list(sender.copy_in(metadata_of(tensors), iter(tensors)))
    assert_same(reader.result(), tensors)


def test_a_call_that_ends_between_two_looks_at_it_has_ended_well():
    sender, (receiver,) = connect()
    is_over = threading.Event()

    def watch():
        if is_over.is_set():
            raise RuntimeError("the call came back before everything was taken")

    begin(sender, [receiver], watch)
    tensors = [("t", torch.randn(5))]
    reader = Reader(receiver, metadata_of(tensors))
    list(sender.copy_in(metadata_of(tensors), iter(tensors)))
    reader.result()

    def wait(_seconds):
        was_over = is_over.is_set()
        is_over.set()  # just after the look
        return was_over

    sender.wait_for(wait, "to end")


@pytest.mark.parametrize("num_slots", [2, 3, 8])
@pytest.mark.parametrize("slot_bytes", [256, 1024, 1 << 20])
def test_tensors_arrive_bitwise_at_receivers_of_any_speed_and_appetite(num_slots, slot_bytes):
    sender, receivers = connect(3, num_slots=num_slots, slot_bytes=slot_bytes)
    tensors = some_tensors()
    metadata = metadata_of(tensors)
    for _ in range(2):
        begin(sender, receivers)
        readers = [
            Reader(receivers[0], metadata),
            Reader(receivers[1], metadata, module=5, pause=0.001),
            Reader(receivers[2], metadata, module=len(tensors)),
        ]
        sent = [name for name, _ in sender.copy_in(metadata, iter(tensors))]
        assert sent == [name for name, _ in tensors]
        for reader in readers:
            assert_same(reader.result(), tensors)
        for reader in readers:
            assert not sender._ring.owes(reader.receiver.index)


@pytest.mark.parametrize("slot_bytes", [256, 512, 4096, 1 << 20])
def test_merging_into_slots_gives_the_bits_and_the_account_of_a_plain_stream(slot_bytes):
    model = with_lora(llama(tied=True))
    weights = MergedWeights(model)
    plain = weights.__iter__()
    want = list(plain)
    sender, receivers = connect(1, slot_bytes=slot_bytes)
    begin(sender, receivers)
    reader = Reader(receivers[0], weights.metadata())
    into = weights.stream_into(sender)
    assert [name for name, _ in into] == [name for name, _ in want]
    assert_same(reader.result(), want)
    assert into.stats.sent == plain.stats.sent
    assert into.stats.peak_staging_bytes == sender.num_bytes
    for name, rounding in plain.stats.rounding.items():
        found = into.stats.rounding[name]
        assert (found.changed, found.unmoved, found.checksum) == (rounding.changed, rounding.unmoved, rounding.checksum)
        assert found.delta_sq == pytest.approx(rounding.delta_sq, rel=1e-5)
        assert found.kept_sq == pytest.approx(rounding.kept_sq, rel=1e-5)


def test_a_slot_that_holds_no_row_of_a_merged_tensor_is_refused_by_name():
    model = with_lora(llama(intermediate_size=400))
    weights = MergedWeights(model)
    sender, receivers = connect(1, slot_bytes=256)
    begin(sender, receivers)
    Reader(receivers[0], weights.metadata())
    with pytest.raises(ValueError, match=r"down_proj.*rows of 400 elements; make slots larger"):
        list(weights.stream_into(sender))
    sender.abort("over")


def test_what_is_held_is_not_written_and_dropping_it_is_the_release():
    sender, (receiver,) = connect(num_slots=4, slot_bytes=1024)
    tensors = [(f"t{i}", torch.full((256,), float(i))) for i in range(40)]
    metadata = metadata_of(tensors)
    begin(sender, [receiver])
    sending = threading.Thread(target=lambda: list(sender.copy_in(metadata, iter(tensors))), daemon=True)
    sending.start()
    source = receiver.tensors(metadata, deadline_s=20)
    held = [next(source)[1] for _ in range(12)]
    for i, tensor in enumerate(held):
        assert torch.equal(tensor, torch.full((256,), float(i)))
    in_ring = [t for t in held if t.untyped_storage().nbytes() == 1024 and sender._ring.owes(0)]
    assert in_ring
    assert sender._ring.owes(0)
    rest = [tensor[0].item() for _, tensor in source]
    assert rest == [float(i) for i in range(12, 40)]
    sending.join(20)
    for i, tensor in enumerate(held):
        assert torch.equal(tensor, torch.full((256,), float(i)))
    view = held[0][5:6]
    del held, tensor, in_ring
    gc.collect()
    assert sender._ring.owes(0)  # a view of it is enough
    del view
    assert not sender._ring.owes(0)


def test_a_source_that_yields_other_than_announced_is_refused():
    tensors = some_tensors()[:4]
    metadata = metadata_of(tensors)
    for wrong, message in [
        (tensors[:3], "yielded None"),
        ([*tensors, ("more", torch.zeros(1))], "yielded more"),
        ([("other", tensors[0][1]), *tensors[1:]], "announced"),
        ([(tensors[0][0], tensors[0][1].double()), *tensors[1:]], "announced"),
    ]:
        sender, receivers = connect()
        begin(sender, receivers)
        Reader(receivers[0], metadata)
        with pytest.raises(ValueError, match=message):
            list(sender.copy_in(metadata, iter(wrong)))
        sender.abort("over")


# -- how waits end --


def test_a_receiver_that_never_acknowledges_is_named_with_the_tensor_that_waits():
    sender, receivers = connect(2, deadline_s=0.3, num_slots=2)
    tensors = [(f"t{i}", torch.zeros(256)) for i in range(9)]
    begin(sender, receivers)
    Reader(receivers[0], metadata_of(tensors), deadline_s=5)
    with pytest.raises(
        PeerLostError, match=rf"waited 0.3 s for engine worker 1 \(process {os.getpid()}\) to make room for t2, in vain"
    ):
        list(sender.copy_in(metadata_of(tensors), iter(tensors)))
    sender.abort("over")


def test_a_receiver_that_never_accepts_is_named():
    sender, _ = connect(2, deadline_s=0.2)
    sender.begin(lambda: None)
    with pytest.raises(PeerLostError, match=r"engine worker 0 .* to accept the update, in vain"):
        sender.wait_accepted()


def test_a_sender_that_falls_silent_is_reported_with_the_tensor_that_is_awaited():
    sender, receivers = connect()
    begin(sender, receivers)
    reader = Reader(receivers[0], metadata_of(some_tensors()), deadline_s=0.2)
    with pytest.raises(PeerLostError, match=r"engine worker 0 waited 0.2 s for t0 to be sent, in vain"):
        reader.result()


def test_when_either_side_gives_up_the_other_hears_why_at_once_and_the_next_update_works():
    sender, receivers = connect(2, num_slots=2)
    tensors = [(f"t{i}", torch.randn(256)) for i in range(9)]
    metadata = metadata_of(tensors)

    begin(sender, receivers)
    readers = [Reader(receiver, metadata) for receiver in receivers]
    source = sender.copy_in(metadata, iter(tensors))
    next(source)
    begun = time.monotonic()
    sender.abort("trainer broke")
    for reader in readers:
        with pytest.raises(TransferError, match="the sender gave up: trainer broke"):
            reader.result()
    assert time.monotonic() - begun < 5
    del readers, reader, source

    generation = begin(sender, receivers)
    Reader(receivers[0], metadata)
    stop = threading.Timer(0.2, lambda: receivers[1].abort(generation, "no memory"))
    stop.start()
    with pytest.raises(TransferError, match="engine worker 1 gave up: no memory"):
        list(sender.copy_in(metadata, iter(tensors)))
    time.sleep(0.2)  # the first reader lets go

    begin(sender, receivers)
    readers = [Reader(receiver, metadata) for receiver in receivers]
    list(sender.copy_in(metadata, iter(tensors)))
    for reader in readers:
        assert_same(reader.result(), tensors)


def test_what_was_sent_before_an_abort_is_not_handed_out_after_it():
    sender, (receiver,) = connect(num_slots=4)
    tensors = [(f"t{i}", torch.zeros(256)) for i in range(3)]
    begin(sender, [receiver])
    source = receiver.tensors(metadata_of(tensors))
    list(sender.copy_in(metadata_of(tensors), iter(tensors)))
    next(source)
    sender.abort("stop")
    with pytest.raises(TransferError, match="the sender gave up: stop"):
        next(source)


def test_a_failure_that_the_watch_sees_ends_the_wait():
    sender, receivers = connect(num_slots=2)
    tensors = [(f"t{i}", torch.zeros(256)) for i in range(9)]

    def watch():
        raise OSError("the call failed")

    generation, first = sender.begin(watch)
    receivers[0].accept(generation, first)
    with pytest.raises(OSError, match="the call failed"):
        list(sender.copy_in(metadata_of(tensors), iter(tensors)))


def test_an_interrupt_ends_a_wait():
    sender, receivers = connect(num_slots=2)
    tensors = [(f"t{i}", torch.zeros(256)) for i in range(9)]
    begin(sender, receivers)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(sender.copy_in(metadata_of(tensors), iter(tensors)))
    assert time.monotonic() - begun < 5
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_mail_arrives_whole_and_in_any_script():
    sender, receivers = connect(2)
    receivers[1].post({"refused": "größer als 权重", "n": 3})
    assert sender.mail(1) == {"refused": "größer als 权重", "n": 3}
    assert sender.mail(0) == {}


# -- processes that die --

RECEIVER = """
import sys, time, torch
from lora_stream.plan import ParamMeta
from lora_stream.ring import Receiver
receiver = Receiver(sys.argv[1])
print("attached", flush=True)
generation, first = map(int, input().split())
receiver.accept(generation, first)
metadata = [ParamMeta(f"t{i}", torch.float32, (256,)) for i in range(1000)]
for name, tensor in receiver.tensors(metadata, deadline_s=30):
    print(name, flush=True)
    if name == "t5":
        time.sleep(60)
"""

SENDER = """
import os, time, torch
from lora_stream.ring import Sender
sender = Sender(num_slots=2, slot_bytes=1024)
print(sender.link(), flush=True)
{after_link}
sender.unlink()
generation, first = sender.begin(lambda: None)
print(generation, first, flush=True)
time.sleep(60)
"""


def spawn(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def kill(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("when", ["before it accepts", "in the middle"])
def test_a_killed_receiver_is_noticed_at_once(when):
    sender = Sender(num_slots=2, slot_bytes=1024, deadline_s=60)
    process = spawn(RECEIVER, sender.link())
    assert process.stdout.readline().strip() == "attached"
    sender.unlink()
    tensors = [(f"t{i}", torch.zeros(256)) for i in range(1000)]
    generation, first = sender.begin(lambda: None)
    if when == "in the middle":
        print(generation, first, file=process.stdin, flush=True)
        sender.wait_accepted()
    threading.Timer(0.5, kill, [process]).start()
    begun = time.monotonic()

    def send():
        sender.wait_accepted()
        list(sender.copy_in(metadata_of(tensors), iter(tensors)))

    with pytest.raises(PeerLostError, match=rf"engine worker 0 \(process {process.pid}\) died while the sender waited"):
        send()
    assert time.monotonic() - begun < 10


def test_a_killed_sender_is_noticed_at_once():
    process = spawn(SENDER.format(after_link="input()"))
    receiver = Receiver(process.stdout.readline().strip())
    print(file=process.stdin, flush=True)
    generation, first = map(int, process.stdout.readline().split())
    receiver.accept(generation, first)
    reader = Reader(receiver, metadata_of(some_tensors()), deadline_s=60)
    time.sleep(0.2)
    kill(process)
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="the sender died while engine worker 0 waited for t0"):
        reader.result()
    assert time.monotonic() - begun < 5


def test_the_name_of_a_killed_owner_is_swept_by_whoever_comes_next():
    process = spawn(SENDER.format(after_link="time.sleep(60)"))
    name = process.stdout.readline().strip()
    assert name in regions()
    Sender(num_slots=2, slot_bytes=1024)
    assert name in regions(), "the owner lives: its name stays"
    receiver = Receiver(name)
    kill(process)
    assert name in regions()
    assert sweep() == 1
    assert name not in regions()
    with pytest.raises(FileNotFoundError, match="the sender must still run"):
        Receiver(name)
    del receiver


def test_no_exit_of_the_owner_leaves_a_name():
    for ending in ("", "raise SystemExit(3)", "os._exit(0)", "import signal; os.kill(os.getpid(), signal.SIGTERM)"):
        process = spawn(SENDER.format(after_link="sender.unlink()").replace("time.sleep(60)", ending))
        name = process.stdout.readline().strip()
        process.wait()
        assert name not in regions()
    process = spawn(SENDER.format(after_link="raise SystemExit(1)"))
    name = process.stdout.readline().strip()
    process.wait()
    assert name not in regions()


def test_a_forked_child_neither_unlinks_the_owners_name_nor_keeps_a_dead_owner_alive():
    code = """
    import os, sys, time
    from lora_stream.ring import Sender
    sender = Sender(num_slots=2, slot_bytes=1024)
    print(sender.link(), flush=True)
    first = os.fork()
    if first == 0:
        del sender
        os._exit(0)
    os.waitpid(first, 0)
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    print("forked", flush=True)
    time.sleep(60)
    """
    process = spawn(code)
    name = process.stdout.readline().strip()
    assert process.stdout.readline().strip() == "forked"
    assert name in regions()
    assert sweep() == 0
    process.kill()
    process.wait()
    assert sweep() == 1
    assert name not in regions()


# -- what the system allows --

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, or mounts: needs root")


def run(code, *prefix):
    command = [*prefix, sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@as_root
def test_shared_memory_that_is_too_small_is_an_error_that_says_what_to_do_and_no_signal():
    code = """
    from lora_stream.ring import Sender
    for _ in range(3):
        try:
            Sender(num_slots=4, slot_bytes=1 << 20)
        except OSError as error:
            print(type(error).__name__, error)
    Sender(num_slots=2, slot_bytes=4096)
    """
    script = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} -c '{textwrap.dedent(code)}'"
    found = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "it has 1.0 MiB free of 1.0 MiB: enlarge it (containers: --shm-size or --ipc=host)" in line


@as_root
def test_another_user_cannot_open_the_region():
    sender = Sender(num_slots=2, slot_bytes=1024)
    path = SHM / sender.link()
    assert path.stat().st_mode & 0o777 == 0o600
    code = f"""
    import os
    from lora_stream.ring import Receiver, sweep
    os.setresuid(65534, 65534, 65534)
    print(sweep())
    try:
        Receiver({path.name!r})
    except PermissionError as error:
        print(error)
    """
    found = run(code)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("0\n")
    assert "belongs to another user; run sender and engine as one user" in found.stdout
    assert path.exists()
    sender.unlink()


@as_root
def test_a_low_limit_of_locked_memory_is_warned_of_once_and_works():
    code = """
    import os, resource, warnings
    from lora_stream.ring import Sender
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 * 1024, 64 * 1024))
    os.setresuid(65534, 65534, 65534)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        senders = [Sender(num_slots=2, slot_bytes=1 << 20) for _ in range(3)]
    print(len(caught), caught[0].message)
    """
    found = run(code)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("1 2 MiB of staging could not be locked in memory")
    assert "ulimit -l" in found.stdout


def test_memory_that_is_locked_is_not_warned_of(monkeypatch):
    monkeypatch.setattr(ring_module, "_has_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sender = Sender(num_slots=2, slot_bytes=256)
    assert sender._ring.locked


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(1, 1024), (65, 1024), (4, 1000), (4, 0)])
def test_impossible_sizes_are_refused(num_slots, slot_bytes):
    with pytest.raises(ValueError, match="got"):
        Sender(num_slots=num_slots, slot_bytes=slot_bytes)


@pytest.mark.parametrize("name", ["", "../etc/passwd", "lora_stream-1/../../x", "psm_abc"])
def test_a_name_that_is_none_of_ours_is_not_opened(name):
    with pytest.raises(OSError, match="not the name of a region"):
        Receiver(name)


def test_foreign_memory_under_such_a_name_is_refused():
    path = SHM / "lora_stream-1-feed"
    holder = Sender(num_slots=2, slot_bytes=1024)
    for content, message in [(b"", "is not a region"), (bytes(1 << 20), "holds no ring")]:
        path.write_bytes(content)
        try:
            with pytest.raises((OSError, ValueError), match=f"{message}|cannot open"):
                Receiver(path.name)
        finally:
            path.unlink(missing_ok=True)
    del holder


def test_a_ring_gives_everything_back():
    def usage():
        gc.collect()
        maps = sum("lora_stream" in line for line in Path("/proc/self/maps").read_text().splitlines())
        return len(os.listdir("/proc/self/fd")), maps

    tensors = some_tensors()
    metadata = metadata_of(tensors)
    before = usage()
    for _ in range(100):
        sender, receivers = connect(2)
        begin(sender, receivers)
        readers = [Reader(receiver, metadata) for receiver in receivers]
        list(sender.copy_in(metadata, iter(tensors)))
        for reader in readers:
            assert_same(reader.result(), tensors)
        del sender, receivers, readers, reader
    assert usage() == before


def plan_on(device):
    """A plan of nothing to do on a device."""
    base = SimpleNamespace(device=torch.device(device))
    return SimpleNamespace(tasks=[SimpleNamespace(base=base)], metadata=list)


def test_memory_is_pinned_once_and_unpinned_before_it_goes(monkeypatch):
    calls = []
    monkeypatch.setattr(_C, "pin", lambda address, size, device: calls.append(("pin", address, size, device)) or "")
    monkeypatch.setattr(_C, "unpin", lambda address: calls.append(("unpin", address)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    sender, (receiver,) = connect()
    receiver.pin(torch.device("cpu"))
    list(sender.batches(plan_on("cpu")))
    assert calls == []
    for _ in range(2):
        list(sender.batches(plan_on("cuda:1")))
        receiver.pin(torch.device("cuda"))
    own, others = sender._ring.address, receiver._ring.address
    assert calls == [("pin", own, sender.num_bytes, 1), ("pin", others, sender.num_bytes, 3)]
    del sender, receiver
    gc.collect()
    assert sorted(calls[2:]) == sorted([("unpin", own), ("unpin", others)])


def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_warning(monkeypatch):
    """Case B38."""
    calls = []
    monkeypatch.setattr(_C, "pin", lambda *args: calls.append(args) or "cudaErrorMemoryAllocation, out of memory")
    monkeypatch.setattr(_C, "unpin", lambda address: pytest.fail("was never pinned"))
    sender, _ = connect()
    with pytest.warns(UserWarning, match="could not be pinned, .*: cudaErrorMemoryAllocation"):
        list(sender.batches(plan_on("cuda:0")))
    list(sender.batches(plan_on("cuda:0")))
    assert len(calls) == 1
    del sender
    gc.collect()
