"""The command `lora-stream`."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:  # the core package needs neither
    raise SystemExit(f"lora-stream needs typer and rich ({error}): pip install 'lora_stream[cli]'") from error

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Merged LoRA weights, streamed into a rollout engine."
)
console = Console()


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

    try:
        records = read_model(_model_without_weights(directory, base), untie=untie)
        found = build_plan(records, scope=scope, planning_only=True)
    except ValueError as error:
        if as_json:
            print(json.dumps({"refused": str(error)}))
        else:
            console.print(f"refused: {error}", style="red", highlight=False)
        raise typer.Exit(1) from None

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


def _account_rows(account: Mapping[str, tuple[str, str]], by_kind: bool) -> Iterable[tuple[tuple[str, str, str], int]]:
    """(fate, FQN, checkpoint name or reason) and how many there are; by kind, names that differ in numbers are one."""
    found = Counter()
    for fqn, (fate, why) in account.items():
        found[fate, *((_NUMBERS.sub(".*", text) if by_kind else text) for text in (fqn, why))] += 1
    return found.items()


_NUMBERS = re.compile(r"\.\d+(?=\.|$)")


def _model_without_weights(directory: Path, base: Path | None):
    """The model on the meta device, with the adapter where `directory` is one. Raises ValueError for what is neither."""
    import torch
    import transformers

    adapter_file = directory / "adapter_config.json"
    is_adapter = adapter_file.exists()
    if is_adapter:
        named = json.loads(adapter_file.read_text()).get("base_model_name_or_path")
        model_directory = base or (Path(named) if named else None)
        if model_directory is None or not (model_directory / "config.json").exists():
            raise ValueError(
                f"{adapter_file}: its base model {named!r} is no local directory with a config.json; name one with --base"
            )
    else:
        model_directory = directory
        if not (directory / "config.json").exists():
            raise ValueError(f"{directory}: has neither config.json nor adapter_config.json")
    config = transformers.AutoConfig.from_pretrained(model_directory, local_files_only=True)
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    if architecture is None:
        raise ValueError(f"{model_directory / 'config.json'}: transformers has no architecture {config.architectures}")
    with torch.device("meta"):
        model = architecture._from_config(config)
        model.requires_grad_(False)
        if is_adapter:
            from peft import PeftConfig, get_peft_model

            adapter_config = PeftConfig.from_pretrained(str(directory))
            adapter_config.inference_mode = False
            model = get_peft_model(model, adapter_config)
    return model
