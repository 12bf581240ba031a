"""Formats of blocks on every backend."""

from __future__ import annotations

import pytest
from block_rows import BACKENDS, FORMATS, SHAPES, backend, check_blocks


@pytest.mark.parametrize("strided", [False, True], ids=["plain", "strided"])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_are_kept_as_torch_keeps_them(format: str, name: str, strided: bool) -> None:
    with backend(name):
        check_blocks(format, SHAPES, strided=strided)
