"""Rules that reduce over rows, columns and other slices, and a referee that runs them as plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilestep.rules import Rule, State, registry, rule
from tilestep.rules.compose import centralize

Shape = tuple[int, ...]


@rule(states={"a": State(shape="row"), "b": State(shape="column", init=1.0)})
def mixed(param: Any, grad: Any, a: Any, b: Any, *, lr: Any = 0.1, step: Any) -> tuple[Any, ...]:
    """Old and new values of row states side by side, extrema, a number per matrix, tensor-level reductions of rows."""
    old = a
    a = a + grad.sum(-1, keepdim=True) / step
    larger = torch.maximum(b, grad.abs().amax(-2, keepdim=True))
    param = param - lr * grad / (1 + old.abs()) - 0.01 * (a - old).tanh() * b
    matrix = (param * grad).mean((-1, -2), keepdim=True)
    param = param * (1 + 0.01 * matrix) + 0.01 * larger.mean() - 0.02 * a.norm() / a.numel()
    return param, a * 0.5 + matrix, larger


@rule
def units(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
    """Reductions over all dimensions but the first, over the first, and truth values of rows."""
    first = grad.mean(dim=(0,), keepdim=True)
    unit = grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True)
    size = grad.norm(dim=-1, keepdim=True)
    long = size > size.mean()
    return param - lr * torch.where(long, grad / (1 + size), first * unit) + 0.01 * unit.sum() / param.size(0)


@rule(states={"low": State(shape="row", init=9.0)})
def extremes(param: Any, grad: Any, low: Any, *, lr: Any = 0.1) -> tuple[Any, ...]:
    """Smallest and largest values of rows and columns in one pass, and a state that nothing else reads."""
    low = torch.minimum(low, grad.amin(dim=-1, keepdim=True))
    span = grad.amax(dim=-2, keepdim=True) - grad.amin(dim=-2, keepdim=True)
    return param - lr * (grad - low) / (1 + span), low


RULES: dict[str, tuple[Rule, dict[str, Any]]] = {
    "adafactor": (registry["Adafactor"], {"weight_decay": 0.1}),
    "tiger": (registry["Tiger"], {"embedding": True}),
    "centralize": (centralize(registry["AdamW"]), {}),
    "mixed": (mixed, {}),
    "units": (units, {}),
    "extremes": (extremes, {}),
}


def random_rule(seed: int) -> Rule:
    """A rule of random arithmetic and reductions, the same for the same seed.

    Args:
        seed: which.
    """
    steps = _random_steps(random.Random(seed))

    def body(param: Any, grad: Any, row: Any, column: Any, *, lr: Any = 0.1) -> tuple[Any, ...]:
        pool = [param, grad, row, column]
        for step in steps:
            pool.append(step(pool))
        total = sum(value.tanh() for value in pool[4:])
        param = param - lr * (grad + total).tanh()
        row = 0.5 * row + (grad * total).mean(dim=-1, keepdim=True)
        column = torch.maximum(column * 0.9, (param + total).amax(dim=-2, keepdim=True))
        return param, row, column

    body.__name__ = f"random_{seed}"
    return Rule(body, name=f"Random{seed}", states={"row": State(shape="row"), "column": State(shape="column")})


def _random_steps(draw: random.Random) -> list[Callable[[list[Any]], Any]]:
    unary = [torch.tanh, torch.abs, torch.neg, torch.sigmoid, lambda value: 1 / (1 + value * value)]
    binary = [torch.add, torch.sub, torch.mul, torch.maximum, lambda x, y: torch.where(x > y, x, 0.3 * y)]
    reductions = ["mean", "amax", "amin", "norm"]
    dims: list[tuple[int, ...]] = [(-1,), (-2,), (-2, -1)]

    def unary_step(which: int, at: float) -> Callable[[list[Any]], Any]:
        return lambda pool: unary[which](_chosen(pool, at))

    def binary_step(which: int, at: float, other: float) -> Callable[[list[Any]], Any]:
        return lambda pool: binary[which](_chosen(pool, at), _chosen(pool, other))

    def reduction_step(name: str, at: float, over: tuple[int, ...] | None) -> Callable[[list[Any]], Any]:
        def apply(pool: list[Any]) -> Any:
            value = _chosen(pool, at)
            return getattr(value, name)() if over is None else getattr(value, name)(dim=over, keepdim=True)

        return apply

    steps = []
    for _ in range(draw.randint(4, 8)):
        kind = draw.random()
        if kind < 0.25:
            steps.append(unary_step(draw.randrange(len(unary)), draw.random()))
        elif kind < 0.6:
            steps.append(binary_step(draw.randrange(len(binary)), draw.random(), draw.random()))
        else:
            over = draw.choice([*dims, *dims, None])
            steps.append(reduction_step(draw.choice(reductions), draw.random(), over))
    return steps


def _chosen(pool: list[Any], at: float) -> Any:
    return pool[int(at * len(pool))]


def drawn(shapes: Sequence[Shape], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Normal tensors, the same for the same seed; every 4-D one channels-last, the third matrix transposed."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    tensors = [
        tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 and index % 2 else tensor
        for index, tensor in enumerate(tensors)
    ]
    matrices = [index for index, tensor in enumerate(tensors) if tensor.dim() == 2]
    if len(matrices) > 2:
        tensors[matrices[2]] = tensors[matrices[2]].t().contiguous().t()
    return tensors


class Referee:
    """Parameters stepped by calling the rule itself on float64 copies, tensor by tensor."""

    def __init__(self, rule: Rule, params: Sequence[torch.Tensor], hyper: dict[str, Any]) -> None:
        self.rule, self.hyper, self.steps = rule, hyper, 0
        self.params = [param.detach().double().clone(memory_format=torch.contiguous_format) for param in params]
        self.states = [[_fresh(rule.states[name], param) for name in rule.state_names] for param in self.params]

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        self.steps += 1
        hyper = {**self.rule.hyperparameters, **self.hyper, **({"step": self.steps} if self.rule.uses_step else {})}
        for index, gradient in enumerate(gradients):
            found = self.rule(self.params[index], gradient.double(), *self.states[index], **hyper)
            self.params[index], self.states[index] = found[0], list(found[1:])


def _fresh(state: State, like: torch.Tensor) -> torch.Tensor:
    if state.init == "param":
        return like.clone()
    shape = {
        "param": tuple(like.shape),
        "scalar": (),
        "row": (*like.shape[:-1], 1),
        "column": (*like.shape[:-2], 1, *like.shape[-1:]),
    }[state.shape]
    return torch.full(shape, float(state.init), dtype=like.dtype)
