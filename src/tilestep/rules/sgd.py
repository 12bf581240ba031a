"""Stochastic gradient descent with momentum."""

from typing import Any

import torch

from .protocol import State, nonnegative, rule
from .scalars import decayed


@rule(
    name="SGD",
    ranges=nonnegative("lr", "momentum", "weight_decay"),
    options={"foreach": None, "differentiable": False, "fused": None},
    keyword_only=("maximize",),
    uncounted=True,
    states={"momentum_buffer": State(zero_if_late="dampening")},
    numbered=1,
)
def sgd(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    *,
    lr: Any = 1e-3,
    momentum: Any = 0.0,
    dampening: Any = 0.0,
    weight_decay: Any = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Gradient descent with momentum, dampening, Nesterov's correction and coupled weight decay.

    Equations (b starts at 0, and the gradient of step 1 enters b without dampening: if `momentum` is raised from 0 in a
    later step, `dampening` must be 0 in that step; while `momentum` is 0, b is dropped, unlike in torch):
        g <- g + weight_decay * p
        b <- momentum * b + (1 - dampening) * g
        g <- g + momentum * b if nesterov else b
        p <- p - lr * g

    Raises:
        ValueError: for `nesterov` without momentum or with dampening.
        StateError: if momentum starts after a parameter's first step, with dampening.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning" (ICML 2013);
    torch.optim.SGD.
    """
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")
    if maximize:
        grad = -grad
    grad = decayed(grad, param, weight_decay)
    if momentum != 0:
        # A buffer that was loaded without a step count is kept, because only the gradient's weight depends on the step.
        momentum_buffer = momentum * momentum_buffer + torch.where(step == 1, 1.0, 1 - dampening) * grad
        grad = grad + momentum * momentum_buffer if nesterov else momentum_buffer
    param = param - lr * grad
    return param, momentum_buffer
