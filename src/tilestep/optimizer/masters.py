"""How low-precision parameters are kept in float32, and how that follows what somebody else writes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..codegen.storage import Master, Remainder, Storage, dtype_name
from ..compat import local_parts
from ..errors import GradientError
from ..placements.local import local_part
from ..rules import State
from ..tensor_watch import sum_of_versions

__all__ = [
    "MASTER_KEYS",
    "MasterKind",
    "MasterWeights",
    "Masters",
    "check_choice",
    "check_master",
    "exact_values",
    "master_kind",
    "other_master",
]

MasterWeights = bool | Literal["remainder"]
"""What `Optimizer` takes as `master_weights`."""


@dataclass(frozen=True)
class MasterKind:
    """One way to keep a low-precision parameter in float32: a buffer beside it, and the storage of the two.

    Args:
        key: the buffer's key in the state.
        dtype: of the buffer.
        start: how it begins.
        dtypes: of the parameters that can be kept so.
        storage: of a parameter, by its dtype.
        made_of: the buffer's values, from the float32 ones.
        follow: takes over into the buffer (first) what somebody has written to its parameter (second).
        shows_writes: whether `follow` leaves elements as they are that nobody has written to. Else it must only be
            called for parameters that somebody has written to.
        takes_others: whether a group may also have parameters of other dtypes, which stay as they are. Else they are
            refused.
    """

    key: str
    dtype: torch.dtype
    start: State
    dtypes: tuple[torch.dtype, ...]
    storage: Callable[[torch.dtype], Storage]
    made_of: Callable[[torch.Tensor], torch.Tensor]
    follow: Callable[[torch.Tensor, torch.Tensor], None]
    shows_writes: bool
    takes_others: bool

    def values(self, param: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter in float32, as a new tensor where the buffer is."""
        tensors = {"param": param.detach().to(buffer.device), self.key: buffer}
        return self.storage(param.dtype).value(tensors, "param", torch.float32)


def _follow_values(master: torch.Tensor, param: torch.Tensor) -> None:
    value = param.detach().to(master.device)
    master.copy_(torch.where(master.to(value.dtype) == value, master, value.to(master.dtype)))


def _forget_rest(remainder: torch.Tensor, param: torch.Tensor) -> None:
    remainder.zero_()


_COPY = MasterKind(
    "master_param",
    torch.float32,
    State("param"),
    (torch.bfloat16, torch.float16),
    Master,
    lambda values: values,
    _follow_values,
    shows_writes=True,
    takes_others=True,
)

_REMAINDER = MasterKind(
    "remainder_param",
    torch.int16,
    State(0.0),
    (torch.bfloat16,),
    lambda _: Remainder(),
    lambda values: Remainder.halves(values)[1],
    _forget_rest,
    shows_writes=False,
    takes_others=False,
)

_KINDS: Mapping[Any, MasterKind | None] = {False: None, True: _COPY, "remainder": _REMAINDER}

MASTER_KEYS = frozenset(kind.key for kind in _KINDS.values() if kind is not None)
"""State keys of the buffers that keep parameters in float32."""


def check_choice(choice: Any) -> None:
    """Raise for a value that `master_weights` cannot have.

    Raises:
        ValueError: naming the values it can have.

    Example:
        >>> check_choice("remainders")
        Traceback (most recent call last):
        ValueError: Invalid master_weights: 'remainders'; it must be False, True or 'remainder'
    """
    if not isinstance(choice, (bool, str)) or choice not in _KINDS:
        *others, last = map(repr, _KINDS)
        raise ValueError(f"Invalid master_weights: {choice!r}; it must be {', '.join(others)} or {last}")


def master_kind(dtype: torch.dtype, group: Mapping[str, Any]) -> MasterKind | None:
    """How parameters of this dtype are kept in float32 in a param group; None where they are not.

    Example:
        >>> master_kind(torch.bfloat16, {"master_weights": "remainder"}).key
        'remainder_param'
        >>> master_kind(torch.float32, {"master_weights": True}) is None
        True
    """
    kind = _KINDS[group.get("master_weights", False)]
    return kind if kind is not None and dtype in kind.dtypes else None


def check_master(label: str, dtype: torch.dtype, group: Mapping[str, Any]) -> None:
    """Raise for a parameter that cannot be kept as its group says.

    Args:
        label: how the message calls the parameter.
        dtype: its dtype.
        group: its param group.

    Raises:
        GradientError: for a dtype that the group's kind of master neither keeps nor leaves as it is.

    Example:
        >>> check_master("a parameter", torch.float32, {"master_weights": True})
    """
    choice = group.get("master_weights", False)
    kind = _KINDS[choice]
    if kind is None or kind.takes_others or dtype in kind.dtypes:
        return
    kept = " and ".join(map(dtype_name, kind.dtypes))
    better = next((each for each, other in _KINDS.items() if other is not None and dtype in other.dtypes), False)
    raise GradientError(
        f"{label} is {dtype_name(dtype)}, and master_weights={choice!r} keeps {kept} parameters alone: put it in a "
        f"param group with master_weights={better!r}"
    )


def other_master(kind: MasterKind, known: Mapping[str, Any]) -> MasterKind | None:
    """The kind of master that a state or checkpoint has where it has none of this kind.

    Args:
        kind: what is asked for.
        known: buffers by name. One of another dtype does not count: torch's optimizers round what they load.
    """
    if kind.key in known:
        return None
    for other in _KINDS.values():
        value = None if other is None else known.get(other.key)
        if other is not None and isinstance(value, torch.Tensor) and value.dtype is other.dtype:
            return other
    return None


def exact_values(param: torch.Tensor, state: Mapping[str, Any]) -> torch.Tensor:
    """A parameter as precisely as its state has it, as a new tensor; without a master, in its own dtype.

    Args:
        param: the parameter, or what of it is here.
        state: its state, with buffers of the same shape.
    """
    for kind in _KINDS.values():
        if kind is not None and kind.key in state:
            return kind.values(param, state[kind.key])
    return param.detach().clone()


class Masters:
    """Parameters with their masters, and which of them somebody else has written to.

    Args:
        members: parameter, its group and its state, for each parameter that has a state.
        fresh: the buffers that have just begun from their parameters, by `id`.
        have_parts: whether some are DTensors, whose parts have versions of their own.
    """

    def __init__(
        self,
        members: Sequence[tuple[torch.Tensor, Mapping[str, Any], Mapping[str, Any]]],
        fresh: set[int],
        have_parts: bool,
    ) -> None:
        found = [(param, master_kind(param.dtype, group), state) for param, group, state in members]
        known = [(param, kind, state[kind.key]) for param, kind, state in found if kind is not None]
        self._params = [param for param, _, _ in known]
        self._members = [(param, kind, buffer) for param, kind, buffer in known if kind.shows_writes]
        self._blind = [(param, kind, buffer) for param, kind, buffer in known if not kind.shows_writes]
        self._ids = set(map(id, self._params))
        self._places = {id(param): place for place, (param, _, _) in enumerate(self._blind)}
        self._looked_at = [param for param, _, _ in self._blind]
        self._have_parts = have_parts
        self._sum = self._total() if all(id(buffer) in fresh for _, _, buffer in known) else None
        now = self._now()
        self._versions = [version if id(buffer) in fresh else None for version, (_, _, buffer) in zip(now, self._blind)]
        """Of parameters whose masters do not show who was written to, one by one; None for those not looked at."""

    def __len__(self) -> int:
        return len(self._params)

    def _total(self) -> int:
        # Versions only grow: no version has changed if their sum has not. A DTensor and its part have one each.
        parts = local_parts(self._params) if self._have_parts else []
        return sum_of_versions(self._params) + sum_of_versions(parts)

    def _versions_of(self, params: list[torch.Tensor]) -> list[int]:
        versions = [param._version for param in params]
        if self._have_parts:
            versions = [own + part._version for own, part in zip(versions, local_parts(params))]
        return versions

    def _now(self) -> list[int]:
        return self._versions_of(self._looked_at)

    def carry(self, before: Masters | None) -> None:
        """Take over when others were last looked at: these are made of the same parameters, state and groups.

        Args:
            before: what was in use so far. Values that show by themselves who was written to are looked at again.
        """
        if before is None:
            return
        keys = [(id(param), kind) for param, kind, _ in self._blind]
        known = dict(zip([(id(param), kind) for param, kind, _ in before._blind], before._versions))
        self._versions = [known.get(key) if version is None else version for key, version in zip(keys, self._versions)]

    def same_versions(self) -> bool:
        """Whether nobody has written to a parameter since `note_versions`."""
        return not self._params or self._total() == self._sum

    def follow(self) -> None:
        """Take over what somebody else has written to parameters since `note_versions`."""
        for param, kind, master in self._members:
            kind.follow(local_part(master), local_part(param))
        for (param, kind, master), now, before in zip(self._blind, self._now(), self._versions):
            if before is not None and now != before:
                kind.follow(local_part(master), local_part(param))

    def note_versions(self) -> None:
        """Parameters and masters agree now."""
        if self._params:
            self._sum = self._total()
        if self._blind:
            self._versions = self._now()  # type: ignore[assignment]

    def forget_versions(self) -> None:
        """Both may have been written by somebody who loads them: what the masters keep belongs to what comes."""
        self._sum, self._versions = None, [None] * len(self._blind)

    @contextmanager
    def own_writes(self, params: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """A block that writes parameters with their masters.

        Args:
            params: those that it may write; None for all.
        """
        chosen = self._params if params is None else [param for param in params if id(param) in self._ids]
        before = self._versions_of(chosen)
        yield
        after = self._versions_of(chosen)
        if self._sum is not None:
            self._sum += sum(after) - sum(before)
        for param, old, new in zip(chosen, before, after):
            place = self._places.get(id(param))
            known = None if place is None else self._versions[place]
            if place is not None and known is not None:
                self._versions[place] = known + new - old
