"""Hyperparameters as a rule sees them: which of them are numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ..rules.scalars import as_python


def flat_numbers(hyperparameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The hyperparameters that are numbers or tensors, tuples entry by entry as `name.index`.

    Example:
        >>> flat_numbers({"lr": 0.1, "betas": (0.9, 0.99), "amsgrad": False})
        [('lr', 0.1), ('betas.0', 0.9), ('betas.1', 0.99)]
    """
    found: list[tuple[str, Any]] = []
    for key, value in hyperparameters.items():
        value = as_python(value)
        entries = (
            [(f"{key}.{index}", entry) for index, entry in enumerate(value)]
            if isinstance(value, (tuple, list))
            else [(key, value)]
        )
        found += [
            (name, entry)
            for name, entry in entries
            if isinstance(entry, (int, float, torch.Tensor)) and not isinstance(entry, bool)
        ]
    return found


def known_numbers(hyperparameters: Mapping[str, Any]) -> tuple[dict[str, float], set[str]]:
    """The hyperparameters that are numbers by name, and the names of those that are tensors.

    Example:
        >>> known_numbers({"lr": 0.1, "momentum": torch.tensor(0.9), "nesterov": True})
        ({'lr': 0.1}, {'momentum'})
    """
    found = flat_numbers(hyperparameters)
    numbers = {name: value for name, value in found if not isinstance(value, torch.Tensor)}
    return numbers, {name for name, _ in found} - set(numbers)


def group_value(group: Mapping[str, Any], name: str) -> Any:
    """The entry of a group that a column of the hyperparameter table holds.

    Example:
        >>> group_value({"betas": (0.9, 0.99)}, "betas.1")
        0.99
    """
    key, index = _column(name)
    value = group.get(key)
    return value if index is None or value is None else value[index]


@functools.cache
def _column(name: str) -> tuple[str, int | None]:
    key, _, index = name.partition(".")
    return key, int(index) if index else None
