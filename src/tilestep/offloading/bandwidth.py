"""What this machine's links and memory carry, measured once a process: what `where="auto"` decides from."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..devices import has_streams
from ..side_stream import SideStream
from .memory import HostMemory

_SIZE = 128 << 20
_ROUNDS = 3


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second."""

    inward: float  # from page-locked memory to the device, alone
    outward: float  # from the device to page-locked memory, alone
    both: float  # each way while copies run in both
    host: float  # what the CPU's threads read and write in a copy of host memory


@functools.cache
def measure_bandwidths(device: torch.device) -> Bandwidths:
    """Measure them, in about a tenth of a second."""
    target, source = HostMemory(device, "a measurement of bandwidth").take([_SIZE, _SIZE])
    here = torch.zeros(2, _SIZE, dtype=torch.uint8, device=device)
    target.zero_()
    source.zero_()
    inward, outward = SideStream(device), SideStream(device)

    def into() -> None:
        inward.copy([(here[0], source)])

    def out() -> None:
        outward.copy([(target, here[1])])

    def both() -> None:
        into()
        out()

    def on_host() -> None:
        target.copy_(source)

    def rate(action: Callable[[], None], size: int) -> float:
        return size / _seconds(action, device)

    return Bandwidths(rate(into, _SIZE), rate(out, _SIZE), rate(both, _SIZE), rate(on_host, 2 * _SIZE))


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    """The fastest of some runs, after one that nobody counts."""
    found = []
    for _ in range(_ROUNDS + 1):
        _synchronize(device)
        begin = time.perf_counter()
        action()
        _synchronize(device)
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def _synchronize(device: torch.device) -> None:
    if has_streams(device):
        torch.cuda.synchronize(device)
