"""Waiting for a GPU, forbidden."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["no_synchronization"]


@contextmanager
def no_synchronization() -> Iterator[None]:
    """A block in which waiting for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
