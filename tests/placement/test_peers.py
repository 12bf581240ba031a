"""How processes come by each other's GPU memory, with a driver that only keeps account: what is opened is closed."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilestep.placement import peers

BASE = 0x7000


class Library:
    """CUDA's driver, as far as it is asked."""

    def __init__(self) -> None:
        self.opened: dict[int, int] = {}
        self.fails = 0
        self.cuIpcOpenMemHandle_v2 = self._open_v2

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        base._obj.value = address.value - 40
        return 0

    def cuIpcGetMemHandle(self, handle: Any, base: Any) -> int:
        ctypes.memmove(handle, base.value.to_bytes(8, "little") + bytes(56), 64)
        return self.fails

    @property
    def _open_v2(self) -> Any:
        def opened(base: Any, handle: Any, flags: int) -> int:
            base._obj.value = BASE
            assert flags == 1
            self.opened[BASE] = self.opened.get(BASE, 0) + 1
            return self.fails

        return opened

    def cuIpcCloseMemHandle(self, base: Any) -> int:
        self.opened[base.value] -= 1
        return 0

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(peers.ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(peers.torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(peers.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(peers, "_require_nvidia", lambda device: None)
    monkeypatch.setattr(peers, "SymmetricMemory", lambda *_: SimpleNamespace(rendezvous=lambda group: None))
    peers.driver_of_this_process.cache_clear()
    yield made
    peers.driver_of_this_process.cache_clear()


def test_memory_is_offered_with_its_place_and_mapped_until_it_is_gone(library: Library) -> None:
    memory = peers.MappedMemory(6, torch.float32, torch.device("cpu"))
    assert int.from_bytes(memory.offer[:8], "little") == 40 and len(memory.offer) == 72
    memory.find(1, [memory.offer, b"", memory.offer])
    assert library.opened == {BASE: 2}
    assert memory.of(2, 1, 4).data_ptr() == BASE + 40 + 4
    del memory
    gc.collect()
    assert library.opened == {BASE: 0}


def test_what_the_driver_refuses_is_said(library: Library) -> None:
    library.fails = 1
    with pytest.raises(RuntimeError, match=r"cannot share memory of torch's .* \(CUDA_ERROR_INVALID_VALUE\)"):
        peers.MappedMemory(6, torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"CUDA cannot map another GPU's memory \(CUDA_ERROR_INVALID_VALUE\)"):
        peers.driver_of_this_process().open(bytes(72), torch.device("cpu"))


def test_without_a_driver_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"no {name}")

    monkeypatch.setattr(peers.ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match=r"driver cannot share memory between processes: no libcuda"):
        peers.Driver()
