"""The backward pass that something is called in."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["after_backward", "backward_pass"]


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
