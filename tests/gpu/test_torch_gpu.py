"""Torch's own lists of arguments on a GPU: twenty steps beside torch, the state exchanged midway."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from case_processes import side_by_side
from torch_twins import argument_lists, compared

pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="torch's own test lists need the package expecttest"
)
LISTS = argument_lists()
DTYPES = [torch.float32, torch.float64]


def case(place: int, dtype: torch.dtype) -> str:
    name, kwargs = LISTS[place]
    return compared(name, kwargs, dtype, "cuda")


@pytest.fixture(scope="module")
def outcome() -> Iterator[Callable[..., str]]:
    with side_by_side(case, [(place, dtype) for place in range(len(LISTS)) for dtype in DTYPES]) as found:
        yield found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", range(len(LISTS)), ids=lambda place: "-".join(map(str, LISTS[place])))
def test_twenty_steps_and_an_exchange_agree_with_torch(
    place: int, dtype: torch.dtype, outcome: Callable[..., str]
) -> None:
    wrong = outcome(place, dtype)
    assert not wrong, wrong
