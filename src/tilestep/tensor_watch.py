"""Whether tensors are unchanged: the look before every step.

A tensor is unchanged if its dtype, device, sizes, strides, dispatch keys (lazy negation and conjugation, zero tensors,
subclasses) and address are the remembered ones. `native/scan.cpp` states the same in `description_of` and `address_of`;
this module asks torch's guards and `data_ptr`. Memory is not kept alive between steps: if a state is moved to another
device, its memory is freed at once.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from . import native
from .compat import (
    DTENSOR_PARTS,
    addresses_equal,
    description,
    distributed_tensor_type,
    local_parts,
    ready,
    tensor_guards,
    version_of,
)


class TensorFingerprint:
    """Remembers a list of tensors, and tells cheaply whether another list differs from it in values alone."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._guard(tensors)
        self._descriptions = list(map(description, tensors))
        self._indices = list(range(len(tensors)))
        self._module: Any = None
        self._remembered: Any = None
        self.times_remembered = 0  # how often addresses were remembered
        self.remember_addresses(tensors)

    def _guard(self, tensors: Sequence[torch.Tensor]) -> None:
        self._check = tensor_guards(tensors) if tensors else lambda: True

    def remember_addresses(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember these tensors' addresses."""
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        self.times_remembered += 1
        if self._remembered is not None:
            self._module.remember(self._remembered, list(tensors))

    def same_metadata(self, tensors: list[torch.Tensor]) -> bool:
        """Whether every tensor is unchanged, but for its address."""
        if self._remembered is not None:
            return self._module.compare(self._remembered, tensors) != _CHANGED
        if len(tensors) != len(self._indices):
            return False
        if not self._check(*tensors):
            # Unlike guards, this ignores `requires_grad` and whether a tensor is a `Parameter`.
            pairs = zip(tensors, self._descriptions)
            if not all(isinstance(tensor, torch.Tensor) and description(tensor) == wanted for tensor, wanted in pairs):
                return False
            self._guard(tensors)
        if len(tensors) >= _WORTH_NATIVE:
            # In C++ from now on, twice as fast, if it is built and the tensors have the remembered addresses.
            self._module = native.module(len(tensors))
            if self._module is not None and self.same_addresses(list(tensors)):
                self._remembered = self._module.watch(list(tensors))
        return True

    def same_metadata_and_addresses(self, tensors: list[torch.Tensor]) -> tuple[bool, bool]:
        """Both answers by one look in C++; without C++ the second is False, which means unknown."""
        if self._remembered is not None:
            answer = self._module.compare(self._remembered, tensors)
            return answer != _CHANGED, answer == _SAME
        return self.same_metadata(tensors), False

    def same_addresses(self, tensors: list[torch.Tensor]) -> bool:
        """Whether every tensor has the remembered address."""
        if self._remembered is not None:
            return self._module.compare(self._remembered, tensors) == _SAME
        return addresses_equal(tensors, self.addresses, self._indices)

    def unchanged(self, tensors: list[torch.Tensor]) -> bool:
        """Whether every tensor is unchanged."""
        same, in_place = self.same_metadata_and_addresses(tensors)
        return same and (in_place or self.same_addresses(tensors))

    def count_writes(self, tensors: list[torch.Tensor]) -> None:
        """Count a version of each of these tensors, as torch does for in-place writes."""
        if self._remembered is not None:
            self._module.bump_list(tensors)
        else:
            torch.autograd.graph.increment_version(tensors)


class FixedTensors:
    """A fixed list of tensors, and whether kernels may still use their addresses."""

    # `state["exp_avg"].data = ...`, `set_`, `share_memory_`, `swap_tensors` and a `resize_` of a storage give a tensor
    # other memory without a change of versions or dictionaries.

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._parts: list[torch.Tensor] = local_parts(self.tensors)
        self._have_parts = any(map(operator.is_not, self._parts, self.tensors))
        self._watch = TensorFingerprint(self._parts)
        self._module: Any = None
        self._fixed: Any = None
        # `are_unmoved`, in C++ once the module is built; a bound method would keep this, and the tensors, until garbage
        # is collected.
        self.look: Callable[[int], bool] = functools.partial(FixedTensors.are_unmoved, weakref.proxy(self))
        self.count_writes: Callable[[list[torch.Tensor]], object] = torch.autograd.graph.increment_version
        """Counts a version of each of some tensors, as torch does for in-place writes."""

    def are_unmoved(self, threads: int = 1) -> bool:
        """Whether every tensor is unchanged; a DTensor is if its local part is the same object and unchanged."""
        if self._fixed is not None:
            return self._module.unmoved(self._fixed, threads)
        if self._have_parts:
            parts = local_parts(self.tensors)
            if not all(map(operator.is_, parts, self._parts)):
                return False
        if not self._watch.unchanged(self._parts):
            return False
        if self._module is None:
            self._module = native.module(len(self.tensors))
            self._fixed = None if self._module is None else self._module.fix(self.tensors, DTENSOR_PARTS)
            if self._fixed is not None:
                self.look = functools.partial(self._module.unmoved, self._fixed)
                self.count_writes = self._module.bump_list
        return True


class Survey(NamedTuple):
    """The result of one look at some parameters."""

    versions: int  # the sum of their versions
    any_gradient: bool  # whether one of them has a gradient
    trains: bytes  # a 1 for each parameter that requires a gradient, a 0 for each other one


def survey(params: list[torch.Tensor]) -> Survey:
    """Look at parameters once, in C++ if it is built."""
    module = native.module(len(params))
    if module is not None:
        return Survey(*module.survey(params))
    any_gradient = not all(map(operator.is_, [param.grad for param in params], itertools.repeat(None)))
    return Survey(sum(map(version_of, params)), any_gradient, bytes([param.requires_grad for param in params]))


def taken_gradients(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of parameters, which are taken away from them."""
    # A param group's `params` are a list, unless a user has replaced it.
    module = native.module(len(params)) if type(params) is list else None
    taken = None if module is None else module.take(params, (*_PLAIN, distributed_tensor_type()))
    if taken is not None:
        return taken  # type: ignore[no-any-return]
    gradients = [param.grad for param in params]
    for param in params:
        param.grad = None
    return [gradient for gradient in gradients if gradient is not None]


def memory_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that hold all memory of some tensors on this rank, most of it once."""
    module = native.module(len(tensors))
    parts = local_parts(tensors) if module is None else module.memory_of(tensors, DTENSOR_PARTS)
    return list(map(ready, parts))


def sum_of_versions(tensors: list[torch.Tensor]) -> int:
    """The sum of the versions of tensors: versions only grow, so if it has not changed, no tensor was written to."""
    return survey(tensors).versions


_PLAIN = (torch.Tensor, torch.nn.Parameter)

_SAME, _CHANGED = 0, 2  # answers of the C++ comparison
_WORTH_NATIVE = 100  # fewer tensors than this are compared in Python as fast
