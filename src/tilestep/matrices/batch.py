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
        index: `members` on the device.
    """

    shape: tuple[int, int]  # rows and columns of each
    members: list[int]  # their places in the segment
    numbers: dict[int, float]  # what operations take beside matrices, by identity of the value
    chunk: int  # how many are worked on at once
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)  # each scratch array, [members, rows, columns]
    states: dict[str, torch.Tensor] = field(default_factory=dict)  # each matrix state, [members, side, side]
    index: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))

    def of(self, members: Sequence[int]) -> Batch:
        """The same of some members; matrix states are kept by all members or none."""
        if list(members) == self.members:
            return self
        index = torch.tensor(members, dtype=torch.int64, device=self.index.device)
        return replace(self, members=list(members), index=index, arrays={}, states={})
