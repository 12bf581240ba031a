"""Hyperparameters that must be the same on all ranks: a digest travels with a message that is sent anyway."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..optimizer.hyperparameters import GROUP_OPTIONS, deciding_keys
from .agree import first_difference, plain_value

if TYPE_CHECKING:
    from ..optimizer import Optimizer
    from .groups import Ranks


_BITS = 11
"""Of each part of a digest: as float32 numbers, sums of thousands of them are exact."""

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass
class _Heard:
    """The sums of all ranks' digests, on their way to the host."""

    wanted: list[float]
    values: torch.Tensor
    event: torch.cuda.Event


class Alike:
    """Finds out whether ranks step with other hyperparameters than each other: a scheduler may run on one alone.

    Each rank adds the parts of its digest to numbers that are summed over the ranks for every step. If all are alike
    the sums are the rank's own parts times the number of ranks; if not, no rank finds them so. On a CPU that is known
    before the step. The host of a GPU does not wait for it: it is known before the next step, but for what makes ranks
    send other messages, a clip that one of them does not have, for which it waits when that changes.
    """

    PARTS = 3

    def __init__(self, optimizer: Callable[[], Optimizer | None], ranks: Ranks) -> None:
        self._optimizer, self._ranks = optimizer, ranks
        self._values: Any = None
        self._parts = [0.0] * self.PARTS
        self._written: list[float] = []
        self._wanted: list[float] = []
        self._now: list[float] | None = None
        self._heard: deque[_Heard] = deque()
        self._messages: Any = None
        self._keys: dict[Any, tuple[str, ...]] = {}

    def begin(self) -> None:
        """The numbers that are summed are others, and have no digest yet."""
        self._written = []

    def write(self, parts: torch.Tensor) -> None:
        """Put this rank's digest into numbers that are going to be summed; the last ones stay there.

        Args:
            parts: float32[PARTS].
        """
        optimizer = self._optimizer()
        if optimizer is None:
            return
        values: list[Any] = []
        for group in optimizer.param_groups:
            keys = self._keys.get(group.get("rule")) or self._keys_of(optimizer, group)
            values.append(tuple(map(group.get, keys)))
            if not _TENSORS.isdisjoint(map(type, values[-1])):
                # One that has been written to is the same tensor.
                self._values = None
        if values != self._values:
            self._values = values
            digest = zlib.crc32(repr(list(_described(optimizer))).encode())
            self._parts = [float(digest >> place & (1 << _BITS) - 1) for place in range(0, 32, _BITS)]
        if self._parts != self._written:
            self._written = self._parts
            self._wanted = [part * self._ranks.count for part in self._parts]
            for part, value in zip(parts.unbind(), self._parts):
                part.fill_(value)

    def _keys_of(self, optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
        name = group.get("rule")
        if name not in self._keys:
            self._keys[name] = deciding_keys(optimizer.rule_of(group))
        return self._keys[name]

    def hear(self, sums: torch.Tensor) -> None:
        """Have the sums come to the host.

        Args:
            sums: float32[PARTS], summed over all ranks when what is queued on the current stream has run.
        """
        if not sums.is_cuda:
            self._now = sums.tolist()
            return
        there = torch.empty(self.PARTS, dtype=torch.float32, device="cpu", pin_memory=True)
        there.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._heard.append(_Heard(self._wanted, there, event))

    def check(self) -> None:
        """Raise on all ranks if they are not alike; before a step."""
        if self._now is not None:
            now, self._now = self._now, None
            if now != self._wanted:
                raise ValueError(self._difference(known_now=True))
        if self._heard:
            self._check_heard()

    def _check_heard(self) -> None:
        optimizer = self._optimizer()
        messages = [group.get("max_grad_norm") is None for group in optimizer.param_groups] if optimizer else None
        waits, self._messages = messages != self._messages, messages
        while len(self._heard) > 1 or (waits and self._heard):
            heard = self._heard.popleft()
            heard.event.synchronize()
            if heard.values.tolist() != heard.wanted:
                self._heard.clear()
                raise ValueError(self._difference(known_now=False))

    def _difference(self, *, known_now: bool) -> str:
        optimizer = self._optimizer()
        assert optimizer is not None
        lines = list(_described(optimizer))
        if known_now:
            return f"{first_difference(self._ranks.everyone(lines))}; nothing was updated"
        return (
            "ranks step with other hyperparameters than each other, for a step or two by now: a scheduler, or a clip, "
            f"that one rank alone has changed; rank {self._ranks.rank} has {', '.join(lines)}"
        )


def _described(optimizer: Optimizer) -> Iterator[str]:
    """Everything that decides what a step makes of the same gradients, in words."""
    for index, group in enumerate(optimizer.param_groups):
        for key in deciding_keys(optimizer.rule_of(group)):
            yield f"group {index} {key}={_told(group.get(key, GROUP_OPTIONS.get(key)))}"


def _told(value: Any) -> str:
    # What only a device knows would have to be waited for.
    return "a number on the device" if isinstance(value, torch.Tensor) and value.is_cuda else plain_value(value)
