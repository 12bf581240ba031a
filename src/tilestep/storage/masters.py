"""The formats that keep parameters of 16 bits more precisely: what `master_weights` may say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from .format import Storage, stored_in, values_of


@dataclass(frozen=True)
class MasterFormat:
    """One way to keep a parameter of 16 bits more precisely, with a buffer beside it."""

    choice: bool | str  # what `master_weights` says for it
    key: str  # the buffer's key in the state
    dtypes: tuple[torch.dtype, ...]  # of the parameters that can be kept so
    storage: Callable[[torch.dtype], Storage]  # of a parameter and its buffer, by the parameter's dtype
    begins_as_parameter: bool
    """Whether the buffer begins with the parameter's values, and shows writes of other code; else with zeros."""

    @property
    def dtype(self) -> torch.dtype:
        """The buffer's dtype."""
        return self.storage(self.dtypes[0]).arrays("param")[1].dtype

    def values(self, param: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter in float32, as a new tensor where the buffer is."""
        tensors = {"param": param.detach().to(buffer.device), self.key: buffer}
        return values_of(self.storage(param.dtype), tensors, "param")

    def buffer_of(self, param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A new buffer that keeps float32 values of a parameter."""
        buffer = torch.empty_like(values, dtype=self.dtype)
        stored_in(self.storage(param.dtype), {self.key: buffer}, "param", values)
        return buffer


@dataclass(frozen=True)
class Widened:
    """What formats share that make a float32 of a bfloat16 and something beside it."""

    dtype: torch.dtype = torch.bfloat16

    words = title = ""  # as people and generated code call it
    precision = torch.float32

    def __str__(self) -> str:
        return self.words

    def is_exact(self, compute: torch.dtype) -> bool:
        return False


MASTER_FORMATS: dict[bool | str, MasterFormat] = {}
"""What `master_weights` can say beside False, and the format that it stands for."""

Format = TypeVar("Format", bound=Callable[[torch.dtype], Storage])


def master_format(
    choice: bool | str, *, key: str, dtypes: tuple[torch.dtype, ...], begins_as_parameter: bool = False
) -> Callable[[Format], Format]:
    """Enter a format under what `master_weights` says for it; arguments as for `MasterFormat`."""

    def enter(storage: Format) -> Format:
        MASTER_FORMATS[choice] = MasterFormat(choice, key, dtypes, storage, begins_as_parameter)
        return storage

    return enter
