"""Schedule-free SGD and AdamW: averaging in place of a learning-rate schedule."""

from typing import Any

import torch

from .protocol import State, between, nonnegative, rule

_STATES = {
    "z": State("param"),
    # float64, as the authors' Python floats: in float32 a sum of a million weights is off by a percent.
    "weight_sum": State(0.0, shape="scalar", dtype=torch.float64),
    "lr_max": State(-1.0, shape="scalar", dtype=torch.float64),
}
_RANGES = nonnegative("lr", "weight_decay", "warmup_steps")
_INSIDE = between(0, 1, open_low=True)


def _averaging(
    lr: Any, lr_max: Any, weight_sum: Any, warmup_steps: Any, r: Any, weight_lr_power: Any, step: Any
) -> tuple[Any, ...]:
    """Return the warmed-up learning rate, the weight of this step's point in the average, and two running scalars."""
    lr = lr * torch.clamp(step / torch.clamp(warmup_steps, min=1), max=1)
    lr_max = torch.maximum(lr, lr_max)
    weight = step**r * lr_max**weight_lr_power
    weight_sum = weight_sum + weight
    share = torch.where(weight_sum > 0, weight / weight_sum, 0.0)
    return lr, share, lr_max, weight_sum


def _move(param: Any, z: Any, direction: Any, lr: Any, share: Any, momentum: Any) -> tuple[Any, Any]:
    """Return y and z after a step along `direction`, without computing x."""
    moved = param + share * (z - param) + lr * (momentum * (1 - share) - 1) * direction
    return moved, z - lr * direction


def average_of_sgd(param: Any, z: Any, *, momentum: Any) -> Any:
    """The weights x to evaluate and save, computed from the training weights.

    Args:
        param: the training weights y.
        z: the state `z`, like `param`.
        momentum: the hyperparameter; not 0.

    Source: Defazio et al. (2024), the interpolation solved for x: y = (1 - momentum) * z + momentum * x.

    Example:
        >>> x, z = torch.tensor([1.0]), torch.tensor([3.0])
        >>> average_of_sgd(0.9 * x + 0.1 * z, z, momentum=0.9)
        tensor([1.])
    """
    return param + (1 - 1 / momentum) * (z - param)


def average_of_adamw(param: Any, z: Any, *, betas: Any) -> Any:
    """The weights x to evaluate and save, computed from the training weights: `average_of_sgd` with beta1 as momentum.

    Args:
        param: the training weights y.
        z: the state `z`, like `param`.
        betas: the hyperparameter; its first entry is not 0.

    Example:
        >>> average_of_adamw(torch.tensor([1.2]), torch.tensor([3.0]), betas=(0.9, 0.999))
        tensor([1.])
    """
    return average_of_sgd(param, z, momentum=betas[0])


@rule(
    name="ScheduleFreeSGD",
    states=_STATES,
    ranges={**_RANGES, "momentum": _INSIDE},
    options={"foreach": None},
    evaluation=average_of_sgd,
)
def schedule_free_sgd(
    param: Any,
    grad: Any,
    z: Any,
    weight_sum: Any,
    lr_max: Any,
    *,
    lr: Any = 1.0,
    momentum: Any = 0.9,
    weight_decay: Any = 0.0,
    warmup_steps: Any = 0,
    r: Any = 0.0,
    weight_lr_power: Any = 2.0,
    step: Any,
) -> tuple[Any, ...]:
    """Gradient descent at an interpolation of its iterate and its average.

    Equations (t is the step count from 1; the parameter holds y, and y = (1 - momentum) * z + momentum * x):
        e <- lr * min(1, t / warmup_steps)
        c <- w / (sum of w so far) with w = t^r * (largest e so far)^weight_lr_power
        u <- g + weight_decay * y
        y <- (1 - c) * y + c * z + e * (momentum * (1 - c) - 1) * u
        z <- z - e * u
    so that x <- (1 - c) * x + c * z is the average to evaluate: `average_of_sgd`. Each parameter sums w over the steps
    in which it had a gradient; the authors' sum is the param group's.

    Source: Defazio et al., "The Road Less Scheduled" (NeurIPS 2024); names and defaults of
    SGDScheduleFree in the authors' facebookresearch/schedule_free.
    """
    lr, share, lr_max, weight_sum = _averaging(lr, lr_max, weight_sum, warmup_steps, r, weight_lr_power, step)
    update = grad + weight_decay * param
    param, z = _move(param, z, update, lr, share, momentum)
    return param, z, weight_sum, lr_max


@rule(
    name="ScheduleFreeAdamW",
    states=_STATES,
    ranges=nonnegative("eps", betas=(_INSIDE, between(0, 1)), inner_momentum=between(0, 1), **_RANGES),
    options={"foreach": None},
    evaluation=average_of_adamw,
)
def schedule_free_adamw(
    param: Any,
    grad: Any,
    z: Any,
    exp_avg_sq: Any,
    weight_sum: Any,
    lr_max: Any,
    exp_avg: Any,
    *,
    lr: Any = 0.0025,
    betas: Any = (0.9, 0.999),
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    warmup_steps: Any = 0,
    r: Any = 0.0,
    weight_lr_power: Any = 2.0,
    inner_momentum: Any = 0.0,
    step: Any,
) -> tuple[Any, ...]:
    """AdamW without schedule, and by default without momentum, at an interpolation of its iterate and its average.

    Equations, with e and c as in `schedule_free_sgd`, and beta1 as its momentum:
        v <- beta2 * v + (1 - beta2) * g^2
        u <- g / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * y
        y <- (1 - c) * y + c * z + e * (beta1 * (1 - c) - 1) * u
        z <- z - e * u
    and with `inner_momentum`, a, in place of g in u: m / (1 - a^t), with m <- a * m + (1 - a) * g.

    Source: Defazio et al., "The Road Less Scheduled" (NeurIPS 2024), algorithm 1; names and defaults of
    AdamWScheduleFree in the authors' facebookresearch/schedule_free, version 1.3 on, with its later `inner_momentum`.
    """
    beta1, beta2 = betas
    lr, share, lr_max, weight_sum = _averaging(lr, lr_max, weight_sum, warmup_steps, r, weight_lr_power, step)
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denom = exp_avg_sq.sqrt() / torch.sqrt(1 - beta2**step) + eps
    direction = grad
    if inner_momentum != 0:
        exp_avg = inner_momentum * exp_avg + (1 - inner_momentum) * grad
        direction = exp_avg / (1 - inner_momentum**step)
    update = direction / denom + weight_decay * param
    param, z = _move(param, z, update, lr, share, beta1)
    return param, z, exp_avg_sq, weight_sum, lr_max, exp_avg
