"""The optimizer that a function is given, or the one that its caller would have made."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .optimizer import Optimizer

__all__ = ["made_for"]


def made_for(caller: str, optimizer: Optimizer | Callable[[], Optimizer]) -> Optimizer:
    """An optimizer, or what a function makes.

    Args:
        caller: what messages call the function that was given it.
        optimizer: an optimizer, or a function that makes one.

    Raises:
        TypeError: for an optimizer of somebody else's, and for anything else.

    Example:
        >>> import tilestep
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> len(made_for("shard", lambda: tilestep.AdamW([weight])).state)
        0
    """
    if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        optimizer = optimizer()
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"{caller}() takes an optimizer of tilestep's, not {type(optimizer).__name__}")
    return optimizer
