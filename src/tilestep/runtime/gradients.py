"""A check of every gradient that steps read, and what has changed in param groups."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..compat import has_memory, is_zero_tensor, ready, resolved
from ..errors import GradientError
from ..graph import flat_numbers
from ..native.table import CHANGED, MOVED, SAME, rows_of, same_list
from .kernel_cache import statics_of
from .overlaps import WrittenMemory
from .segment import Entry, is_dense, same_walk

READABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # the dtypes of gradients that kernels read


class Stale(Exception):
    """The tables no longer describe the tensors: they must be built again."""


def grad_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradients: its own, unless its attribute `grad_dtype` says otherwise."""
    if not param.is_leaf:
        return param.dtype
    declared = getattr(param, "grad_dtype", param.dtype)
    if declared is None and param.grad is not None and param.grad.dtype in READABLE:
        return param.grad.dtype
    return declared or param.dtype


@dataclass
class Inspected:
    """The gradients of one step, each of which was checked."""

    entries: Sequence[Entry]
    written: WrittenMemory  # what a step writes
    gradients: list[torch.Tensor | None]  # for each entry; a copy in the place of a gradient that is not dense
    copies: list[tuple[torch.Tensor, torch.Tensor]]  # gradients and their copies
    strided: dict[int, torch.Tensor]  # by place, those that are not walked as their parameters

    @property
    def places(self) -> list[int]:
        """The entries that have a gradient."""
        return [place for place, gradient in enumerate(self.gradients) if gradient is not None]

    def updated(self) -> list[torch.Tensor]:
        """The parameters with gradients, their local parts and the DTensors that these belong to."""
        entries = [self.entries[place] for place in self.places]
        return [entry.param for entry in entries] + [entry.whole for entry in entries if entry.whole is not None]

    def same_layout(self, before: Inspected | None) -> bool:
        """Whether gradients of an earlier step had the same layouts, at any addresses."""
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
    """Check every gradient; raise for one that kernels cannot read."""
    seen = Inspected(entries, written, [None] * len(entries), [], {})
    for place, (entry, gradient) in enumerate(zip(entries, gradients)):
        if gradient is None:
            continue
        original = gradient = ready(gradient)
        _check_kind(entry, gradient)
        gradient = resolved(gradient)
        _check(entry, gradient)
        if not is_dense(gradient) or (entry.ordered and not same_walk(gradient, entry.param)):
            gradient = _in_order(gradient, entry)
        if gradient is not original:
            seen.copies.append((original, gradient))
        seen.gradients[place] = gradient
        if not same_walk(gradient, entry.param):
            # Shape and strides alone, so that the gradient is not kept alive after its step.
            seen.strided[place] = torch.empty_strided(gradient.shape, gradient.stride(), device="meta")
    sizes = np.asarray([0 if one is None else one.nbytes for one in seen.gradients], dtype=np.int64)
    for place in np.nonzero(written.overlapped(rows_of(seen.gradients), sizes))[0].tolist():
        _set_apart(seen, place)
    return seen


def _set_apart(seen: Inspected, place: int) -> None:
    """Take a copy of a gradient in the memory of its own parameter; raise for one in other memory of a step's."""
    gradient = seen.gradients[place]
    assert gradient is not None
    sharing = seen.written.sharing(gradient)
    for other, name in sharing:
        if (other, name) != (place, "param"):
            of = f"state {name!r} of " * (name != "param") + seen.entries[other].label
            raise GradientError(
                f"the gradient of {seen.entries[place].label} shares memory with {of}, which the step writes: make "
                "it a tensor of its own with .clone()"
            )
    if sharing:
        seen.gradients[place] = copy = gradient.clone()
        seen.copies.append((gradient, copy))


def _in_order(gradient: torch.Tensor, entry: Entry) -> torch.Tensor:
    """A copy that is dense, and lies in memory as its parameter does if it must."""
    if not entry.ordered or not is_dense(entry.param):
        return gradient.contiguous()
    return torch.empty_like(entry.param, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


_FREED = "no memory: its storage was freed, or it is inside of a function transform (torch.func.grad, vmap)"


def _check_kind(entry: Entry, gradient: torch.Tensor) -> None:
    if gradient.layout is torch.strided and not is_zero_tensor(gradient) and not has_memory(gradient):
        kind = type(gradient).__name__
        what = _FREED if kind in ("Tensor", "Parameter") else f"the type {kind}"
        raise GradientError(
            f"the gradient of {entry.label} has {what}; kernels read memory: give it a plain tensor with the values"
        )


def _check(entry: Entry, gradient: torch.Tensor) -> None:
    param, dtype = entry.param, entry.grad_dtype
    device = entry.gradient_device or param.device
    alike = gradient.dtype is dtype and gradient.shape == param.shape and gradient.device == device
    if alike and gradient.layout is torch.strided and not gradient.is_complex():
        return
    if gradient.layout is not torch.strided:
        raise GradientError(
            f"the gradient of {entry.label} is sparse; only dense gradients are supported: use "
            "torch.optim.SparseAdam for this parameter, or sparse=False in its embedding"
        )
    if gradient.is_complex():
        raise GradientError(f"the gradient of {entry.label} is complex; split it with torch.view_as_real")
    if gradient.dtype is not dtype and gradient.dtype in (grad_dtype(param), grad_dtype(entry.handle)):
        raise Stale(f"the gradient of {entry.label} has become {gradient.dtype}")
    for what, actual, wanted in (
        ("shape", tuple(gradient.shape), tuple(param.shape)),
        ("dtype", gradient.dtype, dtype),
        ("device", gradient.device, device),
    ):
        if actual != wanted:
            raise GradientError(f"the gradient of {entry.label} has {what} {actual}, the parameter has {wanted}")


class GroupNumbers:
    """The hyperparameters of one param group as tables have them."""

    def __init__(self, index: int, group: Mapping[str, Any], keys: Sequence[str]) -> None:
        self.index, self._group, self.keys, self.value_of = index, group, tuple(keys), group.get
        self.values: tuple[Any, ...] = ()
        """While the group has these objects, and none is mutable, nothing has changed."""
        self._are_plain = False  # whether the last look has found other plain numbers, and nothing else
        self.remember()

    def chosen(self) -> dict[str, Any]:
        """The entries of the group as they are now."""
        return dict(zip(self.keys, map(self.value_of, self.keys)))

    def remember(self) -> None:
        """Take the present values."""
        chosen = self.chosen()
        self.values = tuple(chosen.values())
        if not self._are_plain:
            self._statics, self._numbers = statics_of(chosen), _numbers(chosen)
            self.tensors = [value for _, value in flat_numbers(chosen) if _on_device(value)]
            """Hyperparameters on a GPU, which only the device can read."""
            self.is_mutable = any(map(_is_mutable, self.values))  # whether a value may change and stay the same object
        self._are_plain = False

    def look(self) -> int:
        """SAME; MOVED for other numbers; CHANGED where a flag or the kind of a value is another one."""
        values, self._are_plain = tuple(map(self.value_of, self.keys)), False
        if not self.is_mutable and all(map(operator.is_, values, self.values)):
            return SAME
        now = dict(zip(self.keys, values))
        if not self.is_mutable and all(map(_both_numbers, values, self.values)):
            # Plain numbers in the place of plain numbers, as schedulers write at every step.
            if values == self.values:
                self.values = values
                return SAME
            limit = self._group.get("max_grad_norm")
            if _has_nan(values) or (isinstance(limit, (float, int)) and limit < 0):
                self._refuse_invalid(flat_numbers(now))
            self._are_plain = True
            return MOVED
        before = self._numbers if self.is_mutable else _numbers(dict(zip(self.keys, self.values)))
        numbers, statics = _numbers(now), statics_of(now)
        if (numbers, statics) == (before, self._statics):
            self.values = self.values if self.is_mutable else values
            return SAME
        self._refuse_invalid(numbers)
        return MOVED if statics == self._statics else CHANGED

    def _refuse_invalid(self, numbers: Sequence[tuple[str, Any]]) -> None:
        for name, value in numbers:
            if value != value:
                raise ValueError(f"Invalid {name} of group {self.index}: nan")
            if name == "max_grad_norm" and value < 0:
                raise ValueError(f"Invalid {name} of group {self.index}: {value}; it must be at least 0, or None")

    def same_tensors(self) -> bool:
        """Whether the same tensors on a GPU are hyperparameters."""
        return same_list([value for _, value in flat_numbers(self.chosen()) if _on_device(value)], self.tensors)


_NUMBERS = (float, int)


def _is_mutable(value: Any) -> bool:
    is_entry = isinstance(value, (list, Mapping, torch.Tensor))
    return is_entry or (type(value) is tuple and any(map(_is_mutable, value)))


def _both_numbers(left: Any, right: Any) -> bool:
    """Whether two values are the same object, both plain numbers, or tuples of these; a bool is no number."""
    if left is right:
        return True
    if type(left) is tuple and type(right) is tuple and len(left) == len(right):
        # Numbers in tuples inside of tuples are constants of graphs.
        return tuple not in map(type, left) and all(map(_both_numbers, left, right))
    return type(left) in _NUMBERS and type(right) in _NUMBERS


def _has_nan(values: Sequence[Any]) -> bool:
    """Whether a number, or a number in a tuple, is NaN."""
    return any(_has_nan(value) if type(value) is tuple else value != value for value in values)


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _numbers(chosen: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every number by name; for a tensor on a GPU its id."""
    try:
        return [(name, id(value) if _on_device(value) else float(value)) for name, value in flat_numbers(chosen)]
    except (RuntimeError, ValueError):
        for name, value in flat_numbers(chosen):
            if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
                kind = f"a tensor of shape {tuple(value.shape)}" + ", complex" * value.is_complex()
                raise ValueError(f"Invalid {name}: {kind}; it must have one element, a real number") from None
        raise
