"""The norm of many tensors at once, and clipping by it."""

from .api import clip_grad_norm_, total_norm
from .table import NormTable, norm_table
