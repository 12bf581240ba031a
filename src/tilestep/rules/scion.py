"""Scion: steps to the boundary of a ball in the norm of each layer.

Example:
    >>> import torch
    >>> from tilestep.rules import registry
    >>> param = torch.tensor([1.0, 1.0])
    >>> registry["Scion"](param, torch.tensor([0.2, -0.2]), None, lr=0.1, scale=2.0)[0]
    tensor([0.7000, 1.1000])
"""

import math
from typing import Any

import torch

from ..errors import RuleError
from ..linalg.orthogonal import orthogonalize
from .protocol import MATRIX_OPTIONS, between, nonnegative, one_of, rule

_EPS = 1e-8  # as in the authors' code


@rule(
    name="Scion",
    ranges=nonnegative(
        "lr",
        momentum=between(0, 1, open_low=True, open_high=False),
        norm=one_of("Auto", "Spectral", "Sign", "ColNorm", "RowNorm", "BiasRMS"),
        normalized=one_of(None, False, True),
        ns_steps=between(0, 100),
    ),
    options=MATRIX_OPTIONS,
)
def scion(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    *,
    lr: Any = 1e-3,
    momentum: Any = 1.0,
    norm: str = "Auto",
    scale: Any = 1.0,
    unconstrained: bool = False,
    normalized: bool | None = None,
    transpose: bool = False,
    ns_steps: Any = 5,
) -> tuple[Any, ...]:
    """Stochastic conditional gradients with a linear minimization oracle for each layer.

    Equations, where momentum is one minus the momentum of other optimizers, and 1 keeps no b:
        b <- (1 - momentum) * b + momentum * g
        p <- p * (1 - lr) - lr * scale * lmo(b)     (p - lr * scale * lmo(b) with `unconstrained`)
    and for a matrix lmo(b) is
        sqrt(rows / columns) * orthogonalize(b)               "Spectral"
        sign(b) / columns                                     "Sign"
        b / (root mean square of each column + 1e-8)          "ColNorm"
        b / (sqrt(columns) * norm of each row + 1e-8)         "RowNorm"
    and for a vector b / (its root mean square + 1e-8), "BiasRMS". "Auto" is "Spectral" for matrices and "BiasRMS" for
    vectors. `normalized` and `transpose` are the authors' `norm_kwargs`: without `normalized` the factors are
    sqrt(rows), 1 and 1 (for "ColNorm" it is off by default, and on it multiplies the denominator by columns);
    `transpose` swaps rows and columns for "ColNorm" and "RowNorm".

    Each matrix inside a parameter is updated as a separate parameter, as in Muon. The authors' "SpectralConv" is
    "Spectral" with `flatten=True` and a `scale` 1 / k times as large for kernels of k x k, 1 / sqrt(k) for k.

    Source: Pethick et al., "Training Deep Learning Models with Norm-Constrained LMOs" (ICML 2025); names and defaults
    of the authors' LIONS-EPFL/scion, whose `init()` of parameters is left to the model.
    """
    if momentum != 1:
        momentum_buffer = (1 - momentum) * momentum_buffer + momentum * grad
        grad = momentum_buffer
    is_matrix = param.dim() > 1
    if norm == "Auto":
        norm = "Spectral" if is_matrix else "BiasRMS"
    if is_matrix == (norm == "BiasRMS"):
        kind = "vectors" if is_matrix else "matrices"
        raise RuleError(f"Scion: norm={norm!r} is for {kind}; use norm='Auto', or a separate param group")
    if norm == "BiasRMS":
        update = grad / ((grad * grad).mean().sqrt() + _EPS)
    elif norm == "Spectral":
        ratio = math.sqrt(param.size(-2) if normalized is False else param.size(-2) / param.size(-1))
        update = ratio * orthogonalize(grad, steps=ns_steps)
    elif norm == "Sign":
        update = torch.sign(grad) if normalized is False else torch.sign(grad) / param.size(-1)
    else:
        rows, columns = (-1, -2) if transpose else (-2, -1)
        if norm == "ColNorm":
            size = (grad * grad).mean(dim=rows, keepdim=True).sqrt()
            size = size * param.size(columns) if normalized else size
        else:
            size = (grad * grad).sum(dim=columns, keepdim=True).sqrt()
            size = size if normalized is False else size * math.sqrt(param.size(columns))
        update = grad / (size + _EPS)
    param = (param if unconstrained else param * (1 - lr)) - lr * scale * update
    return param, momentum_buffer
