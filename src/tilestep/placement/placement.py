"""What a rank updates of a parameter: all of a plain tensor, its part of a DTensor, a section of a bucket."""

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
    """What this rank updates of a parameter: an entry of its plan."""

    label: str  # what messages call the parameter
    listed: str  # what its param group calls it: formats may go by the name in it
    param: torch.Tensor  # as users have it, the key of its state
    holder: torch.Tensor  # whose `grad` and `requires_grad` steps look at: the parameter, or this rank's section of it
    group_index: int
    group: dict[str, Any]
    ordinal: int  # its place among all parameters
    local: torch.Tensor  # what kernels update: `holder`, the local part of a DTensor, or its copy on the host
    exchanges: Sequence[Any] = ()  # of matrices of which ranks have parts, for each size: an exchange, the number there
    whole: torch.Tensor | None = None  # on the meta device, all of a parameter of which `holder` is a cut section
    start: int | None = None  # of a cut section the first element, counted along the parameter's memory
    order: tuple[int, ...] = ()  # of a cut section the parameter's dimensions from the slowest in memory to the fastest

    def logical(self, index: torch.Tensor) -> torch.Tensor:
        """Flat indices into the parameter, of flat indices into a section."""
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
"""A parameter's label in messages, the index of its group, its group, and the parameter."""


class Placement:
    """Plain tensors and DTensors, which tell where they are. A new placement is a class derived from this one."""

    device: torch.device | None = None  # where a rank without shares takes part in decisions; None if it does not
    tables_cover_all = False  # whether statistics have columns for parameters of which this rank has no share

    def share(self, listed: Listed, ordinal: int) -> Share | None:
        """This rank's share of a parameter; None if other ranks have all of it."""
        label, group_index, group, param = listed
        return Share(label, label, param, param, group_index, group, ordinal, param)

    def holder(self, param: torch.Tensor) -> torch.Tensor:
        """The tensor that steps update in place of a parameter of which this rank has a share."""
        return param

    def own_state(self, share: Share, rule: Rule, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """This rank's part of a checkpoint's values; those of DTensors are cut later."""
        return saved

    def sharers(self, params: Iterable[torch.Tensor]) -> ReductionGroup | None:
        """The ranks that hold parts of the same parameters, before there is a plan; None if no other does."""
        parts = [("a parameter", param) for param in params if is_distributed(param)]
        return ReductionGroup.of_tensors(parts) if parts else None

    def take_part(self, plan: Any) -> None:
        """Tell a plan which ranks decide its steps together and combine its reductions."""


LOCAL = Placement()  # the plain placement, which every optimizer begins with
