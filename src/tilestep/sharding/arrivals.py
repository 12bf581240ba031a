"""Which gradients a bucket still waits for in backward: counted in C++ where that is built, else in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import native

__all__ = ["Arrivals", "AwaitedGradients"]


class AwaitedGradients:
    """What one bucket waits for; made by `Arrivals.awaited`.

    Args:
        module: the built C++ module, or None.
        pass_: what C++ knows of the backward pass.
    """

    def __init__(self, module: Any, pass_: Any) -> None:
        self._module = module
        self._known = None if module is None else module.new_awaited(pass_)
        self._places: set[int] = set()

    def begin(self, trains: bytes) -> None:
        """Wait for the gradients of a backward pass.

        Args:
            trains: a one for each parameter of the bucket that has one, else a zero.
        """
        if self._module is not None:
            self._module.await_places(self._known, trains)
        else:
            self._places = {place for place, one in enumerate(trains) if one}

    def come(self, place: int) -> bool:
        """Note that a gradient has come; whether none is awaited now."""
        if self._module is not None:
            return not self._module.come(self._known, place)
        self._places.discard(place)
        return not self._places

    @property
    def is_done(self) -> bool:
        """Whether no gradient is awaited."""
        return not self._places if self._module is None else not self._module.left(self._known)

    def hook(self, place: int, function: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """What is to be called when a gradient has come: counts it where that is all there is to do.

        Args:
            place: the parameter's in the bucket.
            function: what is called otherwise.
        """
        return function if self._module is None else self._module.new_hook(self._known, place, function)


class Arrivals:
    """Counts the gradients of one backward pass after another.

    Args:
        tensors: how many parameters there are; for few, nothing is built to count them.
        by_stream: whether to tell which streams they come from.
    """

    def __init__(self, tensors: int, *, by_stream: bool) -> None:
        self._module = native.module(tensors)
        self.is_native = self._module is not None
        """Whether they are counted in C++."""
        self._pass = None if self._module is None else self._module.new_pass(by_stream)

    def awaited(self) -> AwaitedGradients:
        """For one bucket what it waits for; nothing so far."""
        return AwaitedGradients(self._module, self._pass)

    def follow(self, number: int | None) -> None:
        """Count the gradients of another backward pass from now on.

        Args:
            number: what `compat.backward_pass` calls it; None for no pass: each gradient is a function call.
        """
        if self._module is not None:
            self._module.follow(self._pass, -1 if number is None else number)

    def know_stream(self, tensor: torch.Tensor) -> None:
        """Until the next `follow`, the current stream of a tensor's device is one that is known to write gradients."""
        if self._module is not None:
            self._module.know_stream(self._pass, tensor)
