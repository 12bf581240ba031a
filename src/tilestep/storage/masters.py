"""Formats that store 16-bit parameters more precisely: the choices of `master_weights`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from .format import Array, Storage, dtype_name, stored_in, values_of


@dataclass(frozen=True)
class MasterFormat(Storage):
    """Base of formats that store a 16-bit parameter more precisely, as a float32, with an additional buffer."""

    dtype: torch.dtype = torch.bfloat16  # of the parameter

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)  # supported dtypes of parameters
    key = ""  # the buffer's key in the state
    buffer_dtype = torch.bfloat16
    begins_as_parameter = False
    """Whether the buffer is initialized with the parameter, and detects writes of other code; otherwise with zeros."""
    title = ""  # for generated code
    precision = torch.float32

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} with {dtype_name(self.buffer_dtype)} {self.key.removesuffix('_param')}"

    def arrays(self, name: str) -> tuple[Array, ...]:
        return (Array(name, self.dtype), Array(self.key.removesuffix("param") + name, self.buffer_dtype))

    @classmethod
    def values(cls, param: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter in float32, a new tensor on the buffer's device."""
        tensors = {"param": param.detach().to(buffer.device), cls.key: buffer}
        return values_of(cls(param.dtype), tensors, "param")

    @classmethod
    def buffer_of(cls, param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A new buffer for float32 values of a parameter."""
        buffer = torch.empty_like(values, dtype=cls.buffer_dtype)
        stored_in(cls(param.dtype), {cls.key: buffer}, "param", values)
        return buffer


MASTER_FORMATS: dict[bool | str, type[MasterFormat]] = {}
"""The choices of `master_weights` except False, with their formats."""

Format = TypeVar("Format", bound=type[MasterFormat])


def master_format(choice: bool | str) -> Callable[[Format], Format]:
    """Register a format for a choice of `master_weights`."""

    def enter(kind: Format) -> Format:
        MASTER_FORMATS[choice] = kind
        return kind

    return enter
