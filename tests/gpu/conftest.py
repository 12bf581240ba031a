"""Tests on a GPU run the checks of other folders there; those for several GPUs are marked, so that they can run apart.

    python -m pytest tests/gpu -m "not two_gpus and not four_gpus and not eight_gpus" -n 14 --dist worksteal
    python -m pytest tests/gpu -m two_gpus -n 0

The first test over ranks runs those of all files, on the same ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDERS = (
    "amp",
    "combinations",
    "memory",
    "placement",
    "execution/overlap",
    "execution/zero",
    "storage",
    "stats",
)
sys.path.extend(str(TESTS / folder) for folder in FOLDERS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, before those that need more GPUs than there are get skipped."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.gpu)
