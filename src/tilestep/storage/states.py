"""Formats of states: the choices of `state_dtype`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..errors import did_you_mean
from .blocks import BLOCK
from .format import Array, Storage, dtype_name
from .plain import Plain

STATE_FORMATS: dict[str, Callable[[bool], Storage]] = {}
"""Formats by their names in `state_dtype`.

Each makes the variant for a signed state, or for a state that is never negative. A dtype is
looked up by its name.
"""


@dataclass(frozen=True)
class Blocks(Storage):
    """Base of block formats: a variant for signed states and a variant for states that are never negative."""

    signed: bool

    words = titles = ("", "")  # of both variants, for messages and for generated code
    precision = torch.bfloat16
    codes = (torch.int8, torch.uint8)  # dtypes of both variants
    scales, together = "scales", 1  # name of the array of scales, and number of elements per entry of codes

    def __str__(self) -> str:
        return self.words[not self.signed]

    @property
    def title(self) -> str:
        return self.titles[not self.signed]

    def arrays(self, name: str) -> tuple[Array, ...]:
        codes = Array(f"{name}_codes", self.codes[not self.signed], self.together)
        return (codes, Array(f"{name}_{self.scales}", torch.bfloat16, BLOCK))


Format = TypeVar("Format", bound=Callable[[bool], Storage])


def blocks_format(choice: str) -> Callable[[Format], Format]:
    """Register a format for a choice of `state_dtype`; its constructor takes the flag `signed`."""

    def enter(storage: Format) -> Format:
        STATE_FORMATS[choice] = storage
        return storage

    return enter


for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    STATE_FORMATS[dtype_name(_dtype)] = lambda signed, dtype=_dtype: Plain(dtype)  # type: ignore[misc]


def kept_in_blocks(tensors: Mapping[str, Any], name: str) -> Storage | None:
    """Return the block format of a state, found by names and dtypes of its arrays; None for other formats."""
    for storage, arrays in _blocks(name):
        if arrays[1].name in tensors and all(getattr(tensors.get(a.name), "dtype", None) is a.dtype for a in arrays):
            return storage
    return None


def states_in_blocks(tensors: Mapping[str, Any]) -> dict[str, Storage]:
    """Return the blockwise states of a parameter, with their formats."""
    suffixes = {arrays[0].name for _, arrays in _blocks("")}
    names = [name.removesuffix(suffix) for name in tensors for suffix in suffixes if name.endswith(suffix)]
    found = {name: kept_in_blocks(tensors, name) for name in names}
    return {name: storage for name, storage in found.items() if storage is not None}


def with_code_names(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved state with current names: earlier revisions stored the codes under the name of the state."""
    renamed = {
        name: f"{name}{codes.name}"
        for name, value in tensors.items()
        for _, (codes, scales) in _blocks("")
        if getattr(value, "dtype", None) is codes.dtype
        and getattr(tensors.get(f"{name}{scales.name}"), "dtype", None) is scales.dtype
    }
    return {renamed.get(name, name): value for name, value in tensors.items()} if renamed else tensors


@functools.cache
def _blocks(name: str) -> tuple[tuple[Storage, tuple[Array, ...]], ...]:
    """The block formats with the arrays that a state of this name would have."""
    made = [make(signed) for make in STATE_FORMATS.values() for signed in (True, False)]
    return tuple((storage, storage.arrays(name)) for storage in made if len(storage.arrays(name)) > 1)


def entries_of(tensors: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Return the number of elements per entry, for each array of blockwise states."""
    entries: dict[str, int] = {}
    for name in names:
        if tensors.keys().isdisjoint(block_names(name)):
            continue
        storage = kept_in_blocks(tensors, name)
        if storage is not None:
            entries.update({array.name: array.elements for array in storage.arrays(name)})
    return entries


@functools.cache
def block_names(name: str) -> tuple[str, ...]:
    """Return the possible names of the arrays of a blockwise state: codes and scales."""
    return tuple(dict.fromkeys(array.name for _, arrays in _blocks(name) for array in arrays))


def state_format(choice: Any, signed: bool = True) -> Storage:
    """Return the format of a dtype or a name."""
    is_dtype = isinstance(choice, torch.dtype)
    name = dtype_name(choice) if is_dtype else choice
    if (is_dtype and not choice.is_floating_point) or not isinstance(name, str) or name not in STATE_FORMATS:
        hint = did_you_mean(name.replace("fp", "float"), STATE_FORMATS) if isinstance(name, str) else ""
        possible = f"it must be one of {', '.join(map(repr, STATE_FORMATS))}{hint and f'; {hint}'}"
        raise ValueError(f"Invalid state_dtype: {choice!r}; {possible}")
    return STATE_FORMATS[name](signed)
