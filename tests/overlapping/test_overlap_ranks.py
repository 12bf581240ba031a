"""Overlapped optimizers over ranks that talk through gloo: DistributedDataParallel, FSDP2, HSDP."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from overlapped_ranks import CHECKS, WIDE_CHECKS

sys.path.insert(0, str(Path(__file__).parents[1] / "placements"))
from rank_processes import run_on_ranks


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return run_on_ranks({check.__name__: check for check in CHECKS}, 2)


@pytest.fixture(scope="module")
def wide_outcomes() -> dict[str, str]:
    return run_on_ranks({check.__name__: check for check in WIDE_CHECKS}, 4)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(check: Callable[[], None], outcomes: dict[str, str]) -> None:
    assert outcomes[check.__name__] == "", outcomes[check.__name__]


@pytest.mark.parametrize("check", WIDE_CHECKS, ids=lambda check: check.__name__)
def test_four_ranks(check: Callable[[], None], wide_outcomes: dict[str, str]) -> None:
    assert wide_outcomes[check.__name__] == "", wide_outcomes[check.__name__]
