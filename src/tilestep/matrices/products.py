"""Matrix products and transposes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .operations import MatrixOperation, Space, register


def _product_space(left: Space, right: Space) -> Space:
    return left[0], right[1]


def _matmul(operands: Sequence[torch.Tensor], _: Sequence[float], out: torch.Tensor | None) -> torch.Tensor:
    left, right = operands
    return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)


def _transpose(operands: Sequence[torch.Tensor], _: Sequence[float], out: torch.Tensor | None) -> torch.Tensor:
    return operands[0].mT if out is None else out.copy_(operands[0].mT)


matmul = register(MatrixOperation("matmul", 2, _product_space, _matmul))
"""`left @ right`."""

transpose = register(MatrixOperation("transpose", 1, lambda space: (space[1], space[0]), _transpose, is_view=True))
"""`matrix.mT`."""
