"""Adadelta: steps in the units of the parameters."""

from typing import Any

from .protocol import TORCH_OPTIONS, between, nonnegative, rule
from .scalars import decayed


@rule(
    name="Adadelta",
    ranges=nonnegative("lr", "eps", "weight_decay", rho=between(0, 1, open_high=False)),
    options=TORCH_OPTIONS,
    keyword_only=("maximize",),
    positional=("foreach",),
)
def adadelta(
    param: Any,
    grad: Any,
    square_avg: Any,
    acc_delta: Any,
    *,
    lr: Any = 1.0,
    rho: Any = 0.9,
    eps: Any = 1e-6,
    weight_decay: Any = 0.0,
    maximize: bool = False,
) -> tuple[Any, ...]:
    """Gradients divided by their running size and multiplied by the running size of earlier updates.

    Equations:
        g <- g + weight_decay * p
        v <- rho * v + (1 - rho) * g^2
        d = sqrt(u + eps) / sqrt(v + eps) * g
        u <- rho * u + (1 - rho) * d^2
        p <- p - lr * d

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method" (arXiv 1212.5701); torch.optim.Adadelta.
    """
    if maximize:
        grad = -grad
    grad = decayed(grad, param, weight_decay)
    square_avg = rho * square_avg + (1 - rho) * grad * grad
    delta = (acc_delta + eps).sqrt() / (square_avg + eps).sqrt() * grad
    acc_delta = rho * acc_delta + (1 - rho) * delta * delta
    param = param - lr * delta
    return param, square_avg, acc_delta
