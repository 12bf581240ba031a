"""Adafactor: a second moment kept as one row and one column of a matrix."""

import math
from typing import Any

import torch

from .protocol import Interval, State, at_least, nonnegative, rule
from .scalars import machine_epsilon


@rule(
    name="Adafactor",
    ranges=nonnegative("lr", "eps", "weight_decay", beta2_decay=Interval(high=0), d=at_least(1)),
    options={"foreach": None},
    keyword_only=("maximize",),
    states={"row_var": State(shape="row"), "col_var": State(shape="column")},
)
def adafactor(
    param: Any,
    grad: Any,
    row_var: Any,
    col_var: Any,
    variance: Any,
    *,
    lr: Any = 1e-2,
    beta2_decay: Any = -0.8,
    eps: Any = (None, 1e-3),
    d: Any = 1.0,
    weight_decay: Any = 0.0,
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Adaptive rates in sublinear memory: relative steps, a factored second moment, updates clipped by their RMS.

    Equations (t is the step count from 1; RMS(x) = |x| / sqrt(number of elements)):
        alpha = max(eps[1], RMS(p)) * min(lr, 1 / sqrt(t))
        p <- p - lr * weight_decay * p
        w = t^beta2_decay
        R <- (1 - w) * R + w * (mean of g^2 over the last dimension)
        C <- (1 - w) * C + w * (mean of g^2 over the last but one)
        v = R * C / max(eps[0], mean of R over the last but one)
        u = g / sqrt(max(eps[0]^2, v))
        p <- p - alpha * u / max(1, RMS(u) / d)
    with v <- (1 - w) * v + w * g^2 in place of R and C for parameters of fewer than two dimensions. An eps[0] of None
    is the machine epsilon of the dtype that the parameter is kept in: float32's with a master.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (ICML 2018);
    torch.optim.Adafactor.
    """
    eps1, eps2 = eps
    if eps1 is None:
        eps1 = machine_epsilon(param)
    if maximize:
        grad = -grad
    root_numel = math.sqrt(param.numel())
    # Comparisons, like Python's max in torch's code: an RMS of NaN selects the other operand.
    size = param.norm() / root_numel
    alpha = torch.where(size > eps2, size, eps2) * min(lr, 1 / math.sqrt(step))
    param = param * (1 - lr * weight_decay)
    weight = step**beta2_decay
    square = grad * grad
    if param.dim() > 1:
        row_var = row_var + weight * (square.mean(dim=-1, keepdim=True) - row_var)
        col_var = col_var + weight * (square.mean(dim=-2, keepdim=True) - col_var)
        estimate = row_var / row_var.mean(dim=-2, keepdim=True).clamp(min=eps1) * col_var
    else:
        variance = variance + weight * (square - variance)
        estimate = variance
    update = grad * estimate.clamp(min=eps1 * eps1).rsqrt()
    excess = update.norm() / (root_numel * d)
    denom = torch.where(excess > 1, excess, 1.0)
    param = param - (alpha / denom) * update
    return param, row_var, col_var, variance
