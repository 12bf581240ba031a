"""The command line: the commands are functions in `commands.py`, what several of them take is in `arguments.py`.

A command imports torch and the rest of tilestep inside its function, so that `tilestep --help` answers at once.
"""

from __future__ import annotations

import os
import sys

import typer

from ..errors import TilestepError

FAILURES = (TilestepError, ValueError, TypeError, RuntimeError, OSError, ImportError)


def build_app() -> typer.Typer:
    """The application with every command."""
    from .commands import app

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
