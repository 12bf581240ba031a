"""Taking gradients away as soon as backward has them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..compat import is_last_gradient_hook


class TakesGradients(Protocol):
    """What gradients go to."""

    def gradient_came(self, param: torch.Tensor) -> None:
        """Take a parameter's gradient away."""


class GradientHooks:
    """Hooks on parameters, as long as whoever takes their gradients lives."""

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
                self._register(param)

    def _register(self, param: torch.Tensor) -> None:
        self._handles[param] = param.register_post_accumulate_grad_hook(self._hook())

    def is_last(self, param: torch.Tensor) -> bool:
        """Whether a parameter's hook is called after all others; one that is not is the last from the next time on."""
        handle = self._handles.get(param)
        if handle is None or is_last_gradient_hook(param, handle):
            return True
        handle.remove()
        self._register(param)
        return False

    def _hook(self) -> Any:
        taker = self._taker

        def hook(param: torch.Tensor) -> None:
            living = taker()
            if living is not None:
                living.gradient_came(param)

        return hook
