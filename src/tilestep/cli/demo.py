"""`tilestep demo`: a small GPT trained with torch's AdamW and with tilestep's, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..devices import has_streams


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command()
    def demo(
        out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo"),
        steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each training.")] = 600,
        seed: Annotated[int, typer.Option(help="Of the initial weights and the batches.")] = 0,
        device: Annotated[str, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = "",
        state_dtype: Annotated[str, typer.Option(help="Of tilestep's optimizer: int8, bfloat16, ...")] = "",
        master_weights: Annotated[
            str,
            typer.Option(help="Of tilestep's optimizer: true, remainder, kahan or int8; its model is bfloat16 then."),
        ] = "",
        rounding: Annotated[
            str, typer.Option(help="Of tilestep's optimizer: nearest, or stochastic; its model is bfloat16 then.")
        ] = "nearest",
    ) -> None:
        """Train a byte-level GPT on Python's documentation twice from one seed, and compare losses and step times."""
        import torch
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        from ..bench.results import device_name
        from ..demo import GPT, Recipe, entries, picture, table, train
        from ._rules import chosen_device, parse_formats, require_plotting

        require_plotting()
        console = Console()
        formats = parse_formats(state_dtype, master_weights, rounding)
        recipe = Recipe(chosen_device(device), steps=steps, seed=seed, **formats)
        parameters = list(GPT(recipe.size).parameters())
        count = f"{sum(p.numel() for p in parameters) / 1e6:.1f} M parameters in {len(parameters)} tensors"
        console.print(f"a GPT over bytes, {count}, on {device_name(recipe.device)}", highlight=False)
        if not console.is_terminal:
            console.print(f"{len(entries())} trainings of {steps} steps by turns: minutes on a CPU", highlight=False)
        columns = [TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
            competing = entries()
            tasks = [progress.add_task(entry.name, total=steps, loss="") for entry in competing]

            def advance(index: int, done: int, loss: float) -> None:
                progress.update(tasks[index], completed=done, loss=f"loss {loss:.3f}")

            runs = train(competing, recipe, advance)
        console.print(table(runs, gpu=has_streams(recipe.device)))
        path = out / "demo.png"
        picture(runs, path, f"{count}, {steps} steps, {device_name(recipe.device)}, torch {torch.__version__}")
        console.print(f"picture: {path}", markup=False)
