"""LARS: momentum with a learning rate per layer, from the ratio of the weights' norm to the gradient's."""

from typing import Any

import torch

from .protocol import nonnegative, rule


@rule(
    name="LARS",
    ranges=nonnegative("lr", "momentum", "weight_decay", "trust_coefficient", "eps"),
    keyword_only=("exclude_bias_and_norm",),
)
def lars(
    param: Any,
    grad: Any,
    momentum_buffer: Any,
    *,
    lr: Any = 1e-3,
    momentum: Any = 0.9,
    weight_decay: Any = 1e-4,
    trust_coefficient: Any = 0.001,
    eps: Any = 0.0,
    nesterov: bool = False,
    exclude_bias_and_norm: bool = True,
) -> tuple[Any, ...]:
    """Layer-wise adaptive rate scaling.

    Equations (norms are over one parameter tensor):
        r <- trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p) + eps)
        u <- lr * r * (g + weight_decay * p)
        b <- momentum * b + u
        p <- p - (momentum * b + u if nesterov else b)
    The ratio r is 1 where a norm is 0. Parameters of fewer than two dimensions (biases, normalization) have neither
    the ratio nor the decay while `exclude_bias_and_norm` is set: u <- lr * g.

    Source: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks" (2017), algorithm 1; defaults of
    TensorFlow's LARSOptimizer, where trust_coefficient is called eeta.
    """
    update = lr * grad
    if param.dim() > 1 or not exclude_bias_and_norm:
        param_norm = param.norm()
        grad_norm = grad.norm()
        adapts = (param_norm > 0) & (grad_norm > 0)
        ratio = trust_coefficient * param_norm / (grad_norm + weight_decay * param_norm + eps)
        update = lr * torch.where(adapts, ratio, 1.0) * (grad + weight_decay * param)
    momentum_buffer = momentum * momentum_buffer + update
    param = param - (momentum * momentum_buffer + update if nesterov else momentum_buffer)
    return param, momentum_buffer
