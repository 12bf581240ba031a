"""Taking gradients away as soon as backward has them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["GradientHooks", "TakesGradients"]


class TakesGradients(Protocol):
    """What gradients go to."""

    def take_gradient(self, param: torch.Tensor) -> None:
        """Take a parameter's gradient away."""


class GradientHooks:
    """Hooks on parameters, as long as whoever takes their gradients lives.

    Args:
        taker: what gradients go to.
    """

    def __init__(self, taker: TakesGradients) -> None:
        self._taker = weakref.ref(taker)
        self._handles: dict[torch.Tensor, Any] = {}

    def follow(self, params: Sequence[torch.Tensor]) -> None:
        """Have hooks on these parameters and no others."""
        wanted = set(params)
        for param in [param for param in self._handles if param not in wanted]:
            self._handles.pop(param).remove()
        for param in params:
            if param not in self._handles and param.requires_grad and param.is_leaf:
                self._handles[param] = param.register_post_accumulate_grad_hook(self._hook())

    def _hook(self) -> Any:
        taker = self._taker

        def hook(param: torch.Tensor) -> None:
            living = taker()
            if living is not None:
                living.take_gradient(param)

        return hook
