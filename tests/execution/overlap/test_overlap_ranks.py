"""Overlapped optimizers over ranks that talk through gloo: DistributedDataParallel, FSDP2, HSDP."""

from __future__ import annotations

from overlapped_ranks import CHECKS, WIDE_CHECKS
from rank_processes import each_passes

test_two_ranks = each_passes(CHECKS, 2)


test_four_ranks = each_passes(WIDE_CHECKS, 4)
