"""Formats that store 16-bit parameters more precisely: the choices of `master_weights`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from .format import Array, Storage, dtype_name, stored_in, values_of


@dataclass(frozen=True)
class MasterFormat:
    """A format that stores a 16-bit parameter more precisely, with an additional buffer."""

    choice: bool | str  # the value of `master_weights`
    key: str  # the buffer's key in the state
    dtypes: tuple[torch.dtype, ...]  # supported dtypes of parameters
    storage: Callable[[torch.dtype], Storage]  # format of parameter and buffer, by the parameter's dtype
    begins_as_parameter: bool
    """Whether the buffer is initialized with the parameter, and detects writes of other code; otherwise with zeros."""

    @property
    def dtype(self) -> torch.dtype:
        """The buffer's dtype."""
        return self.storage(self.dtypes[0]).arrays("param")[1].dtype

    def values(self, param: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter in float32, a new tensor on the buffer's device."""
        tensors = {"param": param.detach().to(buffer.device), self.key: buffer}
        return values_of(self.storage(param.dtype), tensors, "param")

    def buffer_of(self, param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A new buffer for float32 values of a parameter."""
        buffer = torch.empty_like(values, dtype=self.dtype)
        stored_in(self.storage(param.dtype), {self.key: buffer}, "param", values)
        return buffer


@dataclass(frozen=True)
class Widened(Storage):
    """Base of formats that combine a 16-bit number and a second array into a float32."""

    dtype: torch.dtype = torch.bfloat16

    title = prefix = ""  # for generated code, and for the second array's name
    second = torch.bfloat16
    precision = torch.float32

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} with {dtype_name(self.second)} {self.prefix}"

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, self.dtype), Array(f"{self.prefix}_{name}", self.second))


MASTER_FORMATS: dict[bool | str, MasterFormat] = {}
"""The choices of `master_weights` except False, with their formats."""

Format = TypeVar("Format", bound=Callable[[torch.dtype], Storage])


def master_format(
    choice: bool | str, *, key: str, dtypes: tuple[torch.dtype, ...], begins_as_parameter: bool = False
) -> Callable[[Format], Format]:
    """Register a format for a choice of `master_weights`; arguments as for `MasterFormat`."""

    def enter(storage: Format) -> Format:
        MASTER_FORMATS[choice] = MasterFormat(choice, key, dtypes, storage, begins_as_parameter)
        return storage

    return enter
