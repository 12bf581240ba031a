"""Storage formats: how a buffer of a rule is stored in memory, as a graph to load and a graph to store."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..graph import Builder, Value, ancestors, folded
from ..graph.terms import Term, dtype_name, where
from .blocks import BLOCK, cut, joined, rows_of


def fused(left: Term, right: Term | float, plus: Term | float) -> Term:
    """A product plus a number, with a single rounding."""
    return left.function("fused", right, plus)


def minimum(left: Term, right: Term | float) -> Term:
    """The smaller of two terms; the second where either is NaN."""
    return where(left < right, left, right)


def maximum(left: Term, right: Term | float) -> Term:
    """The larger of two terms; the second where either is NaN."""
    return where(left > right, left, right)


def if_rounds_to(high: Term, value: Term) -> Term:
    """A number stored as its nearest 16-bit element and a correction; the element's number if the two do not match."""
    # On a mismatch other code has written the element. Bits are compared, so that NaN equals itself and zeros differ.
    rounded = value.element(getattr(torch, high.value.dtype)).named("rounded")
    return where(high.bits().same(rounded.bits()), value, high.number()).named("followed")


def near_bits(high: Term, distance: Term) -> Term:
    """Return the float32 at a distance in bits from a bfloat16; the bfloat16 itself if the result is NaN."""
    number = (high.number().bits() + distance).of_bits().named("number")
    # A distance across zero or beyond infinity belongs to a bfloat16 that other code has overwritten.
    # A distance of at most 16 bits crosses zero only from zero itself, and gives NaN.
    return where(number.function("isnan"), high.number(), number).named("followed")


def magnitude(term: Term) -> Term:
    """The absolute value of an integer; the bits of a number without sign, ordered as magnitudes, NaN last."""
    if term.value.dtype == "int32":
        return where(term < 0, -term, term)
    return term.bits() & 0x7FFFFFFF


def with_sign_of(size: Term, number: Term) -> Term:
    """A non-negative number with the sign of another."""
    return (size.bits() | (number.bits() & -0x80000000)).of_bits()


@dataclass(frozen=True)
class Array:
    """An array in memory: an entry per element of the parameter, or per several neighbours of a row."""

    name: str
    dtype: torch.dtype  # dtype of its entries
    elements: int = 1  # elements per entry: 2 for two elements in a byte, `BLOCK` for a number per block

    @property
    def follows_elements(self) -> bool:
        """Whether it has an entry per element or two, which `offload` moves, and not per block."""
        return self.elements < BLOCK


class Storage(Protocol):
    """A storage format, hashable; kernels and tensor code derive from `load` and `store`."""

    @property
    def title(self) -> str:
        """An identifier for function names in generated code."""

    @property
    def precision(self) -> torch.dtype:
        """The dtype whose precision stored values have."""

    def arrays(self, name: str) -> tuple[Array, ...]:
        """Return the arrays that hold a buffer of this name."""

    def load(self, elements: Sequence[Term]) -> Term:
        """Return the number that elements of the arrays represent."""

    def store(self, value: Term) -> tuple[Term, ...]:
        """Return the elements that store a number, one per array."""

    def is_exact(self, compute: torch.dtype) -> bool:
        """Whether a value of the compute dtype is restored exactly."""
        return False

    def __hash__(self) -> int:
        return object.__hash__(self)


def is_coarse(storage: Storage) -> bool:
    """Whether a format rounds so coarsely that two units in float32's last place are negligible."""
    return getattr(storage, "is_coarse", storage.precision.itemsize <= 2)


@dataclass(frozen=True)
class Codec:
    """A format's graphs."""

    arrays: tuple[Array, ...]  # the arrays of a buffer called `stored`
    loaded: Value  # the number, from loads of these arrays
    stored: tuple[Value, ...]  # the elements, from a load of `number`

    @property
    def reads(self) -> tuple[int, ...]:
        """Positions of the arrays that `loaded` reads."""
        used = {value.attribute for value in ancestors([self.loaded]) if value.operation == "load"}
        return tuple(place for place, array in enumerate(self.arrays) if array.name in used)

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether the format is a single element, rounded to nearest."""
        return self.is_element and self.stored[0].operation == "narrow"

    @functools.cached_property
    def is_element(self) -> bool:
        """Whether the format is a single element whose number is the value."""
        return self.loaded.operation == "widen" and self.loaded.args[0].operation == "load"

    @functools.cached_property
    def is_random(self) -> bool:
        """Whether random bits round the value."""
        return any(value.attribute == "random" for value in ancestors(self.stored) if value.operation == "load")

    @property
    def has_blocks(self) -> bool:
        """Whether an array has entries for several elements."""
        return any(array.elements > 1 for array in self.arrays)

    @property
    def is_packed(self) -> bool:
        """Whether two elements share a byte."""
        return any(array.elements == 2 for array in self.arrays)

    @functools.cached_property
    def largest(self) -> Value | None:
        """The maximum over a block; None without blocks."""
        return next((value for value in ancestors(self.stored) if value.operation == "block_max"), None)


@functools.cache
def codec_of(storage: Storage) -> Codec:
    """Return the graphs of a format."""
    build, arrays = Builder(), storage.arrays("stored")
    elements = [Term(build, build.load(array.name, dtype=dtype_name(array.dtype))) for array in arrays]
    stored = storage.store(Term(build, build.load("number")))
    return Codec(arrays, storage.load(elements).value, tuple(term.value for term in stored))


def read_arrays(storage: Storage, name: str) -> tuple[Array, ...]:
    """Return the arrays that are read for a buffer's value."""
    arrays = storage.arrays(name)
    return tuple(arrays[place] for place in codec_of(storage).reads)


def values_of(
    storage: Storage,
    tensors: Mapping[str, torch.Tensor],
    name: str,
    compute: torch.dtype = torch.float32,
    shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return a buffer's values as a new tensor."""
    codec = codec_of(storage)
    loads = {array.name: tensors[own.name] for array, own in zip(codec.arrays, storage.arrays(name))}
    if codec.has_blocks:
        codes = loads[codec.arrays[0].name]
        shape, device = tuple(codes.shape if shape is None else shape), codes.device
        columns = rows_of(shape)[1]
        if not math.prod(shape):
            return torch.zeros(shape, dtype=compute, device=device)
        # An offloaded optimizer has codes on the host, and scales on the device.
        loads = {array.name: cut(loads[array.name].to(device), columns, array.elements) for array in codec.arrays}
        (values,) = evaluated((codec.loaded,), loads, torch.float32)
        return joined(values, shape, columns).to(compute)
    (values,) = evaluated((codec.loaded,), loads, compute if codec.is_plain else torch.float32)
    shared = any(values is tensor for tensor in loads.values())
    return values.clone() if shared else values.to(compute)


def stored_in(
    storage: Storage,
    tensors: Mapping[str, torch.Tensor],
    name: str,
    values: torch.Tensor,
    shape: Sequence[int] | None = None,
    random: torch.Tensor | None = None,
) -> None:
    """Write new values, which may be broadcast, into a buffer's arrays; arguments as in `values_of`."""
    storage = getattr(storage, "nearest", storage) if random is None else storage
    codec = codec_of(storage)
    number = values if codec.is_plain else values.to(torch.float32)
    elements = {"number": number} if random is None else {"number": number, "random": random}
    arrays, columns = storage.arrays(name), 0
    if codec.has_blocks:
        shape = tuple(tensors[arrays[0].name].shape if shape is None else shape)
        columns = rows_of(shape)[1]
        if not math.prod(shape):
            return
        elements["number"] = number.expand(shape)
        elements = {key: cut(element, columns) for key, element in elements.items()}
    for array, entries in zip(arrays, evaluated(codec.stored, elements, number.dtype)):
        if array.name in tensors:
            tensor = tensors[array.name]
            in_blocks = codec.has_blocks
            tensor.copy_(joined(entries, tensor.shape, columns, array.elements) if in_blocks else entries)


def evaluated(roots: tuple[Value, ...], loads: Mapping[Any, torch.Tensor], compute: torch.dtype) -> list[torch.Tensor]:
    """Evaluate a graph of terms on tensors."""
    results = folded(roots, functools.partial(_apply, loads, compute))
    return [results[id(root)] for root in roots]


def _apply(loads: Mapping[Any, torch.Tensor], compute: torch.dtype, value: Value, args: list[Any]) -> Any:
    operation = value.operation
    if operation == "load":
        return loads[value.attribute]
    if operation == "constant":
        return value.attribute
    if operation == "widen":
        return args[0].to(compute)
    if operation == "narrow":
        return args[0].to(getattr(torch, value.dtype))
    if operation == "bits":
        is_number = args[0].is_floating_point()
        return (args[0].view(INTEGERS[args[0].dtype.itemsize]) if is_number else args[0]).to(torch.int32)
    if operation == "of_bits":
        dtype, bits = getattr(torch, value.dtype or "float32"), args[0]
        return bits.to(INTEGERS[dtype.itemsize]).view(dtype) if dtype.is_floating_point else bits.to(dtype)
    if operation == "whole":
        return args[0].to(torch.int32)
    if operation == "real":
        return args[0].to(torch.float32)
    if operation in ("sqrt", "root") and args[0].dtype is torch.float32:
        # torch's float32 square root on CPUs is off by a unit in the last place for some numbers.
        return args[0].double().sqrt().float()
    if operation == "block_max":
        return (args[0] ^ _SIGN).amax(1, keepdim=True) ^ _SIGN
    if operation == "nibble":
        both = torch.stack([args[0] & 15, (args[0] >> 4) & 15], 2)
        return both.reshape(len(both), -1).to(torch.int32)
    if operation == "pack":
        pairs = args[0].reshape(len(args[0]), -1, 2)
        return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).to(torch.uint8).view(getattr(torch, value.dtype))
    return _ON_TENSORS.get(operation, getattr(torch, operation, None))(*args)


_ON_TENSORS: Mapping[str, Any] = {
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "bit_and": torch.bitwise_and,
    "bit_or": torch.bitwise_or,
    "bit_xor": torch.bitwise_xor,
    "quotient": torch.div,
    "rough_root": torch.sqrt,
    "rough_ceiling": lambda left, right: (left / right).ceil(),
    # The product is exact in float64; so is the sum, apart from negligible terms.
    "fused": lambda left, right, plus: (_wide(left) * _wide(right) + _wide(plus)).float(),
    "within": lambda number, bound: torch.where(number < bound, number, bound),
    "float8_number": lambda number, element: number,
    "float8_element": lambda element, number: element,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "not": torch.logical_not,
}

_SIGN = -(2**31)


def _wide(number: torch.Tensor | float) -> Any:
    return number.double() if isinstance(number, torch.Tensor) else number


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
