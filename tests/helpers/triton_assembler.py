"""What Triton's assembler says of kernels, without a GPU."""

from __future__ import annotations

import pytest

__all__ = ["require_assembler"]


def require_assembler() -> None:
    """Skip the test where Triton has no assembler."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        get_ptxas(90)
    except Exception as error:
        pytest.skip(f"Triton has no ptxas here: {error}")
