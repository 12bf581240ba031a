"""Rules traced for a test, and where their lines are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tilestep
from tilestep import State
from tilestep.graph import Graph, trace

__all__ = ["line_of", "traced"]


def traced(function: Callable[..., Any], dims: int = 1, **states: State) -> Graph:
    """The graph of a function for parameters of so many dimensions."""
    rule = tilestep.rule(function, states=states)
    return trace(rule, rule.hyperparameters, dims)


def line_of(function: Callable[..., Any], text: str) -> str:
    """`file:line` of the only line of a function that holds this text."""
    lines, first = inspect.getsourcelines(function)
    [offset] = [offset for offset, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{first + offset}"
