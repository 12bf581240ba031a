"""How a buffer of a rule is kept in memory: a pair, load and store, that code generation puts around the rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Array", "Body", "Master", "Plain", "Storage", "dtype_name"]

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without `torch.`.

    Example:
        >>> import torch
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Array:
    """One array in memory, element for element beside the parameter."""

    name: str
    dtype: torch.dtype


class Body(Protocol):
    """What a backend offers a storage while it writes a tile's code."""

    def read(self, array: Array) -> str:
        """The expression of an array's element in the compute type."""

    def write(self, array: Array, value: str) -> None:
        """Emit the rounding store of a value to an array's element."""


class Storage(Protocol):
    """A storage format."""

    @property
    def precision(self) -> torch.dtype:
        """The dtype whose precision a kept value has."""

    def arrays(self, name: str) -> tuple[Array, ...]:
        """The arrays that hold a buffer of this name."""

    def load(self, body: Body, name: str) -> str:
        """The expression of the buffer's value."""

    def store(self, body: Body, name: str, value: str) -> None:
        """Emit what keeps a new value."""

    def is_exact(self, compute: torch.dtype) -> bool:
        """Whether a value of the compute dtype comes back unchanged."""


@dataclass(frozen=True)
class Plain:
    """One array of one dtype, rounded to nearest even."""

    dtype: torch.dtype

    def __str__(self) -> str:
        return dtype_name(self.dtype)

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, self.dtype),)

    def load(self, body: Body, name: str) -> str:
        return body.read(Array(name, self.dtype))

    def store(self, body: Body, name: str, value: str) -> None:
        body.write(Array(name, self.dtype), value)

    @property
    def precision(self) -> torch.dtype:
        return self.dtype

    def is_exact(self, compute: torch.dtype) -> bool:
        return self.dtype is compute


@dataclass(frozen=True)
class Master:
    """A float32 master with a low-precision copy that is written in the same pass and never read."""

    dtype: torch.dtype
    master_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} with {dtype_name(self.master_dtype)} master"

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, self.dtype), Array(f"master_{name}", self.master_dtype))

    def load(self, body: Body, name: str) -> str:
        return body.read(self.arrays(name)[1])

    def store(self, body: Body, name: str, value: str) -> None:
        for array in self.arrays(name):
            body.write(array, value)

    @property
    def precision(self) -> torch.dtype:
        return self.master_dtype

    def is_exact(self, compute: torch.dtype) -> bool:
        return self.master_dtype is compute
