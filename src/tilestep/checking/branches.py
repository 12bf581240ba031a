"""A rule's dependence on the step count: counts at which a branch changes, and branches that are never taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..graph import OPERATIONS, Graph, Level, Value, ancestors, evaluate, known_numbers, rule_place

LATE = 1000
"""A step count that is checked for every rule."""

_LAST = 2**23
"""The largest checked count: float32 represents all integers up to twice as many."""

_MOST = 4
"""The number of checked changes per comparison."""


def late_counts(graphs: Iterable[Graph], hyperparameters: Mapping[str, Any]) -> list[int]:
    """The step counts, from 2 on, before and at a change of a comparison of numbers, and `LATE`.

    Args:
        graphs: the rule's graphs.
        hyperparameters: the rule's numbers by name; comparisons with tensors among them are left out.

    Example:
        >>> import tilestep
        >>> rule = tilestep.registry["RAdam"]
        >>> late_counts([tilestep.runtime.graph_for(rule, rule.hyperparameters, 1)], rule.hyperparameters)
        [5, 6, 1000]
    """
    numbers = {**known_numbers(hyperparameters)[0], "gradient_scale": 1.0}
    counts = {LATE}
    for graph in graphs:
        steps = {id(value) for value in graph.values() if value.level <= Level.GROUP and _depends_on_step(value)}
        dependent = [value for value in graph.values() if id(value) in steps and len(value.args) == 2]
        near = {
            count for value in dependent for arg in value.args if id(arg) not in steps for count in _near(arg, numbers)
        }
        probes = sorted({*near, *(2**power for power in range(_LAST.bit_length()))})
        for value in dependent:
            if value.is_bool or value.operation in ("minimum", "maximum"):
                counts.update(_changes(partial(_compared, value, numbers), probes))
    return sorted(count for count in counts if count > 1)


def _depends_on_step(value: Value) -> bool:
    return any(node.operation == "hyper" and node.attribute == "step" for node in ancestors([value]))


def _near(value: Value, numbers: Mapping[str, float]) -> list[int]:
    """Step counts around a number that the step is compared with or divided by."""
    try:
        number = float(evaluate(value, numbers))
    except KeyError:
        return []
    if not 1 <= number < _LAST:
        return []
    return [count for count in range(math.floor(number) - 1, math.ceil(number) + 2) if count > 0]


def _compared(value: Value, numbers: Mapping[str, float], count: int) -> bool | None:
    """The result of a comparison at a step, or whether an extremum is its first operand; None if unknown."""
    operation = value.operation if value.is_bool else "le"
    function = OPERATIONS[operation]
    assert function is not None
    try:
        return bool(function(*(evaluate(arg, {**numbers, "step": float(count)}) for arg in value.args)))
    except KeyError:
        return None


def _changes(result: Callable[[int], bool | None], probes: Iterable[int]) -> Iterator[int]:
    """The counts on both sides of each change of a result; at most one change per pair of probes is found."""
    found = 0
    for before, after in pairwise(probes):
        if result(before) == result(after):
            continue
        while after - before > 1:
            middle = (before + after) // 2
            before, after = (before, middle) if result(middle) != result(before) else (middle, after)
        yield from (before, after)
        found += 1
        if found == _MOST:
            return


class Branches(TorchFunctionMode):
    """Records the values of conditions of `torch.where`, by line; a context around calls of the rule."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, set[bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.where, torch.Tensor.where):
            condition = kwargs["condition"] if "condition" in kwargs else args[func is not torch.where]
            if isinstance(condition, torch.Tensor) and condition.numel():
                self.taken.setdefault(rule_place().line, set()).update(condition.unique().tolist())
        return func(*args, **kwargs)

    def never(self, graphs: Iterable[Graph]) -> list[str]:
        """The conditions of the rule that never changed, as `file:line was always true`."""
        lines = dict.fromkeys(value.line for graph in graphs for value in graph.values() if value.operation == "where")
        outcomes = [(line, self.taken.get(line, ())) for line in lines]
        return [f"{Path(line).name} was always {str(*taken).lower()}" for line, taken in outcomes if len(taken) == 1]
