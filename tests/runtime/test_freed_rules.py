"""Rules, functions given as hyperparameters and what their closures hold are freed with the optimizer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import tilestep
from tilestep.backends.cpp import run


class Trainer:
    """What closures of a training usually hold."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.rate = 0.1

    def schedule(self, step: Any) -> Any:
        return self.rate / step


def by_function(trainer: Trainer) -> tilestep.Optimizer:
    return tilestep.AdamW(trainer.model.parameters(), lr=lambda step: trainer.rate / step)


def by_method(trainer: Trainer) -> tilestep.Optimizer:
    return tilestep.SGD(trainer.model.parameters(), lr=trainer.schedule, momentum=0.9)


def by_rule(trainer: Trainer) -> tilestep.Optimizer:
    def descent(param: Any, grad: Any, *, lr: Any = 0.1) -> Any:
        return param - lr * trainer.rate * grad

    return tilestep.Optimizer(trainer.model.parameters(), tilestep.rule(descent))


def by_composition(trainer: Trainer) -> tilestep.Optimizer:
    rule = tilestep.ema(tilestep.cautious(tilestep.registry["Lion"]))
    return tilestep.Optimizer(trainer.model.parameters(), rule, lr=lambda step: trainer.rate * step)


@pytest.mark.parametrize("make", [by_function, by_method, by_rule, by_composition])
def test_what_closures_hold_is_freed_with_the_optimizer(make: Any) -> None:
    gc.collect()
    libraries = len(run._libraries)
    gone = []
    for _ in range(2):
        trainer = Trainer()
        optimizer = make(trainer)
        for _ in range(2):
            trainer.model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        rule = optimizer.rule_of(optimizer.param_groups[0])
        gone += [weakref.ref(owner) for owner in (trainer, trainer.model, optimizer)]
        gone += [] if rule in tilestep.registry.values() else [weakref.ref(rule)]
        del trainer, optimizer, rule
    gc.collect()
    assert [reference() for reference in gone if reference() is not None] == []
    assert len(run._libraries) == libraries


def test_a_function_that_lives_is_traced_once() -> None:
    from tilestep.runtime import graph_for

    def warm(step: Any) -> Any:
        return 0.1 / step

    rule = tilestep.registry["SGD"]
    assert graph_for(rule, {**rule.hyperparameters, "lr": warm}, 1) is graph_for(
        rule, {**rule.hyperparameters, "lr": warm}, 1
    )
