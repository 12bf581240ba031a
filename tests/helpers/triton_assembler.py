"""What Triton's assembler says of kernels, without a GPU."""

from __future__ import annotations

import pytest

__all__ = ["require_assembler", "require_launchers"]


def require_assembler() -> None:
    """Skip the test where Triton has no assembler."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas

        get_ptxas(90)
    except Exception as error:
        pytest.skip(f"Triton has no ptxas here: {error}")


def require_launchers() -> None:
    """Skip the test where Triton has one launcher for all kernels, which only NVIDIA's driver can load: from 3.8 on."""
    require_assembler()
    from triton.backends.nvidia import driver

    if hasattr(driver, "annotate_arguments"):
        pytest.skip("this Triton builds no launchers")
