"""The norm of many tensors at once, and clipping by it."""

from .api import clip_grad_norm_, total_norm
from .plan_cache import forget_recipes
from .table import NormTable, norm_table
