"""Torch's own lists of arguments on a GPU: twenty steps beside torch, the state exchanged midway."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch_twins import argument_lists, compared

pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="torch's own test lists need the package expecttest"
)
LISTS = argument_lists()
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[tuple[int, torch.dtype], Future[str]]]:
    """Every case, run by as many processes as there are cores: most of the time is the compiler's.

    Each has a CUDA context: those of all of pytest's processes together are no more than that.
    """
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    workers = max(min(14, (os.cpu_count() or 1) // beside), 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield {
            (place, dtype): pool.submit(compared, name, kwargs, dtype, "cuda")
            for place, (name, kwargs) in enumerate(LISTS)
            for dtype in DTYPES
        }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", range(len(LISTS)), ids=lambda place: "-".join(map(str, LISTS[place])))
def test_twenty_steps_and_an_exchange_agree_with_torch(
    place: int, dtype: torch.dtype, outcomes: dict[tuple[int, torch.dtype], Future[Any]]
) -> None:
    wrong = outcomes[place, dtype].result(timeout=300)
    assert not wrong, wrong
