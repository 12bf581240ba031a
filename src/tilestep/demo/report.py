"""What the demo shows: a table and a picture of both runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from ..bench.measure import spread
from .train import Run


def largest_difference(runs: Sequence[Run]) -> float:
    """Return the largest distance between the losses of any two runs at the same step."""
    return max(max(losses) - min(losses) for losses in zip(*(run.losses for run in runs), strict=True))


def table(runs: Sequence[Run], gpu: bool) -> Table:
    """Return the comparison, one column per run."""
    figures: list[tuple[str, Callable[[Run], str]]] = [
        ("training loss at the end", lambda run: f"{run.final_loss:.5f}"),
        ("validation loss", lambda run: f"{run.validation:.5f}"),
        ("clip + step, median ms", lambda run: _milliseconds(run.wall)),
        ("  of which host", lambda run: _milliseconds(run.host)),
        ("launches a step" if gpu else "torch calls a step", lambda run: _count(run, gpu)),
        ("extra memory in a step", lambda run: f"{run.trace.peak_bytes / 1e3:,.1f} kB"),
        ("whole training", lambda run: f"{run.training_seconds:.1f} s"),
    ]
    shown = Table(title=f"largest difference of the two losses at any step: {largest_difference(runs):.2g}")
    shown.add_column("")
    for run in runs:
        shown.add_column(run.name, justify="right")
    for title, figure in figures:
        shown.add_row(title, *[figure(run) for run in runs])
    return shown


def _milliseconds(values: Sequence[float]) -> str:
    middle = spread(values)
    return f"{middle.median:.3f} ±{(middle.high - middle.low) / 2:.3f}"


def _count(run: Run, gpu: bool) -> str:
    return str(run.trace.launches if gpu else run.trace.calls)


def picture(runs: Sequence[Run], path: Path, title: str) -> None:
    """Draw both loss curves, their distance, and the optimizer's time in every step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, distance, times) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    styles = [{"color": "#8a9ba8", "linewidth": 3.5}, {"color": "#c8553d", "linewidth": 1.2}]
    for run, style in zip(runs, styles, strict=True):
        steps = range(1, len(run.losses) + 1)
        losses.plot(steps, run.losses, label=run.name, **style)
        times.plot(steps, run.wall, ".", markersize=3, color=style["color"], alpha=0.5)
        median = statistics.median(run.wall)
        times.axhline(median, color=style["color"], label=f"{run.name}: {median:.2f} ms")
    apart = [abs(one - other) for one, other in zip(runs[0].losses, runs[1].losses, strict=True)]
    distance.plot(range(1, len(apart) + 1), apart, color="black", linewidth=0.8)
    if any(apart):
        distance.set_yscale("log")
    times.set_ylim(0, 3 * max(statistics.median(run.wall) for run in runs))
    for panel, name in ((losses, "training loss, nats a byte"), (distance, "distance of the two losses")):
        panel.set_title(name, fontsize=10)
    times.set_title("clip + optimizer, ms a step", fontsize=10)
    for panel in (losses, distance, times):
        panel.set_xlabel("step")
        panel.spines[["top", "right"]].set_visible(False)
    losses.legend(fontsize=8)
    times.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
