"""Where the parameters of an optimizer are: local tensors, DTensors, or pieces that ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .local import is_distributed
from .reduction import ReductionGroup, SharedSums


@dataclass(frozen=True)
class Origin:
    """The parameter of which a tensor is a piece, and where it begins."""

    param: torch.Tensor
    start: int | None = None
    order: tuple[int, ...] = ()

    def logical(self, index_in_piece: torch.Tensor) -> torch.Tensor:
        """Flat indices into the parameter, of flat indices into the piece."""
        if self.start is None:
            return index_in_piece
        rest = index_in_piece.to(torch.int64) + self.start
        if self.order == tuple(range(self.param.dim())):
            return rest
        shape, strides = self.param.shape, torch.empty(self.param.shape, device="meta").stride()
        index = torch.zeros_like(rest)
        for dim in reversed(self.order):
            index += rest % shape[dim] * strides[dim]
            rest = rest // shape[dim]
        return index


class Placement:
    """Plain tensors and DTensors, which tell where they are. A new placement is a class derived from this one."""

    wholes: Mapping[Any, torch.Tensor] = {}  # for a piece of a parameter, a meta tensor that stands for all of it
    has_own_names = False  # whether labels have names that users' groups have not: formats do not go by these

    def owner(self, optimizer: Any) -> Any:
        """The optimizer that has the parameters as users have them."""
        return optimizer

    def origin(self, param: torch.Tensor) -> Origin | None:
        """The parameter of which a tensor is a piece; None for a tensor that only this rank has."""
        return Origin(param)

    def sharers(self, params: Iterable[torch.Tensor]) -> ReductionGroup | None:
        """The ranks that hold parts of the same parameters, before there is a plan; None if no other does."""
        parts = [("a parameter", param) for param in params if is_distributed(param)]
        return ReductionGroup.of_tensors(parts) if parts else None

    def take_part(self, plan: Any) -> None:
        """Tell a plan which ranks decide its steps together and combine its reductions."""


LOCAL = Placement()  # the plain placement, which every optimizer begins with


class Pieces(Placement):
    """Pieces of parameters; other ranks have the other pieces."""

    def __init__(
        self,
        owner: Callable[[], Any],
        sharers: ReductionGroup,
        deciders: ReductionGroup,
        origins: Mapping[Any, Origin],
        *,
        has_own_names: bool = False,
    ) -> None:
        self._owner, self._sharers, self._deciders = owner, sharers, deciders
        self.has_own_names = has_own_names
        self.parts: Any = None  # what takes updated pieces part by part, with `take(segments)`; None for nothing
        self._origins: dict[Any, Origin] = {}
        self.add(origins)

    def add(self, origins: Mapping[Any, Origin]) -> None:
        """Take in further pieces."""
        self._origins.update(origins)
        cut = {piece: origin.param for piece, origin in origins.items() if origin.start is not None}
        wholes = {piece: torch.empty(param.shape, dtype=param.dtype, device="meta") for piece, param in cut.items()}
        self.wholes = {**self.wholes, **wholes}

    def owner(self, optimizer: Any) -> Any:
        return self._owner()

    def origin(self, param: torch.Tensor) -> Origin | None:
        return self._origins.get(param)

    def take_part(self, plan: Any) -> None:
        """All ranks decide, and those that share the parameters combine reductions."""
        plan.ranks, plan.sharers = self._deciders, self._sharers
        order = {id(whole): place for place, whole in enumerate(self.wholes.values())}

        def first_cut(segment: Any) -> int:
            return min((order[id(entry.whole)] for entry in segment.entries if id(entry.whole) in order), default=0)

        # Of all ranks in one order: what one has whole may come first in a segment there.
        plan.shared_sums = [
            SharedSums(self._sharers, sorted(engine.segments, key=first_cut)) for engine in plan.engines
        ]
        if self.parts is not None:
            self.parts.take([segment for engine in plan.engines for segment in engine.segments])
