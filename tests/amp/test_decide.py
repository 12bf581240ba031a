"""The decision of a step on a GPU: the kernel against the host's formulas."""

from __future__ import annotations

from pathlib import Path

from scripts import all_equal_in_the_interpreter


def test_interpreted_decision_equals_the_hosts() -> None:
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_decide.py"))
