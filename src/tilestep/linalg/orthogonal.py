"""The nearest orthogonal matrix: Newton-Schulz iterations in bfloat16, on Gram matrices where they are smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import MatrixError, RuleError
from .operations import Launch, MatrixOperation, register
from .symmetric import pays, symmetric_launch, symmetric_product

STEPS_OF_A_GRAM = 3
"""Steps until the Gram matrix is made anew: by then rounding has grown to about what a step in bfloat16 makes."""

_ELONGATED = 1.4
"""With a smaller ratio of the sides, Gram matrices take more products than they save."""

_STEEPEST = 4.0


def takes(batch: torch.Tensor, numbers: Sequence[float]) -> bool:
    """Whether a batch is faster this way: on a GPU, large, one side longer, and no coefficients that grow roundings."""
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
        matrix = torch.bmm(*pair, out=out if is_last else None)
    return matrix


def _factor(
    matrix: torch.Tensor,
    squared: torch.Tensor | None,
    scale: torch.Tensor | None,
    count: int,
    coefficients: tuple[float, float, float],
    multiply: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """The factor that several steps multiply a matrix by, bfloat16[B, short, short], including `scale`."""
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


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan's quintic: the largest slope at zero that keeps singular values near one."""

_MOST_STEPS = 100


def orthogonalize(matrix: Any, steps: Any = 5, coefficients: Any = COEFFICIENTS, eps: Any = 1e-7) -> Any:
    """A matrix with the singular vectors of this one and singular values near one, computed in bfloat16.

    With X the matrix over its Frobenius norm, each step is X <- a X + (b G + c G^2) X where G = X X^T; a tall matrix is
    worked on from its short side. In five steps of the default coefficients singular values come to 0.7 ... 1.2.

    Args:
        matrix: two dimensions, any floating dtype; in a rule, a value of the parameter's shape or a product.
        steps: iterations, less than 100.
        coefficients: a, b, c.
        eps: the least norm to divide by.

    Returns:
        A matrix of the same shape and dtype, holding bfloat16 values.

    Raises:
        MatrixError: unless the matrix has two dimensions.
        RuleError: unless `coefficients` has three entries and `steps` is less than 100.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); torch.optim.Muon.

    Example:
        >>> import torch
        >>> matrix = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -2.0]])
        >>> [[round(entry, 1) for entry in row] for row in orthogonalize(matrix).tolist()]
        [[1.1, 0.0, 0.0], [0.0, 0.0, -0.7]]
    """
    from ..rules.protocol import as_scalar  # rules use this module

    if matrix.dim() != 2:
        raise MatrixError(f"orthogonalize takes a matrix, not a tensor of {matrix.dim()} dimensions")
    if len(coefficients) != 3:
        raise RuleError(f"orthogonalize takes three coefficients, not {len(coefficients)}")
    return _op(matrix, [as_scalar(number) for number in (steps, *coefficients, eps)])


@torch.library.custom_op(
    "tilestep::orthogonalize", mutates_args=(), schema="(Tensor matrix, Tensor[] numbers) -> Tensor"
)
def _op(matrix: torch.Tensor, numbers: list[torch.Tensor]) -> torch.Tensor:
    batch = matrix.to(torch.bfloat16).unsqueeze(0)
    return newton_schulz([batch], [float(number) for number in numbers], None)[0].to(matrix.dtype, copy=True)


@_op.register_fake
def _(matrix: torch.Tensor, numbers: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(matrix)


def newton_schulz(
    operands: Sequence[torch.Tensor],
    numbers: Sequence[float],
    out: torch.Tensor | None,
    multiply: Callable[..., torch.Tensor] = symmetric_product,
) -> torch.Tensor:
    """`orthogonalize` for a batch."""
    steps, a, b, c, eps = int(numbers[0]), *numbers[1:]
    if not 0 <= steps < _MOST_STEPS:
        raise RuleError(f"orthogonalize takes less than {_MOST_STEPS} steps, not {steps}")
    batch = operands[0].to(torch.bfloat16)
    if takes(batch, numbers):
        return gram_newton_schulz(batch, numbers, out, multiply)
    is_tall = batch.size(-2) > batch.size(-1)
    norm = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True).clamp_(min=eps)
    batch = torch.div(batch, norm, out=out if steps == 0 else None)
    for step in range(steps):
        update = _update(batch, is_tall, b, c, multiply)
        factors = (batch, update) if is_tall else (update, batch)
        batch = torch.baddbmm(batch, *factors, beta=a, out=out if step == steps - 1 else None)
    return batch


def _update(
    batch: torch.Tensor, is_tall: bool, b: float, c: float, multiply: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """b G + c G^2 with G the Gram matrix of the short side."""
    if c and pays(batch):
        short = min(batch.shape[-2:])
        gram = multiply(batch, batch, batch.new_empty(batch.size(0), short, short))
        return multiply(gram, gram, torch.empty_like(gram), base=gram, alpha=c, beta=b)
    gram = torch.bmm(batch.mT, batch) if is_tall else torch.bmm(batch, batch.mT)
    # Without c there is nothing to multiply; torch's bfloat16 baddbmm on the CPU forgets beta when alpha is 0.
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else gram * b


def _launches(shape: tuple[int, int], numbers: Sequence[float], device: torch.device) -> list[Launch]:
    """The kernels of `newton_schulz` for matrices of a shape, noted in a run that multiplies nothing."""
    batch = torch.zeros(1, *shape, dtype=torch.bfloat16, device=device)
    if not pays(batch):
        return []
    launches: dict[int, Launch] = {}

    def note(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
        launch = symmetric_launch(left, right, out, **options)
        launches[id(launch[0])] = launch
        return out

    newton_schulz([batch], numbers, None, note)
    return list(launches.values())


register(
    MatrixOperation(
        "orthogonalize",
        1,
        lambda space: space,
        newton_schulz,
        torch.bfloat16,
        # The matrix once more, and a handful of Gram matrices.
        workspace=lambda rows, columns: rows * columns + 5 * min(rows, columns) ** 2,
        launches=_launches,
    )
)
