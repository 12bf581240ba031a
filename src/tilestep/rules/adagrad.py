"""Adagrad: each coordinate's rate falls with the gradients it has seen."""

from typing import Any

from .protocol import State, nonnegative, rule
from .scalars import decayed


@rule(
    name="Adagrad",
    ranges=nonnegative("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    options={"foreach": None, "differentiable": False, "fused": None},
    keyword_only=("maximize",),
    positional=("foreach",),
    states={"sum": State(init="initial_accumulator_value")},
    at_once=True,
    numbered=1,
)
def adagrad(
    param: Any,
    grad: Any,
    sum: Any,
    *,
    lr: Any = 1e-2,
    lr_decay: Any = 0.0,
    weight_decay: Any = 0.0,
    initial_accumulator_value: Any = 0.0,
    eps: Any = 1e-10,
    maximize: bool = False,
    step: Any,
) -> tuple[Any, ...]:
    """Gradients divided by the root of the sum of their squares.

    Equations (t is the step count from 1, s starts at `initial_accumulator_value`):
        g <- g + weight_decay * p
        s <- s + g^2
        p <- p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization"
    (JMLR 2011); torch.optim.Adagrad.
    """
    if maximize:
        grad = -grad
    grad = decayed(grad, param, weight_decay)
    sum = sum + grad * grad
    param = param - (lr / (1 + (step - 1) * lr_decay)) * (grad / (sum.sqrt() + eps))
    return param, sum
