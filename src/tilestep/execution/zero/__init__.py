"""Optimizers split over data-parallel ranks: flat buckets, summed gradients, 1/N of the state on each."""

from __future__ import annotations

from .checkpoint import load_checkpoint, save_checkpoint
from .sharded import ShardedOptimizer, shard
