"""Random update rules: straight-line programs of torch operations, as closures that torch runs and tilestep traces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies

import tilestep
from tilestep.rules import Rule

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 7.25, -1e-3, 1e-20, 1e30, 3e38, 1e-40, -1e-45]
SPECIAL += [math.inf, -math.inf, math.nan]


def _extremum(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # Which of 0.0 and -0.0 is the larger depends on torch's vector width: adding 0.0 makes them one.
    return lambda left, right: function(left, right) + 0.0


# Operations with one right result: all of IEEE arithmetic, so that equal means equal in every bit.
UNARY = {name: getattr(torch, name) for name in ("neg", "abs", "sign", "floor", "ceil", "round", "trunc")}
BINARY: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "copysign")},
    "maximum": _extremum(torch.maximum),
    "minimum": _extremum(torch.minimum),
}
COMPARISONS = {name: getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
TESTS = {name: getattr(torch, name) for name in ("isnan", "isinf", "isfinite")}
LOGIC = {name: getattr(torch, f"logical_{name}") for name in ("and", "or", "xor")}
INSTRUCTIONS = [*UNARY, *BINARY, *COMPARISONS, *TESTS, *LOGIC, "not", "where", "where", "number", "constant", "clamp"]

Instruction = tuple[str, int, int, int]


@dataclass
class Program:
    """Instructions over a pool of values, and which values become the new parameter and states."""

    instructions: list[Instruction]
    results: list[int]

    def run(self, numbers: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """New parameter and states; `numbers` begins with the parameter and grows."""
        param, step = numbers[0], numbers[-1]
        truths = [numbers[0] > numbers[1], step > 1.0]

        def number(index: int) -> torch.Tensor:
            return numbers[-1 - index % len(numbers)]

        def truth(index: int) -> torch.Tensor:
            return truths[-1 - index % len(truths)]

        for name, first, second, third in self.instructions:
            if name in UNARY:
                numbers.append(UNARY[name](number(first)))
            elif name in BINARY:
                numbers.append(BINARY[name](number(first), number(second)))
            elif name in COMPARISONS:
                truths.append(COMPARISONS[name](number(first), number(second)))
            elif name in TESTS:
                truths.append(TESTS[name](number(first)))
            elif name in LOGIC:
                truths.append(LOGIC[name](truth(first), truth(second)))
            elif name == "not":
                truths.append(torch.logical_not(truth(first)))
            elif name == "number":
                chosen = truth(first)
                numbers.append(chosen.to(param.dtype if chosen.dim() else torch.float64))
            elif name == "constant":
                numbers.append(torch.full_like(step, SPECIAL[first % len(SPECIAL)]))
            elif name == "clamp":
                numbers.append(number(first).clamp(-2.0, 1.5) + 0.0)
            else:
                condition, if_true = truth(first), number(second)
                # Two float64 numbers chosen element by element would be float64 elements in torch.
                if_false = param if condition.dim() and not if_true.dim() else number(third)
                numbers.append(torch.where(condition, if_true, if_false))
        # One number for the parameter is refused.
        elements = [value for value in numbers if value.dim()]
        first, *others = self.results
        return elements[-1 - first % len(elements)], *(number(index) for index in others)


def programs(length: int = 40) -> strategies.SearchStrategy[Program]:
    """Random programs with five results."""
    index = strategies.integers(0, 40)
    instruction = strategies.tuples(strategies.sampled_from(INSTRUCTIONS), index, index, index)
    instructions = strategies.lists(instruction, min_size=8, max_size=length)
    return strategies.builds(Program, instructions, strategies.lists(index, min_size=5, max_size=5))


def rule_of(program: Program) -> Rule:
    """The update rule that runs a program on its buffers and hyperparameters."""

    def random_rule(
        param: Any, grad: Any, one: Any, two: Any, three: Any, four: Any, *, a: Any = 0.5, b: Any = 2.0, step: Any
    ) -> Any:
        scalars = [a, b, a * b, a - b, step]
        return program.run([param, grad, one, two, three, four, *scalars])

    return tilestep.rule(random_rule)


def all_pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that hold every pair of special numbers."""
    pairs = torch.tensor(list(itertools.product(SPECIAL, repeat=2)), dtype=torch.float64).to(dtype)
    return pairs[:, 0].clone(), pairs[:, 1].clone()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where two tensors are equal in every bit, or both NaN."""
    integer = torch.int64 if left.dtype is torch.float64 else torch.int32
    return (left.view(integer) == right.view(integer)) | (left.isnan() & right.isnan())
