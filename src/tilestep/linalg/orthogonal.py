"""`orthogonalize`: Newton-Schulz iterations in 16 bits; symmetric products for large matrices on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from ..errors import MatrixError, RuleError
from .coefficients import SAFETY, Row, flat, rows_of
from .operations import Launch, MatrixOperation, register
from .scalar_values import as_scalar
from .symmetric import SMALLEST, symmetric_launch, symmetric_product, uses_symmetric_kernel

STEPS_PER_GRAM = (3, 2)
"""The number of steps with the first Gram matrix, and with each later Gram matrix, whose eigenvalues are near one:
after these the rounding errors reach the error of a step in bfloat16."""

_STEEPEST = 40.0
"""The largest coefficient, and the largest product of slopes before a Gram matrix is used: rounding errors grow by
these factors."""

_LEAST = 0.15
"""The first step has a separate Gram matrix if it multiplies a singular value by less than this part of the slope at
zero.

"polar_express" maps a value whose square is 0.68 of the norm's to 0.2, "quintic" maps the norm to 0.1. If the singular
vector has few large elements, the rest of the value in the Gram matrix is mostly rounding error, which further steps
with this Gram matrix would amplify until the matrix diverges.
"""

_LEAST_NORM = 2.0**-60
"""The least norm whose inverse has a finite square in float32; squares of elements underflow earlier."""

_ELONGATED = 1.4
"""With a smaller ratio of the sides, steps that share a Gram matrix take more products than they save."""


def work(high: int, wide: int, numbers: Sequence[float]) -> float:
    """Floating-point operations of `newton_schulz` for a matrix on a GPU.

    Example:
        >>> round(work(2048, 5632, [1e-7, *[3.4445, -4.775, 2.0315] * 5]) / 1e9)
        262
    """
    rows, (short, long) = list(zip(*[iter(numbers[1:])] * 3)), sorted((high, wide))
    is_large = short >= SMALLEST
    symmetric = short * short * (1.0 if is_large else 2.0)  # per element of the inner side; large: half is computed
    total = 0.0
    for steps in restarts(rows, (high, wide)) if is_large else ([row] for row in rows):
        # Besides the square: the factor's product, and two products for each step but the last.
        products = sum(bool(c) for _, _, c in steps) + 3 * (len(steps) - 1)
        total += symmetric * (long + products * short) + 2.0 * short * short * long
    return total


def restarts(rows: Sequence[Row], shape: Sequence[int]) -> list[Sequence[Row]]:
    """Group the steps that share a Gram matrix, if that needs fewer products and does not amplify rounding errors."""
    first, later = STEPS_PER_GRAM
    first = 1 if rows and _min_factor(rows[0]) < _LEAST * rows[0][0] else first
    ends = [0, *range(first, len(rows), later), len(rows)]
    shared = [rows[start:end] for start, end in pairwise(ends) if end]
    growths = [math.prod(a for a, _, _ in steps[:-1]) for steps in shared]
    is_tame = all(abs(number) <= _STEEPEST for number in (*flat(rows), *growths))
    short, long = sorted(shape)
    return shared if is_tame and long >= _ELONGATED * short else [[row] for row in rows]


def _min_factor(row: Row) -> float:
    """The least factor by which a step multiplies a singular value of at most one."""
    a, b, c = row
    lowest = min(max(-b / (2 * c), 0.0), 1.0) if c else 1.0
    return min(a + b * square + c * square**2 for square in (lowest, 1.0))


def gram_newton_schulz(
    batch: torch.Tensor,
    rows: Sequence[Row],
    eps: float,
    out: torch.Tensor | None,
    multiply: Callable[..., torch.Tensor] = symmetric_product,
) -> torch.Tensor:
    """Newton-Schulz for a batch, as accurate as the plain iteration in the batch's dtype.

    With G = X X^T and P = a + b G + c G^2 the step X <- P X maps G to P G P, and consecutive steps map X to Q X with Q
    the product of their P. All these matrices commute and are symmetric, so half of each product is computed. They are
    stored in float16, which has more digits below one than bfloat16; X keeps its dtype, and its norm until the first
    multiplication.

    Source: for working on Gram matrices alone, Dao-AILab's "Gram Newton-Schulz" (2025).
    """
    is_tall = batch.size(-2) > batch.size(-1)
    norm = torch.linalg.vector_norm(batch, dim=(-2, -1), dtype=torch.float32)
    inverse = norm.clamp_(min=max(eps, _LEAST_NORM)).reciprocal_()
    matrix, scale, done = batch, inverse, 0
    for steps in restarts(rows, batch.shape[-2:]):
        squared = scale * scale if done == 0 else None
        factor = _factor(matrix, squared, scale if done == 0 else None, steps, multiply)
        done += len(steps)
        pair = (matrix, factor) if is_tall else (factor, matrix)
        matrix = torch.bmm(*pair, out=out if done == len(rows) else None)
    return matrix


def _factor(
    matrix: torch.Tensor,
    squared: torch.Tensor | None,
    scale: torch.Tensor | None,
    steps: Sequence[Row],
    multiply: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """The factor of several steps, [B, short, short] in the matrix's dtype, including `scale`."""
    short = min(matrix.shape[-2:])

    def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype = torch.float16, **rest: Any) -> Any:
        return multiply(left, right, matrix.new_empty(matrix.size(0), short, short, dtype=dtype), **rest)

    gram = product(matrix, matrix, scale=squared)
    a, b, c = steps[0]
    if len(steps) == 1 and c:
        return product(gram, gram, matrix.dtype, base=gram, alpha=c, beta=b, shift=a, scale=scale)
    factor: torch.Tensor | None = None
    for step, (a, b, c) in enumerate(steps):
        is_last = step == len(steps) - 1
        update = product(gram, gram, base=gram, alpha=c, beta=b) if c else gram * b
        if factor is not None:
            dtype, last_scale = (matrix.dtype, scale) if is_last else (torch.float16, None)
            factor = product(update, factor, dtype, base=factor, beta=a, scale=last_scale)
        if not is_last:
            half = product(update, gram, base=gram, beta=a)
            gram = product(update, half, base=half, beta=a)
        if factor is None:
            update.diagonal(dim1=-2, dim2=-1).add_(a)
            factor = update
    assert factor is not None
    if len(steps) == 1:
        factor = (factor if scale is None else factor * scale[:, None, None]).to(matrix.dtype)
    return factor


PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def orthogonalize(
    x: Any,
    steps: Any = None,
    coefficients: Any = "jordan",
    eps: Any = 1e-7,
    *,
    precision: str = "bfloat16",
    safety: float = SAFETY,
) -> Any:
    """Replace the singular values of matrices by values near one.

    With X a matrix divided by its Frobenius norm, each step is X <- a X + (b G + c G^2) X with G = X X^T; for a tall
    matrix X <- a X + X (b G + c G^2) with G = X^T X.

    Args:
        x: a matrix, or a stack of matrices [..., rows, columns], any floating dtype; in a rule, which sees one matrix
            at a time, a value of the parameter's shape or a product.
        steps: the number of iterations, less than 100; None for the length of the coefficients, 5 for three numbers.
        coefficients: a, b, c for all steps; a list of rows, one per step; or the name of a published set: "jordan"
            ("simple"), "quintic", "polar_express", "polar_express_dion", "cans" and "cubic5" with 5 steps, "aol" with
            4, "deepseek-v4" ("deepseekv4") with 10. Further steps repeat the last row, for "quintic" and "aol" all
            rows; lists, "polar_express_dion" and "cubic5" allow no other number of steps.
        eps: the least norm to divide by.
        precision: the dtype of products, "bfloat16", "float16" or "float32".
        safety: the largest singular value for "polar_express" and "cans". Larger values diverge: 1 leaves no room for
            rounding.

    Returns:
        Matrices of the same shape and dtype, holding bfloat16 values (float16 values, float32 values).

    Raises:
        MatrixError: for a tensor of less than two dimensions, and for integers and complex numbers.
        RuleError: for invalid coefficients, a number of steps that they do not support, a safety below 1 or a negative
            `eps`.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), and torch.optim.Muon for
    "jordan"; You for "quintic"; Amsel et al., "The Polar Express" (2025); Grishina et al., "Accelerating Newton-Schulz
    Iteration for Orthogonalization via Chebyshev-type Polynomials" (2025) for "cans"; Boissin et al., "Turbo-Muon"
    (2025) for "aol", here without its preconditioning; DeepSeek-V4 (2026); for "cubic5", NVIDIA's
    Emerging-Optimizers, whose digits all but the polar_express sets have, "cans" with safety=1; dion for
    "polar_express_dion".

    Example:
        >>> import torch
        >>> matrix = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, -2.0]])
        >>> [[round(entry, 1) for entry in row] for row in orthogonalize(matrix).tolist()]
        [[1.1, 0.0, 0.0], [0.0, 0.0, -0.7]]
        >>> [[round(entry, 1) for entry in row] for row in orthogonalize(matrix, 8, "polar_express").tolist()]
        [[1.0, 0.0, 0.0], [0.0, 0.0, -1.0]]
    """
    if x.dim() < 2:
        raise MatrixError(f"orthogonalize takes matrices, not a tensor of {x.dim()} dimensions")
    if not x.is_floating_point():
        raise MatrixError(f"orthogonalize takes real floating-point numbers, not {x.dtype}")
    if precision not in PRECISIONS:
        raise RuleError(f"orthogonalize: precision={precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if isinstance(eps, (bool, str, type(None))) or (isinstance(eps, (int, float)) and not eps >= 0):
        raise RuleError(f"orthogonalize: eps={eps!r}; it must be at least 0")
    numbers = [eps, *flat(rows_of(coefficients, steps, safety))]
    return _operations[precision](x, [as_scalar(number) for number in numbers])


def newton_schulz(
    operands: Sequence[torch.Tensor],
    numbers: Sequence[float],
    out: torch.Tensor | None,
    multiply: Callable[..., torch.Tensor] = symmetric_product,
    precision: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`orthogonalize` for a batch; `numbers` has eps, then a, b, c of each step."""
    eps, rows = numbers[0], list(zip(*[iter(numbers[1:])] * 3))
    if out is not None and out.dtype is not precision:
        return out.copy_(newton_schulz(operands, numbers, None, multiply, precision))
    batch = operands[0].to(precision) if precision is torch.bfloat16 else operands[0].to(torch.float32)
    if batch.dtype is precision and rows and uses_symmetric_kernel(batch):
        return gram_newton_schulz(batch, rows, eps, out, multiply)
    is_tall = batch.size(-2) > batch.size(-1)
    norm = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True).clamp_(min=eps)
    if batch.dtype is not precision:
        batch = torch.div(batch, norm).to(precision)
        if rows and uses_symmetric_kernel(batch):
            # Only a norm below `eps` is still below 1. Its inverse would overflow in float16.
            return gram_newton_schulz(batch, rows, 1.0, out, multiply)
    else:
        batch = torch.div(batch, norm, out=None if rows else out)
    for step, (a, b, c) in enumerate(rows):
        gram = torch.bmm(batch.mT, batch) if is_tall else torch.bmm(batch, batch.mT)
        # With c = 0 no product is needed; torch's bfloat16 baddbmm on the CPU ignores beta if alpha is 0.
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else gram * b
        factors = (batch, update) if is_tall else (update, batch)
        batch = torch.baddbmm(batch, *factors, beta=a, out=out if step == len(rows) - 1 else None)
    return batch


def _launches(
    shape: tuple[int, int], numbers: Sequence[float], device: torch.device, precision: torch.dtype
) -> list[Launch]:
    """The kernel launches of `newton_schulz` for matrices of a shape, recorded in a run without products."""
    batch = torch.zeros(1, *shape, dtype=precision, device=device)
    if not uses_symmetric_kernel(batch):
        return []
    launches: dict[int, Launch] = {}

    def note(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, **options: Any) -> torch.Tensor:
        launch = symmetric_launch(left, right, out, **options)
        launches[id(launch[0])] = launch
        return out

    newton_schulz([batch], numbers, None, note, precision)
    return list(launches.values())


def _registered(precision: torch.dtype) -> Callable[..., torch.Tensor]:
    """Register `orthogonalize` with products in this precision; returns a torch operator for rules."""
    is_narrow = precision is torch.bfloat16
    # Float16 takes float32 operands: small elements could underflow before the matrix is normalized.
    dtype = torch.bfloat16 if is_narrow else torch.float32
    name = "orthogonalize" if is_narrow else f"orthogonalize_{str(precision).removeprefix('torch.')}"
    register(
        MatrixOperation(
            name,
            1,
            lambda space: space,
            partial(newton_schulz, precision=precision),
            dtype,
            # Another copy of the matrix, and a few Gram matrices.
            workspace=lambda rows, columns: rows * columns + 5 * min(rows, columns) ** 2,
            work=work,
            launches=partial(_launches, precision=precision),
        )
    )

    @torch.library.custom_op(f"tilestep::{name}", mutates_args=(), schema="(Tensor matrix, Tensor[] numbers) -> Tensor")
    def call(matrix: torch.Tensor, numbers: list[torch.Tensor]) -> torch.Tensor:
        batch, known = matrix.to(dtype).unsqueeze(0).flatten(0, -3), [float(number) for number in numbers]
        found = newton_schulz([batch], known, None, precision=precision)
        return found.to(matrix.dtype, copy=True).view(matrix.shape)

    @call.register_fake
    def _(matrix: torch.Tensor, numbers: list[torch.Tensor]) -> torch.Tensor:
        return torch.empty_like(matrix)

    return call


_operations = {name: _registered(precision) for name, precision in PRECISIONS.items()}
