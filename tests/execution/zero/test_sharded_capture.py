"""Captured steps of sharded optimizers, simulated on two CPU ranks."""

from __future__ import annotations

from pathlib import Path

from scripts import all_equal_in_the_interpreter


def test_simulated_captures() -> None:
    all_equal_in_the_interpreter(Path(__file__).parents[2] / "helpers" / "sharded_captures.py")
