"""Memory of parameters that GPUs of the same host read from each other directly, without collectives."""

from __future__ import annotations

import ctypes
import functools
import socket
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from ..compat import SymmetricMemory, is_capturing, tensor_at
from ..devices import has_streams
from ..errors import first_line
from .reduction import Ranks, gather_in


class MappedMemory:
    """Flat memory of torch's allocator, which the other ranks map by CUDA IPC.

    So torch's memory statistics count it, and tensors in it can be shared with further processes. Ranks synchronize by
    a word of symmetric memory. Raises `RuntimeError` if any part fails.
    """

    offer: bytes  # the handle and offset with which another rank maps it

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        _require_nvidia(device)
        self.memory = torch.zeros(numel, dtype=dtype, device=device)
        self._signals = SymmetricMemory(1, torch.int32, device)
        self.offer = driver_of_this_process().export(self.memory)
        self._addresses: dict[int, int] = {}

    def find(self, rank: int, offers: Sequence[bytes]) -> None:
        """Map the memory of the other ranks; `offers` has one offer per rank, `rank` is this rank."""
        driver, device = driver_of_this_process(), self.memory.device
        for other, offer in enumerate(offers):
            if other != rank:
                base, self._addresses[other] = driver.open(offer, device)
                # Not at exit: the driver unmaps everything.
                weakref.finalize(self, driver.close, base, device).atexit = False

    def rendezvous(self, group: Any) -> None:
        """Set up `barrier`; all ranks of the group must call it."""
        self._signals.rendezvous(group)

    def of(self, rank: int, first: int, stop: int) -> torch.Tensor:
        """A view of a rank's memory, as the source of copies."""
        dtype = self.memory.dtype
        address = self._addresses[rank] + first * dtype.itemsize
        return tensor_at(address, stop - first, dtype, self.memory.device)

    def barrier(self) -> None:
        """A barrier of the current streams of all ranks; the host does not wait."""
        self._signals.barrier()


class OwnMemory(SymmetricMemory):
    """Symmetric memory outside of torch's caching allocator, for configurations whose memory IPC cannot map."""

    offer = b""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        _require_nvidia(device)
        super().__init__(numel, dtype, device)

    def find(self, rank: int, offers: Sequence[bytes]) -> None:
        """Nothing: `rendezvous` maps the memory."""


def _require_nvidia(device: torch.device) -> None:
    if not has_streams(device) or torch.version.cuda is None:
        raise RuntimeError(f"only NVIDIA GPUs read each other's memory, and the parameters are on {device}")


PeerMemory = MappedMemory | OwnMemory
WAYS: tuple[type[PeerMemory], ...] = (MappedMemory, OwnMemory)
"""The first way costs nothing. The second is outside of torch's allocator: only `param_buffer="peers"` uses it."""


def share_memory(
    numel: int, dtype: torch.dtype, device: torch.device, ranks: Ranks, ways: Sequence[type[PeerMemory]]
) -> tuple[PeerMemory | None, str]:
    """Zeroed memory that ranks read from each other, or None and the reason.

    All ranks decide together: if a rank cannot, no rank has it. The ways are tried in order.
    """
    hosts = set(gather_in(ranks.shard, socket.gethostname()))
    apart = f"the ranks that shard the state are on {len(hosts)} hosts" if len(hosts) > 1 else ""
    first = next(filter(None, ranks.gather_objects(apart)), "")
    for way in () if first else ways:
        # All ranks finish each step before the next.
        made, reason = _together(ranks, partial(way, numel, dtype, device))
        if not reason:
            offers = gather_in(ranks.shard, made.offer)
            reason = _together(ranks, partial(made.find, ranks.rank, offers))[1]
            reason = reason or _together(ranks, partial(made.rendezvous, ranks.shard))[1]
            reason = reason or _together(ranks, partial(_verify, made, ranks))[1]
            if not reason:
                return made, ""
        made, first = None, first or reason  # free the memory before the next way allocates
    return None, first


def _together(ranks: Ranks, work: Callable[[], Any]) -> tuple[Any, str]:
    """The result of `work` on this rank, and the error of the first rank on which it fails; empty if none fails."""
    result, reason = None, ""
    try:
        result = work()
    except Exception as error:
        # Any error: the other ranks wait for this rank's answer.
        reason = first_line(error)
    return result, next(filter(None, ranks.gather_objects(reason)), "")


_SAMPLE = 64
"""The number of elements that ranks read from each other to verify the mapping."""


@torch.no_grad()
def _verify(made: PeerMemory, ranks: Ranks) -> None:
    """Verify reads of other ranks' memory: on some machines copies between GPUs return wrong values."""
    sample = made.memory[:_SAMPLE]
    sample.fill_(ranks.rank + 1)
    made.barrier()
    received = torch.empty_like(sample)
    differ = []
    for other in range(ranks.size):
        if other != ranks.rank:
            received.copy_(made.of(other, 0, len(sample)))
            differ.append((received != other + 1).any())
    wrong = torch.stack(differ).tolist()
    made.barrier()
    sample.zero_()
    if any(wrong):
        raise RuntimeError(f"rank {ranks.rank} does not read the values that other GPUs of the host wrote")


class _Handle(ctypes.Structure):
    _fields_: ClassVar[Any] = [("reserved", ctypes.c_char * 64)]


class Driver:
    """The functions of CUDA's driver that map memory of other processes. Errors raise `RuntimeError`."""

    _LAZY_PEER_ACCESS = 1

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._open = self._library.cuIpcOpenMemHandle_v2
            self._open.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"the CUDA driver cannot share memory between processes: {error}") from error

    def export(self, memory: torch.Tensor) -> bytes:
        """The offer of a tensor: its offset in its allocation, and the allocation's IPC handle."""
        address, base, size = ctypes.c_uint64(memory.data_ptr()), ctypes.c_uint64(), ctypes.c_size_t()
        handle = _Handle()
        with torch.cuda.device(memory.device):
            self._check(
                "find the allocation of memory",
                self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address),
            )
            # Fails for expandable segments and cudaMallocAsync.
            self._check(
                "share memory of torch's allocator with this configuration",
                self._library.cuIpcGetMemHandle(ctypes.byref(handle), base),
            )
        return (address.value - base.value).to_bytes(8, "little") + bytes(handle)

    def open(self, offer: bytes, device: torch.device) -> tuple[int, int]:
        """Map an offer; the addresses of the allocation and of the tensor in it."""
        handle, base = _Handle.from_buffer_copy(offer[8:]), ctypes.c_uint64()
        with torch.cuda.device(device):
            code = self._open(ctypes.byref(base), handle, self._LAZY_PEER_ACCESS)
            self._check("map another GPU's memory", code)
        return base.value, base.value + int.from_bytes(offer[:8], "little")

    def close(self, base: int, device: torch.device) -> None:
        """Unmap an allocation after all copies that read it."""
        if is_capturing():
            # A capture allows no wait: the allocation stays mapped until the process exits.
            return
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
            self._library.cuIpcCloseMemHandle(ctypes.c_uint64(base))

    def _check(self, what: str, code: int) -> None:
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise RuntimeError(f"CUDA cannot {what} ({(name.value or b'unknown error').decode()})")


driver_of_this_process = functools.cache(Driver)
"""The process's driver, loaded at the first call."""
