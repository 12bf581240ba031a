"""Run by test_rows.py under TRITON_INTERPRET=1: the Triton kernels of passes over slices, on CPU tensors."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from row_rules import RULES, Referee, Shape, drawn, random_rule

import tilestep
from tilestep.backends import registry
from tilestep.backends.triton.run import TritonPasses
from tilestep.rules import Rule

SHAPES: list[Shape] = [(5, 9), (66, 130), (9, 7), (4, 1), (45, 132), (3, 4, 5), (6, 4, 3, 3), (2, 5, 3, 2)]


def check(chosen: Rule, hyper: dict[str, Any], shapes: list[Shape]) -> None:
    params = [torch.nn.Parameter(tensor) for tensor in drawn(shapes, torch.float32)]
    referee = Referee(chosen, params, hyper)
    optimizer = tilestep.Optimizer(params, chosen, **hyper)
    for step in range(2):
        gradients = drawn(shapes, torch.float32, seed=step + 1)
        for param, gradient in zip(params, gradients):
            # At the second step one gradient lies in memory otherwise than its parameter.
            param.grad = gradient.contiguous() if step else gradient.clone(memory_format=torch.preserve_format)
        optimizer.step()
        referee.step(gradients)
    for param, expected, states in zip(params, referee.params, referee.states):
        close(chosen, param.detach(), expected)
        for name, state in zip(chosen.state_names, states):
            if name in optimizer.state[param]:
                close(chosen, optimizer.state[param][name], state)


def close(chosen: Rule, actual: torch.Tensor, expected: torch.Tensor) -> None:
    message = f"{chosen.name}, {tuple(actual.shape)}"
    torch.testing.assert_close(actual.double(), expected, rtol=3e-5, atol=3e-5, msg=lambda text: f"{message}: {text}")


def check_nothing_but_empty_tensors() -> None:
    for shape in ((0, 5), (5, 0)):
        param = torch.nn.Parameter(torch.ones(shape))
        optimizer = tilestep.Adafactor([param])
        for _ in range(2):
            param.grad = torch.ones(shape)
            optimizer.step()
        state = optimizer.state[param]
        assert int(state["step"]) == 2 and all(value.isfinite().all() for value in state.values()), state


def launches(shapes: list[Shape]) -> int:
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = tilestep.Adafactor(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    [engine] = optimizer.plan.engines
    return sum(len(list(passes._step_launches(False))) for passes in engine.passes)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    registry.passes_class = lambda device: TritonPasses
    for chosen, hyper in RULES.values():
        check(chosen, hyper, SHAPES)
    for seed in range(3):
        check(random_rule(seed), {}, [(5, 9), (66, 130), (3, 4, 5), (7, 5)])  # (7, 5) lies transposed
    check_nothing_but_empty_tensors()
    assert launches([(5, 9), (6, 8)]) == launches([(5, 9)] * 12), "launches grow with the number of tensors"
    print("all equal")
