"""Every storage format on every backend: kept and read as torch does, to the bit, and good enough to train with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from format_rows import ROWS, RULES, backend, check_kept, check_training

from tilestep.storage import MASTER_FORMATS

HERE = Path(__file__).parent


def test_every_format_has_a_row() -> None:
    assert {row.master_weights for row in ROWS.values()} == set(MASTER_FORMATS)


@pytest.mark.parametrize("name", ["cpp", "eager"])
@pytest.mark.parametrize("row", ROWS)
def test_numbers_are_kept_as_torch_keeps_them(row: str, name: str) -> None:
    with backend(name):
        check_kept(ROWS[row])


@pytest.mark.parametrize("name", ["cpp", "eager"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("row", ROWS)
def test_training_is_that_of_float32_masters(row: str, rule: str, name: str) -> None:
    with backend(name):
        check_training(ROWS[row], rule)


def test_in_triton_s_interpreter() -> None:
    """In a process of its own, since Triton reads the variable when it is imported."""
    pytest.importorskip("triton", reason="Triton is not installed")
    helpers = os.pathsep.join([str(HERE.parent / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": helpers}
    command = [sys.executable, str(HERE / "interpreted_formats.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip().endswith("all rows")
