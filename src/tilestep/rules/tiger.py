"""Tiger: sign momentum with a learning rate relative to each tensor's size."""

from typing import Any

import torch

from .protocol import between, nonnegative, rule


@rule(
    name="Tiger",
    ranges=nonnegative(
        "lr", "weight_decay", beta=between(0, 1), shrink_ratio=between(0, 1, open_high=False, or_none=True)
    ),
    keyword_only=("embedding", "center"),
)
def tiger(
    param: Any,
    grad: Any,
    exp_avg: Any,
    *,
    lr: Any = 1e-3,
    beta: Any = 0.965,
    weight_decay: Any = 0.01,
    shrink_ratio: Any = 0.99,
    embedding: bool = False,
    center: Any = 0.0,
) -> tuple[Any, ...]:
    """A tight-fisted optimizer: one momentum buffer, signs, and relative learning rates.

    Equations (rms is over one parameter tensor, over each row of it with `embedding`):
        m <- beta * m + (1 - beta) * g
        p <- p - lr * rms(p) * (sign(m) + weight_decay * p)
    Parameters of fewer than two dimensions take lr / 2 in place of lr * rms(p), and no decay. Where a gradient holds a
    NaN, m stays and p <- (p - center) * shrink_ratio + center; `center=1.0` is for normalization scales, and
    `shrink_ratio=None` drops this rescue and its pass over the gradient.

    Source: Su, "Tiger: A Tight-fisted Optimizer" (2023); names and defaults of the author's bojone/tiger, where names
    of variables tell biases, scales and embeddings. Its gradient accumulation inside the momentum is left out.
    """
    averaged = beta * exp_avg + (1 - beta) * grad
    if param.dim() > 1:
        squares = param * param
        mean = squares.mean(dim=-1, keepdim=True) if embedding else squares.mean()
        moved = param - lr * mean.sqrt() * (averaged.sign() + weight_decay * param)
    else:
        moved = param - 0.5 * lr * averaged.sign()
    if shrink_ratio is None:
        return moved, averaged
    broken = torch.where(torch.isnan(grad), 1.0, 0.0).amax() > 0
    param = torch.where(broken, (param - center) * shrink_ratio + center, moved)
    exp_avg = torch.where(broken, exp_avg, averaged)
    return param, exp_avg
