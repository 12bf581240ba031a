"""How torch calls its operations: seeing each call, tensors without data, operations taken apart."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

TensorDispatch = TorchDispatchMode
"""Base class of the tracer: sees every ATen call."""


def fake_tensors() -> Any:
    """A mode under which tensors have shapes and dtypes but no data; without it rules are traced on tiny real ones."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        return contextlib.nullcontext()
    return _unlogged(FakeTensorMode(allow_non_fake_inputs=True))


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has a shape and no data, as those have that are made under a `FakeTensorMode`.

    Example:
        >>> is_fake(torch.zeros(2))
        False
    """
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return kind is not None and isinstance(tensor, kind)


_active_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def fake_mode_is_active() -> bool:
    """Whether operations give fake tensors just now.

    Example:
        >>> fake_mode_is_active()
        False
    """
    if not _active_modes():
        return False
    kind = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensorMode", None)
    # Not by making a tensor to look at: other modes would see it.
    return kind is not None and any(
        isinstance(mode, kind) for mode in _python_dispatch._get_current_dispatch_mode_stack()
    )


@contextlib.contextmanager
def _unlogged(mode: Any) -> Iterator[None]:
    """A mode that does not tell torch's log of operations that fail in it: their errors say it."""
    log = logging.getLogger(type(mode).__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        with mode:
            yield
    finally:
        log.disabled = was_disabled


def decomposition(overload: Any) -> Callable[..., Any] | None:
    """torch's own rewriting of an ATen operation into simpler ones, or None."""
    try:
        from torch._decomp import decomposition_table
    except ImportError:
        return None
    return decomposition_table.get(overload)


def wrapper_tensor(kind: type, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass that has no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)


def is_copy(operation: Any) -> bool:
    """Whether an ATen operation gives the same numbers, maybe elsewhere or in another dtype."""
    aten = torch.ops.aten
    return operation in (aten.detach.default, aten.clone.default, aten._to_copy.default)


def is_empty_like(operation: Any) -> bool:
    """Whether an ATen operation makes memory for a tensor like another, as for a checkpoint that is written later."""
    return operation == torch.ops.aten.new_empty.default
