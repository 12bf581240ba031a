"""The table of tensors that kernels access by address; before every step a look detects changed tensors.

A tensor is unchanged if its dtype, device, sizes, strides, dispatch keys (lazy negation and conjugation, zero tensors,
subclasses) and address are the remembered ones. `scan.cpp` implements this in `description_of` and `address_of`; this
module uses torch's guards and `data_ptr`, for tensors that C++ does not support, or if C++ is not built. The table
does not keep memory alive between steps: if a state is moved to another device, its old memory is freed.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import devices, native
from ..compat import (
    DTENSOR_PARTS,
    PLAIN,
    addresses_equal,
    description,
    distributed_tensor_type,
    has_memory,
    local_parts,
    ready,
    tensor_guards,
    version_of,
)
from ..devices import copy_to, is_host

SAME, MOVED, CHANGED = 0, 1, 2
"""Results of a look: nothing has changed; addresses have changed; something else has changed."""

_AT_ONCE = 512  # tensors per look in turn

_LARGE, _MOST_LOOKING, _MOST_WOKEN = 500, 8, 4
"""The least number of tensors for a look by several threads, and the most threads; fewer if they must be woken."""

_LOW = 1 << 32  # most memory has higher addresses; a lower address may be an offset from a null pointer


class _Described:
    """Remembered metadata and addresses of tensors; for DTensors, of their local parts, which are kept alive."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, fixed: bool = False) -> None:
        self.tensors: list[torch.Tensor] = list(tensors) if fixed else []
        self._parts = local_parts(self.tensors)
        looked = self._parts if fixed else tensors
        self._descriptions = list(map(description, looked))
        self._indices = list(range(len(looked)))
        self._guard(looked)
        self.addresses, self.sizes = addresses_of(looked).tolist(), np.asarray([tensor.nbytes for tensor in looked])

    def _guard(self, tensors: Sequence[torch.Tensor]) -> None:
        self._check: Callable[..., bool] = tensor_guards(tensors) if tensors else bool

    def look(self, tensors: list[torch.Tensor] | None = None) -> int:
        """Compare the fixed tensors, or `tensors` in their place: SAME, MOVED or CHANGED."""
        if tensors is None:
            tensors = local_parts(self.tensors)
            if not same_list(tensors, self._parts):
                return CHANGED
        if len(tensors) != len(self._indices):
            return CHANGED
        if tensors and not self._check(*tensors):
            # Unlike guards, descriptions ignore `requires_grad` and whether a tensor is a `Parameter`.
            pairs = zip(tensors, self._descriptions)
            if not all(isinstance(tensor, torch.Tensor) and description(tensor) == wanted for tensor, wanted in pairs):
                return CHANGED
            self._guard(tensors)
        return SAME if addresses_equal(tensors, self.addresses, self._indices) else MOVED

    def follow(self) -> None:
        """Remember the current addresses of the fixed tensors."""
        self.addresses = addresses_of(self._parts).tolist()


class Table:
    """Addresses and metadata of parameters, gradients and states on one device.

    Args:
        addresses: int64[rows] on the device, addresses of gradients; 0 for no gradient, 1 for an empty gradient. None
            for addresses on the host only, in `host`.
        params: for each row the tensor that kernels write, or a DTensor with it as local part; empty for a table of
            gradients only.
        states: further tensors; for DTensors their local parts.
        written: the memory of parameters and states; a gradient that moves into it is a change.
    """

    # `state["exp_avg"].data = ...`, `set_`, `share_memory_`, `swap_tensors` and a `resize_` of a storage give a tensor
    # other memory without a change of versions or dictionaries.

    def __init__(
        self,
        addresses: torch.Tensor | None = None,
        params: Sequence[torch.Tensor] = (),
        states: Sequence[torch.Tensor] = (),
        written: Any = None,
    ) -> None:
        self.host, self._target = np.zeros(0 if addresses is None else len(addresses), dtype=np.int64), addresses
        if addresses is not None and is_host(addresses.device):
            self.host, self._target = addresses.numpy(), None
        """The addresses on the host; for a CPU the same memory as `addresses`."""
        self.params, self._states = _Described(params, fixed=True), _Described(states, fixed=True)
        self.is_large = len(params) >= _LARGE  # whether several threads look
        self._written = written
        self.places: list[int] = []  # rows with a gradient
        self.generation = 0  # count of address changes
        self.is_uploaded = False  # whether the device has the addresses of the last look
        self.finds = False  # whether C++ reads the gradients from the parameters
        self._may_find = False
        self._is_known = False  # whether gradients are described, and are not new copies in each step
        self._native: Any = None  # the C++ table; None before the first request, False if unsupported
        self._turns: list[Table] = []
        self.look: Callable[[int], int] = _fixed_look(self)
        """Looks at parameters and states only, with a number of threads: SAME or CHANGED."""
        self.release: Callable[[], object] = _nothing
        """Releases the gradients, which a look keeps alive if the table `finds` them; call it after the last launch."""
        self.count_writes: Callable[[], object] = _nothing
        """Bumps the version of every parameter with a gradient, as in-place writes do."""
        self.same_list: Callable[[Any, Any], bool] = same_list
        """The function `same_list`, in C++ if it is built."""

    @property
    def threads(self) -> int:
        """The number of threads that look; on a CPU the threads of the update are awake already."""
        most = _MOST_LOOKING if self._target is None else _MOST_WOKEN
        return min(devices.thread_count(), most) if self.is_large else 1

    def refresh(self, gradients: Sequence[torch.Tensor | None] | None, threads: int = 1) -> int:
        """Look at all tensors once, and update the addresses unless something else has changed.

        Args:
            gradients: the gradients of the rows; None if the table `finds` them.
            threads: number of threads.

        Returns:
            SAME, MOVED for gradients with other addresses, or CHANGED: gradients must be described again by `remember`,
            or a parameter or state has changed (`params`, `states_are_same`).
        """
        # After an interrupt (Ctrl-C) the device may have the addresses of an earlier step.
        was_uploaded, self.is_uploaded = self.is_uploaded, False
        if not self._is_known:
            return CHANGED
        if self._native and (gradients is None or not self.finds):
            seen = self._native(gradients, threads)
        else:
            seen = self._look(gradients, threads)
        if seen == CHANGED:
            return CHANGED
        if seen == MOVED or not was_uploaded:
            self.generation += 1
            if self._target is not None:
                copy_to(self._target, self.host)
        self.is_uploaded = True
        return seen

    def _look(self, gradients: Any, threads: int) -> int:
        if self.params.look() != SAME or not self.states_are_same():
            return CHANGED
        seen = SAME if gradients is False else self._look_at_gradients(gradients)
        if seen != CHANGED and self._native is None:
            self._look_natively(gradients)
        return seen

    def _look_at_gradients(self, gradients: Sequence[torch.Tensor | None]) -> int:
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if len(gradients) != len(self.host) or places != self.places:
            return CHANGED
        present: list[Any] = [gradients[place] for place in places]
        try:
            seen = self._gradients.look(present)
            if seen == MOVED and not self._put(present):
                return CHANGED
        except RuntimeError:  # a tensor has no address: the look at each gradient names it
            return CHANGED
        return seen

    def _put(self, present: Sequence[torch.Tensor]) -> bool:
        """Write addresses on the host; False if a gradient has no memory, or overlaps memory that kernels write."""
        addresses, sizes = addresses_of(present), self._gradients.sizes
        if self._written is not None and self._written.overlapped(addresses, sizes).any():
            return False
        # Only low addresses may belong to elements without memory.
        if addresses.min(initial=_LOW) < _LOW and not all(map(has_memory, present)):
            return False
        self.host[:] = 0
        self.host[self.places] = np.where(sizes == 0, 1, addresses)
        # Last: if interrupted before, the next look must see the moves.
        self._gradients.addresses = addresses.tolist()
        return True

    def _look_natively(self, gradients: Any) -> None:
        """Look in C++ from now on, if it is built and supports the tensors."""
        params, states = self.params.tensors, self._states.tensors
        module = native.module(len(params) + len(states) + len(gradients or ()))
        if module is None:
            return
        if gradients is False:
            fixed = module.create([], [*params, *states], DTENSOR_PARTS, [])
            self.look = self.look if fixed is None else partial(module.look, fixed, 0, False)
            return
        finds = self._may_find and same_list(local_parts([param.grad for param in params]), gradients)
        arguments = () if self._written is None else self._written.arguments
        table = module.create(params, states, DTENSOR_PARTS, None if finds else list(gradients), *arguments)
        self._native = table is not None and partial(module.look, table, self.host.ctypes.data)
        if self._native:
            self.finds, self.same_list, self.look = finds, module.same_list, partial(module.look, table, 0, False)
        if self.finds:
            self.release, self.count_writes = partial(module.release, table), partial(module.bump, table)

    def remember(
        self,
        gradients: Sequence[torch.Tensor | None],
        written: Sequence[torch.Tensor] = (),
        *,
        finds: bool = False,
        again: bool = True,
    ) -> None:
        """Describe the current gradients.

        Args:
            gradients: the gradients of the rows, in memory that kernels do not write.
            written: the tensors of parameters with gradients, whose versions a step bumps.
            finds: whether later looks may read them from their parameters.
            again: whether later gradients may match these; False if these are copies.
        """
        self.places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        self._gradients = _Described([gradient for gradient in gradients if gradient is not None])
        self.release, self.count_writes = _nothing, partial(torch.autograd.graph.increment_version, written)
        self._forget_native()
        self._may_find, self._is_known = finds, again
        if len(self.host) != len(gradients):
            self.host = np.zeros(len(gradients), dtype=np.int64)
        self.host[:] = rows_of(gradients)
        self.generation += 1
        if self._target is not None:
            copy_to(self._target, self.host)
        self.is_uploaded = True

    def _forget_native(self) -> None:
        self._native, self.finds, self.look, self._turns = None, False, _fixed_look(self), []

    def invalidate(self) -> None:
        """Make the next look report changed gradients."""
        self._is_known = self.finds = False

    def look_in_turn(self, turn: int) -> int:
        """`look`, at a few hundred tensors per turn."""
        if not self._turns:
            tensors = [*self.params.tensors, *self._states.tensors]
            self._turns = [Table(states=tensors[at : at + _AT_ONCE]) for at in range(0, len(tensors), _AT_ONCE)]
        return self._turns[turn % len(self._turns)].look(1) if self._turns else SAME

    @property
    def is_native(self) -> bool:
        """Whether C++ looks at the tensors."""
        return bool(self._native) or self.look.func is not Table._look  # type: ignore[attr-defined]

    def follow_params(self, written: Any) -> None:
        """Remember the parameters' current addresses, and the memory that kernels write."""
        self.params.follow()
        self._written = written
        self._forget_native()

    def states_are_same(self) -> bool:
        """Whether no state has changed."""
        return self._states.look() == SAME


def _fixed_look(table: Table) -> Callable[[int], int]:
    # A bound method would be a reference cycle, which keeps the tensors until a garbage collection.
    return partial(Table._look, weakref.proxy(table), False)


def _nothing() -> None:
    """Release nothing: the table keeps no gradients alive."""


def same_list(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


address_of: Callable[[torch.Tensor | torch.UntypedStorage], int] = operator.methodcaller("data_ptr")
"""The address of a tensor or of a storage."""


def addresses_of(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """int64[tensors], addresses of tensors."""
    return np.fromiter(map(address_of, tensors), dtype=np.int64, count=len(tensors))


def rows_of(gradients: Sequence[torch.Tensor | None]) -> np.ndarray:
    """int64[gradients], addresses of gradients; 0 for None, 1 for an empty gradient, which may have no address."""
    rows = [0 if grad is None else address_of(grad) if grad.numel() else 1 for grad in gradients]
    return np.asarray(rows, dtype=np.int64)


class Survey(NamedTuple):
    """The result of `survey`."""

    versions: int  # sum of versions, which only grow: with an equal sum no tensor was written to
    any_gradient: bool  # whether any parameter has a gradient
    trains: bytes  # per parameter 1 if it requires a gradient, else 0


def survey(params: list[torch.Tensor]) -> Survey:
    """Sum versions and read flags of parameters, in C++ if it is built."""
    module = native.module(len(params))
    if module is not None:
        return Survey(*module.survey(params))
    any_gradient = not all(map(operator.is_, [param.grad for param in params], itertools.repeat(None)))
    return Survey(sum(map(version_of, params)), any_gradient, bytes([param.requires_grad for param in params]))


def taken_gradients(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Remove the gradients from parameters and return them."""
    # `params` of a param group is a list, unless a user has replaced it.
    module = native.module(len(params)) if type(params) is list else None
    taken = None if module is None else module.take(params, (*PLAIN, distributed_tensor_type()))
    if taken is not None:
        return taken  # type: ignore[no-any-return]
    gradients = [param.grad for param in params]
    for param in params:
        param.grad = None
    return [gradient for gradient in gradients if gradient is not None]


def memory_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Plain tensors that own all memory of `tensors` on this rank."""
    module = native.module(len(tensors))
    parts = local_parts(tensors) if module is None else module.memory_of(tensors, DTENSOR_PARTS)
    return list(map(ready, parts))


class Writes:
    """Detects in-place writes of other code by versions of parameters, and of the local parts of DTensors.

    Args:
        params: the parameters.
        known: for each parameter, False if other code may have written it already; by default True for all.
    """

    # A write through `param.data` bumps no version, and is not detected.

    def __init__(self, params: Sequence[torch.Tensor], known: Sequence[bool] | None = None) -> None:
        self.params = list(params)
        self._have_parts = not same_list(local_parts(self.params), self.params)
        self._places = {id(param): place for place, param in enumerate(self.params)}
        self.note()
        if known is not None and not all(known):
            self.known, self.total = np.asarray(known), -1  # -1: no sum of versions

    def note(self) -> None:
        """Remember the current versions."""
        self.versions = self._versions_of(self.params)
        self.known = np.ones(len(self.params), dtype=bool)
        self.total = int(self.versions.sum())

    def _versions_of(self, params: list[torch.Tensor]) -> np.ndarray:
        versions = np.fromiter(map(version_of, params), dtype=np.int64, count=len(params))
        if self._have_parts:
            pairs = zip(local_parts(params), params)
            parts = (0 if part is param else version_of(part) for part, param in pairs)
            versions += np.fromiter(parts, dtype=np.int64, count=len(params))
        return versions

    def are_none(self, total: int | None = None) -> bool:
        """Whether there were no writes; `total` is the sum of the parameters' versions, if known."""
        # Versions only grow: with an equal sum all versions are equal.
        if total is None and self.params:
            total = survey(self.params).versions
            if self._have_parts:
                pairs = zip(local_parts(self.params), self.params)
                total += survey([part for part, param in pairs if part is not param]).versions
        return not self.params or total == self.total

    def take(self) -> list[int]:
        """The indices of parameters that were written to; remembers their current versions."""
        now = self._versions_of(self.params)
        written = np.nonzero(self.known & (now != self.versions))[0]
        self.versions[written] = now[written]
        return written.tolist()

    def attribute(self, params: Sequence[torch.Tensor]) -> None:
        """Distribute the writes that only `total` counts over these parameters, equally."""
        if params and (counted := self.total - int(self.versions.sum())):
            self.versions[[self._places[id(param)] for param in params]] += counted // len(params)

    @contextmanager
    def own(self, params: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """A context whose writes to some or all parameters are not attributed to other code."""
        chosen = self.params if params is None else [param for param in params if id(param) in self._places]
        before = self._versions_of(chosen)
        try:
            yield
        finally:
            counted = self._versions_of(chosen) - before
            self.total += int(counted.sum()) if self.total >= 0 else 0
            self.versions[[self._places[id(param)] for param in chosen]] += counted
