"""`tilestep tune`: measure tile shapes on this machine and keep the fastest."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command()
    def tune(
        rules: Annotated[
            list[str] | None, typer.Argument(help="Names, or module:function.", metavar="[RULE]...")
        ] = None,
        device: Annotated[str, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = "",
        rounds: Annotated[int, typer.Option(min=1, help="Timed turns of each candidate.")] = 7,
        elements: Annotated[int, typer.Option(min=0, help="Elements of all parameters; 0 fits the device.")] = 0,
        save: Annotated[bool, typer.Option(help="Keep the result for later processes.")] = True,
    ) -> None:
        """Measure how to cut tensors into tiles, for the traffic of these rules; without any, of every rule there is.

        Rules that move the same bytes share the result, and work on whole matrices is not tiled.
        Optimizers take it up when they are made.
        """
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Table

        from ..bench.tune import jobs, tiled_rules
        from ..bench.tune import tune as measured
        from ..tuning import device_key
        from ._rules import chosen_device, load_rule

        console = Console()
        chosen = chosen_device(device)
        listed = jobs([load_rule(name) for name in rules] if rules else tiled_rules(), chosen)
        table = Table(title=f"milliseconds of a step, {device_key(chosen)}", title_justify="left")
        for title in ("signature", "for example"):
            table.add_column(title)
        for title in ("before", "ms", "after", "ms", "gain"):
            table.add_column(title, justify="right", no_wrap=True)
        columns = [TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("measuring", total=len(listed))
            for outcome in measured(listed, chosen, rounds, elements, save):
                job, times = outcome.job, outcome.milliseconds
                table.add_row(
                    job.signature,
                    f"{job.rule.name}, {job.kind}",
                    str(outcome.before),
                    f"{times[outcome.before]:.3f}",
                    "the same" if outcome.after == outcome.before else str(outcome.after),
                    f"{times[outcome.after]:.3f}",
                    f"{outcome.gain:.1%}",
                )
                progress.update(task, advance=1, description=f"measured {job.rule.name}, {job.kind}")
        console.print(table)
