"""The optimizer and the classes made from named rules."""

from __future__ import annotations

from .checkpoint import full_precision
from .control import joint_norm
from .groups import param_groups
from .optimizer import Optimizer, named_optimizers
from .sorting import muon_groups
