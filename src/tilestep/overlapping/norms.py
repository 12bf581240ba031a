"""The norm of all gradients, from sums that were made in backward while each group's gradients were fresh."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..compat import local_parts, version_of
from ..engine import JointNorm
from ..optimizer.plan import StepPlan

__all__ = ["EarlyNorms"]

Seen = list[tuple[Any, int, int]]
"""For each gradient of an engine a weak reference, its version, and that of its local part."""


class EarlyNorms:
    """Which engines' gradients are summed already, and whether they are still those that were summed."""

    def __init__(self) -> None:
        self._joint: JointNorm | None = None
        self._seen: dict[int, Seen] = {}

    def put(self, tables: StepPlan, places: Sequence[int]) -> None:
        """Sum the gradients of some engines.

        Args:
            tables: the optimizer's.
            places: of the engines, which are prepared.
        """
        for place in places:
            joint = tables.engines[place].decider.joint
            if joint is None or not joint.takes_pieces or len({engine.decider for engine in tables.engines}) > 1:
                return
            if joint is not self._joint:
                self._joint, self._seen = joint, {}
            joint.put(tables.engines[place])
            self._seen[place] = _look(tables.members[place])

    def complete(self, tables: StepPlan) -> None:
        """Before the step's norm pass: sum what is missing or has changed, if anything can be kept.

        Args:
            tables: the optimizer's, prepared.
        """
        joint = self._joint
        if joint is None or not tables.engines or tables.engines[0].decider.joint is not joint:
            return
        kept = {place for place, seen in self._seen.items() if _same(seen, tables.members[place])}
        if kept:
            for place, engine in enumerate(tables.engines):
                if place not in kept:
                    joint.put(engine)
            joint.is_put = True

    def forget(self) -> None:
        """After a step."""
        self._seen.clear()


def _look(params: Sequence[torch.Tensor]) -> Seen:
    gradients = [param.grad for param in params]
    return [
        (None, 0, 0) if gradient is None else (weakref.ref(gradient), version_of(gradient), version_of(part))
        for gradient, part in zip(gradients, local_parts(gradients))
    ]


def _same(seen: Seen, params: Sequence[torch.Tensor]) -> bool:
    gradients = [param.grad for param in params]
    for (reference, version, part_version), gradient, part in zip(seen, gradients, local_parts(gradients)):
        if reference is None or gradient is None:
            if reference is not None or gradient is not None:
                return False
        elif reference() is not gradient or version_of(gradient) != version or version_of(part) != part_version:
            return False
    return True
