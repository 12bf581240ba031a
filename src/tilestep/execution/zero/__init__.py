"""`shard` (ZeRO 1 and 2): flat buckets, reduce-scattered gradients, 1/N of the state per data-parallel rank."""

from __future__ import annotations

from .checkpoint import load_checkpoint, save_checkpoint
from .sharded import ShardedOptimizer, shard
