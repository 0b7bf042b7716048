"""Processes that play the ranks of a trainer. They are started once; each run gives them a process group of its own."""

import contextlib
import datetime
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass

TIMEOUT_S = 8.0  # of a collective


@dataclass
class Outcome:
    """What a function returned on one rank, or its error. `died`: the process did, or had to be killed."""

    value: object = None
    error: BaseException | None = None
    text: str = ""  # of the error, with its traceback
    seconds: float = 0.0
    died: bool = False


class Pool:
    def __init__(self):
        self._processes = []

    def run(self, num_ranks, function, *args, limit_s=60.0):
        """The function's values on each rank; raises with the first rank's traceback if one fails."""
        outcomes = self.outcomes(num_ranks, function, *args, limit_s=limit_s)
        # The first to fail: the others may only have waited for it.
        for rank, outcome in sorted(enumerate(outcomes), key=lambda item: item[1].seconds):
            assert outcome.error is None, f"rank {rank}: {outcome.text}"
        for rank, outcome in enumerate(outcomes):
            assert not outcome.died, f"rank {rank} died or hung"
        return [outcome.value for outcome in outcomes]

    def outcomes(self, num_ranks, function, *args, limit_s=60.0):
        """How the function went on each rank. A rank that takes longer than the limit is killed."""
        while len(self._processes) < num_ranks:
            self._processes.append(_start())
        with tempfile.TemporaryDirectory() as folder:
            pipes = [pipe for _, pipe in self._processes[:num_ranks]]
            for rank, pipe in enumerate(pipes):
                pipe.send((os.path.join(folder, "store"), rank, num_ranks, function, args))
            for pipe in pipes:
                pipe.recv()  # it has imported what it needs, which may take longer than a collective may
            for pipe in pipes:
                pipe.send("go")
            give_up = time.monotonic() + limit_s
            return [self._outcome(rank, give_up) for rank in range(num_ranks)]

    def _outcome(self, rank, give_up):
        process, pipe = self._processes[rank]
        if pipe.poll(max(0.0, give_up - time.monotonic())):
            with contextlib.suppress(EOFError, ConnectionResetError):
                return pipe.recv()
        process.kill()
        process.join()
        self._processes[rank] = _start()
        return Outcome(died=True)

    def close(self):
        for process, _ in self._processes:
            process.kill()
            process.join()


def _start():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(pipe):
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    while True:
        store, rank, num_ranks, function, args = pipe.recv()
        pipe.send("ready")
        pipe.recv()
        torch.manual_seed(20260801)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=TIMEOUT_S),
        )
        begin = time.perf_counter()
        try:
            outcome = Outcome(function(rank, *args))
        except BaseException as error:
            text = traceback.format_exc()
            outcome = Outcome(error=_picklable(error), text=text)
        outcome.seconds = time.perf_counter() - begin
        pipe.send(outcome)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _picklable(error):
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
