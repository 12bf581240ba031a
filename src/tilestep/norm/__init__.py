"""`total_norm` and `clip_grad_norm_` of many tensors, with their kernels for GPUs and CPUs."""

from .api import clip_grad_norm_, total_norm
from .table import NormTable, norm_table
