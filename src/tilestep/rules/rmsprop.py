"""RMSprop: gradients divided by their running root mean square."""

from typing import Any

from .protocol import TORCH_OPTIONS, nonnegative, rule
from .scalars import decayed


@rule(
    name="RMSprop",
    ranges=nonnegative("lr", "alpha", "eps", "weight_decay", "momentum"),
    options=TORCH_OPTIONS,
    keyword_only=("maximize",),
    positional=("capturable", "foreach", "maximize", "differentiable"),
    numbered=1,
)
def rmsprop(
    param: Any,
    grad: Any,
    square_avg: Any,
    momentum_buffer: Any,
    grad_avg: Any,
    *,
    lr: Any = 1e-2,
    alpha: Any = 0.99,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    momentum: Any = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> tuple[Any, ...]:
    """Gradients divided by their running root mean square, or with `centered` by their running standard deviation.

    Equations:
        g <- g + weight_decay * p
        v <- alpha * v + (1 - alpha) * g^2
        a <- alpha * a + (1 - alpha) * g, and v - a^2 in place of v below, if centered
        u = g / (sqrt(v) + eps)
        b <- momentum * b + u, and b in place of u below, if momentum > 0
        p <- p - lr * u

    Source: Tieleman and Hinton, "Lecture 6.5: rmsprop" (Coursera 2012); Graves, "Generating Sequences With Recurrent
    Neural Networks" (arXiv 1308.0850) for centered; torch.optim.RMSprop.
    """
    if maximize:
        grad = -grad
    grad = decayed(grad, param, weight_decay)
    square_avg = alpha * square_avg + (1 - alpha) * grad * grad
    variance = square_avg
    if centered:
        grad_avg = grad_avg + (1 - alpha) * (grad - grad_avg)
        variance = square_avg - grad_avg * grad_avg
    update = grad / (variance.sqrt() + eps)
    if momentum > 0:
        momentum_buffer = momentum * momentum_buffer + update
        update = momentum_buffer
    param = param - lr * update
    return param, square_avg, momentum_buffer, grad_avg
