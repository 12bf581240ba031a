"""The norm pass over gradients of several engines, or with different shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..norm import NormTable
from .segment import Entry


class NormedEngine(Protocol):
    """An engine, as the norm of its gradients sees it."""

    device: torch.device
    entries: list[Entry]
    grads: torch.Tensor


class JointNorm:
    """The norm pass over the gradients of several engines on one device, bitwise as that of one engine."""

    def __init__(self, entries: Sequence[Entry], engines: Sequence[NormedEngine]) -> None:
        # Not the engines, which hold this: a circle would keep their states until garbage is collected.
        self._grads = [engine.grads for engine in engines]
        device = engines[0].device
        own = [id(entry) for engine in engines for entry in engine.entries]
        place_of = {entry: place for place, entry in enumerate(own)}
        self._order = torch.tensor([place_of[id(entry)] for entry in entries], dtype=torch.int64, device=device)
        self._norm = SharedNorm(device, entries)
        self._power_sum = torch.zeros(1, dtype=torch.float64, device=device)

    def norm(self) -> torch.Tensor:
        """As `DeviceEngine.norm`."""
        return self._norm.launch(torch.cat(self._grads)[self._order], self._power_sum)

    def norm_partials(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `DeviceEngine.norm_partials`."""
        return self._norm.tables[0].launch_tiles(torch.cat(self._grads)[self._order])


class SharedNorm:
    """The norm pass over tensors with different shares: a table for each share, all with one table of addresses."""

    def __init__(self, device: torch.device, entries: Sequence[Entry]) -> None:
        self.shares = sorted({entry.norm_weight for entry in entries})
        dtypes = [entry.grad_dtype for entry in entries]
        self.tables = [NormTable(device, _numels(entries, share), dtypes) for share in self.shares]
        self._weights = torch.tensor(self.shares, dtype=torch.float64, device=device)
        self._sums = [torch.zeros(1, dtype=torch.float64, device=device) for _ in self.shares]

    def launch(self, addresses: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write and return the sum of squares times shares."""
        alone = self.shares == [1.0]
        for table, total in zip(self.tables, [out] if alone else self._sums):
            table.launch(addresses, total)
        if not alone:
            torch.sum(torch.cat(self._sums) * self._weights, 0, keepdim=True, out=out)
        return out


def _numels(entries: Sequence[Entry], share: float) -> list[int]:
    """The number of elements of each tensor with this share; 0 for others."""
    return [entry.param.numel() if entry.norm_weight == share else 0 for entry in entries]


def norm_table(device: torch.device, entries: Sequence[Entry]) -> NormTable:
    """The norm pass over tensors that all count once."""
    return NormTable(device, [entry.param.numel() for entry in entries], [entry.grad_dtype for entry in entries])
