"""A float32 master of a 16-bit parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .format import Array, Term, dtype_name, if_rounds_to
from .masters import master_format


@master_format(True, key="master_param", dtypes=(torch.bfloat16, torch.float16), begins_as_parameter=True)
@dataclass(frozen=True)
class Master:
    """A float32 master; its rounded 16-bit copy is written in the same pass.

    A copy that differs from the rounded master was written by other code, and overrides the master.
    """

    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} with float32 master"

    @property
    def title(self) -> str:
        return f"master_of_{dtype_name(self.dtype)}"

    @property
    def precision(self) -> torch.dtype:
        return torch.float32

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, self.dtype), Array(f"master_{name}", torch.float32))

    def load(self, elements: Sequence[Term]) -> Term:
        copy, master = elements
        return if_rounds_to(copy, master.number().named("value"))

    def store(self, value: Term) -> tuple[Term, ...]:
        return value.element(self.dtype).named("copy"), value.element(torch.float32).named("master")

    def is_exact(self, compute: torch.dtype) -> bool:
        return compute is torch.float32
