"""What kinds of device are like: the place to ask, outside of the backends."""

from __future__ import annotations

import torch


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is launched on streams and runs beside the host, as on CUDA's GPUs."""
    return device.type == "cuda"


def is_host(device: torch.device) -> bool:
    """Whether a device is the host itself, whose work is done when a call returns."""
    return device.type == "cpu"
