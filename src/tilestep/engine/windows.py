"""Runs of a segment's tiles whose arrays lie elsewhere while a tile pass works on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Window:
    """A run of a segment's tiles, of whole tensors and of parts of tensors.

    Args:
        addresses: for arrays that lie elsewhere meanwhile, by name: int64[tensors], where the array would begin if all
            of it lay beside the part that the window has.
    """

    tiles: range  # the places of its tiles in the segment
    tensors: range  # the places of the tensors that these belong to
    addresses: Mapping[str, np.ndarray] = field(default_factory=dict)


class Mover(Protocol):
    """What runs the tile passes of a segment whose arrays live elsewhere."""

    def run(self, index: int) -> None:
        """Run tile pass `index`."""

    def settle(self) -> None:
        """Have the host see gradients and arrays that live in its memory."""
