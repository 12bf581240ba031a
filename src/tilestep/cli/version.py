"""`tilestep version`: what a bug report needs, and what is wrong with this machine."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command()
    def version() -> None:
        """Print versions, compilers and the device, and say in sentences what is wrong with this machine."""
        from rich.console import Console

        from ..bench.results import environment
        from ._machine import complaints, facts

        console = Console(soft_wrap=True)
        for name, value in {**environment(), **facts()}.items():
            console.print(f"{name:<12} {value}", highlight=False, markup=False)
        wrong = complaints()
        console.print("nothing is wrong with this machine" if not wrong else "what is wrong with this machine:")
        for sentence in wrong:
            console.print(f"- {sentence}", highlight=False, markup=False)
