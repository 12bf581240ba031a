"""Elementwise operations of the graph on batches of matrices that have not their parameter's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_OTHERWISE: dict[str, Callable[..., Any]] = {
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
    "number": lambda value: value,
}


def elementwise(operation: str, arguments: list[torch.Tensor]) -> torch.Tensor:
    """An operation of the graph by torch's function of the same name.

    Example:
        >>> elementwise("maximum", [torch.tensor([1.0, 5.0]), torch.tensor(3.0)])
        tensor([3., 5.])
    """
    function = _OTHERWISE.get(operation) or getattr(torch, operation)
    return function(*arguments)
