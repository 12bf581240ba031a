"""Run by test_matrices_symmetric.py under TRITON_INTERPRET=1: the kernel for symmetric products on CPU tensors."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tilestep.linalg import symmetric
from tilestep.linalg.symmetric import Blocks, symmetric_product

# The interpreter cannot count to a number that was loaded, so the loop is spelled otherwise for it.
LOOP = "for k in range(0, inner, BLOCK_K):\n"
SPELLED = "k = 0 - BLOCK_K\n    while k + BLOCK_K < inner:\n        k += BLOCK_K\n"


def interpretable() -> Any:
    source = Path(symmetric.__file__).with_name("symmetric_triton.py").read_text()
    assert source.count(LOOP) == 1
    path = Path(tempfile.mkdtemp()) / "symmetric_spelled.py"
    path.write_text(source.replace(LOOP, SPELLED))
    described = importlib.util.spec_from_file_location("symmetric_spelled", path)
    assert described is not None and described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules["symmetric_spelled"] = module
    described.loader.exec_module(module)
    return module


def check(matrices: int, rows: int, inner: int, tall: bool, blocks: Blocks) -> None:
    operand = torch.randn(matrices, rows, inner)
    square, scale = torch.randn(matrices, rows, rows), torch.rand(matrices)
    square = square + square.mT
    stored = operand.mT.contiguous() if tall else operand
    out = torch.empty_like(square)
    symmetric_product(stored, stored, out, base=square, alpha=0.5, beta=-2.0, shift=3.0, scale=scale, blocks=blocks)
    wanted = scale[:, None, None] * (0.5 * operand @ operand.mT - 2.0 * square + 3.0 * torch.eye(rows))
    assert torch.equal(out, out.mT)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    symmetric_product(stored, stored, out, blocks=blocks)
    torch.testing.assert_close(out, operand @ operand.mT, rtol=1e-4, atol=1e-4)


def main() -> None:
    torch.manual_seed(0)
    module = interpretable()
    symmetric._triton = lambda: module  # type: ignore[assignment]
    for blocks in (Blocks(32, 16), Blocks(64, 32), Blocks(16, 32)):
        for matrices, rows, inner in ((2, 96, 48), (1, 80, 32), (3, 16, 64), (1, 80, 80), (2, 16, 128)):
            for tall in {False, inner > rows}:
                check(matrices, rows, inner, tall, blocks)
    print("all equal")


if __name__ == "__main__":
    main()
