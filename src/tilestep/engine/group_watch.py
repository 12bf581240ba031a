"""Which param groups' hyperparameters changed since the last step, found without looking at every number."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..graph import flat_numbers
from .recipes import statics_of


class GroupWatch:
    """Watches the hyperparameters of one param group.

    Example:
        >>> group = {"lr": 0.1, "nesterov": False}
        >>> watch = GroupWatch(0, group, ["lr", "nesterov"])
        >>> watch.changed()
        False
        >>> group["lr"] = 0.2
        >>> watch.changed(), watch.same_statics()
        (True, True)
    """

    def __init__(self, index: int, group: Mapping[str, Any], keys: Sequence[str]) -> None:
        self.index = index
        self.group = group
        self.keys = tuple(keys)
        self.value_of = group.get
        self._only_numbers_differ = False
        self.remember()

    is_mutable: bool
    """Whether a value can change and stay the same object."""

    values: tuple[Any, ...]
    """The known values; as long as they are these objects, and none is mutable, nothing has changed."""

    def _get(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(map(group.get, self.keys))

    def remember(self) -> None:
        """Take the values as they are now as the known ones."""
        self.values = self._get(self.group)
        if self._only_numbers_differ:
            self._only_numbers_differ = False
            return
        chosen = self.chosen()
        self._statics = statics_of(chosen)
        self._tensors = [value for _, value in flat_numbers(chosen) if isinstance(value, torch.Tensor)]
        self._device_tensors = {name: value for name, value in flat_numbers(chosen) if _on_device(value)}
        self.is_mutable = bool(self._tensors) or any(isinstance(value, list) for value in self.values)
        self._seen = _numbers(chosen) if self.is_mutable else []

    @property
    def on_device(self) -> bool:
        """Whether a hyperparameter lives on a device, where only the device can read it."""
        return bool(self._device_tensors)

    def changed(self) -> bool:
        """Whether a hyperparameter has another value, or is of another kind, than the known one."""
        now = self._get(self.group)
        self._only_numbers_differ = False
        if not self.is_mutable:
            if all(map(operator.is_, now, self.values)):
                return False
            if all(map(_both_numbers, now, self.values)):
                return self._other_numbers(now)
        chosen = self.chosen()
        numbers = _numbers(chosen)
        if numbers == self._known_numbers() and statics_of(chosen) == self._statics:
            if not self.is_mutable:
                self.values = now
            return False
        self._refuse_invalid(numbers)
        return True

    def _other_numbers(self, now: tuple[Any, ...]) -> bool:
        """`changed` where a schedule has put plain numbers in the place of others: at every step of a training."""
        if now == self.values:
            self.values = now
            return False
        limit = self.group.get("max_grad_norm")
        if _has_nan(now) or (limit is not None and type(limit) in _NUMBERS and limit < 0):
            self._refuse_invalid(flat_numbers(self.chosen()))
        self._only_numbers_differ = True
        return True

    def _refuse_invalid(self, numbers: Sequence[tuple[str, Any]]) -> None:
        for name, value in numbers:
            if value != value:
                raise ValueError(f"Invalid {name} of group {self.index}: nan")
            if name == "max_grad_norm" and value < 0:
                raise ValueError(f"Invalid {name} of group {self.index}: {value}; it must be at least 0, or None")

    def _known_numbers(self) -> list[tuple[str, Any]]:
        return self._seen if self.is_mutable else _numbers(dict(zip(self.keys, self.values)))

    def same_statics(self) -> bool:
        """Whether flags, strings, None and the kinds of all values are the known ones."""
        return self._only_numbers_differ or statics_of(self.chosen()) == self._statics

    def same_tensors(self) -> bool:
        """Whether the same hyperparameters live on a device, in the same tensors."""
        if self._only_numbers_differ:
            return True
        now = {name: value for name, value in flat_numbers(self.chosen()) if _on_device(value)}
        known = self._device_tensors
        return now.keys() == known.keys() and all(now[name] is known[name] for name in now)

    def chosen(self) -> dict[str, Any]:
        """The watched entries of the group as they are now."""
        return dict(zip(self.keys, self._get(self.group)))


_NUMBERS = (float, int)


def _both_numbers(left: Any, right: Any) -> bool:
    """Whether two values are the same object, or plain numbers both, or tuples of such; a bool is a flag."""
    if left is right:
        return True
    if type(left) is tuple and type(right) is tuple and len(left) == len(right):
        return all(map(_both_numbers, left, right))
    return type(left) in _NUMBERS and type(right) in _NUMBERS


def _has_nan(values: Sequence[Any]) -> bool:
    """Whether a number in here, or in a tuple in here, is NaN."""
    return any(_has_nan(value) if type(value) is tuple else value != value for value in values)


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _numbers(chosen: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Every number by name; one on a device stands for itself by identity."""
    return [(name, id(value) if _on_device(value) else float(value)) for name, value in flat_numbers(chosen)]
