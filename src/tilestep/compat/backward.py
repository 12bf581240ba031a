"""The backward pass that something is called in."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

_KEPT = "_post_accumulate_grad_hooks"
_kept_by = operator.attrgetter(_KEPT)


def backward_pass() -> int | None:
    """A number of the backward pass that this is called in; None outside of one, or where torch does not say."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    number = -1 if current is None else current()
    return None if number == -1 else number


def after_backward(callback: Callable[[], None]) -> bool:
    """Have something called at the end of the backward pass that this is called in.

    Returns:
        Whether it is going to be; without torch's engine saying so, nobody can know.
    """
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
