"""Every storage format on every backend: kept and read as torch does, to the bit, and good enough to train with."""

from __future__ import annotations

from pathlib import Path

import pytest
from format_rows import ROWS, RULES, backend, check_kept, check_training
from scripts import all_equal_in_the_interpreter

from tilestep.storage import MASTER_FORMATS


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
    all_equal_in_the_interpreter(Path(__file__).with_name("interpreted_formats.py"))
