"""Stochastic rounding, up or down at random so that the stored value is unbiased, and its random bits.

The bits of an element are a function of four numbers: the optimizer's seed, the parameter's index among all, the step
count, and the element's index in the whole tensor. They do not depend on mesh, execution, tile or backend.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..graph import Builder, Value
from .format import Array, Storage, Term, evaluated, where

RANDOM_BITS = 16  # random bits per stored number


@dataclass(frozen=True)
class Stochastic(Storage):
    """A format with stochastic rounding: the probability to round up is the distance from the lower neighbour.

    Exactly representable values are kept, NaN and infinities included. Values beyond the largest finite number are
    rounded to nearest, and so become infinite.

    Source: Croci et al., "Stochastic rounding: implementation, error analysis and applications" (2022).
    """

    nearest: Any  # a format whose `store` accepts 16 random bits as an integer

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


_LARGEST_BFLOAT16, _LARGEST_FLOAT16 = torch.finfo(torch.bfloat16).max, torch.finfo(torch.float16).max


def element_at_random(number: Term, dtype: torch.dtype, random: Term) -> Term:
    """A number as an element of 16 bits.

    A bfloat16's bits are the upper half of a float32's: random bits are added to the lower half, which is cut off.
    For a float16 they are 13; its numbers below 2^-14 are multiples of 2^-24.
    """
    nearest, size = number.element(dtype).named("nearest"), number.function("abs").named("size")
    if dtype is torch.bfloat16:
        raised = (number.bits() + random) >> 16
        return where(size < _LARGEST_BFLOAT16, raised, nearest.bits()).of_bits(dtype)
    raised = (number.bits() + (random >> 3)) & -0x2000
    steps = ((size * 2.0**40).function("whole") + random) >> 16
    small = (steps.number() * 2.0**-24).bits() | (number.bits() & -0x80000000)
    finite = where(size < 2.0**-14, small, raised).of_bits().element(dtype)
    return where(size < _LARGEST_FLOAT16, finite.bits(), nearest.bits()).of_bits(dtype)


_FRACTION = 11
"""Fractional bits of numbers that are rounded stochastically to integers."""


def whole_at_random(number: Term, random: Term, plus: int = 0) -> Term:
    """One of the two integers around a number between -255 and 255, plus an even integer, in the lowest eight bits.

    The number is first rounded to a 2048th: an integer with rounding errors stays, for any random bits.
    """
    at_point = number + (1.5 * 2.0 ** (23 - _FRACTION) + plus)
    return ((at_point.bits() << (RANDOM_BITS - _FRACTION)) + random) >> RANDOM_BITS


_GOLDEN, _SPREAD = 0x9E3779B9, 0x9E3779B1
_ROUNDS = (((16, 0x21F0AAAD), (15, 0x735A2D97), 15), ((16, 0x2C1B3C6D), (13, 0x297A2D39), 16))
"""Shifts and factors of two 32-bit hashes.

Source: Wellons, "Prospecting for Hash Functions" (2018), and searches that followed it.
"""


def _integer(number: int) -> int:
    """The lowest 32 bits as a signed number."""
    return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1)


def _shifted(bits: Term, places: int) -> Term:
    """A logical shift to the right."""
    return (bits >> places) & ((1 << (32 - places)) - 1)


def _hashed(bits: Term, key: Term | None, further: bool = False) -> Term:
    """A 32-bit hash of the bits, and of a key if given."""
    (first, factor), (second, other), last = _ROUNDS[further]
    bits = (bits ^ _shifted(bits, first)) * _integer(factor)
    middle = _shifted(bits, second) if key is None else _shifted(bits, second) ^ key
    bits = (bits ^ middle) * _integer(other)
    return bits ^ _shifted(bits, last)


def stream_keys(low: Term, high: Term, count: Term) -> tuple[Term, Term]:
    """Return the keys of a parameter's random bits at a step."""
    key = _hashed(low + count * _integer(_GOLDEN), None).named("key")
    return key, _hashed(high ^ count, key, further=True)


def random_bits(slot: int, key_0: Term, key_1: Term, low: Term, high: Term) -> Term:
    """Return 16 random bits of an element: half of a hash whose last factor is shared by two slots."""
    key = (high * _integer(_GOLDEN) + key_1).named("key")
    (first, factor), (second, _), last = _ROUNDS[0]
    bits = low * _integer(_SPREAD) + key
    bits = (bits ^ _shifted(bits, first)) * _integer(factor)
    mixed = (bits ^ (_shifted(bits, second) ^ (key ^ key_0))).named("mixed")
    draw = (mixed * _integer(_factor(slot // 2))).named("draw")
    # The upper half is used directly; the lower half is mixed with the other bits.
    return _shifted(draw, 16) if slot % 2 else (draw ^ _shifted(draw, last)) & 0xFFFF


def _factor(pair: int) -> int:
    """Return an odd 32-bit factor; the constants decorrelate neighbours at all distances up to 2^17."""
    return _FACTORS[pair] if pair < len(_FACTORS) else _mixed(pair) >> 32 | 1


_FACTORS = (0x735A2D97, 0x1D0B14E5, 0x6E73E373)


def _loads(*names: str) -> list[Term]:
    build = Builder()
    return [Term(build, build.load(name, dtype="int32")) for name in names]


@functools.cache
def keys_graph() -> tuple[Value, Value]:
    """`stream_keys` of loads of `low`, `high` and `count`."""
    first, second = stream_keys(*_loads("low", "high", "count"))
    return first.value, second.value


@functools.cache
def bits_graph(slot: int) -> Value:
    """`random_bits` of loads of `key_0`, `key_1`, `low` and `high`."""
    return random_bits(slot, *_loads("key_0", "key_1", "low", "high")).value


def random_tensor(stream: int, count: int, slot: int, index: torch.Tensor) -> torch.Tensor:
    """Return the random bits of elements, int32."""

    def word(number: int) -> torch.Tensor:
        return torch.tensor(_integer(number), dtype=torch.int32, device=index.device)

    key_0, key_1 = evaluated(
        keys_graph(), {"low": word(stream), "high": word(stream >> 32), "count": word(count)}, torch.float32
    )
    # In 64 bits: conversions that overflow differ between devices.
    low = ((index & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    loads = {"key_0": key_0, "key_1": key_1, "low": low.to(torch.int32), "high": (index >> 32).to(torch.int32)}
    return evaluated((bits_graph(slot),), loads, torch.float32)[0]


def stream_of(seed: int, ordinal: int) -> int:
    """Return 64 bits, as a signed number, that select the random bits of a parameter."""
    bits = _mixed(_mixed(seed) + ordinal)
    return bits - (bits >> 63 << 64)


def _mixed(bits: int) -> int:
    """A 64-bit hash: a step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    bits = (bits + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return bits ^ bits >> 31
