"""The command `lora-stream`."""

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as error:  # the core package needs neither
    raise SystemExit(f"lora-stream needs typer and rich ({error}): pip install 'lora_stream[cli]'") from error

from lora_stream.bench.commands import app as bench

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Merged LoRA weights, streamed into a rollout engine."
)
app.add_typer(bench, name="bench")
console = Console()
errors = Console(stderr=True)


def main() -> None:
    app()


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps.")] = 30,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 5e-4,
) -> None:
    """Teach SmolLM2-135M an answer and sync it into a live engine; exit 1 if the engine does not learn it."""
    from lora_stream.demo import run

    if not run(console, steps=steps, learning_rate=learning_rate):
        console.print("the engine did not learn what the trainer was taught", style="red")
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False) -> None:
    """What is built in and found here, and what to do about the rest."""
    from lora_stream.doctor import examine

    findings = examine()
    if as_json:
        print(json.dumps([finding.to_dict() for finding in findings]))
        return
    table = Table("", "found", "what to do")
    for finding in findings:
        table.add_row(finding.what, finding.found, finding.advice, style=None if finding.ok else "yellow")
    console.print(table)


@app.command()
def plan(
    directory: Annotated[Path, typer.Argument(help="A Hugging Face model directory or a PEFT adapter directory.")],
    base: Annotated[
        Path | None, typer.Option(help="The base model's directory, for an adapter that does not name it.")
    ] = None,
    scope: Annotated[str, typer.Option(help='"all" or "trained".')] = "all",
    untie: Annotated[bool, typer.Option("--untie", help="For an engine that does not tie embedding and head.")] = False,
    names: Annotated[
        bool, typer.Option("--names", help="A line for every tensor, not for every kind of them.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What a sync would merge, copy and leave, with bytes, and what becomes of every tensor; exit 1 and the reason where it
    would be refused. Loads no weights."""
    from lora_stream.peft import read_model
    from lora_stream.plan import build_plan
    from lora_stream.report import format_bytes

    with _refusals(as_json):
        records = read_model(_model_without_weights(directory, base), untie=untie)
        found = build_plan(records, scope=scope, planning_only=True)

    sizes = Counter()
    for task in found.tasks:
        sizes[task.fqn] += task.meta.num_bytes
    summary = {}
    for fate in ("merged", "copied", "left", "consumed"):
        fqns = [fqn for fqn, (of, _) in found.account.items() if of == fate]
        summary[fate] = {"tensors": len(fqns), "bytes": sum(sizes[fqn] for fqn in fqns)}
    if as_json:
        account = {fqn: list(entry) for fqn, entry in found.account.items()}
        print(json.dumps({"scope": scope, "summary": summary, "account": account}))
        return
    table = Table("", "tensors", "sent", title=f"{directory}, scope {scope}", title_justify="left")
    for fate, entry in summary.items():
        table.add_row(fate, str(entry["tensors"]), format_bytes(entry["bytes"]) if entry["bytes"] else "")
    console.print(table)
    table = Table("", "tensors", "of the model", "in the checkpoint, or why not", title="account", title_justify="left")
    for (fate, fqn, why), count in _account_rows(found.account, by_kind=not names):
        table.add_row(fate, str(count), fqn, why)
    console.print(table)


@app.command()
def merge(
    source: Annotated[
        Path,
        typer.Argument(
            help="A PEFT adapter, a verl or torch.distributed checkpoint, or a model with an adapter in it."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where to: a directory that does not exist or is empty.")],
    base: Annotated[
        Path | None, typer.Option(help="The base model's directory, where SOURCE neither holds nor names it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights as written: bfloat16, float16 or float32.")] = "bfloat16",
    rounding: Annotated[str, typer.Option(help='To that dtype: "nearest" or "dither".')] = "nearest",
    seed: Annotated[int, typer.Option(help="Of dithering.")] = 0,
    max_shard_size: Annotated[str, typer.Option(help="Of one file, like 5GB.")] = "5GB",
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the adapter alone, as PEFT loads it.")
    ] = False,
    with_adapter: Annotated[bool, typer.Option("--with-adapter", help="Write it too, to OUT/lora_adapter.")] = False,
    adapter_name: Annotated[str | None, typer.Option(help="Which of several adapters.")] = None,
    rank: Annotated[int | None, typer.Option(help="The training's r, where no file tells it.")] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="The training's lora_alpha, where no file tells it.")] = None,
    use_rslora: Annotated[
        bool | None, typer.Option("--use-rslora/--no-use-rslora", help="Whether scaling is lora_alpha / sqrt(r).")
    ] = None,
    untie: Annotated[
        bool, typer.Option("--untie", help="Write embedding and head both, and untie the config.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code that comes with the base.")
    ] = False,
    check_finite: Annotated[
        bool, typer.Option("--check-finite/--no-check-finite", help="Refuse a weight that is NaN or infinite.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Merge an adapter into its base and write a Hugging Face checkpoint; exit 1 and the reason, and no OUT, where anything is
    missing, left over or in doubt."""
    import torch
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from lora_stream import checkpoint

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with _refusals(as_json), Progress(*columns, console=errors, disable=as_json, transient=True) as bar:
        if dtype not in dtypes:
            raise ValueError(f"--dtype must be one of {list(dtypes)}, got {dtype!r}")
        task = bar.add_task("", total=None)
        report = checkpoint.merge(
            source,
            out,
            base=base,
            dtype=dtypes[dtype],
            rounding=rounding,
            seed=seed,
            max_shard_size=max_shard_size,
            adapter_only=adapter_only,
            with_adapter=with_adapter,
            adapter_name=adapter_name,
            rank=rank,
            lora_alpha=lora_alpha,
            use_rslora=use_rslora,
            untie=untie,
            trust_remote_code=trust_remote_code,
            check_finite=check_finite,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _show(report.to_dict(), report.rows(), as_json)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What a directory is: its kind, adapter, r, alpha, scaling, targets, what is missing, and the command that would merge it."""
    from lora_stream.checkpoint import inspecting

    with _refusals(as_json):
        found = inspecting.inspect(path)
    _show(found.to_dict(), inspecting.rows(found), as_json)


@contextlib.contextmanager
def _refusals(as_json: bool) -> Iterator[None]:
    """What cannot be done is said, and the exit status tells it."""
    try:
        yield
    except (ValueError, OSError) as error:
        if as_json:
            print(json.dumps({"refused": str(error)}))
        else:
            console.print(f"refused: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from None


def _show(found: dict, rows: Iterable[tuple[str, str]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    table = Table(show_header=False)
    for label, text in rows:
        table.add_row(label, Text(text))
    console.print(table)


def _account_rows(account: Mapping[str, tuple[str, str]], by_kind: bool) -> Iterable[tuple[tuple[str, str, str], int]]:
    """(fate, FQN, checkpoint name or reason) and how many there are; by kind, names that differ in numbers are one."""
    found = Counter()
    for fqn, (fate, why) in account.items():
        found[fate, *((_NUMBERS.sub(".*", text) if by_kind else text) for text in (fqn, why))] += 1
    return found.items()


_NUMBERS = re.compile(r"\.\d+(?=\.|$)")


def _model_without_weights(directory: Path, base: Path | None):
    """The model on the meta device, with the adapter where `directory` is one. Raises ValueError for what is neither."""
    from lora_stream.checkpoint import adapters, models

    if not (directory / adapters.CONFIG_NAME).exists():
        return models.empty_model(models.config_of(directory), where=directory)
    spec = adapters.spec_of(directory, [directory], names_found=[])
    model_directory = base or (Path(spec.base_name) if spec.base_name else None)
    if model_directory is None or not (model_directory / "config.json").exists():
        raise ValueError(
            f"{directory / adapters.CONFIG_NAME}: its base model {spec.base_name!r} is no local directory with a config.json; "
            "name one with --base"
        )
    model = models.empty_model(models.config_of(model_directory), task_type=spec.task_type, where=model_directory)
    return models.with_adapter(model, spec)
