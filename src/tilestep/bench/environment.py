"""What a measured figure depends on: device, host, versions, commit, date."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import timeit
from datetime import datetime, timezone
from pathlib import Path

import torch

from .._version import __version__
from ..devices import has_streams


def device_name(device: torch.device) -> str:
    """Return the marketing name of a GPU, or the CPU's model and core count.

    >>> "core" in device_name(torch.device("cpu"))
    True
    """
    if has_streams(device):
        return torch.cuda.get_device_name(device)
    return (
        f"{_cpu_model()}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"
    )


def environment(device: torch.device | None = None) -> dict[str, str]:
    """Return the names and versions that a result or a bug report should carry.

    >>> environment(torch.device("cpu"))["tilestep"] == __version__
    True
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
        "host": f"{_addition() * 1e6:.2f} us for an addition of two numbers",
    }
    if has_streams(device):
        described["cuda"] = str(torch.version.cuda)
    return described


def _addition() -> float:
    """Seconds in which torch adds two numbers: one kind of GPU is found with hosts of which one takes twice as long."""
    number = torch.ones((), device="cpu")
    return statistics.median(timeit.repeat(lambda: number + number, number=1000, repeat=7)) / 1000


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
