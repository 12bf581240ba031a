"""The optimizer and the classes made from named rules."""

from __future__ import annotations

from .checkpoint import full_precision
from .control import joint_norm
from .groups import muon_groups, param_groups
from .optimizer import Optimizer, named_optimizers
