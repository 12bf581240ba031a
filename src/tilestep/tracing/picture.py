"""A traced iteration as a picture: a lane for each kind of work, and the optimizer's exposed time across them."""

from __future__ import annotations

from pathlib import Path

from .intervals import Intervals
from .report import Report

_COLORS = {
    "forward": "#7fa8c9",
    "backward": "#3d6d99",
    "communication": "#6a994e",
    "update": "#c8553d",
    "copies": "#d9a441",
    "host": "#8a9ba8",
}
_FINEST = 1 / 3000
"""Gaps smaller than this part of the picture's width are drawn over: nobody could see them."""


def draw(report: Report, path: Path, title: str) -> None:
    """Draw the report's shown iteration."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown, rows = report.shown, report.rows()
    figure, panel = pyplot.subplots(figsize=(11, 0.9 + 0.42 * len(rows)), layout="constrained")

    def bars(spans: Intervals) -> list[tuple[float, float]]:
        return [
            ((start - shown.start) / 1e3, (stop - start) / 1e3)
            for start, stop in _visible(spans, shown.stop - shown.start)
        ]

    for place, (name, spans) in enumerate(rows):
        panel.broken_barh(bars(spans), (place - 0.38, 0.76), color=_COLORS[name], linewidth=0)
    for start, width in bars(shown.lanes.exposed):
        panel.axvspan(start, start + width, color=_COLORS["update"], alpha=0.15, linewidth=0)
    panel.set_yticks(range(len(rows)), [name for name, _ in rows])
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xlim(0, shown.milliseconds)
    panel.set_xlabel("milliseconds; shaded: only the optimizer runs", fontsize=9)
    panel.tick_params(labelsize=9, left=False)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_title(f"{title}\n{report.summary()}", fontsize=9, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _visible(spans: Intervals, width: float) -> Intervals:
    drawn: Intervals = []
    for start, stop in spans:
        if drawn and start - drawn[-1][1] < width * _FINEST:
            drawn[-1] = (drawn[-1][0], stop)
        else:
            drawn.append((start, stop))
    return drawn
