"""Stochastic rounding: up or down by chance, so that what is kept is the number on average; and its random bits.

The bits of an element are a function of four numbers: the optimizer's seed, the parameter's place among all, the step
count, and the element's index in the whole tensor. No mesh, schedule, tile or backend changes any of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..graph import Builder, Value
from .format import Array, Storage, Term, evaluated, magnitude, maximum, minimum, where

RANDOM_BITS = 16  # random bits for each number that is kept


class Rounding(Storage, Protocol):
    """A format that can be told to round at random."""

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        """As `Storage.store`; with 16 random bits as an integer, rounded by them."""


@dataclass(frozen=True)
class Stochastic:
    """Another format, with what is kept rounded up as often as the number is nearer to what is above.

    What the format has exactly stays, NaN and infinities too. Beyond the largest number, numbers are rounded to the
    nearest: infinite becomes what rounding to nearest makes infinite.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications" (2022).
    """

    nearest: Rounding

    def __str__(self) -> str:
        return f"{self.nearest}, rounded at random"

    @property
    def title(self) -> str:
        return f"{self.nearest.title}_at_random"

    @property
    def precision(self) -> torch.dtype:
        return self.nearest.precision

    def arrays(self, name: str) -> tuple[Array, ...]:
        return self.nearest.arrays(name)

    def load(self, elements: Sequence[Term]) -> Term:
        return self.nearest.load(elements)

    def store(self, value: Term) -> tuple[Term, ...]:
        return self.nearest.store(value, Term(value.build, value.build.load("random", dtype="int32")))

    def is_exact(self, compute: torch.dtype) -> bool:
        return False


def element_at_random(number: Term, dtype: torch.dtype, random: Term) -> Term:
    """A number as an element of 16 bits.

    A bfloat16's bits are the upper half of a float32's: random bits are added to the lower half, and cut off. Those of
    a float16 are 13; its numbers below 2^-14 are multiples of 2^-24.
    """
    nearest, size = number.element(dtype).named("nearest"), magnitude(number).named("size")
    if dtype is torch.bfloat16:
        raised = (number.bits() + random) >> 16
        return where(size < 0x7F7F0000, raised, nearest.bits()).of_bits(dtype)
    raised = (number.bits() + (random >> 3)) & -0x2000
    steps = ((number.function("abs") * 2.0**40).whole() + random) >> 16
    small = (steps.number() * 2.0**-24).bits() | (number.bits() & -0x80000000)
    finite = where(size < 0x38800000, small, raised).of_bits().element(dtype)
    return where(size < 0x477FE000, finite.bits(), nearest.bits()).of_bits(dtype)


def code_at_random(
    nearest: Term, is_exact: Term, number: Term, number_of: Callable[[Term], Term], random: Term, codes: tuple[int, int]
) -> Term:
    """One of the two codes whose numbers are around a number, by how near it is to them."""
    near = number_of(nearest).named("near")
    is_above = (near > number).named("is_above")
    other = where(is_above, nearest - 1, nearest + 1).named("other")
    far = number_of(other).named("far")
    lower, upper = where(is_above, far, near).named("lower"), where(is_above, near, far).named("upper")
    rises = ((number - lower) * 2.0**RANDOM_BITS > random.number() * (upper - lower)).named("rises")
    chosen = where(rises, where(is_above, nearest, other), where(is_above, other, nearest))
    least, most = codes
    return where(is_exact, nearest, maximum(minimum(chosen, most), least)).named("chosen")


def chance(random: Term) -> Term:
    """A number between 0 and 1 by 11 random bits, at least 2^-12 from either.

    A number rises to the code above where its share of the way there is larger. So a share that is off by less counts
    as none or all of the way: from either code a number is at, roughly computed ones lead to the same.
    """
    return (((random << 7) & 0x7FF000) | 0x3F800800).of_bits() - 1.0


_GOLDEN = 0x9E3779B9
_ROUNDS = (((16, 0x21F0AAAD), (15, 0x735A2D97), 15), ((16, 0x2C1B3C6D), (13, 0x297A2D39), 16))
"""Shifts and factors of a hash of 32 bits; of the first and of further draws.

Source: Wellons, "Prospecting for Hash Functions" (2018), and searches that followed it.
"""


def _integer(number: int) -> int:
    """32 bits as a signed number."""
    return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1)


def _shifted(bits: Term, places: int) -> Term:
    """Bits moved right, with zeros behind them."""
    return (bits >> places) & ((1 << (32 - places)) - 1)


def _hashed(bits: Term, key: Term | None, further: bool = False) -> Term:
    """32 bits of which each depends on all, and on a key's where there is one."""
    (first, factor), (second, other), last = _ROUNDS[further]
    bits = (bits ^ _shifted(bits, first)) * _integer(factor)
    middle = _shifted(bits, second) if key is None else _shifted(bits, second) ^ key
    bits = (bits ^ middle) * _integer(other)
    return bits ^ _shifted(bits, last)


def stream_keys(low: Term, high: Term, count: Term) -> tuple[Term, Term]:
    """The keys of a parameter's bits at a step."""
    key = _hashed(low + count * _integer(_GOLDEN), None).named("key")
    return key, _hashed(high ^ count, key, further=True)


def random_bits(slot: int, key_0: Term, key_1: Term, low: Term, high: Term) -> Term:
    """16 random bits of an element: of its first draw of 32 bits for slots 0 and 1, of a further one for others."""
    key = (high * _integer(_GOLDEN) + key_1).named("key")
    draw = _hashed(low + key, key ^ key_0).named("draw")
    for further in range(slot // 2):
        draw = _hashed(draw + _integer(_GOLDEN * (further + 1)), key, further=True).named("draw")
    return _shifted(draw, 16) if slot % 2 else draw & 0xFFFF


@functools.cache
def keys_graph() -> tuple[Value, Value]:
    """`stream_keys` of loads of `low`, `high` and `count`."""
    build = Builder()
    keys = stream_keys(*(Term(build, build.load(name, dtype="int32")) for name in ("low", "high", "count")))
    return keys[0].value, keys[1].value


@functools.cache
def bits_graph(slot: int) -> Value:
    """`random_bits` of loads of `key_0`, `key_1`, `low` and `high`."""
    build = Builder()
    names = ("key_0", "key_1", "low", "high")
    return random_bits(slot, *(Term(build, build.load(name, dtype="int32")) for name in names)).value


def random_tensor(stream: int, count: int, slot: int, index: torch.Tensor) -> torch.Tensor:
    """The random bits of elements, int32."""

    def word(number: int) -> torch.Tensor:
        return torch.tensor(_integer(number), dtype=torch.int32, device=index.device)

    key_0, key_1 = evaluated(
        keys_graph(), {"low": word(stream), "high": word(stream >> 32), "count": word(count)}, torch.float32
    )
    # By way of 64 bits: conversions of what does not fit are another number on some devices.
    low = ((index & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    given = {"key_0": key_0, "key_1": key_1, "low": low.to(torch.int32), "high": (index >> 32).to(torch.int32)}
    return evaluated((bits_graph(slot),), given, torch.float32)[0]


def stream_of(seed: int, ordinal: int) -> int:
    """The 64 bits, as a signed number, that make the random bits of a parameter its own."""
    bits = _mixed(_mixed(seed) + ordinal)
    return bits - (bits >> 63 << 64)


def _mixed(bits: int) -> int:
    """64 bits of which each depends on all: a step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    bits = (bits + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return bits ^ bits >> 31
