"""Where the parameters of an optimizer lie: a local tensor or a DTensor each, or pieces that ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .sums import SharedSums


class Placement:
    """Parameters that say themselves where they lie. A new placement is a class derived from this one."""

    wholes: Mapping[Any, torch.Tensor] = {}
    """For a parameter that is a piece of another: a tensor on the meta device that stands for all of it."""

    def take_part(self, plan: Any) -> None:
        """Have the tables of steps know which ranks decide them together and combine their reductions."""


LOCAL = Placement()
"""The plain placement, which every optimizer begins with."""


class Pieces(Placement):
    """Pieces of parameters, of which other ranks have the rest."""

    def __init__(self, ranks: Any, deciders: Any, wholes: Mapping[Any, torch.Tensor]) -> None:
        self._ranks, self._deciders, self.wholes = ranks, deciders, dict(wholes)

    def add(self, wholes: Mapping[Any, torch.Tensor]) -> None:
        """Take in further pieces."""
        self.wholes = {**self.wholes, **wholes}

    def take_part(self, plan: Any) -> None:
        """All ranks decide, and those that share the parameters combine reductions."""
        plan.ranks = self._deciders
        plan.shared_sums = [SharedSums(self._ranks, engine.segments) for engine in plan.engines]
