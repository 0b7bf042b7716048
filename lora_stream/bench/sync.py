"""`bench sync`: what does it cost to bring a policy into a live vLLM in other processes, and to serve it there?

Ceiling: vLLM's own loading within a full sync of ours, which every way of sending all weights pays
Rivals:  pickled RPC        all merged tensors in one collective_rpc
         safetensors        save_file into /dev/shm, then vLLM's reload_weights
         adapter            PEFT's save_pretrained into /dev/shm and a LoRARequest in place: vLLM serves the adapter unmerged

The first two merge eagerly before, as most trainers do. The adapter takes an engine of its own, and longer for each token that it
generates: from the two the break-even follows.
"""

import contextlib
import os
import pickle
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lora_stream.bench import measuring, models
from lora_stream.bench.results import Group, Spread, Way
from lora_stream.engine_sync import sync
from lora_stream.report import SyncReport

LOADING, OURS, FULL, IN_PLACE = "vLLM's loading", "ours", "ours, full", "ours, in place"
ADAPTER, MERGED = "adapter", "merged"


@dataclass(frozen=True, kw_only=True)
class Setup:
    size_name: str
    size: models.Size
    num_layers: int
    vocab: int
    rank: int
    batches: tuple[int, ...]  # sequences that are generated at once
    num_tokens: int  # of each
    repeats: int

    @property
    def name(self) -> str:
        return f"{self.size_name}, {self.num_layers} layers, bfloat16, r={self.rank}"


def bench(setup: Setup, *, progress: measuring.Progress) -> list[Group]:
    _prepare_environment()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        directory = Path(disk)
        progress("making the model")
        model = models.make_model(setup.size, setup.num_layers, torch.bfloat16, vocab=setup.vocab)
        model.save_pretrained(directory)
        model = models.with_lora(model, setup.rank)
        progress("starting an engine")
        with _engine(directory, setup) as llm:
            ways, reports, missing = _sync_ways(model, llm, directory, Path(shm))
            syncs = _measure(ways, reports, model, setup.repeats, progress)
            syncs.ways += [Way(name=name, missing=reason) for name, reason in missing.items()]
            tokens = {batch: [_seconds_per_token(llm, batch, setup, progress)] for batch in setup.batches}
        progress("starting an engine with LoRA")
        with _engine(directory, setup, enable_lora=True, max_loras=1, max_lora_rank=max(8, setup.rank)) as llm:
            adapter = _Adapter(model, llm, Path(shm) / "adapter")
            seconds = measuring.interleaved({ADAPTER: adapter.send}, setup.repeats, progress=progress)
            syncs.ways.append(Way(name=ADAPTER, seconds=seconds[ADAPTER], num_bytes={"sent": adapter.num_bytes}))
            for batch, found in tokens.items():
                found.append(_seconds_per_token(llm, batch, setup, progress, adapter.request()))
    syncs.name = f"one sync: {setup.name}"
    return [syncs, *(_tokens_group(setup, batch, *found, syncs) for batch, found in tokens.items())]


def _prepare_environment() -> None:
    """Before anything imports vLLM."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # an engine in this process does not tell how long it loaded
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Where trainer and engine share the cores, idle OpenMP threads of the one spin on the other's time.
        "OMP_WAIT_POLICY": "passive",
    }.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def _engine(directory: Path, setup: Setup, **kwargs) -> Iterator:
    try:
        from vllm import LLM
    except ImportError as error:
        raise ValueError(f"bench sync needs vLLM 0.32 ({error})") from error
    llm = LLM(
        str(directory),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=max(256, 2 * setup.num_tokens),
        max_num_seqs=max(setup.batches),
        disable_log_stats=True,
        gpu_memory_utilization=0.5,
        use_tqdm_on_load=False,
        worker_extension_cls="lora_stream.bench.sync_worker.Extension",
        weight_transfer_config={"backend": "lora_stream"},
        **kwargs,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _sync_ways(
    model: nn.Module, llm, directory: Path, shm: Path
) -> tuple[dict, dict[str, list[SyncReport]], dict[str, str]]:
    """The ways, the reports that they will leave, and why others are missing."""
    for file in directory.iterdir():
        if file.suffix == ".json" and not file.name.endswith(".index.json"):
            (shm / file.name).write_bytes(file.read_bytes())
    reports: dict[str, list[SyncReport]] = {FULL: [], OURS: []}

    def by_pickle() -> None:
        llm.collective_rpc("load_pickled", args=(pickle.dumps(_merged_eagerly(model)),))
        assert llm.reset_prefix_cache()

    def by_safetensors() -> None:
        from safetensors.torch import save_file

        tensors = {name: tensor.detach().contiguous() for name, tensor in _merged_eagerly(model)}
        save_file(tensors, shm / "model.safetensors", metadata={"format": "pt"})
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(shm)})
        assert llm.reset_prefix_cache()

    missing = {}
    ways = {
        FULL: lambda: reports[FULL].append(sync(model, llm, full=True)),
        OURS: lambda: reports[OURS].append(sync(model, llm)),
        "pickled RPC": by_pickle,
        "safetensors": by_safetensors,
    }
    try:
        sync(model, llm, in_place=True, full=True)
        ways[IN_PLACE] = lambda: reports[IN_PLACE].append(sync(model, llm, in_place=True))
        reports[IN_PLACE] = []
    except ValueError as error:  # the CPU packs weights for its kernels
        missing[IN_PLACE] = f"not run: {error}"
    return ways, reports, missing


@torch.no_grad()
def _merged_eagerly(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All tensors of the merged model, under checkpoint names."""
    tensors = []
    base = model.get_base_model()
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            continue
        prefix, is_target, _ = name.partition(".base_layer.")
        if is_target:
            delta = base.get_submodule(prefix).get_delta_weight("default")
            parameter = (parameter.float() + delta.float()).to(torch.bfloat16)
        tensors.append((name.replace(".base_layer.", "."), parameter))
    return tensors


def _measure(
    ways: dict, reports: dict[str, list[SyncReport]], model: nn.Module, repeats: int, progress: measuring.Progress
) -> Group:
    def after_a_step(way):
        def run() -> None:
            models.step(model)
            begin = time.perf_counter()
            way()
            took.append(time.perf_counter() - begin)  # without the step

        return run

    took: list[float] = []
    measuring.interleaved({name: after_a_step(way) for name, way in ways.items()}, repeats, progress=progress)
    counted = took[len(ways) :]  # without the round that warms up
    rows = {name: Way(name=name, seconds=counted[i :: len(ways)]) for i, name in enumerate(ways)}
    for name, found in reports.items():
        last = found[-1]
        rows[name].num_bytes = {"sent": last.num_bytes, "left": last.num_bytes_left}
        phases = ("plan", "check", "merge", "transfer", "engine")
        rows[name].phases = {
            phase: Spread.of([report.seconds[phase] for report in found[1:]]).median for phase in phases
        }
    loading = Way(name=LOADING, seconds=[report.seconds_loading or 0.0 for report in reports[FULL][1:]])
    return Group(name="", ceiling=LOADING, ours=OURS, ways=[loading, *rows.values()])


class _Adapter:
    """The way of vLLM's own LoRA."""

    def __init__(self, model: nn.Module, llm, directory: Path) -> None:
        self._model, self._llm, self._directory = model, llm, directory
        self.num_bytes = 0

    def send(self) -> None:
        self._model.save_pretrained(self._directory)
        self._llm.llm_engine.add_lora(self.request(load_inplace=True))
        assert self._llm.reset_prefix_cache()
        self.num_bytes = (self._directory / "adapter_model.safetensors").stat().st_size

    def request(self, **kwargs):
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", 1, str(self._directory), **kwargs)


def _seconds_per_token(llm, batch: int, setup: Setup, progress: measuring.Progress, lora_request=None) -> list[float]:
    """Of each output token of each sequence, in every repeat: the difference of a long and a short generation."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * i + j) % 100 + 3 for j in range(16)]} for i in range(batch)]

    def generate(num_tokens: int):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        return lambda: llm.generate(prompts, params, use_tqdm=False, lora_request=lora_request)

    candidates = {"short": generate(2), "long": generate(setup.num_tokens)}
    seconds = measuring.interleaved(candidates, setup.repeats, progress=progress)
    return [
        (long - short) / (setup.num_tokens - 2) for short, long in zip(seconds["short"], seconds["long"], strict=True)
    ]


def _tokens_group(setup: Setup, batch: int, merged: Sequence[float], adapter: Sequence[float], syncs: Group) -> Group:
    group = Group(
        name=f"one output token of each of {batch} sequences: {setup.name}",
        ceiling=MERGED,
        ours=MERGED,
        ways=[Way(name=MERGED, seconds=list(merged)), Way(name=ADAPTER, seconds=list(adapter))],
    )
    group.note = break_even(group, syncs)
    return group


def break_even(tokens: Group, syncs: Group) -> str:
    """From how many tokens of each sequence on a merged sync has paid for itself, by the medians."""
    merged, adapter = (Spread.of(way.seconds).median for way in tokens.ways)
    ours, its = (Spread.of(syncs.way(name).seconds).median for name in (OURS, ADAPTER))
    if not tokens.ways[1].over(tokens.ways[0]).is_difference():
        return "no break-even: serving the adapter costs no more per token than the spread"
    if adapter <= merged:
        return "the adapter is as fast as merged weights here: it pays for every length"
    if ours <= its:
        return "the merged sync takes no longer than the adapter's: it pays for every length"
    return f"a merged sync pays from {(ours - its) / (adapter - merged):.0f} tokens per sequence and sync on"
