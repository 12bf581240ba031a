"""Properties of device types, copies between devices, and the host's threads, for modules outside the backends."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch


def has_streams(device: torch.device) -> bool:
    """Whether work on a device runs asynchronously on streams, as on CUDA."""
    return device.type == "cuda"


def is_host(device: torch.device) -> bool:
    """Whether a device is the host, where work is complete when a call returns."""
    return device.type == "cpu"


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a number to another device; the host waits only for copies to the host."""
    # A non-blocking copy to the CPU may be read before it has arrived.
    return tensor.to(device, non_blocking=not is_host(device))


def combined(
    numbers: Sequence[torch.Tensor], operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.add
) -> torch.Tensor:
    """Reduce numbers on several devices, by default to their sum, on a GPU if any number is on a GPU."""
    if len(numbers) == 1:
        return numbers[0]
    device = next((number.device for number in numbers if not is_host(number.device)), numbers[0].device)
    return functools.reduce(operation, [moved(number, device) for number in numbers])


_TAKEN_AT_ONCE = 1 << 15
"""Bytes that CUDA copies from pageable memory without waiting for the device (up to 64 KiB): cheaper than pinned
memory, which must be allocated, and kept until the device has read it."""


def copy_to(target: torch.Tensor, host: np.ndarray) -> None:
    """Copy a numpy table to a tensor without waiting for the device."""
    source = torch.from_numpy(host)
    if target.is_cuda and host.nbytes <= _TAKEN_AT_ONCE:
        target.copy_(source, non_blocking=True)
    elif target.is_cuda:
        pinned = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
        pinned.copy_(source)
        target.copy_(pinned, non_blocking=True)
    else:
        target.copy_(source)


def synchronize(device: torch.device) -> None:
    """Wait for a device; returns at once for a CPU."""
    if has_streams(device):
        torch.cuda.synchronize(device)


thread_count: Callable[[], int] = torch.get_num_threads
"""The number of threads for C++: torch's. A fork replaces this: call it as an attribute of the module."""


def _note_fork() -> None:
    # OpenMP's threads may be those of the parent: a forked child would wait for them forever.
    global thread_count
    thread_count = functools.partial(int, 1)


os.register_at_fork(after_in_child=_note_fork)
