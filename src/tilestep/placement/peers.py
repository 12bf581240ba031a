"""Memory of parameters that the GPUs of one host read from each other."""

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
    """Flat memory of torch's allocator, which the other ranks map by CUDA's IPC.

    So it is counted as any other, and can be given to further processes as any other. Ranks meet in a word of
    symmetric memory. What fails is a `RuntimeError`.
    """

    offer: bytes  # what another rank must know to find it

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        _require_nvidia(device)
        self.memory = torch.zeros(numel, dtype=dtype, device=device)
        self._signals = SymmetricMemory(1, torch.int32, device)
        self.offer = driver_of_this_process().export(self.memory)
        self._addresses: dict[int, int] = {}

    def find(self, rank: int, offers: Sequence[bytes]) -> None:
        """Map the others' memory; `offers` are those of all ranks, of which this one is `rank`."""
        driver, device = driver_of_this_process(), self.memory.device
        for other, offer in enumerate(offers):
            if other != rank:
                base, self._addresses[other] = driver.open(offer, device)
                # Not when the process ends, and everything with it.
                weakref.finalize(self, driver.close, base, device).atexit = False

    def meet_first(self, group: Any) -> None:
        """Get ready to meet; all ranks of the group call it."""
        self._signals.meet_first(group)

    def of(self, rank: int, first: int, stop: int) -> torch.Tensor:
        """Elements of a rank's memory, which copies read."""
        dtype = self.memory.dtype
        address = self._addresses[rank] + first * dtype.itemsize
        return tensor_at(address, stop - first, dtype, self.memory.device)

    def meet(self) -> None:
        """Let what comes next in the current stream wait until all ranks are here in theirs."""
        self._signals.meet()


class OwnMemory(SymmetricMemory):
    """Memory that torch's allocator knows nothing of: it does where that has none that can be mapped."""

    offer = b""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        _require_nvidia(device)
        super().__init__(numel, dtype, device)

    def find(self, rank: int, offers: Sequence[bytes]) -> None:
        """`meet_first` does."""


def _require_nvidia(device: torch.device) -> None:
    if not has_streams(device) or torch.version.cuda is None:
        raise RuntimeError(f"only NVIDIA's GPUs read each other's memory, and the parameters are on {device}")


PeerMemory = MappedMemory | OwnMemory
WAYS: tuple[type[PeerMemory], ...] = (MappedMemory, OwnMemory)
"""The first is as good as memory that is not shared. The others have a price, and are for those who ask for them."""


def share_memory(
    numel: int, dtype: torch.dtype, device: torch.device, ranks: Ranks, ways: Sequence[type[PeerMemory]]
) -> tuple[PeerMemory | None, str]:
    """Zeroed memory that the ranks that split the state read from each other, and why there is none.

    All ranks decide together: if one of them cannot, none of them has it. They try the ways one after the other.
    """
    hosts = set(gather_in(ranks.shard, socket.gethostname()))
    apart = f"ranks that split the state are on {len(hosts)} hosts" if len(hosts) > 1 else ""
    first = next(filter(None, ranks.gather_objects(apart)), "")
    for way in () if first else ways:
        # Each part of it on all ranks, before any begins with the next.
        made, reason = _together(ranks, partial(way, numel, dtype, device))
        if not reason:
            offers = gather_in(ranks.shard, made.offer)
            reason = _together(ranks, partial(made.find, ranks.rank, offers))[1]
            reason = reason or _together(ranks, partial(made.meet_first, ranks.shard))[1]
            reason = reason or _together(ranks, partial(_verify, made, ranks))[1]
            if not reason:
                return made, ""
        made, first = None, first or reason  # what was made is free before the next way allocates
    return None, first


def _together(ranks: Ranks, work: Callable[[], Any]) -> tuple[Any, str]:
    """What it gives here, and why the first rank on which it fails cannot do it; empty if all can."""
    result, reason = None, ""
    try:
        result = work()
    except Exception as error:
        # Whatever it is: the other ranks wait for this one's answer.
        reason = first_line(error)
    return result, next(filter(None, ranks.gather_objects(reason)), "")


_SAMPLE = 64
"""Elements that ranks read from each other once, before anything depends on it."""


@torch.no_grad()
def _verify(made: PeerMemory, ranks: Ranks) -> None:
    """Read what the others have written: machines are known on which copies between GPUs bring something else."""
    sample = made.memory[:_SAMPLE]
    sample.fill_(ranks.rank + 1)
    made.meet()
    received = torch.empty_like(sample)
    differ = []
    for other in range(ranks.size):
        if other != ranks.rank:
            received.copy_(made.of(other, 0, len(sample)))
            differ.append((received != other + 1).any())
    wrong = torch.stack(differ).tolist()
    made.meet()
    sample.zero_()
    if any(wrong):
        raise RuntimeError(f"rank {ranks.rank} does not read what the other GPUs of the host have written")


class _Handle(ctypes.Structure):
    _fields_: ClassVar[Any] = [("reserved", ctypes.c_char * 64)]


class Driver:
    """CUDA's driver: what processes need to map each other's memory. An error is a `RuntimeError`."""

    _LAZY_PEER_ACCESS = 1

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
            self._open = self._library.cuIpcOpenMemHandle_v2
            self._open.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"CUDA's driver shares no memory between processes: {error}") from error

    def export(self, memory: torch.Tensor) -> bytes:
        """What another process opens: a handle of the allocation that a tensor is in, and where it begins in that."""
        address, base, size = ctypes.c_uint64(memory.data_ptr()), ctypes.c_uint64(), ctypes.c_size_t()
        handle = _Handle()
        with torch.cuda.device(memory.device):
            self._check(
                "find the allocation of memory",
                self._library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address),
            )
            # Not that of expandable segments, nor of cudaMallocAsync.
            self._check(
                "share memory of torch's allocator as it is set up",
                self._library.cuIpcGetMemHandle(ctypes.byref(handle), base),
            )
        return (address.value - base.value).to_bytes(8, "little") + bytes(handle)

    def open(self, offer: bytes, device: torch.device) -> tuple[int, int]:
        """Where such an allocation is mapped, and the tensor in it."""
        handle, base = _Handle.from_buffer_copy(offer[8:]), ctypes.c_uint64()
        with torch.cuda.device(device):
            code = self._open(ctypes.byref(base), handle, self._LAZY_PEER_ACCESS)
            self._check("map another GPU's memory", code)
        return base.value, base.value + int.from_bytes(offer[:8], "little")

    def close(self, base: int, device: torch.device) -> None:
        """Map it no longer; copies that still read it come first."""
        if is_capturing():
            # Nobody can wait for copies now: it stays mapped until the process ends.
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
"""The driver, once it has been loaded."""
