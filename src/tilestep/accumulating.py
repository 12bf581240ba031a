"""Accumulation over several backward passes, said in one way by everybody who looks at gradients as they come."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Accumulating", "announce_gradients"]


class Accumulating:
    """Something that goes on with gradients in backward, except inside of `no_sync`.

    Example:
        >>> looks_at_gradients = Accumulating()
        >>> with looks_at_gradients.no_sync():
        ...     looks_at_gradients.syncing
        False
        >>> looks_at_gradients.syncing
        True
    """

    syncing = True
    """Whether the next backward is the last one before a step."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block in which backward only accumulates."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before


def announce_gradients(param: torch.Tensor, announce: Any, *told: Any, through: Any = None) -> Any:
    """Have a method called when backward has accumulated a parameter's gradient, as long as its object lives.

    Tensors keep their hooks where Python's garbage collector does not look: who holds the parameter, and is held by its
    hook, would never be let go, and neither would the model.

    Args:
        param: the parameter; one that is frozen now has gradients once it is thawed.
        announce: the method, bound to its object; it is called with what follows here, and then the parameter.
        told: plain values.
        through: makes, of the function that torch would call, the one that it is to call in its place.

    Returns:
        A handle that ends it.
    """
    living, function = weakref.ref(announce.__self__), announce.__func__

    def hook(arrived: torch.Tensor) -> None:
        # Called for every parameter in every backward; `weakref.WeakMethod` is written in Python.
        known = living()
        if known is not None:
            function(known, *told, arrived)

    trains = param.requires_grad
    param.requires_grad_(True)
    handle = param.register_post_accumulate_grad_hook(hook if through is None else through(hook))
    param.requires_grad_(trains)
    return handle
