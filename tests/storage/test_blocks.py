"""Formats of blocks on every backend."""

from __future__ import annotations

import pytest
import torch
from block_rows import BACKENDS, FORMATS, SHAPES, backend, check_blocks

from tilestep.storage import STATE_FORMATS, shape_of_entries, stored_in, values_of


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_are_kept_as_torch_keeps_them(format: str, name: str, strided: bool) -> None:
    with backend(name):
        check_blocks(format, SHAPES, strided=strided)


@pytest.mark.parametrize(
    ("format", "moment", "root"), [("int8", 3.4e-5, 1e-5), ("float8_e4m3", 7e-4, 2e-4), ("int4", 1.2e-2, 4e-3)]
)
def test_normal_numbers_and_their_squares_come_back_as_documented(format: str, moment: float, root: float) -> None:
    values = torch.randn(512, 1000, generator=torch.Generator().manual_seed(0)) * 1e-4
    for signed, exact, bound in ((True, values, moment), (False, values.square(), root)):
        storage = STATE_FORMATS[format](signed)
        arrays = {
            array.name: torch.empty(shape_of_entries(exact.shape, array.elements), dtype=array.dtype)
            for array in storage.arrays("state")
        }
        stored_in(storage, arrays, "state", exact, exact.shape)
        back = values_of(storage, arrays, "state", shape=exact.shape)
        wanted, found = (exact, back) if signed else (exact.sqrt(), back.sqrt())
        error = (found - wanted).double().square().sum() / wanted.double().square().sum()
        assert float(error) < bound
        assert signed or bool((back[exact > 0] > 0).all())
