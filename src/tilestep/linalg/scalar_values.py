"""Conversions between numbers and 0-dim tensors, for rules and operations on matrices."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

traced_by: ContextVar[Any] = ContextVar("traced_by", default=None)
"""The `Recorder` of a rule, while it traces: numbers become 0-dim values by its `constant`."""


def as_python(value: Any) -> Any:
    """A numpy number, or array of one element, as Python's; tuples, lists, arrays by entries; anything else as it is.

    Example:
        >>> import numpy as np
        >>> as_python((np.float32(0.5), np.bool_(True), 1e-3))
        (0.5, True, 0.001)
    """
    if type(value) in PYTHON_TYPES:
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(map(as_python, value)) if type(value) in (tuple, list) else value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
        return value.item()
    return tuple(value.tolist()) if isinstance(value, np.ndarray) else value


PYTHON_TYPES = frozenset((float, int, bool, type(None), str))
"""What needs no `as_python`."""


def as_scalar(value: Any, device: torch.device | None = None) -> Any:
    """A number as a 0-dim float64 value, a tuple entry by entry; flags, strings, None and tensors unchanged."""
    value = as_python(value)
    if isinstance(value, (tuple, list)):
        return tuple(as_scalar(entry, device) for entry in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    tracer = traced_by.get()
    return tracer.constant(value) if tracer else torch.tensor(float(value), dtype=torch.float64, device=device)
