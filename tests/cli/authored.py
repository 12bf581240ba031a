"""Rules as a user would write them, for the commands that take `module:function`."""

from __future__ import annotations

import torch

import tilestep


@tilestep.rule(ranges={"lr": tilestep.at_least(0)})
def signed(param, grad, *, lr=0.1, weight_decay=0.0):
    """Descend along the sign.

    Equations:
        p <- p - lr * (sign(g) + weight_decay * p)
    """
    update = torch.sign(grad) + weight_decay * param
    return param - lr * update


def undecorated(param, grad, momentum_buffer, *, lr=0.1, momentum=0.9, step):
    momentum_buffer = momentum * momentum_buffer + grad
    return param - lr * momentum_buffer / (1 - momentum**step), momentum_buffer


@tilestep.rule
def branching(param, grad, *, lr=0.1):
    if grad.sum() > 0:
        return param - lr * grad
    return param


@tilestep.rule
def untranslatable(param, grad, *, lr=0.1):
    return param - lr * torch.special.bessel_j0(grad)


@tilestep.rule
def too_many(param, grad, momentum_buffer, *, lr=0.1):
    return param - lr * grad


@tilestep.rule
def misspelt(param, grad, *, lr=0.1):
    return param - lrr * grad  # noqa: F821


@tilestep.rule
def divided_by_zero(param, grad, *, lr=0.1):
    return param - lr * grad / 0


@tilestep.rule
def resetting(param, grad, exp_avg, *, lr=0.1, period=500, step):
    """Its reset divides by zero."""
    exp_avg = torch.where(step % period == 0, grad / (step % period), 0.9 * exp_avg + grad)
    return param - lr * exp_avg, exp_avg


@tilestep.rule
def warming(param, grad, *, lr=0.1, warmup=150, step):
    """It leaves large gradients out, and descends by another function after its warm-up."""
    grad = torch.where(grad.abs() > 1e3, 0.0, grad)
    return param - lr * min(1, step / warmup) * torch.where(step > warmup, torch.exp(-grad.abs()) * grad, grad)


NOT_A_RULE = 3
CALLS = 0


@tilestep.rule
def counting(param, grad, *, lr=0.1, drift=0.01):
    global CALLS
    CALLS += 1
    return param - lr * grad - drift * CALLS


@tilestep.rule
def for_volumes(param, grad, *, lr=0.1):
    if param.dim() != 3:
        raise tilestep.RuleError("volumes only")
    return param - lr * (grad - grad.mean(dim=(1, 2), keepdim=True))


@tilestep.rule
def of_a_wrong_shape(param, grad, average, *, lr=0.1):
    return param - lr * grad, grad.mean(dim=-1, keepdim=True)


@tilestep.rule
def lost_momentum(param, grad, momentum_buffer, *, lr=0.1):
    momentum_buffer = 0.9 * momentum_buffer + grad
    param.sub_(lr * momentum_buffer)


@tilestep.rule
def varying(param, grad, *, lr=0.1):
    return param - lr * grad / grad.std()


@tilestep.rule(states={"momentum_buffer": tilestep.State(signed=False)})
def said_to_be_positive(param, grad, momentum_buffer, *, lr=0.1):
    """Its state has both signs, of which a root has no place."""
    momentum_buffer = 0.9 * momentum_buffer + grad
    return param - lr * momentum_buffer, momentum_buffer


@tilestep.rule
def over_rows(param, grad, mean, *, lr=0.1):
    """Reduces over rows; its state can be in blocks all the same."""
    mean = mean + 0.1 * (grad - mean)
    return param - lr * mean / (mean.square().mean(dim=-1, keepdim=True).sqrt() + 1e-8), mean
