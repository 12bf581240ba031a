"""Where parameters are: DTensors (FSDP2, tensor-parallel, HSDP) and plain tensors; steps work on local parts."""

from __future__ import annotations

from .local import LocalGradients, checked_part, distribute, is_distributed, is_whole, local_state
from .matrices import MatrixExchange, take_in_matrix
from .peers import WAYS, PeerMemory, share_memory
from .placement import LOCAL, Listed, Placement, Share
from .reduction import Ranks, Received, ReductionGroup, message_length, next_number
