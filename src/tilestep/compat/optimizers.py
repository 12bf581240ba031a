"""Torch's optimizers and gradient scalers: who watches their steps, and who unscales their gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import dispatch, profiler


def step_is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody wants to know of an optimizer's steps: hooks, its own or of all optimizers, or a profiler.

    Where torch keeps hooks otherwise the answer is yes.
    """
    try:
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        recording = profiler._profiler_enabled
        return bool(hooks or _EVERY_PRE_HOOK or _EVERY_POST_HOOK or recording is None or recording())
    except AttributeError:
        return True


def step_is_ordinary() -> bool:
    """Whether nothing is around a step: no capture, profiler, autocast or mode that sees operations."""
    recording = profiler._profiler_enabled
    return not (
        recording is None
        or recording()
        or dispatch._active_modes()
        or (_HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )


_HAS_CUDA = torch.backends.cuda.is_built()
_UNKNOWN = {"": "hooks of all optimizers are kept otherwise"}
_EVERY_PRE_HOOK = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_pre_hooks", _UNKNOWN)
_EVERY_POST_HOOK = getattr(sys.modules[torch.optim.Optimizer.__module__], "_global_optimizer_post_hooks", _UNKNOWN)


def route_unscaling(concerns: Callable[[Any], bool], route: Callable[..., Any]) -> bool:
    """Have torch's scalers call `route` with their method that unscales, and its arguments; whether they do."""
    method = getattr(torch.amp.GradScaler, "_unscale_grads_", None)
    if method is None or hasattr(method, "__wrapped__"):
        return method is not None

    @functools.wraps(method)
    def routed(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(method, scaler)
        return route(bound, optimizer, *args, **kwargs) if concerns(optimizer) else bound(optimizer, *args, **kwargs)

    torch.amp.GradScaler._unscale_grads_ = routed  # type: ignore[assignment,method-assign]
    return True


_scaled = [0]


def count_scaled_losses() -> int:
    """How often any of torch's scalers has scaled a loss since this was first asked; 0 where torch scales otherwise."""
    method = getattr(torch.amp.GradScaler, "scale", None)
    if method is None or hasattr(method, "__wrapped__"):
        return _scaled[0]

    @functools.wraps(method)
    def scale(scaler: Any, outputs: Any) -> Any:
        if not torch.compiler.is_compiling() and scaler.is_enabled():
            _scaled[0] += 1
        return method(scaler, outputs)

    torch.amp.GradScaler.scale = scale  # type: ignore[assignment,method-assign]
    return _scaled[0]
