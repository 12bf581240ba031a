"""Captured steps of sharded optimizers, simulated on two CPU ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_simulated_captures() -> None:
    """In a process of its own, since Triton reads the variable when it is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    folder = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(folder / "sharded_captures.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
