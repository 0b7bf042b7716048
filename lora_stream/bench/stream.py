"""`bench stream`: what does a pass over a model cost, beside the ways that trainers stream merged weights today?

Ceiling: on one rank every base weight cast to the wire dtype into fresh memory; on several the same bytes gathered alone,
         full_tensor() of shards that were merged and cast before
Rivals:  PEFT    merge_adapter, full_tensor and cast of each tensor, unmerge_adapter
         peers   whatever scripts of other packages are named with --peer, see benchmarks/peers/README.md

All ways of a round run in turn on the same model, and every tensor is dropped when it has come, as one does whose engine has
taken it. Seconds are those of the slowest rank, extra memory that of the largest.
"""

import contextlib
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from lora_stream.bench import measuring, models
from lora_stream.bench.results import Group, Way
from lora_stream.merged_weights import MergedWeights, Stream

CEILING, OURS = "bytes alone", "ours"
Items = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    size_name: str
    size: models.Size
    num_layers: int
    vocab: int
    rank: int  # of the LoRA
    dtype: torch.dtype
    num_ranks: int  # 0: a plain model in this process
    bucket_bytes: int
    repeats: int
    peers: tuple[Path, ...]
    device: torch.device

    @property
    def name(self) -> str:
        where = f"FSDP2 on {self.num_ranks} ranks" if self.num_ranks else "plain"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.size_name}, {self.num_layers} layers, {dtype}, r={self.rank}, {where}"


def bench(setup: Setup, *, progress: measuring.Progress) -> Group:
    if not setup.num_ranks:
        return _measure(setup, progress)
    with tempfile.TemporaryDirectory() as folder:
        results = torch.multiprocessing.get_context("spawn").SimpleQueue()
        context = torch.multiprocessing.spawn(
            _serve, args=(str(Path(folder) / "store"), setup, results), nprocs=setup.num_ranks, join=False
        )
        found = None
        while not context.join(timeout=0.1):
            # The queue is read while the ranks run: its pipe is smaller than what it may have to hold.
            while not results.empty():
                found = _told(results.get(), progress) or found
        while not results.empty():
            found = _told(results.get(), progress) or found
    assert found is not None, "rank 0 tells what it measured"
    return found


def _told(message: "str | Group", progress: measuring.Progress) -> Group | None:
    if isinstance(message, Group):
        return message
    progress(message)
    return None


def _serve(rank: int, store: str, setup: Setup, results) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // setup.num_ranks))
    is_cuda = setup.device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(store, setup.num_ranks), rank=rank, world_size=setup.num_ranks
    )
    group = _measure(setup, results.put if rank == 0 else lambda what: None)
    if rank == 0:
        results.put(group)
    dist.barrier()
    dist.destroy_process_group()


def _measure(setup: Setup, progress: measuring.Progress) -> Group:
    """On every rank; what it returns on the first counts."""
    torch.manual_seed(0)
    model = _make_model(setup)
    ways, missing = _ways(model, setup)
    all_bytes = MergedWeights(model).plan.num_bytes
    seen = {name: _Seen() for name in ways}
    for round_ in range(setup.repeats + 1):
        for name in [name for name in ways if name not in missing]:
            progress(name)
            try:
                seconds, extra, items = _run(ways[name], setup.device)
            except Exception as error:  # a peer's own failure on this model is a finding; ours is not
                if name.startswith(OURS):
                    raise
                missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            if round_:
                seen[name].add(seconds, extra, items, all_bytes)
    rows = [found.way(name) for name, found in seen.items() if name not in missing]
    rows += [Way(name=name, missing=why) for name, why in missing.items()]
    return Group(name=setup.name, ceiling=CEILING, ours=OURS, ways=rows)


def _ways(model: nn.Module, setup: Setup) -> tuple[dict[str, Callable[[], Items]], dict[str, str]]:
    """Functions that begin a pass, by name; and why others are missing."""

    def ours(**kwargs) -> Callable[[], Items]:
        return lambda: iter(MergedWeights(model, bucket_bytes=setup.bucket_bytes, **kwargs))

    ways = {CEILING: bytes_alone(model), OURS: ours(), f"{OURS}, trained scope": ours(scope="trained")}
    if setup.num_ranks > 1:
        ways[f"{OURS}, to one sender"] = ours(gather="sender")
    ways["PEFT"] = lambda: by_peft(model)
    missing: dict[str, str] = {}
    for path in setup.peers:
        _add_peer(path, model, ways, missing)
    return ways, missing


@dataclass
class _Seen:
    """What the rounds that count have shown of a way."""

    seconds: list[float] = field(default_factory=list)
    extra: list[int] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    num_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, seconds: float, extra: int, items: Items, all_bytes: int) -> None:
        self.seconds.append(seconds)
        self.extra.append(extra)
        if isinstance(items, Stream):
            gather = items.stats.traffic.seconds_gathering
            merge = items.stats.seconds_merge - gather
            for phase, took in {
                "merge and copy": merge,
                "gather": gather,
                "plan and hand over": seconds - merge - gather,
            }.items():
                self.phases[phase].append(max(0.0, took))
            self.num_bytes = _bytes_of(items, all_bytes)

    def way(self, name: str) -> Way:
        return Way(
            name=name,
            seconds=self.seconds,
            phases={phase: statistics.median(took) for phase, took in self.phases.items()},
            num_bytes=self.num_bytes,
            extra_bytes=round(statistics.median(self.extra)),
        )


def _make_model(setup: Setup) -> nn.Module:
    model = models.make_model(setup.size, setup.num_layers, setup.dtype, vocab=setup.vocab)
    model = models.with_lora(model, setup.rank).to(setup.device)
    if setup.num_ranks:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh(setup.device.type, (setup.num_ranks,))
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _run(way: Callable[[], Items], device: torch.device) -> tuple[float, int, Items]:
    """Seconds and extra bytes of one run, of the slowest and the largest rank."""
    is_shared = dist.is_initialized()
    memory = measuring.ExtraMemory(device)
    if is_shared:
        dist.barrier()
    measuring.wait(device)
    begin = time.perf_counter()
    items = way()
    for _name, tensor in items:
        del tensor
    measuring.wait(device)
    if is_shared:
        dist.barrier()
    seconds, extra = time.perf_counter() - begin, memory.num_bytes()
    if is_shared:
        found = torch.tensor([seconds, extra], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        seconds, extra = found[0].item(), int(found[1])
    return seconds, extra, items


def _bytes_of(stream: Stream, all_bytes: int) -> dict[str, int]:
    """What became of the checkpoint's bytes, and what came from other ranks."""
    sizes = Counter(merged=0, copied=0)
    for task in stream.plan.tasks:
        sizes["merged" if task.adapters else "copied"] += task.meta.num_bytes
    sizes["left"] = all_bytes - stream.plan.num_bytes
    sizes["gathered"] = stream.stats.traffic.gathered
    return dict(sizes)


@torch.no_grad()
def by_peft(model: nn.Module) -> Items:
    model.merge_adapter()
    try:
        for name, tensor in model.state_dict().items():
            if "lora_" not in name:
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                yield name, whole.to(torch.bfloat16)
    finally:
        model.unmerge_adapter()


def bytes_alone(model: nn.Module) -> Callable[[], Items]:
    """What the wire carries of every base parameter, tied ones once, and nothing else done."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if "lora_" not in name}
    if not dist.is_initialized() or dist.get_world_size() == 1:

        def cast() -> Items:
            for name, parameter in parameters.items():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                yield name, local.to(torch.bfloat16, copy=True)

        return cast
    from torch.distributed.tensor import DTensor

    shards = {
        name: DTensor.from_local(
            p.to_local().to(torch.bfloat16), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
        )
        for name, p in parameters.items()
    }
    return lambda: ((name, shard.full_tensor()) for name, shard in shards.items())


def _add_peer(path: Path, model: nn.Module, ways: dict, missing: dict[str, str]) -> None:
    """Ways of another package, by a script that calls it as it is installed.

    It has a text NAME and a function ways(model) that returns, by name, functions that begin a pass; it raises ImportError
    where the package is not installed, ValueError where it is not for this model.
    """
    spec = importlib.util.spec_from_file_location(f"lora_stream_peer_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"--peer {path}: no Python file")
    module = importlib.util.module_from_spec(spec)
    name = path.stem
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it finds its neighbours, as a program does
    with contextlib.redirect_stdout(None):
        try:
            spec.loader.exec_module(module)
            name = module.NAME
            ways |= module.ways(model)
        except (ImportError, ValueError) as error:
            missing[name] = f"not run: {error}"


def default_layers(size: models.Size, dtype: torch.dtype, num_ranks: int, device: torch.device) -> int:
    """As many as fit when every rank makes the whole model once before it is sharded, and the ways need some more."""
    budget = measuring.available_bytes(device if device.type == "cpu" else torch.device("cpu")) // 4
    return size.layers_for(budget // max(1, num_ranks), dtype.itemsize)


def setups(
    *,
    model: str,
    ranks: Sequence[int],
    layers: int | None,
    vocab: int | None,
    rank: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    repeats: int,
    peers: Sequence[Path],
    device: torch.device,
) -> list[Setup]:
    size = models.size_named(model)
    if layers is None:
        layers = default_layers(size, dtype, max(ranks, default=0), device)
    return [
        Setup(
            size_name=model,
            size=size,
            num_layers=layers,
            vocab=size.vocab if vocab is None else vocab,
            rank=rank,
            dtype=dtype,
            num_ranks=num_ranks,
            bucket_bytes=bucket_bytes,
            repeats=repeats,
            peers=tuple(peers),
            device=device,
        )
        for num_ranks in ranks
    ]
