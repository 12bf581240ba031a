"""Overlapped optimizers of models on several meshes, of shared and unused weights, of offloaded state; gloo ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from overlapped_meshes import CHECKS, WIDE_CHECKS
from rank_processes import run_on_ranks


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_on_ranks(CHECKS, 2)


@pytest.fixture(scope="module")
def wide_failures() -> dict[str, str]:
    return run_on_ranks(WIDE_CHECKS, 4)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(check: Callable[[], None], failures: dict[str, str]) -> None:
    assert check.__name__ not in failures, failures[check.__name__]


@pytest.mark.parametrize("check", WIDE_CHECKS, ids=lambda check: check.__name__)
def test_four_ranks(check: Callable[[], None], wide_failures: dict[str, str]) -> None:
    assert check.__name__ not in wide_failures, wide_failures[check.__name__]
