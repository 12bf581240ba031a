"""States that are square matrices beside a parameter: they cannot come or go in the middle of a training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import StateError
from ..rules import Rule
from .parameters import labelled

if TYPE_CHECKING:
    from .protocol import Optimizer


_SQUARES = ("left", "right")


def _squares(rule: Rule, state: Mapping[str, Any]) -> list[str]:
    return [name for name, start in rule.states.items() if start.shape in _SQUARES and name in state]


@contextmanager
def keeping_squares(optimizer: Optimizer) -> Iterator[None]:
    """A block that makes tables anew, in which no parameter that has been stepped may get or lose a square matrix.

    Other states are turned into such bases and scaled by them, and a basis of zeros would hold its parameter still.
    """
    before: list[tuple[str, Rule, torch.Tensor, list[str]]] = []
    for label, _, group, param in labelled(optimizer):
        rule = optimizer.rule_of(group)
        if param in optimizer.state and any(start.shape in _SQUARES for start in rule.states.values()):
            before.append((label, rule, param, _squares(rule, optimizer.state[param])))
    yield
    for label, rule, param, known in before:
        state = optimizer.state[param]
        kept = _squares(rule, state)
        changed = [name for name in rule.states if (name in known) != (name in kept)]
        if changed and float(state["step"]) > 0:
            happens = "gets" if changed[0] in kept else "loses"
            raise StateError(
                f"with these hyperparameters of {rule.name}, {label} {happens} the states "
                f"{', '.join(changed)} in the middle of a training; put back what has changed, or delete the "
                "parameter from the optimizer's `state` to begin anew"
            )
