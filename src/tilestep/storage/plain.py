"""A single array of one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .format import Array, Term, dtype_name
from .stochastic import element_at_random


@dataclass(frozen=True)
class Plain:
    """A single array of one dtype, rounded to nearest even unless random bits are given."""

    dtype: torch.dtype

    def __str__(self) -> str:
        return dtype_name(self.dtype)

    @property
    def title(self) -> str:
        return dtype_name(self.dtype)

    @property
    def precision(self) -> torch.dtype:
        return self.dtype

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, self.dtype),)

    def load(self, elements: Sequence[Term]) -> Term:
        return elements[0].number()

    def store(self, value: Term, random: Term | None = None) -> tuple[Term, ...]:
        return (value.element(self.dtype) if random is None else element_at_random(value, self.dtype, random),)

    def is_exact(self, compute: torch.dtype) -> bool:
        return self.dtype is compute
