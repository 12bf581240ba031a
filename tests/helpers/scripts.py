"""Python scripts that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["all_equal_in_the_interpreter", "run_script"]


def run_script(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script with this process's module path and some environment variables more."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)


def all_equal_in_the_interpreter(script: Path) -> None:
    """Run a script that compares Triton's interpreter with something, and prints "all equal" last.

    It is a process of its own, since Triton reads the variable when it is imported.
    """
    pytest.importorskip("triton", reason="Triton is not installed")
    result = run_script(script, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert result.stdout.strip().endswith("all equal"), result.stdout[-3000:]
