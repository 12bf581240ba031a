"""ASGD: stochastic gradient descent whose iterates are averaged."""

from typing import Any

import torch

from .protocol import TORCH_OPTIONS, State, nonnegative, rule
from .scalars import decayed


@rule(
    name="ASGD",
    ranges=nonnegative("lr", "weight_decay"),
    options=TORCH_OPTIONS,
    keyword_only=("maximize",),
    positional=("foreach", "maximize", "differentiable", "capturable"),
    # float32 even for float64 parameters, as in torch: the rounded rate is the rate in use.
    states={
        "eta": State(init="lr", shape="scalar", dtype=torch.float32),
        "mu": State(init=1.0, shape="scalar", dtype=torch.float32),
    },
)
def asgd(
    param: Any,
    grad: Any,
    eta: Any,
    mu: Any,
    ax: Any,
    *,
    lr: Any = 1e-2,
    lambd: Any = 1e-4,
    alpha: Any = 0.75,
    t0: Any = 1e6,
    weight_decay: Any = 0.0,
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Gradient descent with a falling rate, and in `ax` the average of the parameters since step `t0`.

    Equations (t is the step count from 1, eta starts at lr, mu at 1, a at 0):
        g <- g + weight_decay * p
        p <- p - eta * (g + lambd * p)
        a <- p if mu = 1 else a + mu * (p - a)
        eta <- lr / (1 + lambd * lr * t)^alpha
        mu <- 1 / max(1, t - t0)

    Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (SIAM 1992), with the rates of
    Bottou, "Stochastic Gradient Descent Tricks" (2012); torch.optim.ASGD.
    """
    # Earlier steps may have been skipped, with another rate than this step's; if the rate is unchanged, keep eta's
    # rounded value.
    eta = torch.where((step == 1) & ((lr - eta).abs() > 1e-6 * lr), lr, eta)
    if maximize:
        grad = -grad
    grad = decayed(grad, param, weight_decay)
    # Not a product with 1 - lambd * eta: its rounding to float32 is an error of that size at every step, and
    # accumulates. But the product would keep infinite weights, and so does this.
    shrinking = torch.where(torch.isinf(param), 0.0, param)
    param = param - eta * (grad + lambd * shrinking)
    ax = torch.where(mu == 1, param, ax + mu * (param - ax))
    eta = lr / (1 + lambd * lr * step) ** alpha
    mu = 1 / max(1, step - t0)
    return param, eta, mu, ax
