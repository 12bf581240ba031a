"""Newton-Schulz on Gram matrices: all products are symmetric but those that bring the matrix itself up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .symmetric import pays, symmetric_product

STEPS_OF_A_GRAM = 3
"""Steps until the Gram matrix is made anew: by then rounding has grown to about what a step in bfloat16 makes."""

_ELONGATED = 1.4
"""With sides nearer each other, the products that are saved are fewer than those that Gram matrices take."""

_STEEPEST = 4.0


def takes(batch: torch.Tensor, numbers: Sequence[float]) -> bool:
    """Whether a batch is worked on faster this way: on a GPU, large, one side longer, with coefficients that allow it.

    Steep coefficients make what rounding leaves grow too fast.

    Args:
        batch: bfloat16[B, R, C].
    """
    steps, a, _, c, _ = numbers
    short, long = sorted(batch.shape[-2:])
    return long >= _ELONGATED * short and steps >= 1 and abs(a) <= _STEEPEST and c != 0 and pays(batch)


def gram_newton_schulz(
    batch: torch.Tensor,
    numbers: Sequence[float],
    out: torch.Tensor | None,
    multiply: Callable[..., torch.Tensor] = symmetric_product,
) -> torch.Tensor:
    """Newton-Schulz for a batch; as near to the exact iteration as the plain one in bfloat16.

    With G = X X^T and P = a + b G + c G^2 the step X <- P X takes G to P G P, and steps after one another take X to
    Q X with Q the product of their P. All of these commute and are symmetric, so half of each is enough. They are kept
    in float16, which below one has more digits than bfloat16; X stays in bfloat16 and keeps its norm until it is
    first multiplied.

    Source: for working on Gram matrices alone, Dao-AILab's "Gram Newton-Schulz" (2025).

    Args:
        batch: bfloat16[B, R, C], contiguous; it is left as it is.
        out: bfloat16[B, R, C] for the result, or None.
    """
    steps, a, b, c, eps = int(numbers[0]), *numbers[1:]
    is_tall = batch.size(-2) > batch.size(-1)
    norm = torch.linalg.vector_norm(batch, dim=(-2, -1), dtype=torch.float32)
    inverse = norm.clamp_(min=eps).reciprocal_()
    matrix, scale = batch, inverse
    for start in range(0, steps, STEPS_OF_A_GRAM):
        count = min(STEPS_OF_A_GRAM, steps - start)
        squared = scale * scale if start == 0 else None
        factor = _factor(matrix, squared, scale if start == 0 else None, count, (a, b, c), multiply)
        pair = (matrix, factor) if is_tall else (factor, matrix)
        is_last = start + count == steps
        matrix = torch.bmm(*pair, out=out) if is_last and out is not None else torch.bmm(*pair)
    return matrix


def _factor(
    matrix: torch.Tensor,
    squared: torch.Tensor | None,
    scale: torch.Tensor | None,
    count: int,
    coefficients: tuple[float, float, float],
    multiply: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """What a number of steps multiply a matrix by, bfloat16[B, short, short], with `scale` in it."""
    a, b, c = coefficients
    short = min(matrix.shape[-2:])

    def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype = torch.float16, **rest: Any) -> Any:
        return multiply(left, right, matrix.new_empty(matrix.size(0), short, short, dtype=dtype), **rest)

    gram = product(matrix, matrix, scale=squared)
    factor: torch.Tensor | None = None
    for step in range(count):
        is_last = step == count - 1
        if factor is None:
            factor = torch.empty_like(gram)
            update = product(gram, gram, base=gram, alpha=c, beta=b, shifted=factor, shift=a)
        else:
            update = product(gram, gram, base=gram, alpha=c, beta=b)
            dtype, last_scale = (matrix.dtype, scale) if is_last else (torch.float16, None)
            factor = product(update, factor, dtype, base=factor, beta=a, scale=last_scale)
        if not is_last:
            half = product(update, gram, base=gram, beta=a)
            gram = product(update, half, base=half, beta=a)
    assert factor is not None
    if count == 1:
        factor = (factor if scale is None else factor * scale[:, None, None]).to(matrix.dtype)
    return factor
