"""A picture of a result: bars against the ceiling, and what seconds and bytes went into."""

from pathlib import Path

from lora_stream.bench.results import Change, Group, Result, Spread, Way

_COLORS = {"ceiling": "#9a9a9a", "ours": "#2b6cb0", "other": "#dd8452"}


def plot(result: Result, path: Path) -> None:
    """Raises ValueError where matplotlib is missing or nothing was measured."""
    groups = [group for group in result.groups if any(way.seconds for way in group.ways)]
    if not groups:
        raise ValueError("nothing was measured, so there is nothing to plot")
    panels = [(group, draw) for group in groups for draw in (_times, _phases, _bytes) if _shown(group, draw)]
    heights = [0.9 + 0.32 * len(_shown(group, draw)) for group, draw in panels]
    figure = _figure(sum(heights) + 0.4)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (group, draw) in zip(all_axes, panels, strict=True):
        draw(axes, group)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(9)
        axes.xaxis.label.set_fontsize(8)
    figure.suptitle(f"lora-stream bench {result.benchmark}, {result.machine['cpu']}", fontsize=10)
    figure.savefig(path, dpi=130)


def plot_fidelity(result: Result, path: Path) -> None:
    """Of every group the policy gain, and the KL on a logarithmic scale."""
    figure = _figure(0.4 + 1.9 * len(result.groups))
    for (gains, divergences), group in zip(
        figure.subplots(len(result.groups), 2, squeeze=False), result.groups, strict=True
    ):
        names = [way.name for way in group.ways]
        colors = [_COLORS["ours" if name == group.ours else "other"] for name in names]
        gains.barh(names, [way.figures["gain"] for way in group.ways], color=colors)
        gains.axvline(1, color="black", lw=0.8, ls="--")
        divergences.barh(names, [way.figures["KL"] for way in group.ways], color=colors)
        divergences.set_xscale("log")
        divergences.set_yticklabels([])
        gains.set_title(group.name, fontsize=7, loc="left")
        for axes, label in ((gains, "policy gain"), (divergences, "KL to the exact policy")):
            axes.invert_yaxis()
            axes.tick_params(labelsize=7)
            axes.set_xlabel(label, fontsize=7)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def plot_changes(changes: list[Change], path: Path) -> None:
    """After over before of every way, with the spread."""
    figure = _figure(0.9 + 0.32 * len(changes))
    axes = figure.subplots()
    colors = {"faster": "#2f855a", "slower": "#c53030"}
    for i, change in enumerate(changes):
        ratio = change.ratio
        error = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        axes.barh(
            i, ratio.median, color=colors.get(change.verdict(), _COLORS["ceiling"]), xerr=error, error_kw={"lw": 1}
        )
    axes.set_yticks(range(len(changes)), [f"{change.group}: {change.way}" for change in changes], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", lw=0.8, ls="--")
    axes.set_xlabel("after over before")
    figure.savefig(path, dpi=130)


def _figure(height: float):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"--plot needs matplotlib ({error}): pip install 'lora_stream[bench]'") from error
    return Figure(figsize=(9, height), layout="constrained")


def _shown(group: Group, draw) -> list[Way]:
    """The ways that a panel has bars of."""
    of = {_times: lambda way: way.seconds, _phases: lambda way: way.phases, _bytes: lambda way: way.num_bytes}[draw]
    return [way for way in group.ways if of(way)]


def _times(axes, group: Group) -> None:
    ceiling = group.way(group.ceiling)
    for i, way in enumerate(way for way in group.ways if way.seconds):
        spread = Spread.of(way.seconds) if ceiling is None else way.over(ceiling)
        kind = "ceiling" if way.name == group.ceiling else "ours" if way.name.startswith(group.ours) else "other"
        error = [[spread.median - spread.low], [spread.high - spread.median]]
        axes.barh(i, spread.median, color=_COLORS[kind], xerr=error, error_kw={"lw": 1})
    names = [way.name for way in group.ways if way.seconds]
    axes.set_yticks(range(len(names)), names)
    if ceiling is not None:
        axes.axvline(1, color="black", lw=0.8, ls="--")
    axes.set_title(group.name, loc="left")
    axes.set_xlabel("seconds" if ceiling is None else f"time over {group.ceiling}")


def _stacked(axes, group: Group, parts_of, label: str, unit: float) -> None:
    ways = [way for way in group.ways if parts_of(way)]
    for part in dict.fromkeys(name for way in ways for name in parts_of(way)):
        widths = [parts_of(way).get(part, 0) / unit for way in ways]
        starts = [sum(value for _, value in _before(parts_of(way), part)) / unit for way in ways]
        axes.barh(range(len(ways)), widths, height=0.6, left=starts, label=part)
    axes.set_yticks(range(len(ways)), [way.name for way in ways])
    axes.set_title(label, loc="left")
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _before(parts: dict, part: str):
    for name, value in parts.items():
        if name == part:
            return
        yield name, value


def _phases(axes, group: Group) -> None:
    _stacked(axes, group, lambda way: way.phases, "what its seconds went into", 1)


def _bytes(axes, group: Group) -> None:
    """What became of the checkpoint; what came from other ranks for it is told beside."""
    _stacked(
        axes,
        group,
        lambda way: {what: count for what, count in way.num_bytes.items() if what != "gathered"},
        "what became of the bytes, MiB",
        2**20,
    )
    for i, way in enumerate(way for way in group.ways if way.num_bytes):
        if gathered := way.num_bytes.get("gathered"):
            end = sum(count for what, count in way.num_bytes.items() if what != "gathered") / 2**20
            axes.text(
                end, i, f"{gathered / 2**20:.3g} MiB gathered ", fontsize=7, va="center", ha="right", color="white"
            )
