"""Where parameters live: DTensors (FSDP2, tensor-parallel, HSDP) beside plain tensors; steps work on local parts."""

from __future__ import annotations

from .agreement import Agreement
from .gradients import LocalGradients
from .local import checked_part, distribute, is_distributed, is_whole, local_state
from .matrices import Exchanges
from .placement import LOCAL, Origin, Pieces, Placement
from .sums import SharedSums

__all__ = [
    "LOCAL",
    "Agreement",
    "Exchanges",
    "LocalGradients",
    "Origin",
    "Pieces",
    "Placement",
    "SharedSums",
    "checked_part",
    "distribute",
    "is_distributed",
    "is_whole",
    "local_state",
]
