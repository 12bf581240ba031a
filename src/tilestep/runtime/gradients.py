"""Check every gradient that steps read."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..compat import has_memory, is_zero_tensor, ready, resolved
from ..errors import GradientError
from ..native.table import rows_of
from .overlaps import WrittenMemory
from .segment import Entry, is_dense, same_walk

GRAD = operator.attrgetter("grad")

READABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # dtypes of gradients that kernels read


class Stale(Exception):
    """The tables no longer describe the tensors and must be rebuilt."""


def grad_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients: its own dtype, unless its attribute `grad_dtype` overrides it."""
    if not param.is_leaf:
        return param.dtype
    declared = getattr(param, "grad_dtype", param.dtype)
    if declared is None and param.grad is not None and param.grad.dtype in READABLE:
        return param.grad.dtype
    return declared or param.dtype


@dataclass
class Inspected:
    """The checked gradients of a step."""

    entries: Sequence[Entry]
    written: WrittenMemory  # the memory that a step writes
    gradients: list[torch.Tensor | None]  # per entry; a copy in place of a gradient that is not dense
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # gradients and their copies
    strided: dict[int, torch.Tensor]  # by place: gradients whose memory order differs from their parameter's

    @property
    def places(self) -> list[int]:
        """The entries with a gradient."""
        return [place for place, gradient in enumerate(self.gradients) if gradient is not None]

    def updated(self) -> list[torch.Tensor]:
        """Return the parameters with gradients, their local parts and the DTensors of these parts."""
        entries = [self.entries[place] for place in self.places]
        return [entry.param for entry in entries] + [entry.whole for entry in entries if entry.whole is not None]

    def same_layout(self, before: Inspected | None) -> bool:
        """Whether an earlier step's gradients had the same layouts, at any addresses."""
        return before is not None and _strides(before.strided) == _strides(self.strided)

    def copy_back(self) -> None:
        """Write the copies of gradients, which kernels have changed, back to the gradients."""
        for gradient, copy in self.copies:
            # A gradient whose elements share memory cannot be written.
            expanded = any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape))
            if not expanded and not is_zero_tensor(gradient) and not self.written.sharing(gradient):
                gradient.copy_(copy)


def _strides(tensors: Mapping[int, torch.Tensor]) -> dict[int, tuple[int, ...]]:
    return {place: tensor.stride() for place, tensor in tensors.items()}


def inspect(entries: Sequence[Entry], written: WrittenMemory, gradients: Sequence[torch.Tensor | None]) -> Inspected:
    """Check every gradient; raise for a gradient that kernels cannot read."""
    seen = Inspected(entries, written, [None] * len(entries), [], {})
    for place, (entry, gradient) in enumerate(zip(entries, gradients)):
        if gradient is None:
            continue
        original = gradient = ready(gradient)
        if gradient.layout is torch.strided and not is_zero_tensor(gradient) and not has_memory(gradient):
            kind = type(gradient).__name__
            raise GradientError(
                f"the gradient of {entry.share.label} has {_FREED if kind in _PLAIN else f'the type {kind}'}: set it "
                "to a plain tensor with memory, which kernels can read"
            )
        gradient = resolved(gradient)
        _check(entry, gradient)
        if not is_dense(gradient) or (entry.ordered and not same_walk(gradient, entry.param)):
            gradient = _in_order(gradient, entry)
        if gradient is not original:
            seen.copies.append((original, gradient))
        seen.gradients[place] = gradient
        if not same_walk(gradient, entry.param):
            # Only shape and strides, so that the gradient is not kept alive after its step.
            seen.strided[place] = torch.empty_strided(gradient.shape, gradient.stride(), device="meta")
    sizes = np.asarray([0 if one is None else one.nbytes for one in seen.gradients], dtype=np.int64)
    for place in np.nonzero(written.overlapped(rows_of(seen.gradients), sizes))[0].tolist():
        _copy_overlapping(seen, place)
    return seen


def _copy_overlapping(seen: Inspected, place: int) -> None:
    """Copy a gradient that shares memory with its parameter; raise if it shares other memory that a step writes."""
    gradient = seen.gradients[place]
    assert gradient is not None
    sharing = seen.written.sharing(gradient)
    for other, name in sharing:
        if (other, name) != (place, "param"):
            of = f"state {name!r} of " * (name != "param") + seen.entries[other].share.label
            raise GradientError(
                f"the gradient of {seen.entries[place].share.label} shares memory with {of}, which the step writes: "
                "use .clone()"
            )
    if sharing:
        seen.gradients[place] = copy = gradient.clone()
        seen.copies.append((gradient, copy))


def _in_order(gradient: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return a dense copy, in the memory order of its parameter if required."""
    if not entry.ordered or not is_dense(entry.param):
        return gradient.contiguous()
    return torch.empty_like(entry.param, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


_PLAIN = ("Tensor", "Parameter")
_FREED = "no memory (its storage was freed, or it is inside a function transform such as torch.func.grad or vmap)"


def _check(entry: Entry, gradient: torch.Tensor) -> None:
    param, dtype = entry.param, entry.grad_dtype
    device = entry.gradient_device or param.device
    alike = gradient.dtype is dtype and gradient.shape == param.shape and gradient.device == device
    if alike and gradient.layout is torch.strided and not gradient.is_complex():
        return
    if gradient.layout is not torch.strided:
        raise GradientError(
            f"the gradient of {entry.share.label} is sparse; only dense gradients are supported: use "
            "torch.optim.SparseAdam for this parameter, or sparse=False in its embedding"
        )
    if gradient.is_complex():
        raise GradientError(f"the gradient of {entry.share.label} is complex; use torch.view_as_real")
    if gradient.dtype is not dtype and gradient.dtype in (grad_dtype(param), grad_dtype(entry.handle)):
        raise Stale(f"the dtype of the gradient of {entry.share.label} has changed to {gradient.dtype}")
    for what, actual, wanted in (
        ("shape", tuple(gradient.shape), tuple(param.shape)),
        ("dtype", gradient.dtype, dtype),
        ("device", gradient.device, device),
    ):
        if actual != wanted:
            raise GradientError(f"the gradient of {entry.share.label} has {what} {actual}, the parameter has {wanted}")
