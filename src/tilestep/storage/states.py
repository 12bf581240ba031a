"""What a state can be kept in: what `state_dtype` may say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..errors import did_you_mean
from .format import Array, Storage, dtype_name
from .plain import Plain

STATE_FORMATS: dict[str, Callable[[bool], Storage]] = {}
"""Formats by the names that `state_dtype` can give, for a state that is signed or for one that is never negative; those
of dtypes stand for the dtypes too."""


@dataclass(frozen=True)
class Blocks:
    """What formats of blocks share: they have one way for signed states, and one for those that are never negative."""

    signed: bool

    words = titles = ("", "")  # as people and generated code call the two
    precision = torch.bfloat16

    def __str__(self) -> str:
        return self.words[not self.signed]

    @property
    def title(self) -> str:
        return self.titles[not self.signed]

    def is_exact(self, compute: torch.dtype) -> bool:
        return False


Format = TypeVar("Format", bound=Callable[[bool], Storage])


def blocks_format(choice: str) -> Callable[[Format], Format]:
    """Enter a format under what `state_dtype` says for it; made with whether the state is signed."""

    def enter(storage: Format) -> Format:
        STATE_FORMATS[choice] = storage
        return storage

    return enter


for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    STATE_FORMATS[dtype_name(_dtype)] = lambda signed, dtype=_dtype: Plain(dtype)  # type: ignore[misc]


def kept_in_blocks(tensors: Mapping[str, Any], name: str) -> Storage | None:
    """The format of blocks that a state is kept in, by the names and dtypes of its arrays; None for any other."""
    for storage, arrays in _blocks(name):
        if arrays[1].name in tensors and all(getattr(tensors.get(a.name), "dtype", None) is a.dtype for a in arrays):
            return storage
    return None


def states_in_blocks(tensors: Mapping[str, Any]) -> dict[str, Storage]:
    """The states of a parameter that are kept in blocks, with their formats."""
    suffixes = {arrays[0].name for _, arrays in _blocks("")}
    names = [name.removesuffix(suffix) for name in tensors for suffix in suffixes if name.endswith(suffix)]
    found = {name: kept_in_blocks(tensors, name) for name in names}
    return {name: storage for name, storage in found.items() if storage is not None}


def with_code_names(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved state with the names of today: earlier revisions kept the codes under the name of the state."""
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
    """The formats of blocks with the arrays of a state of this name."""
    made = [make(signed) for make in STATE_FORMATS.values() for signed in (True, False)]
    return tuple((storage, storage.arrays(name)) for storage in made if len(storage.arrays(name)) > 1)


def entries_of(tensors: Mapping[str, Any], names: Iterable[str]) -> dict[str, int]:
    """For arrays of states in blocks of how many neighbours one of their entries is."""
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
    """The names that the arrays of a state in blocks can have: of its codes, and of its scales."""
    return tuple(dict.fromkeys(array.name for _, arrays in _blocks(name) for array in arrays))


def state_format(choice: Any, signed: bool = True) -> Storage:
    """The format that a dtype or a name stands for."""
    is_dtype = isinstance(choice, torch.dtype)
    name = dtype_name(choice) if is_dtype else choice
    if (is_dtype and not choice.is_floating_point) or not isinstance(name, str) or name not in STATE_FORMATS:
        hint = did_you_mean(name.replace("fp", "float"), STATE_FORMATS) if isinstance(name, str) else ""
        possible = f"a state can be kept as {', '.join(map(repr, STATE_FORMATS))}{hint and f'; {hint}'}"
        raise ValueError(f"Invalid state_dtype: {choice!r}; {possible}")
    return STATE_FORMATS[name](signed)
