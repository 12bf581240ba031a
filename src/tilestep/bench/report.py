"""What people see of a result: tables in the terminal and a picture."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from .measure import Spread
from .results import Group, Result, Row
from .sections import OURS

OURS_COLOUR, OTHER_COLOUR = "#c8553d", "#8a9ba8"


def print_result(result: Result, console: Console) -> None:
    """Print one table per group, but for those that a table over several groups is made of, then the notes."""
    for group in result.groups:
        if not group.tags:
            console.print(_table(group))
    for name, value in result.summary.items():
        console.print(f"geometric mean, {name}: {value:.3f}x", markup=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)


def _table(group: Group) -> Table:
    """A column that no row has a figure for is left out."""
    columns = [
        ("host ms", [_time(row.host) if row.device else "" for row in group.rows]),
        ("wall ms", [_time(row.wall) for row in group.rows]),
        ("device ms", [_time(row.device) for row in group.rows]),
        ("launches", ["" if row.launches is None else str(row.launches) for row in group.rows]),
        ("torch calls", ["" if row.calls is None else str(row.calls) for row in group.rows]),
        ("peak MB", ["" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.2f}" for row in group.rows]),
        ("GB/s", ["" if row.bandwidth is None else f"{row.bandwidth / 1e9:,.1f}" for row in group.rows]),
        (f"of {group.limit_name}", ["" if row.of_limit is None else f"{row.of_limit:.0%}" for row in group.rows]),
        ("speedup", ["" if row.speedup is None else f"{row.speedup:.2f}x" for row in group.rows]),
    ]
    shown = [(title, cells) for title, cells in columns if any(cells)]
    table = Table(title=group.title, title_justify="left", title_style="bold")
    table.add_column("")
    for title, _ in shown:
        table.add_column(title, justify="right")
    for index, row in enumerate(group.rows):
        name = row.contender if row.failure is None else f"{row.contender}: {row.failure}"
        style = "bold" if row.contender.startswith(OURS) else None
        table.add_row(name, *[cells[index] for _, cells in shown], style=style)
    return table


def _time(figure: Spread | None) -> str:
    """Median and half the distance between the quartiles."""
    if figure is None:
        return ""
    half = (figure.high - figure.low) / 2
    return f"{figure.median:,.3g} ±{half:.2g}" if figure.median < 1000 else f"{figure.median:,.0f} ±{half:,.0f}"


def plot(result: Result, path: Path) -> None:
    """Draw one panel per group: wall time of each contender, device time inside it, the limit's time as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = max(len(result.groups), 1)
    heights = [0.8 + 0.32 * len(_drawn(group)) for group in result.groups] or [1.0]
    figure, panels = pyplot.subplots(
        count, 1, figsize=(9, sum(heights) + 0.5), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for panel, group in zip(panels[:, 0], result.groups, strict=False):
        _panel(panel, group)
    described = result.environment
    figure.suptitle(f"{described['device']}, torch {described['torch']}, {described['date']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _drawn(group: Group) -> list[Row]:
    limits = ("flat read", "copy")
    return [row for row in group.rows if row.wall is not None and not row.contender.startswith(limits)]


def _panel(panel, group: Group) -> None:  # type: ignore[no-untyped-def]  # matplotlib is optional
    rows = _drawn(group)[::-1]
    for position, row in enumerate(rows):
        assert row.wall is not None
        colour = OURS_COLOUR if row.contender.startswith(OURS) else OTHER_COLOUR
        error = [[row.wall.median - row.wall.low], [row.wall.high - row.wall.median]]
        faded = 0.45 if row.device else 1.0
        panel.barh(position, row.wall.median, xerr=error, color=colour, alpha=faded, height=0.7)
        if row.device:
            panel.barh(position, row.device.median, color=colour, height=0.4)
        panel.annotate(f" {row.wall.median:,.3g} ms", (row.wall.high, position), va="center", fontsize=8)
    panel.set_yticks(range(len(rows)), [row.contender for row in rows], fontsize=8)
    panel.margins(x=0.15)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(group.title, fontsize=9, loc="left")
    moved = max((row.bytes_moved for row in rows), default=0)
    if group.limit and moved:
        panel.axvline(moved / group.limit * 1e3, color="black", linewidth=0.8, linestyle=":")
    if any(row.device for row in rows):
        panel.set_xlabel("ms: wall (light), device (dark); dotted: the same bytes at full bandwidth", fontsize=7)
