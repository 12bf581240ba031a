"""`Share` and `Placement`: the part of a parameter that this rank updates, of a plain tensor, DTensor or bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .local import is_distributed
from .reduction import ReductionGroup

if TYPE_CHECKING:
    from ..rules import Rule


@dataclass
class Share:
    """This rank's part of a parameter: an entry of the plan."""

    label: str  # the parameter's name in messages
    listed: str  # its label in the param group; formats may depend on the name in it
    param: torch.Tensor  # the user's parameter, the key of its state
    holder: torch.Tensor  # the tensor whose `grad` and `requires_grad` steps read: the parameter, or this rank's piece
    group_index: int
    group: dict[str, Any]
    ordinal: int  # the parameter's index among all parameters
    local: torch.Tensor  # the tensor that kernels update: `holder`, a DTensor's local part, or a copy on the host
    exchanges: Sequence[Any] = ()  # for sharded matrices, by size: a `MatrixExchange`, and the number in it
    whole: torch.Tensor | None = None  # for a piece of a cut parameter, a meta tensor of the parameter's shape
    start: int | None = None  # for a piece of a cut parameter, its first element, in memory order
    order: tuple[int, ...] = ()  # for such a piece, the parameter's dimensions in memory order, the slowest first

    def logical(self, index: torch.Tensor) -> torch.Tensor:
        """Convert flat indices into a piece to flat indices into the parameter."""
        if self.start is None:
            return index
        rest = index.to(torch.int64) + self.start
        if self.order == tuple(range(self.param.dim())):
            return rest
        shape, strides = self.param.shape, torch.empty(self.param.shape, device="meta").stride()
        index = torch.zeros_like(rest)
        for dim in reversed(self.order):
            index += rest % shape[dim] * strides[dim]
            rest = rest // shape[dim]
        return index


Listed = tuple[str, int, dict[str, Any], torch.Tensor]
"""A parameter's label in messages, the index of its param group, the param group, and the parameter."""


class Placement:
    """The placement of plain tensors and DTensors; other placements derive from this class."""

    device: torch.device | None = None  # the device on which a rank without shares joins decisions; None if it does not
    tables_cover_all = False  # whether statistics have columns for parameters without a share on this rank

    def share(self, listed: Listed, ordinal: int) -> Share | None:
        """This rank's share of a parameter; None if other ranks own all of it."""
        label, group_index, group, param = listed
        return Share(label, label, param, param, group_index, group, ordinal, param)

    def holder(self, param: torch.Tensor) -> torch.Tensor:
        """The tensor that steps update for a parameter with a share on this rank."""
        return param

    def own_state(self, share: Share, rule: Rule, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of a checkpoint's values; values of DTensors are cut later."""
        return saved

    def sharers(self, params: Iterable[torch.Tensor]) -> ReductionGroup | None:
        """The ranks that hold parts of the same parameters, before a plan exists; None if no other rank does."""
        parts = [("a parameter", param) for param in params if is_distributed(param)]
        return ReductionGroup.of_tensors(parts) if parts else None

    def set_ranks(self, plan: Any) -> None:
        """Set the ranks over which a plan takes decisions and combines reductions."""


LOCAL = Placement()  # the placement of every new optimizer
