"""One round of what needs GPUs, in little time: tests and figures part by part, each with a limit and files of its own.

    python benchmarks/gpu_round.py --list
    python benchmarks/gpu_round.py --out round --seconds 540 --only tests-engine,compile,trace
    python benchmarks/gpu_round.py --out round --seconds 540          # all for as many GPUs as there are

Parts run one after the other, since they are timings, or fill the memory. None is begun that usually takes longer than
is left. What a part has written by the time it is ended stays: look through it, and copy what is good to
benchmarks/results/h200. Failed tests of all parts stand in failures.txt with their tracebacks, each from the moment it
failed.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from tilestep import native

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 1.8
"""A part is ended after this many times its usual seconds."""


@dataclass(frozen=True)
class Part:
    """Something to run.

    Args:
        name: what it is asked for by.
        gpus: how many it needs; one for a single GPU also runs where there are more.
        seconds: what it usually takes on a machine with nothing else to do.
        command: after Python's name; {out} is the folder of the part, {round} that of all parts.
    """

    name: str
    gpus: int
    seconds: float
    command: str

    def words(self, out: Path) -> list[str]:
        """The command in words."""
        return [word.format(out=out, round=out.parent) for word in shlex.split(self.command)]


def _tests(name: str, gpus: int, seconds: float, words: str) -> Part:
    # A part may be killed: -v names a test before it runs, and the file has every failure that came before.
    options = "-v -n 0 -rf --tb=short -p no:cacheprovider --failures-to {round}/failures.txt"
    return Part(f"tests-{name}", gpus, seconds, f"-m pytest {options} {words}")


def _trace(during: str, options: str = "") -> Part:
    model = "--bf16 --layers 6 --width 4096 --context 1024 --batch 8"
    return Part(f"trace-{during}", 1, 25, f"-m tilestep trace {model} --during {during} {options} --out {{out}}")


PARTS = [
    _trace("neither"),
    _trace("forward"),
    _trace("backward", "--clip 0"),
    Part("compile", 1, 130, "benchmarks/bench.py compile --rules all --out {out}"),
    Part("offload", 1, 110, "benchmarks/offload_figures.py --output {out}"),
    Part("norm", 1, 30, "-m tilestep bench norm --out {out}"),
    Part("step", 1, 40, "-m tilestep bench step --out {out}"),
    Part("rules", 1, 55, "benchmarks/bench.py rules --out {out}"),
    Part("formats", 1, 70, "benchmarks/formats.py --out {out}"),
    Part("stats", 1, 40, "benchmarks/stats_figures.py --out {out}/stats.json"),
    _tests("engine", 1, 250, "tests/gpu/test_engine_gpu.py"),
    _tests("tools", 1, 90, "tests/gpu/test_tools_gpu.py"),
    _tests("capture", 1, 100, "tests/gpu/test_capture_gpu.py"),
    _tests("matrices", 1, 175, "tests/gpu/test_matrices_gpu.py"),
    _tests("rows", 1, 200, "tests/gpu/test_rows_gpu.py"),
    _tests("norm", 1, 60, "tests/gpu/test_norm_gpu.py"),
    _tests("offload", 1, 140, "tests/gpu/test_offload_gpu.py"),
    _tests("scaler", 1, 130, "tests/gpu/test_scaler_gpu.py"),
    _tests("torch", 1, 145, "tests/gpu/test_torch_gpu.py"),
    _tests("stats", 1, 90, "tests/gpu/test_stats_gpu.py"),
    _tests("blocks", 1, 90, "tests/gpu/test_blocks_gpu.py"),
    _tests("random", 1, 90, "tests/gpu/test_random_gpu.py tests/gpu/test_fuzz_gpu.py"),
    _tests(
        "later",
        1,
        120,
        "tests/gpu/test_drop_in_gpu.py tests/gpu/test_elementwise_gpu.py tests/gpu/test_memory_gpu.py "
        "tests/gpu/test_park_gpu.py",
    ),
    _tests("eject", 1, 160, "tests/gpu/test_eject_gpu.py"),
    _tests("overlap", 1, 90, "tests/gpu/test_overlap_gpu.py tests/gpu/test_kept_gradients_gpu.py -m 'not two_gpus'"),
    Part("e2e", 1, 480, "benchmarks/bench.py e2e --mode both --compiled --seconds 460 --out {out}"),
    Part("shard-2", 2, 150, "benchmarks/shard_figures.py --ranks 2 --output {out}/shard-2.json"),
    Part("overlap-2", 2, 240, "benchmarks/overlap_figures.py --ranks 2 --limit 230 --output {out}"),
    _tests("two", 2, 240, "tests/gpu -m two_gpus"),
    Part("shard-4", 4, 150, "benchmarks/shard_figures.py --ranks 4 --output {out}/shard-4.json"),
    Part("overlap-4", 4, 240, "benchmarks/overlap_figures.py --ranks 4 --limit 230 --output {out}"),
    _tests("shard-4", 4, 90, "tests/gpu/test_shard_gpu.py -m four_gpus"),
    Part("meshes-8", 8, 100, "benchmarks/shard_figures.py --ranks 8 --parts meshes --output {out}/meshes_8.json"),
    _tests("shard-8", 8, 150, "tests/gpu/test_shard_gpu.py -m eight_gpus"),
]


def chosen(only: str, gpus: int) -> list[Part]:
    """The parts to run, in the order they are asked for; if none is, those that need most of the GPUs that there are.

    Args:
        only: names, with commas.
        gpus: how many there are.

    Raises:
        typer.BadParameter: for a name that no part has, and for parts that need more GPUs.
    """
    if not only:
        most = max(part.gpus for part in PARTS if part.gpus <= max(gpus, 1))
        return [part for part in PARTS if part.gpus == most]
    known = {part.name: part for part in PARTS}
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"no part is called {name!r}; there are: {', '.join(known)}", param_hint="--only")
        if known[name].gpus > gpus:
            raise typer.BadParameter(f"{name} needs {known[name].gpus} GPUs, here are {gpus}", param_hint="--only")
    return [known[name] for name in names]


def run(part: Part, out: Path, seconds: float) -> tuple[str, float]:
    """Run a part in a folder of its own.

    Args:
        part: the part.
        out: the folder of all parts.
        seconds: after which it is ended.

    Returns:
        How it ended, and the seconds it took.
    """
    folder = out / part.name
    folder.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    with (folder / "output.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *part.words(folder)],
            cwd=ROOT,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        try:
            code = process.wait(seconds)
            how = "done" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = "ended: out of time"
        finally:
            _end(process)
    return how, time.monotonic() - begin


def _heed_interrupts() -> None:
    # Shells have what they run in the background ignore them, and it would be inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and the ranks that it has started; tests are asked first, so that they say how far they are."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:100] if lines else ""


def main(
    out: Annotated[Path, typer.Option(help="Folder: one for each part, with its output.")] = Path("gpu-round"),
    seconds: Annotated[float, typer.Option(min=0, help="No part begins that would take longer; 0: no limit.")] = 0,
    only: Annotated[str, typer.Option(help="Only these parts, in this order, with commas.")] = "",
    list_parts: Annotated[bool, typer.Option("--list", help="Say which parts there are.")] = False,
) -> None:
    """Run parts one after the other and say how each ended."""
    console, begin = Console(), time.monotonic()
    if list_parts:
        console.print(_table())
        return
    parts = chosen(only, torch.cuda.device_count())
    native.wait()
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for part in parts:
        left = seconds - (time.monotonic() - begin) if seconds else math.inf
        line = f"{part.name}: left out, it takes {part.seconds:g} s and {left:.0f} are left"
        if part.seconds <= left:
            how, took = run(part, out, min(PATIENCE * part.seconds, left))
            failed |= how != "done"
            line = f"{part.name}: {how}, {took:.0f} s: {_last_line(out / part.name / 'output.log')}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        with (out / "summary.txt").open("a") as summary:
            summary.write(line + "\n")
    raise typer.Exit(int(failed))


def _table() -> Table:
    table = Table("part", "GPUs", "seconds", "command")
    for part in PARTS:
        table.add_row(part.name, str(part.gpus), f"{part.seconds:g}", part.command)
    return table


if __name__ == "__main__":
    typer.run(main)
