"""Placements of parameters: the part of each that this rank updates, for plain tensors, DTensors and shards."""

from __future__ import annotations

from .local import LocalGradients, checked_part, distribute, is_distributed, is_whole, local_state
from .matrices import MatrixExchange, add_matrix
from .peers import WAYS, PeerMemory, share_memory
from .placement import LOCAL, Listed, Placement, Share
from .reduction import Ranks, Received, ReductionGroup, message_length, next_number
