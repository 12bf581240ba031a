"""`tilestep bench`: peers side by side, as a table, JSON files and pictures."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Section(str, Enum):
    """What can be measured."""

    norm = "norm"
    step = "step"
    cpu = "cpu"
    all = "all"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command()
    def bench(
        section: Annotated[Section, typer.Argument(help="What to measure.")] = Section.all,
        out: Annotated[Path, typer.Option(help="Folder for <section>.json and <section>.png.")] = Path("bench"),
        device: Annotated[str, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = "",
        rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each contender.")] = 15,
        compiled: Annotated[bool, typer.Option(help="Also peers that compile for minutes.")] = False,
        quick: Annotated[bool, typer.Option(help="Tiny workloads: checks the harness, measures nothing.")] = False,
    ) -> None:
        """Measure norms and optimizer steps of tilestep and its peers, in interleaved rounds.

        First steps, all rules and whole training iterations are measured by `benchmarks/bench.py` of a checkout.
        """
        from rich.console import Console

        from ..bench.report import plot, print_result
        from ..bench.sections import Settings, run_cpu, run_norm, run_step
        from ..native import wait
        from ._rules import chosen_device, require_plotting

        require_plotting()
        console = Console()

        def say(line: str) -> None:
            console.print(line, style="dim", markup=False)

        chosen = chosen_device(device)
        if not quick and wait():
            say("the C++ look at tensors is built: steps are measured as a training sees them after its first minute")
        settings = Settings(chosen, quick=quick, compiled=compiled, rounds=rounds, say=say)
        runs = {"norm": run_norm, "step": run_step, "cpu": run_cpu}
        for name in runs if section is Section.all else [section.value]:
            result = runs[name](settings)
            stored = result.save(out)
            plot(result, stored.with_suffix(".png"))
            print_result(result, console)
            console.print(f"written: {stored} and {stored.with_suffix('.png')}", markup=False)
