"""The decision of a step on a GPU: the kernel against the host's formulas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_interpreted_decision_equals_the_hosts() -> None:
    """In a process of its own, since Triton reads the variable when it is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    script = Path(__file__).with_name("interpreted_decide.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip().endswith("all equal")
