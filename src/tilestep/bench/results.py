"""The result of a section: rows of figures with the environment they were measured in, as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import timeit
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from ..devices import has_streams
from .measure import Spread, Timing


def device_name(device: torch.device) -> str:
    """Return the marketing name of a GPU, or the CPU's model and core count."""
    if has_streams(device):
        return torch.cuda.get_device_name(device)
    return (
        f"{_cpu_model()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"
    )


def environment(device: torch.device | None = None) -> dict[str, str]:
    """Return the names and versions that a result or a bug report should carry."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    number = torch.ones((), device="cpu")
    # One kind of GPU is found with hosts of which one takes twice as long.
    addition = statistics.median(timeit.repeat(lambda: number + number, number=1000, repeat=7))
    described = {
        "tilestep": __version__,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "compiler": _compiler(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "host": f"{addition * 1e3:.2f} us for an addition of two numbers",
    }
    if has_streams(device):
        described["cuda"] = str(torch.version.cuda)
    return described


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _first_line(command: list[str], directory: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else ""


def _commit() -> str:
    if named := os.environ.get("TILESTEP_COMMIT"):
        return named  # a copy of a checkout without its history
    source = Path(__file__).resolve().parent
    commit = _first_line(["git", "rev-parse", "--short=12", "HEAD"], source)
    changed = commit and _first_line(["git", "status", "--porcelain", "--untracked-files=no"], source)
    return (commit + "+changes" if changed else commit) or "not a git checkout"


def _compiler() -> str:
    command = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "")
    return (command and _first_line([*command.split(), "--version"])) or "none"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


FORMAT = 1


@dataclass
class Row:
    """One contender's figures in one group.

    Times in milliseconds, memory in bytes, bandwidth in bytes a second; None where there is no such figure.
    `of_limit` is the bandwidth as a fraction of the group's limit. `failure` says why a contender has no figures.
    End to end, `speedup` is over the baseline, `share` what the step alone would be of the iteration, and
    `setup_seconds` the first three steps with all that is built for them.
    """

    contender: str
    host: Spread | None = None
    wall: Spread | None = None
    device: Spread | None = None
    launches: int | None = None
    calls: int | None = None
    peak_bytes: int | None = None
    bytes_moved: int = 0
    bandwidth: float | None = None
    of_limit: float | None = None
    failure: str | None = None
    speedup: float | None = None
    share: float | None = None
    setup_seconds: float | None = None

    @classmethod
    def of(cls, timing: Timing, limit: float | None, gpu: bool) -> Row:
        """Return the row for what was measured, against a bandwidth limit in bytes a second."""
        trace, bandwidth = timing.trace, timing.bandwidth
        return cls(
            contender=timing.contender,
            host=timing.host,
            wall=timing.wall,
            device=timing.device,
            launches=trace.launches if trace and gpu else None,
            calls=trace.calls if trace else None,
            peak_bytes=trace.peak_bytes if trace else None,
            bytes_moved=timing.bytes_moved,
            bandwidth=bandwidth,
            of_limit=bandwidth / limit if bandwidth and limit else None,
            failure=timing.failure,
        )


@dataclass
class Group:
    """Contenders that did the same work, and the bandwidth (bytes a second, and whose) that they are held against."""

    title: str
    rows: list[Row]
    limit: float | None = None
    limit_name: str = ""
    tags: dict[str, str] = field(default_factory=dict)

    def row(self, contender: str) -> Row | None:
        """Return a contender's row, or None if it did not take part."""
        return next((row for row in self.rows if row.contender == contender), None)


@dataclass
class Result:
    """One section of the benchmark; `summary` holds figures over all groups, by what they are."""

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
