"""Adam-atan2: the quotient of Adam's moments without an epsilon.

Example:
    >>> import torch
    >>> from tilestep.rules import registry
    >>> zeros = torch.zeros(2)
    >>> registry["AdamAtan2"](zeros, torch.tensor([3.0, -1e-9]), zeros, zeros, lr=1.0, a=4 / torch.pi, step=1)[0]
    tensor([-1.,  1.])
"""

from typing import Any

import torch

from .protocol import between, nonnegative, rule


@rule(
    name="AdamAtan2",
    ranges=nonnegative("lr", "weight_decay", "a", "b", betas=between(0, 1)),
)
def adam_atan2(
    param: Any,
    grad: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    *,
    lr: Any = 1e-4,
    betas: Any = (0.9, 0.99),
    weight_decay: Any = 0.0,
    a: Any = 1.27,
    b: Any = 1.0,
    step: Any,
) -> tuple[Any, ...]:
    """Adam whose updates do not change with the scale of the loss, and have an upper bound.

    Equations (t is the step count from 1):
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        p <- p - lr * weight_decay * p
        p <- p - lr * a * atan2(m / (1 - beta1^t), b * sqrt(v / (1 - beta2^t)))
    An element of the update is at most lr * a * pi / 2. The authors of the paper write a and b as factors; 1.27 keeps
    the size of Adam's updates where m is about sqrt(v).

    Source: Everett et al., "Scaling Exponents Across Parameterizations and Optimizers" (ICML 2024), section 4.3; names
    and defaults of lucidrains/adam-atan2-pytorch, whose `cautious_factor=0` is `tilestep.cautious`, and
    `cautious_wd=True` is `tilestep.cautious_weight_decay`.
    """
    beta1, beta2 = betas
    exp_avg = exp_avg + (1 - beta1) * (grad - exp_avg)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    angle = torch.atan2(exp_avg / (1 - beta1**step), b * (exp_avg_sq / (1 - beta2**step)).sqrt())
    param = param * (1 - lr * weight_decay) - lr * a * angle
    return param, exp_avg, exp_avg_sq
