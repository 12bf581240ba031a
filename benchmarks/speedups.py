"""What people see of speedups: a table and a bar chart over the groups of the `e2e` and the `rules` section."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from e2e import BASELINE, ITERATION
from rich.console import Console
from rich.table import Table

from tilestep.bench.results import Group, Result
from tilestep.bench.sections import OURS

__all__ = ["plot_speedups", "print_iterations", "print_rules", "print_speedups"]

COLOURS = {"torch fused": "#8a9ba8", "torch compiled": "#c9a15a", OURS: "#c8553d"}
PLAIN = "#777777"


def print_speedups(result: Result, console: Console) -> None:
    """Print the tables over the groups of a result."""
    if result.section == "e2e":
        print_iterations(result, console)
    print_rules(result, console)


def print_iterations(result: Result, console: Console) -> None:
    """Print a table for each mode: iteration time of the baseline, speedups, share of clip and step."""
    for mode, groups in _by_mode(result).items():
        console.print(_iterations(mode, groups))
        built = [row.setup_seconds for group in groups for row in group.rows if row.contender == "torch compiled"]
        if any(built):
            total = sum(seconds or 0.0 for seconds in built)
            console.print(
                f"torch compiled: {total:,.0f} s to compile the optimizer for {len(built)} models", markup=False
            )
        for group in groups:
            for row in group.rows:
                if row.failure is not None:
                    console.print(f"failed, {group.tags['model']}, {row.contender}: {row.failure}", markup=False)


def _by_mode(result: Result) -> dict[str, list[Group]]:
    modes: dict[str, list[Group]] = {}
    for group in result.groups:
        if group.tags.get("work") == ITERATION:
            modes.setdefault(group.tags["mode"], []).append(group)
    return modes


def _contenders(groups: list[Group]) -> list[str]:
    return list(dict.fromkeys(row.contender for group in groups for row in group.rows))


def _iterations(mode: str, groups: list[Group]) -> Table:
    table = Table(title=f"training iterations, model {mode}: speedup over {BASELINE} (share of clip + step)")
    table.add_column("")
    table.add_column("M", justify="right")  # parameters
    names = _contenders(groups)
    for name in names:
        title = name.removeprefix("torch ")
        table.add_column(title, justify="right", style="bold" if name == OURS else None, no_wrap=True)
    for group in groups:
        millions = f"{int(group.tags['elements']) / 1e6:,.4g}"
        table.add_row(group.tags["model"], millions, *[_cell(group, name) for name in names])
    return table


def _cell(group: Group, name: str) -> str:
    row = group.row(name)
    if row is None:
        return ""
    if row.failure is not None:
        return "failed"
    speedup = f"{row.speedup:.2f}x" if row.speedup is not None else ""
    milliseconds = f"{row.wall.median:,.1f} ms" if row.wall is not None else ""
    share = f" ({row.share:.0%})" if row.share is not None else ""
    return (milliseconds if name == BASELINE else speedup) + share


def print_rules(result: Result, console: Console) -> None:
    """Print a table for each list of tensors: every rule's step, torch's fastest, and how much faster ours is."""
    works: dict[str, list[Group]] = {}
    for group in result.groups:
        if "rule" in group.tags:
            works.setdefault(group.tags["work"], []).append(group)
    for work, groups in works.items():
        table = Table(title=f"every rule's step, {work}")
        for title in ("", f"{OURS} ms", f"of {groups[0].limit_name}", "torch's fastest", "ms", "speedup"):
            table.add_column(title, justify="right" if title else "left")
        for group in groups:
            table.add_row(group.tags["rule"], *_rule_cells(group))
        console.print(table)


def _rule_cells(group: Group) -> list[str]:
    ours = group.row(OURS)
    if ours is None or ours.wall is None:
        return [f"failed: {ours.failure if ours is not None else ''}"]
    others = [
        (row.wall.median, row.contender)
        for row in group.rows
        if row.contender.startswith("torch") and row.wall is not None
    ]
    milliseconds, name = min(others, default=(0.0, ""))
    return [
        f"{ours.wall.median:,.3g}",
        f"{ours.of_limit:.0%}" if ours.of_limit is not None else "",
        name,
        f"{milliseconds:,.3g}" if name else "",
        f"{ours.speedup:.2f}x" if ours.speedup is not None else "",
    ]


@dataclass
class _Chart:
    """A panel: for each label a bar for each contender; 0 where there is none."""

    title: str
    unit: str
    labels: list[str]
    bars: dict[str, list[float]]


def plot_speedups(result: Result, path: Path) -> None:
    """Draw a panel for each mode (`e2e`, with geometric means) or list of tensors (`rules`): a bar for each speedup.

    Args:
        result: of `run_e2e` or `run_rules`.
        path: where to write the picture; the suffix chooses the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    charts = [_mode_chart(mode, groups, result) for mode, groups in _by_mode(result).items()] or _rule_charts(result)
    longest = max(len(chart.labels) for chart in charts)
    figure, panels = pyplot.subplots(
        1, len(charts), figsize=(7 * len(charts), 1.2 + 0.4 * longest), squeeze=False, layout="constrained"
    )
    for panel, chart in zip(panels[0], charts, strict=True):
        _panel(panel, chart)
    described = result.environment
    figure.suptitle(f"{described['device']}, torch {described['torch']}, {described['date']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _mode_chart(mode: str, groups: list[Group], result: Result) -> _Chart:
    bars = {}
    for name in _contenders(groups):
        if name != BASELINE:
            rows = [group.row(name) for group in groups]
            values = [(row.speedup if row is not None else None) or 0.0 for row in rows]
            bars[name] = [*values, result.summary.get(f"{name}, {mode}, all models", 0.0)]
    labels = [*(group.tags["model"] for group in groups), "geometric mean"]
    return _Chart(f"training iteration, model {mode}", f"speedup over {BASELINE} Adam, clip on", labels, bars)


def _rule_charts(result: Result) -> list[_Chart]:
    works: dict[str, dict[str, float]] = {}
    for group in result.groups:
        ours = group.row(OURS)
        if "rule" in group.tags and ours is not None:
            works.setdefault(group.tags["work"], {})[group.tags["rule"]] = ours.speedup or 0.0
    charts = []
    for work, values in works.items():
        shown = {rule: value for rule, value in values.items() if value} or values
        charts.append(_Chart(work, "speedup over torch's fastest variant", list(shown), {OURS: list(shown.values())}))
    return charts


def _panel(panel, chart: _Chart) -> None:  # type: ignore[no-untyped-def]  # matplotlib is optional
    height = 0.8 / max(len(chart.bars), 1)
    for index, (name, values) in enumerate(chart.bars.items()):
        positions = [position + (index - (len(chart.bars) - 1) / 2) * height for position in range(len(values))]
        panel.barh(positions, values, height=height, color=COLOURS.get(name, PLAIN), label=name)
        for position, value in zip(positions, values, strict=True):
            if value:
                panel.annotate(f" {value:.2f}", (value, position), va="center", fontsize=7)
    panel.axvline(1.0, color="black", linewidth=0.8)
    panel.set_yticks(range(len(chart.labels)), chart.labels, fontsize=8)
    panel.set_ylim(len(chart.labels) - 0.4, -0.6)
    panel.margins(x=0.1)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(chart.title, fontsize=9, loc="left")
    panel.set_xlabel(chart.unit, fontsize=8)
    panel.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)  # above: bars are long
