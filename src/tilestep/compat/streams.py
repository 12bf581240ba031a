"""Streams of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _public(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


current_stream_number: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _public)
"""The current stream of a device as a number, which costs a tenth of what an object costs."""
