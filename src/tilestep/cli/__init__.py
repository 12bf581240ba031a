"""The command line: commands are functions in `commands.py`, shared arguments are in `arguments.py`.

A command imports torch and the rest of tilestep inside its function, so that `tilestep --help` answers immediately.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path

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
    except Exception as failure:
        if os.environ.get("TILESTEP_TRACEBACK"):
            raise
        print(f"error: {reason_of(failure)}  (TILESTEP_TRACEBACK=1 shows where)", file=sys.stderr)
        raise SystemExit(1) from None


def reason_of(failure: Exception) -> str:
    """Return the reason of an error as one line."""
    reason = " ".join(str(failure).split())
    if not (isinstance(failure, FAILURES) and reason):
        reason = f"{type(failure).__name__}: {reason}".removesuffix(": ")
    return reason + _user_line(failure, reason)


def _user_line(failure: Exception, reason: str) -> str:
    """Return the last place of the failure in the user's code, if the reason does not name it."""
    own, installed = str(Path(__file__).parents[1]), sysconfig.get_paths()
    folders = (own, *(installed[name] for name in ("stdlib", "purelib", "platlib", "scripts")), "<")
    for frame in reversed(traceback.extract_tb(failure.__traceback__)):
        if not frame.filename.startswith(folders):
            return "" if frame.filename in reason else f"; see {frame.filename}:{frame.lineno}"
    return ""
