"""Hyperparameters as a rule sees them: which of them are numbers, and numbers that are 0-dim tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..rules.scalars import as_python

__all__ = ["ScalarCalls", "flat_numbers", "known_numbers"]


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


class ScalarCalls(TorchFunctionMode):
    """Lets 0-dim tensors stand where torch wants numbers: `alpha=`, `value=`, and lerp's weight."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").rstrip("_")
        factor = kwargs.get("alpha", kwargs.get("value"))
        if isinstance(factor, torch.Tensor) and name in ("add", "sub", "addcmul", "addcdiv"):
            kwargs.pop("alpha", None)
            kwargs.pop("value", None)
            args = list(args)
            args[1] = args[1] * factor
        if name == "lerp" and len(args) == 3 and isinstance(args[2], torch.Tensor) and args[2].dim() == 0:
            start, end, weight = args
            result = start + weight * (end - start)
            return start.copy_(result) if func.__name__.endswith("_") else result
        return func(*args, **kwargs)
