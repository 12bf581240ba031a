"""What torch keeps of optimizers, backward passes and profilers: hooks, scalers, functions that clip."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import tensors

_KEPT = "_post_accumulate_grad_hooks"
_kept_by = operator.attrgetter(_KEPT)


def backward_pass() -> int | None:
    """A number of the backward pass that this is called in; None outside of one, or where torch does not say."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    number = -1 if current is None else current()
    return None if number == -1 else number


def after_backward(callback: Callable[[], None]) -> bool:
    """Have something called at the end of the backward pass that this is called in."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None or not hasattr(engine, "queue_callback"):
        return False
    engine.queue_callback(callback)
    return True


def is_in_another_backward() -> bool:
    """Whether the backward pass that this is called in was begun by a function's backward, as reentrant checkpoints do.

    Said by the call stack, since torch's engine does not say it: False where torch calls such functions otherwise.
    """
    calls = getattr(getattr(torch.autograd.function, "BackwardCFunction", None), "apply", None)
    code, frame = getattr(calls, "__code__", None), sys._getframe(1)
    while code is not None and frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def count_gradient_hooks(params: Iterable[torch.Tensor]) -> int:
    """How many hooks for accumulated gradients some parameters have together; each has one at least, or torch does not
    say: then it is 0."""
    try:
        return sum(map(len, map(_kept_by, params)))
    except (AttributeError, TypeError):
        return 0


def is_last_gradient_hook(param: torch.Tensor, handle: Any) -> bool:
    """Whether a gradient hook is called after all others of its parameter; True if torch does not say."""
    hooks = getattr(param, _KEPT, None)
    return not isinstance(hooks, dict) or handle.id not in hooks or next(reversed(hooks)) == handle.id


def profiler_is_running() -> bool:
    """Whether a torch profiler records; True where torch cannot tell, and what it costs to be recorded is paid then.

    Example:
        >>> profiler_is_running()
        False
    """
    return _profiler_enabled is None or _profiler_enabled()


_profiler_enabled = getattr(torch._C._autograd, "_profiler_enabled", None)

_watched: list[Callable[[list[Any]], None]] = []
_NAMES = ("_clip_grads_with_norm_", "clip_grad_value_")


def watch_clips(look: Callable[[list[Any]], None]) -> bool:
    """Have something see the parameters whose gradients torch is going to clip; it may raise.

    `clip_grad_norm_` looks its second half up in its module, so whoever has imported it before is seen too.
    """
    if look in _watched:
        return True
    module: Any = sys.modules.get("torch.nn.utils.clip_grad")
    originals = {name: getattr(module, name, None) for name in _NAMES}
    if not all(map(callable, originals.values())):
        return False
    _watched.append(look)
    if len(_watched) == 1:
        for original in originals.values():
            seen = _seen(original)
            for place in (module, torch.nn.utils):
                for key, value in list(vars(place).items()):
                    if value is original:
                        setattr(place, key, seen)
    return True


def _seen(original: Any) -> Any:
    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(parameters, *args, **kwargs)
        # A generator could be read only once.
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for look in _watched:
            look(listed)
        return original(listed, *args, **kwargs)

    return clip


def load_hooks(optimizer: object) -> tuple[list[Any], list[Any]]:
    """The hooks that torch calls before and after it loads a checkpoint; empty where torch keeps them otherwise."""
    known = vars(optimizer)
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    before, after = (list(known.get(name, {}).values()) for name in names)
    return before, after


def step_is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anything listens to an optimizer's steps: hooks, its own or of all optimizers, or a profiler.

    Where torch keeps hooks otherwise the answer is yes.
    """
    try:
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        recording = _profiler_enabled
        return bool(hooks or _EVERY_PRE_HOOK or _EVERY_POST_HOOK or recording is None or recording())
    except AttributeError:
        return True


def step_is_ordinary() -> bool:
    """Whether nothing is around a step: no profiler, autocast or mode that sees operations."""
    recording = _profiler_enabled
    return not (
        recording is None
        or recording()
        or tensors._active_modes()
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
    )


def is_capturing() -> bool:
    """Whether what is launched now goes into a CUDA graph instead of being run.

    Example:
        >>> is_capturing()
        False
    """
    # Without a driver the question itself may fail, with the error of whoever asked the driver before: a profiler.
    return _HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


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
