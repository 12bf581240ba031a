"""Properties of device types, copies between devices, and the host's threads, for modules outside the backends."""

from __future__ import annotations

import functools
import hashlib
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
    if target.is_cuda and host.nbytes > _TAKEN_AT_ONCE:
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


def synchronize_stream(device: torch.device) -> None:
    """Wait for a device's current stream; returns at once for a CPU."""
    if has_streams(device):
        torch.cuda.current_stream(device).synchronize()


_sources: dict[bytes, torch.Tensor] = {}
"""Pinned memory that captured CUDA graphs copy from at each replay, by the digest of its contents. Never freed, as the
end of a graph is unknown, and never written to: captures with the same contents share it."""


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array as a tensor on a device, without waiting for the device."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if has_streams(device):
        # torch's allocator reuses pinned memory only after the copy has run.
        host = source_of_graphs(host) if torch.cuda.is_current_stream_capturing() else host.pin_memory()
    return host.to(device, non_blocking=True)


def source_of_graphs(host: torch.Tensor) -> torch.Tensor:
    """Pinned memory with constant contents, for captured graphs."""
    kind = f"{host.dtype}{tuple(host.shape)}"
    digest = hashlib.blake2b(host.numpy().tobytes() + kind.encode(), digest_size=32).digest()
    if digest not in _sources:
        _sources[digest] = host.pin_memory()
    return _sources[digest]


thread_count: Callable[[], int] = torch.get_num_threads
"""The number of threads for C++: torch's. A fork replaces this: call it as an attribute of the module."""


def _note_fork() -> None:
    # OpenMP's threads may be those of the parent: a forked child would wait for them forever.
    global thread_count
    thread_count = functools.partial(int, 1)


os.register_at_fork(after_in_child=_note_fork)
