"""The result of a section as JSON: rows of figures, and the environment of the measurement."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import timeit
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .._version import __version__
from ..backends.cpp.compile import compiler_version
from ..backends.tuning import device_key
from ..devices import has_streams
from ..tracing.shown import OTHER_COLOUR, OURS_COLOUR, picture, table
from .measure import Row, Spread


def device_name(device: torch.device) -> str:
    """Return the marketing name of a GPU, or the CPU's model and core count."""
    if has_streams(device):
        return device_key(device)
    count = len(os.sched_getaffinity(0))
    return f"{device_key(device)}, {count} cores"


def environment(device: torch.device | None = None) -> dict[str, str]:
    """Return the names and versions that a result or a bug report should carry."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    number = torch.ones((), device="cpu")
    # Hosts of one kind of GPU differ by a factor of two.
    addition = statistics.median(timeit.repeat(lambda: number + number, number=1000, repeat=7))
    described = {
        "tilestep": __version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": next((found.version for found in importlib.metadata.distributions(name="triton")), "none"),
        "compiler": next(iter(compiler_version().splitlines()), "none"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "host": f"{addition * 1e3:.2f} us for an addition of two numbers",
    }
    if has_streams(device):
        described["cuda"] = str(torch.version.cuda)
    return described


def _commit() -> str:
    if named := os.environ.get("TILESTEP_COMMIT"):
        return named  # a copy of a checkout without its history
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+changes"]
    source = Path(__file__).parent
    try:
        described = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        is_checkout = any((folder / ".git").exists() for folder in source.parents)
        missing = "git is not installed" if isinstance(error, FileNotFoundError) else "git cannot describe it"
        return f"a checkout, but {missing}" if is_checkout else "not a git checkout"
    return described.stdout.strip()


FORMAT = 1
OURS = "tilestep"  # its name in tables, or a prefix of it


@dataclass
class Group:
    """Contenders of the same work, and the bandwidth limit (bytes per second, and its name) they are compared with."""

    title: str
    rows: list[Row]
    limit: float | None = None
    limit_name: str = ""
    tags: dict[str, str] = field(default_factory=dict)

    def row(self, contender: str) -> Row | None:
        """Return the row of a contender, or None without one."""
        return next((row for row in self.rows if row.contender == contender), None)


@dataclass
class Result:
    """A section of the benchmark; `summary` has named figures over all groups."""

    section: str
    environment: dict[str, str]
    groups: list[Group] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write `<section>.json` into a folder and return its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.section}.json"
        path.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` wrote."""
        stored: dict[str, Any] = json.loads(path.read_text())
        if stored.pop("format", None) != FORMAT:
            raise ValueError(f"{path} is not a benchmark result of format {FORMAT}")
        groups = [Group(**{**group, "rows": [_row(row) for row in group["rows"]]}) for group in stored.pop("groups")]
        return cls(**stored, groups=groups)


def _row(stored: dict[str, Any]) -> Row:
    times = {name: Spread(**stored[name]) if stored[name] else None for name in ("host", "wall", "device")}
    return Row(**{**stored, **times})


def print_result(result: Result, console: Console) -> None:
    """Print a table per group, except for groups of a combined table, then the notes."""
    for group in result.groups:
        if not group.tags:
            titles = ["host ms", "wall ms", "device ms", "launches", "torch calls", "peak MB", "GB/s"]
            columns = ["", *titles, f"of {group.limit_name}", "speedup"]
            console.print(table(group.title, columns, map(_cells, group.rows), bold=OURS))
    for name, value in result.summary.items():
        console.print(f"geometric mean, {name}: {value:.3f}x", markup=False)
    for note in result.notes:
        console.print(f"note: {note}", markup=False)


def _cells(row: Row) -> list[str]:
    def shown(value: float | None, spec: str, unit: float = 1) -> str:
        return "" if value is None else format(value / unit, spec)

    return [
        row.contender if row.failure is None else f"{row.contender}: {row.failure}",
        *(_time(time) for time in (row.host if row.device else None, row.wall, row.device)),
        *(shown(row.launches, ".0f"), shown(row.calls, ".0f"), shown(row.peak_bytes, ",.2f", 1e6)),
        *(
            shown(row.bandwidth, ",.1f", 1e9),
            shown(row.of_limit, ".0%"),
            shown(row.speedup, ".2f") + "x" * bool(row.speedup),
        ),
    ]


def _time(figure: Spread | None) -> str:
    """Median and half the distance between the quartiles."""
    if figure is None:
        return ""
    half = (figure.high - figure.low) / 2
    return f"{figure.median:,.3g} ±{half:.2g}" if figure.median < 1000 else f"{figure.median:,.0f} ±{half:,.0f}"


def plot(result: Result, path: Path) -> None:
    """Draw one panel per group: wall time of each contender, device time inside it, the limit's time as a line."""
    limits = ("flat read", "copy")
    drawn = [
        [(row, row.wall) for row in group.rows[::-1] if row.wall is not None and not row.contender.startswith(limits)]
        for group in result.groups
    ]
    heights = [0.8 + 0.32 * len(rows) for rows in drawn] or [1.0]
    size = (9, sum(heights) + 0.5)
    with picture(path, len(heights), figsize=size, height_ratios=heights) as (figure, panels):
        for panel, group, rows in zip(panels, result.groups, drawn, strict=False):
            _panel(panel, group, rows)
        described = result.environment
        figure.suptitle(f"{described['device']}, torch {described['torch']}, {described['date']}", fontsize=9)


def _panel(panel: Any, group: Group, rows: list[tuple[Row, Spread]]) -> None:
    for position, (row, wall) in enumerate(rows):
        colour = OURS_COLOUR if row.contender.startswith(OURS) else OTHER_COLOUR
        error = [[wall.median - wall.low], [wall.high - wall.median]]
        panel.barh(position, wall.median, xerr=error, color=colour, alpha=0.45 if row.device else 1.0, height=0.7)
        if row.device:
            panel.barh(position, row.device.median, color=colour, height=0.4)
            panel.set_xlabel("ms: wall (light), device (dark); dotted: the same bytes at full bandwidth", fontsize=7)
        panel.annotate(f" {wall.median:,.3g} ms", (wall.high, position), va="center", fontsize=8)
    panel.set_yticks(range(len(rows)), [row.contender for row, _ in rows], fontsize=8)
    panel.margins(x=0.15)
    panel.tick_params(axis="x", labelsize=8)
    panel.set_title(group.title, fontsize=9, loc="left")
    moved = max((row.bytes_moved for row, _ in rows), default=0)
    if group.limit and moved:
        panel.axvline(moved / group.limit * 1e3, color="black", linewidth=0.8, linestyle=":")
