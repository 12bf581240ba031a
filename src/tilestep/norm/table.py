"""The norm kernels of a list of tensors: built once, launched with current addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..devices import has_streams
from .cpu_backend import EagerNorm, cpu_norm
from .triton_backend import TritonNorm

NormTable = EagerNorm | TritonNorm
"""Norm kernels over a fixed list of tensor sizes on one device; each launch takes addresses.

float64 tensors are summed in float64, all others in float32; tiles are summed in float64, in an order that makes two
runs equal to the bit. Launches allocate nothing, and do not synchronize.
"""


def norm_table(device: torch.device, numels: Sequence[int], dtypes: Sequence[torch.dtype]) -> NormTable:
    """The norm kernels of this device for tensors of these lengths and dtypes."""
    if not has_streams(device):
        return cpu_norm(numels, dtypes)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return TritonNorm(device, numels, dtypes)
