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
        seconds: Annotated[float, typer.Option(min=0, help="Time for all of it, in seconds; 0 for no limit.")] = 300,
        save: Annotated[bool, typer.Option(help="Keep the result for later processes.")] = True,
    ) -> None:
        """Measure how to cut tensors into tiles, for the traffic of these rules; without any, of every rule there is.

        Rules that move the same bytes share the result, and work on whole matrices is not tiled.
        Optimizers take it up when they are made. What is measured is kept at once: Ctrl-C loses the rest alone.
        """
        import contextlib
        import io
        import sys

        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from ..bench.tune import jobs, tiled_rules
        from ..bench.tune import tune as measured
        from ..tuning import device_key
        from ._rules import chosen_device, load_rule

        # Triton prints the code of a compilation that Ctrl-C has ended, with a request to report it.
        console = Console(file=sys.stdout)
        chosen = chosen_device(device)
        with console.status("looking for signatures"):
            listed = jobs([load_rule(name) for name in rules] if rules else tiled_rules(), chosen)
        console.print(f"milliseconds of a step, {device_key(chosen)}", markup=False)
        columns = [BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")]
        count, stopped = 0, ""
        progress = Progress(*columns, console=console, transient=True, redirect_stdout=False)
        with progress, contextlib.redirect_stdout(io.StringIO()):
            task = progress.add_task("", total=len(listed))
            try:
                for outcome in measured(
                    listed,
                    chosen,
                    rounds,
                    elements,
                    save,
                    seconds,
                    lambda job, text: progress.update(task, description=f"{job.rule.name}, {job.kind}: {text}"),
                ):
                    job, times, count = outcome.job, outcome.milliseconds, count + 1
                    change = "no other is faster"
                    if outcome.after != outcome.before:
                        change = f"after {outcome.after}: {times[outcome.after]:.3f}, {outcome.gain:.1%} less"
                    progress.console.print(
                        f"{job.rule.name}, {job.kind} ({job.signature})\n"
                        f"  before {outcome.before}: {times[outcome.before]:.3f}; {change} ({len(times)} shapes)",
                        markup=False,
                        highlight=False,
                        soft_wrap=True,
                    )
                    progress.update(task, advance=1)
            except KeyboardInterrupt:
                stopped = "stopped"
        if count < len(listed):
            kept = "kept" if save else "measured"
            console.print(
                f"{stopped or f'{seconds:g} seconds are over'}: {count} of {len(listed)} signatures are {kept}; "
                "--seconds, or names of rules, for the others",
                markup=False,
            )
        if stopped:
            raise typer.Exit(130)
