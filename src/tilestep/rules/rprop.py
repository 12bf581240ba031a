"""Rprop: a step size for every coordinate, moved by the signs of the gradients."""

from typing import Any

import torch

from .protocol import TORCH_OPTIONS, Interval, State, between, nonnegative, rule


@rule(
    name="Rprop",
    ranges=nonnegative("lr", etas=(between(0, 1, open_low=True), Interval(low=1, open_low=True))),
    options=TORCH_OPTIONS,
    keyword_only=("maximize",),
    states={"step_size": State(init="lr", signed=False)},
)
def rprop(
    param: Any,
    grad: Any,
    prev: Any,
    step_size: Any,
    *,
    lr: Any = 1e-2,
    etas: Any = (0.5, 1.2),
    step_sizes: Any = (1e-6, 50.0),
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Resilient backpropagation: steps grow while a gradient keeps its sign and shrink when it flips.

    Equations (s starts at lr, which is not read again; h starts at 0):
        s <- clamp(s * (etas[1] if g * h > 0, etas[0] if g * h < 0, 1 if g * h = 0), step_sizes[0], step_sizes[1])
        h <- 0 if g * h < 0 else g
        p <- p - s * sign(h)

    Source: Riedmiller and Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm"
    (ICNN 1993); torch.optim.Rprop.
    """
    eta_minus, eta_plus = etas
    smallest, largest = step_sizes
    if maximize:
        grad = -grad
    # Set again at the first step taken: earlier steps may have been skipped, with other rates.
    step_size = torch.where(step == 1, lr, step_size)
    agreement = grad * prev
    shrunk = torch.where(agreement < 0, step_size * eta_minus, step_size)
    step_size = torch.where(agreement > 0, step_size * eta_plus, shrunk).clamp(smallest, largest)
    prev = torch.where(agreement < 0, 0.0, grad)
    param = param - step_size * prev.sign()
    return param, prev, step_size
