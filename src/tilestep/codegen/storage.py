"""How a buffer of a rule is kept in memory: a pair, load and store, that code generation puts around the rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["Array", "Body", "Master", "Plain", "Remainder", "Storage", "dtype_name"]

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

    def join(self, function: str, arrays: Sequence[Array]) -> str:
        """The expression of the value that a function of the backend makes of the arrays' elements as they are."""

    def split(self, function: str, arrays: Sequence[Array], value: str) -> None:
        """Emit the store of the elements that a function of the backend makes of a value, one for each array."""


class Storage(Protocol):
    """A storage format: as code around a rule, `load` and `store`, and on tensors, `value` and `keep`."""

    @property
    def precision(self) -> torch.dtype:
        """The dtype whose precision a kept value has."""

    def arrays(self, name: str) -> tuple[Array, ...]:
        """The arrays that hold a buffer of this name."""

    def load(self, body: Body, name: str) -> str:
        """The expression of the buffer's value."""

    def store(self, body: Body, name: str, value: str) -> None:
        """Emit what keeps a new value."""

    def value(self, tensors: Mapping[str, torch.Tensor], name: str, compute: torch.dtype) -> torch.Tensor:
        """The buffer's values as a new tensor; `tensors` has its arrays by name."""

    def keep(self, tensors: Mapping[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
        """Write new values, which may be broadcast, into the buffer's arrays."""

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

    def value(self, tensors: Mapping[str, torch.Tensor], name: str, compute: torch.dtype) -> torch.Tensor:
        return tensors[name].to(compute, copy=True)

    def keep(self, tensors: Mapping[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
        tensors[name].copy_(value)

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

    def value(self, tensors: Mapping[str, torch.Tensor], name: str, compute: torch.dtype) -> torch.Tensor:
        return tensors[f"master_{name}"].to(compute, copy=True)

    def keep(self, tensors: Mapping[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
        for array in self.arrays(name):
            tensors[array.name].copy_(value)

    @property
    def precision(self) -> torch.dtype:
        return self.master_dtype

    def is_exact(self, compute: torch.dtype) -> bool:
        return self.master_dtype is compute


@dataclass(frozen=True)
class Remainder:
    """A float32 as the bfloat16 nearest to it, and by how many units in float32's last place it is off that.

    The bits of a bfloat16 are the upper half of a float32's, so the difference of the bits is what rounding has taken
    away, from -32768 to 32768 units. Of these only 32768 does not fit 16 bits: a tie that was rounded down to even. It
    is kept as 32767, which leaves the bfloat16 what rounding makes of the value, and the value one unit off. NaN stays
    NaN, without its payload; everything else comes back as it was, by an addition of integers.

    Source: apex's DistributedFusedAdam has the same idea as `store_param_remainders`.
    """

    def __str__(self) -> str:
        return "bfloat16 with int16 remainder"

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, torch.bfloat16), Array(f"remainder_{name}", torch.int16))

    def load(self, body: Body, name: str) -> str:
        return body.join("join_remainder", self.arrays(name))

    def store(self, body: Body, name: str, value: str) -> None:
        body.split("split_remainder", self.arrays(name), value)

    @staticmethod
    def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """The float32 values of bfloat16 ones and their remainders.

        Example:
            >>> values = torch.tensor([1 / 3, -1e-40, torch.inf])
            >>> torch.equal(Remainder.joined(*Remainder.halves(values)), values)
            True
        """
        return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)

    @staticmethod
    def halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 values as bfloat16 ones and remainders, int16.

        Example:
            >>> high, low = Remainder.halves(torch.tensor([1.0, 1 + 2**-23, 1 + 2**-8]))
            >>> high.tolist(), low.tolist()
            ([1.0, 1.0, 1.0], [0, 1, 32767])
        """
        high = value.to(torch.bfloat16)
        low = value.view(torch.int32) - (high.view(torch.int16).to(torch.int32) << 16)
        return high, torch.where(value.isnan(), 0, low).clamp(max=32767).to(torch.int16)

    def value(self, tensors: Mapping[str, torch.Tensor], name: str, compute: torch.dtype) -> torch.Tensor:
        return self.joined(tensors[name], tensors[f"remainder_{name}"]).to(compute)

    def keep(self, tensors: Mapping[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
        high, low = self.halves(value.to(torch.float32))
        tensors[name].copy_(high)
        tensors[f"remainder_{name}"].copy_(low)

    @property
    def precision(self) -> torch.dtype:
        return torch.float32

    def is_exact(self, compute: torch.dtype) -> bool:
        return False
