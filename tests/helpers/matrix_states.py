"""Rules whose states take the place of each other, and steps of them beside the rule itself."""

from __future__ import annotations

from typing import Any

import torch

import tilestep

__all__ = ["STATES", "check_states"]

SQUARE = tilestep.State(0.0, shape="left")


NUMBER = tilestep.State(1.0, shape="scalar", dtype=torch.float64)


@tilestep.rule(states={"left": SQUARE})
def turned(param: Any, grad: Any, left: Any, *, lr: Any = 0.1) -> tuple[Any, ...]:
    """Its state is nothing but transposed."""
    return param - lr * (left @ grad), left.mT


@tilestep.rule(states={"left": SQUARE, "before": SQUARE})
def moved_on(param: Any, grad: Any, left: Any, before: Any, *, lr: Any = 0.1) -> tuple[Any, ...]:
    """One state is the other's old value."""
    return param - lr * (before @ grad), left + grad @ grad.mT, left


@tilestep.rule(states={"now": NUMBER, "before": NUMBER})
def counted(param: Any, grad: Any, now: Any, before: Any, *, lr: Any = 0.1) -> tuple[Any, ...]:
    """The same of two numbers that are kept in float64."""
    return param - lr * before * grad, 2 * now, now


STATES = {rule.__name__: rule for rule in (turned, moved_on, counted)}


def check_states(rule: tilestep.Rule) -> tilestep.Optimizer:
    """Step a matrix, from states that are no symmetric matrices, and compare with the rule in float64."""
    generator = torch.Generator().manual_seed(2)
    param = torch.nn.Parameter(torch.randn(3, 4, generator=generator))
    optimizer = tilestep.Optimizer([param], rule)
    param.grad = torch.randn(3, 4, generator=generator)
    optimizer.step()
    states = [state for name, state in optimizer.state[param].items() if name != "step"]
    for state in states:
        state.copy_(torch.rand(state.shape, generator=generator))
    expected, *wanted = (tensor.detach().to(torch.float64, copy=True) for tensor in (param, *states))
    for _ in range(3):
        param.grad = torch.randn(3, 4, generator=generator)
        expected, *wanted = rule(expected, param.grad.double(), *wanted)
        optimizer.step()
    for tensor, reference in zip((param, *states), (expected, *wanted)):
        torch.testing.assert_close(tensor.detach().double(), reference, rtol=1e-5, atol=1e-5)
    return optimizer
