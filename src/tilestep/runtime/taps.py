"""Outputs of a segment besides its updates: statistics of tensors, bits of changed weights."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..backends.taps import NEAR, kept_states, tap_columns, taps_fit
from ..devices import is_host
from ..storage import values_of
from ..tensor_watch import sum_of_versions
from .segment import Segment

WORD = 32  # weights whose bits are in one word


def extent_of(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory, gaps included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


class SegmentTaps:
    """The outputs of a segment, computed with torch where its kernels cannot."""

    def __init__(self, segment: Segment, *, stats: bool, changes: bool, by_kernels: bool) -> None:
        self._segment, self.stats, self.changes = segment, stats, changes
        self.by_kernels = by_kernels and taps_fit(segment.spec)
        self.columns = tap_columns(segment.spec)
        self.measures = False
        self.has_run = False  # whether its passes have run in this step
        device, entries = segment.device, segment.entries
        width = len(self.columns)
        self.totals = torch.full((len(entries), width), math.nan, dtype=torch.float64, device=device)
        self._empty = [place for place, entry in enumerate(entries) if not entry.param.numel()]
        counts = np.asarray([-(-extent_of(entry.param) // WORD) if changes else 0 for entry in entries], dtype=np.int64)
        self.first_word = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        self.words = torch.zeros(max(int(self.first_word[-1]), 1), dtype=torch.int32, device=device)
        self._before: list[torch.Tensor] = []
        self._raw: list[torch.Tensor] = []
        self._zeros: list[torch.Tensor | None] = []  # where gradients are 0, before their loss scale is taken away
        self._versions: list[int] = []
        self._arrays = [dict(entry.arrays) for entry in entries]
        """The arrays; streamed ones are elsewhere while passes work on them."""
        self.watched: list[list[torch.Tensor]] = [[entry.param] for entry in entries]
        """For each parameter the tensors whose versions count writes to it."""
        self.writes = np.zeros(len(entries), dtype=np.int64)
        """Versions of these that the step's own torch operations have counted."""

    def bits(self, position: int) -> torch.Tensor:
        """int32[words], a view of the bits of the tensor at this position."""
        return self.words[int(self.first_word[position]) : int(self.first_word[position + 1])]

    def carry(self, position: int, other: SegmentTaps, place: int) -> None:
        """Take over the statistics of a tensor that another segment has measured in the same step."""
        if other.has_run and other.columns.names == self.columns.names:
            self.totals[position] = other.totals[place].to(self.totals.device)
            self.has_run = True

    @property
    def goes_round(self) -> bool:
        """Whether this step's parameters are compared with copies."""
        return not self.by_kernels and (self.measures or self.changes)

    def begin(self) -> None:
        """Before the passes: copy parameters and look at gradients, where kernels do not."""
        if self.measures and (is_host(self.totals.device) or not self.by_kernels):
            self.totals.fill_(math.nan)
            if self.by_kernels:
                self.totals[self._empty] = 0.0  # no range of tiles has them
        self.has_run = True
        if self._sees_writes:
            self._versions = list(map(sum_of_versions, self.watched))
        if not self.goes_round:
            return
        segment = self._segment
        self._settle()
        self._raw = [entry.param.detach().clone() for entry in segment.entries]
        if self.measures:
            self._before = [self._number("param", position) for position in range(len(segment.entries))]
            self._zeros = [None] * len(segment.entries)
            for position, gradient in enumerate(segment.gradients):
                if gradient is not None:
                    exact = gradient.detach().to(segment.device, torch.float64)
                    self._put(position, "grad_squares", exact.square().sum())
                    self._put(position, "grad_max", _largest(exact))
                    zero = self._zeros[position] = exact == 0
                    self._put(position, "grad_zeros", zero.sum())

    @property
    def _sees_writes(self) -> bool:
        """Whether torch operations write parameters: those of passes or of a streamer."""
        return self.changes and (not self.by_kernels or self._segment.streamer is not None)

    def _settle(self) -> None:
        """Wait for streamed arrays that statistics read."""
        if self.measures and self._segment.streamer is not None:
            self._segment.streamer.settle()

    def _number(self, name: str, position: int) -> torch.Tensor:
        """A buffer's numbers, in float64 beside the parameter."""
        segment = self._segment
        entry, storage = segment.entries[position], segment.spec.storages[name]
        arrays = {own.name: self._arrays[position][own.name].to(segment.device) for own in storage.arrays(name)}
        return values_of(storage, arrays, name, segment.spec.compute, entry.param.shape).to(torch.float64)

    def _put(self, position: int, column: str, value: torch.Tensor) -> None:
        self.totals[position, self.columns.slot(column)] = value

    def end(self) -> None:
        """After the passes: compare."""
        if self._sees_writes and self._versions:
            self.writes += np.asarray(list(map(sum_of_versions, self.watched))) - np.asarray(self._versions)
        if not self.goes_round:
            return
        segment = self._segment
        self._settle()
        before, self._before = self._before, []
        raw, self._raw = self._raw, []
        zeros, self._zeros = self._zeros, []
        for position, entry in enumerate(segment.entries):
            integer = _INTEGERS[entry.param.dtype.itemsize]
            others = entry.param.detach().view(integer) != raw[position].view(integer)
            bits = self.bits(position)
            if self.changes and len(bits):  # they count along the parameter's memory
                laid = torch.zeros(len(bits) * WORD, dtype=torch.int32, device=bits.device)
                laid.as_strided(entry.param.shape, entry.param.stride()).copy_(others)
                weights = torch.ones((), dtype=torch.int32, device=bits.device) << torch.arange(
                    WORD, device=bits.device
                )
                bits |= (laid.view(-1, WORD) * weights.to(torch.int32)).sum(1, dtype=torch.int32)
            zero = zeros[position] if self.measures else None
            if zero is not None:
                same = ~zero & ~others & (segment.skip == 0).to(others.device)
                self._columns_after(position, before[position], same)

    def _columns_after(self, position: int, before: torch.Tensor, same: torch.Tensor) -> None:
        now = self._number("param", position)
        update = now - before
        self._put(position, "param_squares", now.square().sum())
        self._put(position, "param_max", _largest(now))
        self._put(position, "update_squares", update.square().sum())
        self._put(position, "update_max", _largest(update))
        self._put(position, "lost", (same & (update == 0)).sum())
        for name in self.columns.states:
            self._put_state(name, position)

    def _put_state(self, name: str, position: int) -> None:
        state = self._number(name, position)
        self._put(position, f"{name}_near", state.square().sum() * NEAR**2)
        self._put(position, f"{name}_far", torch.zeros((), dtype=torch.float64, device=state.device))
        self._put(position, f"{name}_max", _largest(state))

    def put_kept_states(self, grads: torch.Tensor) -> None:
        """After kernels that measured: add the states that they do not write."""
        names = kept_states(self._segment.spec)
        if names:
            self._settle()
        for name in names:
            for position in range(len(self._segment.entries)):
                self._put_state(name, position)
        self.totals.masked_fill_((grads == 0)[:, None], math.nan)

    def table(self) -> torch.Tensor:
        """float64[tensors, columns]: sums, counts and extremes of the last step that measured."""
        return self.totals


def _largest(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude; 0 of nothing."""
    return values.abs().amax() if values.numel() else values.new_zeros(())


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def chunks_of(counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Runs of at most so many of each tensor's tiles: first and one past the last of each run, and of each tensor's."""
    runs = -(-counts // size)
    stops, ends = np.cumsum(counts), np.cumsum(runs)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - runs, runs)
    first = np.repeat(stops - counts, runs) + within * size
    last = np.minimum(first + size, np.repeat(stops, runs))
    return np.stack([first, last]), np.stack([ends - runs, ends])
