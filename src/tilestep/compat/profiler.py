"""Torch's profilers: whether one records."""

from __future__ import annotations

import torch


def profiler_is_running() -> bool:
    """Whether a torch profiler records; True where torch cannot tell, and what it costs to be recorded is paid then.

    Example:
        >>> profiler_is_running()
        False
    """
    return _profiler_enabled is None or _profiler_enabled()


_profiler_enabled = getattr(torch._C._autograd, "_profiler_enabled", None)
