"""The numbers of param groups, as stored in the tables of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..graph import flat_numbers
from ..native.table import CHANGED, MOVED, SAME, same_list
from .kernel_cache import statics_of


class GroupNumbers:
    """The hyperparameters of a param group, as stored in tables."""

    def __init__(self, index: int, group: Mapping[str, Any], keys: Sequence[str]) -> None:
        self.index, self._group, self.keys, self.value_of = index, group, tuple(keys), group.get
        self.values: tuple[Any, ...] = ()
        """If the group still has these objects, and none is mutable, nothing has changed."""
        self._are_plain = False  # whether the last look found new plain numbers, and no other change
        self.remember()

    def chosen(self) -> dict[str, Any]:
        """Return the current entries of the group."""
        return dict(zip(self.keys, map(self.value_of, self.keys)))

    def remember(self) -> None:
        """Store the current values."""
        chosen = self.chosen()
        self.values = tuple(chosen.values())
        if not self._are_plain:
            self._statics, self._numbers = statics_of(chosen), _numbers(chosen)
            self.tensors = [value for _, value in flat_numbers(chosen) if _on_device(value)]
            """Hyperparameters on a GPU, which only the device reads."""
            self.is_mutable = any(map(_is_mutable, self.values))  # whether a value may change in place
        self._are_plain = False

    def look(self) -> int:
        """Return SAME; MOVED for new numbers; CHANGED if a flag or the kind of a value differs."""
        values, self._are_plain = tuple(map(self.value_of, self.keys)), False
        now = dict(zip(self.keys, values))
        if not self.is_mutable and all(map(_both_numbers, values, self.values)):
            # Plain numbers replaced by plain numbers, as schedulers do at every step.
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
        """Whether the hyperparameters on a GPU are the same tensors as before."""
        return same_list([value for _, value in flat_numbers(self.chosen()) if _on_device(value)], self.tensors)


_NUMBERS = (float, int)


def _is_mutable(value: Any) -> bool:
    is_entry = isinstance(value, (list, Mapping, torch.Tensor))
    return is_entry or (type(value) is tuple and any(map(_is_mutable, value)))


def _both_numbers(left: Any, right: Any) -> bool:
    """Whether two values are the same object, both plain numbers, or tuples of these; a bool is not a number."""
    if left is right:
        return True
    if type(left) is tuple and type(right) is tuple and len(left) == len(right):
        # Numbers in nested tuples are constants of graphs.
        return tuple not in map(type, left) and all(map(_both_numbers, left, right))
    return type(left) in _NUMBERS and type(right) in _NUMBERS


def _has_nan(values: Sequence[Any]) -> bool:
    """Whether a number, or a number in a tuple, is NaN."""
    return any(_has_nan(value) if type(value) is tuple else value != value for value in values)


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _numbers(chosen: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return every number by name; for a tensor on a GPU, its id."""
    try:
        return [(name, id(value) if _on_device(value) else float(value)) for name, value in flat_numbers(chosen)]
    except (RuntimeError, ValueError):
        for name, value in flat_numbers(chosen):
            if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_complex()):
                kind = f"a tensor of shape {tuple(value.shape)}" + ", complex" * value.is_complex()
                raise ValueError(f"Invalid {name}: {kind}; it must have one element, a real number") from None
        raise
