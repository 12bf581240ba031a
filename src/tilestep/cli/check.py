"""`tilestep check`: run a rule of the user's through everything tilestep's own rules are tested for."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command()
    def check(
        rule: Annotated[str, typer.Argument(help="module:function, or a rule's name in any case.")],
        settings: Annotated[
            list[str] | None, typer.Option("--set", help="A hyperparameter: momentum=0.9.", metavar="NAME=VALUE")
        ] = None,
        interpret: Annotated[
            bool, typer.Option(help="Without a GPU, run the Triton code in Triton's interpreter, which is slow.")
        ] = True,
    ) -> None:
        """Check a rule: does it translate, and does every kernel do what its own code does in float64?

        Exit code 0 if nothing failed, 1 if something did.
        """
        from rich.console import Console

        from ..checking import check_rule
        from ._rules import load_rule, parse_settings

        loaded = load_rule(rule)
        given = parse_settings(settings or [], loaded)
        console = Console()
        marks = {True: ("ok  ", "green"), False: ("FAIL", "bold red"), None: ("-   ", "yellow")}
        failed = left_out = 0
        console.print(f"{loaded.name}   ({loaded.where})", markup=False, highlight=False, soft_wrap=True)
        with console.status("checking"):
            for verdict in check_rule(loaded, given, interpret=interpret):
                mark, style = marks[verdict.passed]
                failed += verdict.passed is False
                left_out += verdict.passed is None
                console.print(mark, style=style, end=" ")
                line = f"{verdict.item}: {verdict.text}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        if failed:
            console.print(f"{failed} of the checks failed: do not use {loaded.name} like this.", style="bold red")
            raise typer.Exit(1)
        rest = f"; {left_out} could not be checked here" if left_out else ""
        console.print(f"{loaded.name} does what its code says{rest}.", style="bold green", soft_wrap=True)
