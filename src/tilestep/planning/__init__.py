"""What a sharded training will need before it is run: memory and time of a rank, from measured constants."""

from __future__ import annotations

from .constants import Constants, default_constants
from .plan import Job, Plan, best_bucket, meshes, plan
from .storage import Footprint, footprint

__all__ = [
    "Constants",
    "Footprint",
    "Job",
    "Plan",
    "best_bucket",
    "default_constants",
    "footprint",
    "meshes",
    "plan",
]
