"""A batch: matrices of one shape, which an operation takes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch


class MatrixSegment(Protocol):
    """A segment of the engine, as far as matrices are concerned: its tensors, and what is known of a step."""

    spec: Any
    entries: list[Any]
    groups: Sequence[Mapping[str, Any]]
    device: torch.device
    grads: torch.Tensor
    gradients: Sequence[torch.Tensor | None]
    control: torch.Tensor
    step: torch.Tensor
    may_skip: bool

    def row_table(self) -> torch.Tensor:
        """The row table, on the device."""


@dataclass
class Batch:
    """Tensors of one shape whose operations take the same numbers.

    Args:
        shape: rows and columns of each.
        members: their places in the segment.
        numbers: what operations take beside matrices, by identity of the value.
        chunk: how many are worked on at once.
        arrays: each scratch array, [members, rows, columns].
        states: each matrix state, [members, side, side].
        index: `members` on the device.
    """

    shape: tuple[int, int]
    members: list[int]
    numbers: dict[int, float]
    chunk: int
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    index: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))

    def of(self, members: Sequence[int]) -> Batch:
        """The same of some members; matrix states are kept by all members or none.

        Args:
            members: the places in the segment of some of this batch's.
        """
        if list(members) == self.members:
            return self
        index = torch.tensor(members, dtype=torch.int64, device=self.index.device)
        return replace(self, members=list(members), index=index, arrays={}, states={})
