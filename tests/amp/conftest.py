"""Where the tests of this folder run; gpu/test_scaler_gpu.py runs the same ones on a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture
def device() -> str:
    return "cpu"
