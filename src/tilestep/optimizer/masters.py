"""Masters of 16-bit parameters, and how they follow what other code writes to the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..compat import local_parts, version_of
from ..errors import GradientError
from ..placement.local import local_part
from ..storage import MASTER_FORMATS, MasterFormat, dtype_name
from ..tensor_table import sum_of_versions

MasterWeights = bool | str  # what `Optimizer` takes as `master_weights`: False, or a key of `MASTER_FORMATS`
_CHOICES: Mapping[Any, MasterFormat | None] = {False: None, **MASTER_FORMATS}

MASTER_KEYS = frozenset(kind.key for kind in MASTER_FORMATS.values())  # their keys in states


def check_choice(choice: Any) -> None:
    """Raise for a value that `master_weights` cannot have."""
    if not isinstance(choice, (bool, str)) or choice not in _CHOICES:
        *others, last = map(repr, _CHOICES)
        raise ValueError(f"Invalid master_weights: {choice!r}; it must be {', '.join(others)} or {last}")


def master_kind(dtype: torch.dtype, group: Mapping[str, Any]) -> MasterFormat | None:
    """The kind of master that a param group gives to parameters of this dtype, or None."""
    kind = _CHOICES[group.get("master_weights", False)]
    return kind if kind is not None and dtype in kind.dtypes else None


def check_master(label: str, dtype: torch.dtype, group: Mapping[str, Any]) -> None:
    """Raise for a parameter that cannot have the master of its group."""
    choice = group.get("master_weights", False)
    kind = _CHOICES[choice]
    if kind is None or choice is True or dtype in kind.dtypes:
        return
    kept = " and ".join(map(dtype_name, kind.dtypes))
    better = next((name for name, other in _CHOICES.items() if other is not None and dtype in other.dtypes), False)
    raise GradientError(
        f"{label} is {dtype_name(dtype)}, and master_weights={choice!r} keeps {kept} parameters alone: put it in a "
        f"param group with master_weights={better!r}"
    )


def other_master(kind: MasterFormat, state: Mapping[str, Any]) -> MasterFormat | None:
    """Another kind of master that a state or checkpoint has, if it has none of this kind."""
    if kind.key in state:
        return None
    for other in MASTER_FORMATS.values():
        value = state.get(other.key)
        if isinstance(value, torch.Tensor) and value.dtype is other.dtype:
            return other
    return None


def exact_values(param: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """A parameter's values with its master's precision, as a new tensor; without a master, in its own dtype."""
    for kind in MASTER_FORMATS.values():
        if kind.key in state:
            return kind.values(param, state[kind.key])
    return param.detach().clone()


class Masters:
    """Parameters with masters that are invalid once other code has written to the parameter, which versions show."""

    # A remainder belongs to one 16-bit value. (A kernel compares a float32 master with the parameter when it reads it.)
    # A write that does not count a version, through `param.data`, leaves an error of half a unit in the last place.

    def __init__(
        self,
        members: Sequence[tuple[torch.Tensor, Mapping[str, Any], Mapping[str, Any]]],
        fresh: set[int],
        have_parts: bool,
    ) -> None:
        kinds = [(param, master_kind(param.dtype, group), state) for param, group, state in members]
        self._members = [
            (param, kind, state[kind.key]) for param, kind, state in kinds if kind is not None and not kind.sees_writes
        ]
        self._params = [param for param, _, _ in self._members]
        self._places = {id(param): place for place, param in enumerate(self._params)}
        self._have_parts = have_parts
        is_fresh = [id(buffer) in fresh for _, _, buffer in self._members]
        self._sum = self._total() if all(is_fresh) else None
        now = self._versions_of(self._params)
        self._versions = [version if is_new else None for version, is_new in zip(now, is_fresh)]  # None: not looked at

    def __len__(self) -> int:
        return len(self._params)

    def _total(self) -> int:
        # Versions only grow: if their sum has not changed, none has. A DTensor and its local part have one each.
        own = sum_of_versions(self._params)
        return own + sum_of_versions(local_parts(self._params)) if self._have_parts else own

    def _versions_of(self, params: list[torch.Tensor]) -> list[int]:
        versions = list(map(version_of, params))
        if self._have_parts:
            versions = [own + version_of(part) for own, part in zip(versions, local_parts(params))]
        return versions

    def carry(self, before: Masters | None) -> None:
        """Take over the versions of the masters of a previous plan of the same parameters."""
        if before is None:
            return
        keys = [(id(param), kind) for param, kind, _ in self._members]
        versions = dict(zip([(id(param), kind) for param, kind, _ in before._members], before._versions))
        self._versions = [versions.get(key) if own is None else own for key, own in zip(keys, self._versions)]

    def same_versions(self) -> bool:
        """Whether no other code has written to a parameter since `record_versions`."""
        return not self._params or self._total() == self._sum

    def follow(self) -> None:
        """Zero the masters of parameters that other code has written to since `record_versions`."""
        now = self._versions_of(self._params)
        for place, ((_, _, master), version) in enumerate(zip(self._members, now)):
            if self._versions[place] not in (None, version):
                local_part(master).zero_()
                self._versions[place] = version

    def record_versions(self) -> None:
        """Remember the present versions: parameters and masters agree."""
        if self._params:
            versions = self._versions_of(self._params)
            self._versions, self._sum = list(versions), sum(versions)

    @contextmanager
    def own_writes(self, params: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """A block that writes parameters and masters together."""
        chosen = self._params if params is None else [param for param in params if id(param) in self._places]
        before = self._versions_of(chosen)
        try:
            yield
        finally:
            after = self._versions_of(chosen)
            if self._sum is not None:
                self._sum += sum(after) - sum(before)
            for param, old, new in zip(chosen, before, after):
                place = self._places[id(param)]
                version = self._versions[place]
                if version is not None:
                    self._versions[place] = version + new - old
