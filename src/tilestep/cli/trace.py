"""`tilestep trace`: one training iteration as a picture of lanes, of the demo's model or of a script."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..tracing import Report


class During(str, Enum):
    """When updates run."""

    neither = "neither"
    backward = "backward"
    forward = "forward"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    # What follows the script's name is the script's.
    settings = {"allow_interspersed_args": False}

    @app.command(context_settings=settings)
    def trace(
        script: Annotated[Path | None, typer.Argument(help="It says what is traced.", metavar="SCRIPT")] = None,
        arguments: Annotated[list[str] | None, typer.Argument(help="Its own.", metavar="ARGUMENT")] = None,
        out: Annotated[Path, typer.Option(help="Folder for trace.json and trace.png.")] = Path("trace"),
        device: Annotated[str, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = "",
        iterations: Annotated[int, typer.Option(min=1, help="Traced iterations of the demo's model.")] = 5,
        optimizer: Annotated[str, typer.Option(help="A rule's name, or torch for torch's fused AdamW.")] = "AdamW",
        layers: Annotated[int, typer.Option(min=1, help="Of the demo's model.")] = 4,
        width: Annotated[int, typer.Option(min=4, help="Of the demo's model; heads have 64.")] = 128,
        context: Annotated[int, typer.Option(min=1, help="Bytes in a sequence.")] = 64,
        batch: Annotated[int, typer.Option(min=1, help="Sequences in an iteration.")] = 16,
        bf16: Annotated[bool, typer.Option(help="Parameters in bfloat16.")] = False,
        clip: Annotated[float, typer.Option(min=0, help="Clip gradients to this norm; 0 does not.")] = 1.0,
        during: Annotated[During, typer.Option(help="When updates run: see tilestep.overlap.")] = During.neither,
    ) -> None:
        """Trace a few training iterations: when forward, backward, update, copies and communication ran.

        Without a script it trains the demo's model. A script says itself what is traced, with `tilestep.profile`.
        """
        from rich.console import Console

        from ..demo import Size, Traced, train_traced
        from ._rules import chosen_device, require_plotting

        require_plotting()
        console = Console()
        if script is None:
            size = Size(layers, width, 1 if width % 64 else width // 64, context)
            schedule = "" if during is During.neither else during.value
            traced = Traced(chosen_device(device), iterations, optimizer, size, batch, bf16, clip, schedule)
            reports = [train_traced(traced, out)]
        else:
            reports = _script(script, arguments or [], out)
        for report in reports:
            console.print(report.table())
            console.print(report.summary(), highlight=False)
        for path in dict.fromkeys(path for report in reports for path in report.files):
            console.print(f"written: {path}", markup=False)


def _script(script: Path, arguments: list[str], out: Path) -> list[Report]:
    import runpy
    import sys

    from ..tracing import collecting

    if not script.is_file():
        raise typer.BadParameter(f"there is no script {script}", param_hint="SCRIPT")
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        with collecting(out) as reports:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    if not reports:
        raise ValueError(f"{script} has traced nothing: put `with tilestep.profile():` around a few iterations")
    return reports
