"""What has changed since the last step: the gradients of a device, the hyperparameters of param groups."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..compat import has_memory, is_zero_tensor, ready, resolved
from ..errors import GradientError
from ..graph import flat_numbers
from ..tensor_watch import CHANGED, MOVED, Watch
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
class Seen:
    """The gradients of one step."""

    active: list[int]  # places of the entries that have one
    present: list[torch.Tensor]  # these gradients; in the place of one that is not dense, its copy
    strided: dict[int, torch.Tensor]
    copies: list[tuple[torch.Tensor, torch.Tensor]]

    def addresses(self, count: int) -> np.ndarray:
        """int64[count], where they begin; 0 for an entry without gradient."""
        starts = np.zeros(count, dtype=np.int64)
        # An empty gradient may have no address; it is there all the same.
        starts[self.active] = [tensor.data_ptr() if tensor.numel() else 1 for tensor in self.present]
        return starts


class Gradients:
    """Watches the gradients of a fixed list of tensors."""

    def __init__(self, entries: Sequence[Entry], grads: torch.Tensor) -> None:
        self.entries = list(entries)
        self.grads = grads
        self.strided: dict[int, torch.Tensor] = {}
        self.active: list[torch.Tensor] = []
        """The parameters that have a gradient, their local parts and the DTensors that these belong to."""
        self.places: list[int] = []  # of the entries that have one, as of the last look
        self._inactive: list[int] = []
        self._layout_known = True
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._watch = Watch([])
        self._host = np.zeros(len(self.entries), dtype=np.int64)
        self._sizes = np.zeros(0, dtype=np.int64)  # bytes of the gradients
        self._memory: WrittenMemory | None = None
        self.is_apart = False  # whether gradients were compared with the memory that steps write now
        self.settled = False  # whether what is remembered holds, and all gradients were dense
        self.scanned = False  # whether the table has the addresses of the last look, which was one in C++

    def unchanged(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether the gradients are, but for their addresses, those of the last step; updates the addresses."""
        present = self._present(gradients)
        try:
            seen = CHANGED if present is None else self._watch.look(present)
            if present is None or seen == CHANGED:
                return False
            if self.scanned or not self.is_apart or seen == MOVED:
                self._watch.remember(present)
                if self.overlap(np.asarray(self._watch.addresses, dtype=np.int64)):
                    self.invalidate()
                    return False
                self.is_apart = True
                # Only low addresses can tell of elements without memory.
                if min(self._watch.addresses, default=_LOW) < _LOW and not all(map(has_memory, present)):
                    return False
                self._upload()
        except RuntimeError:  # of a tensor that has no address: a look at each gradient names it
            self.invalidate()
            return False
        except BaseException:  # as of Ctrl-C: the table has addresses of a step before
            self.invalidate()
            raise
        return True

    @property
    def written(self) -> WrittenMemory:
        """The memory that steps write."""
        if self._memory is None:
            self._memory = WrittenMemory(self.entries)
        return self._memory

    @written.setter
    def written(self, memory: WrittenMemory) -> None:
        self._memory, self.is_apart = memory, False

    def overlap(self, addresses: np.ndarray) -> bool:
        """Whether a gradient at these addresses overlaps memory that steps write."""
        return bool(self.written.overlapped(addresses, self._sizes).any())

    def invalidate(self) -> None:
        """Look at every gradient again at the next step: looks in C++ have changed addresses since."""
        self.settled = self.scanned = False

    def forget(self) -> None:
        """As `invalidate`, and compare their layouts with none."""
        self.invalidate()
        self._layout_known = False

    def have_none(self) -> None:
        """Note that no entry has a gradient in this step, which has not looked at them."""
        self.places = []
        self.forget()

    def _present(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor] | None:
        """The gradients of the entries that had one at the last step, if they are the same entries now."""
        if not self.settled:
            return None
        if not self._inactive:
            return gradients  # type: ignore[return-value]
        if any(gradients[index] is not None for index in self._inactive):
            return None
        return [gradients[index] for index in self.places]  # type: ignore[misc]

    def inspect(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Check every gradient and write the address table anew."""
        seen = self.look(gradients)
        changed = not self.same_layout(seen)
        self.strided, self._copies, self.places = seen.strided, seen.copies, seen.active
        self._layout_known, self.settled = True, not seen.copies
        self.active = self._written(seen.active)
        chosen = set(seen.active)
        self._inactive = [index for index in range(len(self.entries)) if index not in chosen]
        self._empty = [position for position, gradient in enumerate(seen.present) if gradient.numel() == 0]
        self._watch = Watch(seen.present)
        self._sizes = _sizes_of(seen.present)
        self.is_apart = True
        self._upload()
        return changed

    def look(self, gradients: Sequence[torch.Tensor | None]) -> Seen:
        """Check every gradient; nothing is remembered."""
        seen = Seen([], [], {}, [])
        for index, (entry, gradient) in enumerate(zip(self.entries, gradients)):
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
            seen.active.append(index)
            seen.present.append(gradient)
            if not same_walk(gradient, entry.param):
                # Shape and strides alone, so that the gradient is not kept alive after its step.
                seen.strided[index] = torch.empty_strided(gradient.shape, gradient.stride(), device="meta")
        addresses = np.asarray([gradient.data_ptr() for gradient in seen.present], dtype=np.int64)
        for position in np.nonzero(self.written.overlapped(addresses, _sizes_of(seen.present)))[0].tolist():
            self._set_apart(seen, position)
        return seen

    def _set_apart(self, seen: Seen, position: int) -> None:
        """Take a copy of a gradient in the memory of its own parameter; raise for one in other memory of a step's."""
        index, gradient = seen.active[position], seen.present[position]
        sharing = self.written.sharing(gradient)
        for place, name in sharing:
            if (place, name) != (index, "param"):
                of = f"state {name!r} of " * (name != "param") + self.entries[place].label
                raise GradientError(
                    f"the gradient of {self.entries[index].label} shares memory with {of}, which the step writes: make "
                    "it a tensor of its own with .clone()"
                )
        if sharing:
            seen.present[position] = gradient.clone()
            seen.copies.append((gradient, seen.present[position]))

    def usable(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """This step's gradients, with the copies of those that were copied."""
        if not self._copies:
            return gradients
        copies = {id(original): copy for original, copy in self._copies}
        return [copies.get(id(gradient), gradient) for gradient in gradients]

    def release(self) -> None:
        """Free this step's copies."""
        self._copies = []

    @contextmanager
    def taking(self, seen: Seen) -> Iterator[None]:
        """A block that works on gradients that are not remembered afterwards."""
        before = self.active, self._copies
        self.active, self._copies = self._written(seen.active), seen.copies
        try:
            yield
        finally:
            self.active, self._copies = before

    def _written(self, active: Sequence[int]) -> list[torch.Tensor]:
        entries = [self.entries[index] for index in active]
        return [entry.param for entry in entries] + [entry.whole for entry in entries if entry.whole is not None]

    def same_layout(self, seen: Seen) -> bool:
        """Whether the gradients have the layouts of the last step's, at any addresses."""
        before = {index: tensor.stride() for index, tensor in self.strided.items()}
        return self._layout_known and before == {index: tensor.stride() for index, tensor in seen.strided.items()}

    def copy_back(self) -> None:
        """Write the copies of gradients, which kernels have changed, back to the gradients."""
        for gradient, copy in self._copies:
            # A gradient whose elements share memory cannot be written.
            expanded = any(stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape))
            if not expanded and not is_zero_tensor(gradient) and not self.written.sharing(gradient):
                gradient.copy_(copy)

    def _upload(self) -> None:
        addresses = np.asarray(self._watch.addresses, dtype=np.int64)
        if self._empty:
            addresses[self._empty] = 1
        if self._inactive:
            self._host[:] = 0
            self._host[self.places] = addresses
        else:
            self._host[:] = addresses
        self.scanned = False
        copy_to(self.grads, self._host)


def _sizes_of(gradients: Sequence[torch.Tensor]) -> np.ndarray:
    return np.asarray([gradient.nbytes for gradient in gradients], dtype=np.int64)


def _in_order(gradient: torch.Tensor, entry: Entry) -> torch.Tensor:
    """A copy that is dense, and lies in memory as its parameter does if it must."""
    if not entry.ordered or not is_dense(entry.param):
        return gradient.contiguous()
    return torch.empty_like(entry.param, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


_TAKEN_AT_ONCE = 1 << 15
"""Bytes that CUDA copies from pageable memory without waiting for the device (up to 64 KiB): cheaper than pinned
memory, which has to be allocated, and watched until the device has read it."""


def copy_to(target: torch.Tensor, host: np.ndarray) -> None:
    """Copy a numpy table to a tensor without waiting for the device."""
    source = torch.from_numpy(host)
    if target.is_cuda and host.nbytes <= _TAKEN_AT_ONCE:
        target.copy_(source, non_blocking=True)
    elif target.is_cuda:
        pinned = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        pinned.copy_(source)
        target.copy_(pinned, non_blocking=True)
    else:
        target.copy_(source)


_LOW = 1 << 32  # most memory lies above this address: a lower one may be an offset from a null pointer


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


class GroupWatch:
    """Watches the hyperparameters of one param group."""

    def __init__(self, index: int, group: Mapping[str, Any], keys: Sequence[str]) -> None:
        self.index = index
        self.group = group
        self.keys = tuple(keys)
        self.value_of = group.get
        self._only_numbers_differ = False
        self.remember()

    is_mutable: bool  # whether a value can change and stay the same object
    values: tuple[Any, ...]
    """The remembered values; while they are these objects, and none is mutable, nothing has changed."""

    def _get(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(map(group.get, self.keys))

    def remember(self) -> None:
        """Remember the present values."""
        self.values = self._get(self.group)
        if self._only_numbers_differ:
            self._only_numbers_differ = False
            return
        chosen = self.chosen()
        self._statics = statics_of(chosen)
        self._tensors = [value for _, value in flat_numbers(chosen) if isinstance(value, torch.Tensor)]
        self._device_tensors = {name: value for name, value in flat_numbers(chosen) if _on_device(value)}
        self.is_mutable = bool(self._tensors) or any(map(_has_list, self.values))
        self._seen = _numbers(chosen) if self.is_mutable else []

    @property
    def on_device(self) -> bool:
        """Whether a hyperparameter is a tensor on a GPU, which only the device can read."""
        return bool(self._device_tensors)

    def changed(self) -> bool:
        """Whether a hyperparameter has another value, or another kind of value, than the remembered one."""
        now = self._get(self.group)
        self._only_numbers_differ = False
        if not self.is_mutable:
            if all(map(operator.is_, now, self.values)):
                return False
            if all(map(_both_numbers, now, self.values)):
                return self._other_numbers(now)
        chosen = self.chosen()
        numbers = _numbers(chosen)
        before = self._seen if self.is_mutable else _numbers(dict(zip(self.keys, self.values)))
        if numbers == before and statics_of(chosen) == self._statics:
            if not self.is_mutable:
                self.values = now
            return False
        self._refuse_invalid(numbers)
        return True

    def _other_numbers(self, now: tuple[Any, ...]) -> bool:
        """`changed` if plain numbers were replaced by plain numbers, as schedulers do at every step."""
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

    def same_statics(self) -> bool:
        """Whether flags, strings, None and the kinds of all values are the remembered ones."""
        return self._only_numbers_differ or statics_of(self.chosen()) == self._statics

    def same_tensors(self) -> bool:
        """Whether the same hyperparameters are on a GPU, in the same tensors."""
        if self._only_numbers_differ:
            return True
        now = {name: value for name, value in flat_numbers(self.chosen()) if _on_device(value)}
        before = self._device_tensors
        return now.keys() == before.keys() and all(now[name] is before[name] for name in now)

    def chosen(self) -> dict[str, Any]:
        """The watched entries of the group as they are now."""
        return dict(zip(self.keys, self._get(self.group)))


_NUMBERS = (float, int)


def _has_list(value: Any) -> bool:
    return isinstance(value, (list, Mapping)) or (type(value) is tuple and any(map(_has_list, value)))


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
