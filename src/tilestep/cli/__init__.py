"""The command line: every module of this package is one command (or one group of them) and has a `register(app)`.

A command imports torch and the rest of tilestep inside its function, so that `tilestep --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import typer

from ..errors import TilestepError

FAILURES = (TilestepError, ValueError, TypeError, RuntimeError, OSError, ImportError)


def build_app() -> typer.Typer:
    """Return the application with every command found in this package."""
    app = typer.Typer(
        name="tilestep",
        help="Optimizer steps at the speed of memory.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )

    @app.callback()
    def several_commands() -> None:
        """Optimizer steps at the speed of memory."""

    for module in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}").register(app)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: exit code 0 on success, 1 on failure (one line says why), 2 on bad usage."""
    try:
        build_app()(args=arguments, prog_name="tilestep")
    except FAILURES as failure:
        if os.environ.get("TILESTEP_TRACEBACK"):
            raise
        reason = " ".join(str(failure).split()) or type(failure).__name__
        print(f"error: {reason}  (TILESTEP_TRACEBACK=1 shows where)", file=sys.stderr)
        raise SystemExit(1) from None
