"""Tables and JSON of what was measured."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lora_stream.bench.results import Change, Group, Result, Spread, Way, verdict
from lora_stream.report import format_bytes


def show(result: Result, console: Console) -> None:
    for group in result.groups:
        console.print(table_of(group))
        if group.note:
            console.print(group.note, style="yellow", markup=False)
    for key, value in result.config.items():
        console.print(f"{key}: {value}", style="dim", markup=False, highlight=False)
    console.print(" · ".join(f"{key} {value}" for key, value in result.machine.items()), style="dim", markup=False)


def columns(group: Group) -> list[str]:
    """The heads of rows()."""
    ways = group.ways
    is_timed = any(way.seconds or way.missing for way in ways)
    heads = ["", "time", f"over {group.ceiling}", "beside ours"] if is_timed else [""]
    if any(way.extra_bytes is not None for way in ways):
        heads.append("memory above")
    if any(way.num_bytes for way in ways):
        heads.append("bytes")
    if any(way.phases for way in ways):
        heads.append("of it")
    return [*heads, *_figures(group)]


def rows(group: Group) -> list[list[str]]:
    """A line for each way; medians with the quartiles in brackets."""
    heads = columns(group)
    return [_row(way, group, heads) for way in group.ways]


def _figures(group: Group) -> list[str]:
    return list(dict.fromkeys(name for way in group.ways for name in way.figures))


def _row(way: Way, group: Group, heads: list[str]) -> list[str]:
    if way.missing:
        return [way.name, way.missing, *("" for _ in heads[2:])]
    ceiling, ours = group.way(group.ceiling), group.way(group.ours)
    cells = {
        "": way.name,
        "time": _time(Spread.of(way.seconds)) if way.seconds else "",
        "memory above": "" if way.extra_bytes is None else format_bytes(way.extra_bytes),
        "bytes": ", ".join(f"{what} {format_bytes(count)}" for what, count in way.num_bytes.items() if count),
        "of it": ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in way.phases.items()),
    }
    if way.seconds and ceiling is not None and way is not ceiling:
        cells[f"over {group.ceiling}"] = str(way.over(ceiling))
    if way.seconds and ours is not None and way is not ours:
        cells["beside ours"] = verdict(way, ours)
    cells |= {name: f"{value:.4g}" for name, value in way.figures.items()}
    return [cells.get(head, "") for head in heads]


def _time(spread: Spread) -> str:
    unit, scale = next(((unit, scale) for unit, scale in _UNITS if spread.median >= scale), _UNITS[-1])
    return f"{Spread(*(value / scale for value in spread))} {unit}"


_UNITS = (("s", 1), ("ms", 1e-3), ("µs", 1e-6))


def table_of(group: Group) -> Table:
    table = Table(title=group.name, title_justify="left")
    for head in columns(group):
        table.add_column(head)
    for row in rows(group):
        table.add_row(*row)
    return table


def markdown_of(group: Group) -> str:
    heads = columns(group)
    lines = [heads, ["---"] * len(heads), *rows(group)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def table_of_changes(changes: list[Change]) -> Table:
    table = Table("", "way", "in", "before", "after", "after over before", "", title_justify="left")
    group = None
    for change in changes:
        name = change.group if change.group != group else ""
        group = change.group
        unit = "s" if change.unit == "s" else "ceilings"
        cells = (name, change.way, unit, str(change.before), str(change.after), str(change.ratio), change.verdict())
        table.add_row(*cells)
    return table


def write(found: dict, path: Path | None) -> None:
    """One JSON line at the end of the output, and into a file if one is asked for."""
    line = json.dumps(found)
    if path is not None:
        path.write_text(line + "\n")
    print(line, flush=True)


def read(path: Path) -> Result:
    """A result from a file, or from the last line of an output that was kept. Raises ValueError for anything else."""
    lines = path.read_text().strip().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: its last line is no JSON: {error}") from error
    try:
        return Result.from_dict(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
