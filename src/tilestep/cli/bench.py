"""`tilestep bench`: peers side by side, as a table, JSON files and pictures."""

from __future__ import annotations

import importlib
import math
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

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

OUTSIDE = {"compile": "first_step", "rules": "rule_steps", "e2e": "e2e"}
"""Sections that only a checkout has, with their modules in its folder of benchmarks."""


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

        from ..bench.report import plot, print_result
        from ..bench.results import Result
        from ..bench.sections import Settings, run_cpu, run_norm, run_step
        from ..native import wait
        from ._rules import chosen_device, require_plotting

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
            module = _of_a_checkout("e2e")
            modes = module.MODES if mode is Mode.both else (mode.value,)
            return module.run_e2e(settings, _names(models), modes, batch, keep, known("e2e"), seconds or math.inf)

        def first_steps(settings: Settings) -> Result:
            known_result, limit = known("compile"), seconds or math.inf
            return _of_a_checkout("first_step").run_compile(
                settings, _names(rules), keep=keep, known=known_result, seconds=limit
            )

        if not quick and section is not Section.compile and wait():  # first steps run in other processes
            say("the C++ look at tensors is built: steps are measured as a training sees them after its first minute")
        settings = Settings(chosen, quick=quick, compiled=compiled, rounds=rounds, say=say)
        runs = {
            "norm": run_norm,
            "step": run_step,
            "compile": first_steps,
            "cpu": run_cpu,
            "rules": lambda settings: _of_a_checkout("rule_steps").run_rules(settings, _names(rules)),
            "e2e": end_to_end,
        }
        for name in ALL if section is Section.all else [section.value]:
            if section is Section.all and name in OUTSIDE and not _folder().is_dir():
                say(f"left out, since only a checkout of tilestep has it: {name}")
                continue
            result = runs[name](settings)
            stored = result.save(out)
            if any(group.tags for group in result.groups):
                speedups = _of_a_checkout("speedups")
                speedups.plot_speedups(result, stored.with_suffix(".png"))
                speedups.print_speedups(result, console)
            else:
                plot(result, stored.with_suffix(".png"))
            print_result(result, console)
            console.print(f"written: {stored} and {stored.with_suffix('.png')}", markup=False)


def _folder() -> Path:
    return Path(__file__).resolve().parents[3] / "benchmarks"


def _of_a_checkout(name: str) -> Any:
    """A module of the folder of benchmarks, which a wheel does not have."""
    if not (_folder() / f"{name}.py").is_file():
        raise ValueError(
            "an installed tilestep measures norm, step and cpu; the other sections are run in a checkout of it, with "
            "its `pip install -e .` or `make bench`"
        )
    if str(_folder()) not in sys.path:
        sys.path.insert(0, str(_folder()))
    return importlib.import_module(name)


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]
