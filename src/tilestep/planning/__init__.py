"""What a sharded training will need before it is run: memory and time of a rank, from measured constants."""

from __future__ import annotations

from .plan import Constants, Footprint, Job, Plan, best_bucket, default_constants, footprint, meshes, plan
