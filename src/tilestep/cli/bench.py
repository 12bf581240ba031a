"""`tilestep bench`: peers side by side, as a table, JSON files and pictures."""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Section(str, Enum):
    """What can be measured."""

    norm = "norm"
    step = "step"
    compile = "compile"
    cpu = "cpu"
    rules = "rules"
    e2e = "e2e"
    all = "all"


ALL = ("norm", "step", "compile", "cpu")
"""What `all` runs; the others take minutes each."""


class Mode(str, Enum):
    """How models run in `e2e`."""

    eager = "eager"
    compiled = "compiled"
    both = "both"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command()
    def bench(
        section: Annotated[
            Section, typer.Argument(help="What to measure; all is everything but rules and e2e.")
        ] = Section.all,
        out: Annotated[Path, typer.Option(help="Folder for <section>.json and <section>.png.")] = Path("bench"),
        device: Annotated[str, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = "",
        rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each contender.")] = 15,
        compiled: Annotated[bool, typer.Option(help="Also peers that compile for minutes.")] = False,
        quick: Annotated[bool, typer.Option(help="Tiny workloads: checks the harness, measures nothing.")] = False,
        models: Annotated[str, typer.Option(help="e2e: only these models, by name, with commas.")] = "",
        mode: Annotated[Mode, typer.Option(help="e2e: models eager, under torch.compile, or both.")] = Mode.eager,
        batch: Annotated[int, typer.Option(min=0, help="e2e: batch size; 0 takes each model's own.")] = 0,
        seconds: Annotated[
            float, typer.Option(min=0, help="e2e, compile: begin nothing that ends later; 0: no limit.")
        ] = 0,
        add: Annotated[bool, typer.Option(help="e2e, compile: keep what --out has, measure the rest.")] = False,
        rules: Annotated[str, typer.Option(help="rules: only these, with commas; compile: these, or all.")] = "",
    ) -> None:
        """Measure norms, optimizer steps and training iterations of tilestep and its peers, in interleaved rounds."""
        from rich.console import Console

        from tilestep import native
        from tilestep.bench.e2e import MODES, run_e2e
        from tilestep.bench.first_step import run_compile
        from tilestep.bench.report import plot, print_result
        from tilestep.bench.results import Result
        from tilestep.bench.rule_steps import run_rules
        from tilestep.bench.sections import Settings, run_cpu, run_norm, run_step
        from tilestep.cli._options import chosen_device, require_plotting

        require_plotting()
        console = Console()
        chosen = chosen_device(device)

        def say(line: str) -> None:
            console.print(line, style="dim", markup=False)

        def keep(result: Result) -> None:
            result.save(out)

        def known(name: str) -> Result | None:
            stored = out / f"{name}.json"
            return Result.load(stored) if add and stored.exists() else None

        def end_to_end(settings: Settings) -> Result:
            modes = MODES if mode is Mode.both else (mode.value,)
            return run_e2e(settings, _names(models), modes, batch, keep, known("e2e"), seconds or math.inf)

        def first_steps(settings: Settings) -> Result:
            known_result, limit = known("compile"), seconds or math.inf
            return run_compile(settings, _names(rules), keep=keep, known=known_result, seconds=limit)

        if not quick and section is not Section.compile and native.wait():  # first steps run in other processes
            say("the C++ look at tensors is built: steps are measured as a training sees them after its first minute")
        settings = Settings(chosen, quick=quick, compiled=compiled, rounds=rounds, say=say)
        runs = {
            "norm": run_norm,
            "step": run_step,
            "compile": first_steps,
            "cpu": run_cpu,
            "rules": lambda settings: run_rules(settings, _names(rules)),
            "e2e": end_to_end,
        }
        for name in ALL if section is Section.all else [section.value]:
            result = runs[name](settings)
            stored = result.save(out)
            plot(result, stored.with_suffix(".png"))
            print_result(result, console)
            console.print(f"written: {stored} and {stored.with_suffix('.png')}", markup=False)


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]
