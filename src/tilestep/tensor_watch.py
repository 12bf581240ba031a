"""Whether tensors are unchanged: the look before every step.

A tensor is unchanged if its dtype, device, sizes, strides, dispatch keys (lazy negation and conjugation, zero tensors,
subclasses) and address are the remembered ones. `native/scan.cpp` states the same in `description_of` and `address_of`;
this module asks torch's guards and `data_ptr`. Memory is not kept alive between steps: if a state is moved to another
device, its memory is freed at once.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
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

SAME, MOVED, CHANGED = 0, 1, 2
"""Answers of a look: tensors are what they were; some have other addresses; some are otherwise."""


class Watch:
    """Remembers tensors, and says by one look whether they, or others in their place, are still what they were.

    A fixed watch holds its tensors and looks at them; a DTensor is unchanged if its local part is the same object and
    unchanged. Other watches hold none, and look at lists.
    """

    # `state["exp_avg"].data = ...`, `set_`, `share_memory_`, `swap_tensors` and a `resize_` of a storage give a tensor
    # other memory without a change of versions or dictionaries.

    def __init__(self, tensors: Sequence[torch.Tensor], *, fixed: bool = False) -> None:
        self.tensors = list(tensors) if fixed else []
        self._is_fixed = fixed
        self._parts: list[torch.Tensor] = local_parts(self.tensors)
        self._have_parts = any(map(operator.is_not, self._parts, self.tensors))
        remembered = self._parts if fixed else tensors
        self._guard(remembered)
        self._descriptions = list(map(description, remembered))
        self._indices = list(range(len(remembered)))
        self._module: Any = None
        self.native: Any = None
        """What the C++ module looks at, once it is built and supports the tensors."""
        self.times_remembered = 0  # how often addresses were remembered
        # A bound method would be a circle, which keeps the tensors until garbage is collected.
        self.look: Callable[..., int] = partial(Watch._look, weakref.proxy(self))
        """SAME, MOVED or CHANGED, for the tensors of a fixed watch or for a list; MOVED fixed tensors are CHANGED."""
        self.count_writes: Callable[[list[torch.Tensor]], object] = torch.autograd.graph.increment_version
        """Counts a version of each of some tensors, as torch does for in-place writes."""
        self.remember(remembered)

    def _guard(self, tensors: Sequence[torch.Tensor]) -> None:
        self._check = tensor_guards(tensors) if tensors else lambda: True

    def remember(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember the addresses of tensors that a look did not call changed."""
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))
        self.times_remembered += 1
        if self.native is not None:
            self._module.remember(self.native, list(tensors))

    def _look(self, tensors: list[torch.Tensor] | None = None) -> int:
        looked = self._parts if tensors is None else tensors
        if tensors is None and self._have_parts:
            parts = local_parts(self.tensors)
            if not all(map(operator.is_, parts, self._parts)):
                return CHANGED
        if not self._same_metadata(looked):
            return CHANGED
        if not addresses_equal(looked, self.addresses, self._indices):
            return CHANGED if tensors is None else MOVED
        # In C++ from now on, twice as fast, if it is built.
        if self._module is None and (self._is_fixed or len(looked) >= _WORTH_NATIVE):
            self._module = native.module(len(looked))
            if self._module is not None:
                own = (self.tensors, DTENSOR_PARTS) if self._is_fixed else (list(looked),)
                self.native = self._module.watch(*own)
            if self.native is not None:
                fixed = (None,) if self._is_fixed else ()
                self.look = partial(self._module.look, self.native, *fixed)
                self.count_writes = self._module.bump
        return SAME

    def _same_metadata(self, tensors: list[torch.Tensor]) -> bool:
        if len(tensors) != len(self._indices):
            return False
        if not self._check(*tensors):
            # Unlike guards, this ignores `requires_grad` and whether a tensor is a `Parameter`.
            pairs = zip(tensors, self._descriptions)
            if not all(isinstance(tensor, torch.Tensor) and description(tensor) == wanted for tensor, wanted in pairs):
                return False
            self._guard(tensors)
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

_WORTH_NATIVE = 100  # fewer tensors than this are compared in Python as fast
