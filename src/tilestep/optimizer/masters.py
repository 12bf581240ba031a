"""Masters of 16-bit parameters, and how they follow writes of other code to the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import GradientError
from ..native.table import Writes
from ..placement.local import local_part
from ..storage import MASTER_FORMATS, MasterFormat, dtype_name
from .memory import StateMemory

MasterWeights = bool | str  # type of `Optimizer`'s `master_weights`: False, or a key of `MASTER_FORMATS`
_CHOICES: Mapping[Any, type[MasterFormat] | None] = {False: None, **MASTER_FORMATS}

MASTER_KEYS = frozenset(kind.key for kind in MASTER_FORMATS.values())  # their keys in states


def check_choice(choice: Any) -> None:
    """Raise for an invalid value of `master_weights`."""
    if not isinstance(choice, (bool, str)) or choice not in _CHOICES:
        *choices, last = map(repr, _CHOICES)
        raise ValueError(f"Invalid master_weights: {choice!r}; it must be {', '.join(choices)} or {last}")


def master_kind(dtype: torch.dtype, group: Mapping[str, Any]) -> type[MasterFormat] | None:
    """Return the master format of a param group for parameters of this dtype, or None."""
    kind = _CHOICES[group.get("master_weights", False)]
    return kind if kind is not None and dtype in kind.dtypes else None


def check_master(label: str, dtype: torch.dtype, group: Mapping[str, Any]) -> None:
    """Raise for a parameter whose dtype does not fit the master of its group."""
    choice = group.get("master_weights", False)
    kind = _CHOICES[choice]
    if kind is None or choice is True or dtype in kind.dtypes:
        return
    kept = " and ".join(map(dtype_name, kind.dtypes))
    better = next((name for name, other in _CHOICES.items() if other is not None and dtype in other.dtypes), False)
    raise GradientError(
        f"{label} is {dtype_name(dtype)}, and master_weights={choice!r} supports only {kept} parameters: put it "
        f"in a param group with master_weights={better!r}"
    )


def other_master(kind: type[MasterFormat], state: Mapping[str, Any]) -> type[MasterFormat] | None:
    """Return the other master format that a state or checkpoint uses, if it has no master of this format."""
    if kind.key in state:
        return None
    for other in MASTER_FORMATS.values():
        value = state.get(other.key)
        if isinstance(value, torch.Tensor) and value.dtype is other.buffer_dtype:
            return other
    return None


def exact_values(param: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """Return a parameter's values in its master's precision, as a new tensor; without a master, in its own dtype."""
    for kind in MASTER_FORMATS.values():
        if kind.key in state:
            return kind.values(param, state[kind.key])
    return param.detach().clone()


class Masters:
    """Masters that become invalid once other code writes to their parameter; version counters detect such writes."""

    # A remainder belongs to a particular 16-bit value. (Kernels compare a float32 master with the parameter on
    # reading.) A write that does not increment the version counter, through `param.data`, leaves an error of half a
    # unit in the last place.

    def __init__(
        self,
        members: Sequence[tuple[torch.Tensor, Mapping[str, Any], Mapping[str, Any]]],
        fresh: set[int],
        memory: StateMemory,
    ) -> None:
        self._members = [
            (param, kind, state[kind.key])
            for param, group, state in members
            if (kind := master_kind(param.dtype, group)) is not None and not kind.begins_as_parameter
        ]
        self._memory, self.exist = memory, bool(self._members)
        self.follow = self.exist or type(memory).sync_masters is not StateMemory.sync_masters
        """Whether masters, or copies on the host, follow writes of other code to parameters."""
        self.writes = Writes([one[0] for one in self._members], [id(buffer) in fresh for _, _, buffer in self._members])

    def carry(self, before: Masters | None) -> None:
        """Copy the versions of the masters from a previous plan of the same parameters."""
        if before is None:
            return
        places = {(id(param), kind): place for place, (param, kind, _) in enumerate(before._members)}
        new, old = self.writes, before.writes
        for place, (param, kind, _) in enumerate(self._members):
            earlier = places.get((id(param), kind))
            if earlier is not None and old.known[earlier] and not new.known[place]:
                new.versions[place], new.known[place] = old.versions[earlier], True

    def drop_buffers(self) -> None:
        """Keep only the data that `carry` reads: the masters' memory is freed."""
        self._members = [(param, kind, torch.empty(0, device="meta")) for param, kind, _ in self._members]

    def sync(self) -> None:
        """Apply writes of other code to parameters since the last step, where kernels do not detect them."""
        self._memory.sync_masters()
        if not self.writes.are_none():
            self._memory.wait()
            for place in self.writes.take():
                local_part(self._members[place][2]).zero_()

    def catch_up(self) -> None:
        """Sync between two steps, and record the new versions."""
        self.sync()
        self.record()

    def record(self) -> None:
        """Record the versions of the parameters after a step."""
        self._memory.record_parameters()
        self.writes.note()
