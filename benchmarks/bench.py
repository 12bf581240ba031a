"""First steps, steps of all rules, and whole training iterations of tilestep and its peers.

    python benchmarks/bench.py compile --rules all
    python benchmarks/bench.py rules --rules AdamW,LAMB
    python benchmarks/bench.py e2e --mode both --compiled --seconds 500 --add --out results

Each writes <section>.json and <section>.png. `tilestep bench` has the sections that need no checkout.
"""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tilestep import native
from tilestep.bench.results import Result, plot, print_result
from tilestep.bench.sections import Settings
from tilestep.cli.arguments import chosen_device, require_plotting


class Section(str, Enum):
    """What can be measured."""

    compile = "compile"
    rules = "rules"
    e2e = "e2e"


class Mode(str, Enum):
    """How models run in `e2e`."""

    eager = "eager"
    compiled = "compiled"
    both = "both"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    section: Annotated[Section, typer.Argument(help="What to measure.")],
    out: Annotated[Path, typer.Option(help="Folder for <section>.json and <section>.png.")] = Path("bench"),
    device: Annotated[str, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls of each contender.")] = 15,
    compiled: Annotated[bool, typer.Option(help="Also peers that compile for minutes.")] = False,
    quick: Annotated[bool, typer.Option(help="Tiny workloads: checks the harness, measures nothing.")] = False,
    models: Annotated[str, typer.Option(help="e2e: only these models, by name, with commas.")] = "",
    mode: Annotated[Mode, typer.Option(help="e2e: models eager, under torch.compile, or both.")] = Mode.eager,
    batch: Annotated[int, typer.Option(min=0, help="e2e: batch size; 0 takes each model's own.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="e2e, compile: begin nothing that ends later.")] = 0,
    add: Annotated[bool, typer.Option(help="e2e, compile: keep what --out has, measure the rest.")] = False,
    rules: Annotated[str, typer.Option(help="rules: only these, with commas; compile: these, or all.")] = "",
) -> None:
    """Measure training iterations, first steps, or steps of every rule."""
    require_plotting()
    console, limit = Console(), seconds or math.inf
    settings = Settings(
        chosen_device(device),
        quick=quick,
        compiled=compiled,
        rounds=rounds,
        say=lambda line: console.print(line, style="dim", markup=False),
    )
    if not quick and section is not Section.compile:  # first steps run in other processes
        native.wait()
    stored = out / f"{section.value}.json"
    known = Result.load(stored) if add and stored.exists() else None

    def keep(result: Result) -> None:
        result.save(out)

    if section is Section.e2e:
        from e2e import MODES, run_e2e

        modes = MODES if mode is Mode.both else (mode.value,)
        result = run_e2e(settings, _names(models), modes, batch, keep, known, limit)
    elif section is Section.rules:
        from rule_steps import run_rules

        result = run_rules(settings, _names(rules))
    else:
        from first_step import run_compile

        result = run_compile(settings, _names(rules), keep=keep, known=known, seconds=limit)
    result.save(out)
    if any(group.tags for group in result.groups):
        from speedups import plot_speedups, print_speedups

        plot_speedups(result, stored.with_suffix(".png"))
        print_speedups(result, console)
    else:
        plot(result, stored.with_suffix(".png"))
    print_result(result, console)
    console.print(f"written: {stored} and {stored.with_suffix('.png')}", markup=False)


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


if __name__ == "__main__":
    app()
