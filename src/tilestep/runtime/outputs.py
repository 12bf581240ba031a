"""Tables of a segment's outputs, and their evaluation with torch if no kernel computes them."""

from __future__ import annotations

import math

import numpy as np
import torch

from ..devices import is_host
from ..kernels.outputs import Traced, traced
from ..kernels.spec import Output
from ..native.table import survey
from ..storage import INTEGERS, Leaf, evaluated, values_of
from .segment import Segment

WORD = 32  # elements per word: a bit each
NOTHING = {"sum": 0.0, "max": -math.inf}  # the reduction of zero elements


def extent_of(tensor: torch.Tensor) -> int:
    """Return the elements from a tensor's first to its last in memory, gaps included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


class OutputTables:
    """The outputs of a segment: every step has the outputs of its spec, a step that measures has more."""

    def __init__(self, segment: Segment, measured: tuple[Output, ...], *, has_kernels: bool) -> None:
        self._segment, spec = segment, segment.spec
        self.measuring = spec.with_outputs((*spec.outputs, *measured))
        entries = traced(self.measuring)
        reported = [entry.output for entry in entries if entry.output.reduce != "or"]
        self.names, self.reduces = [one.name for one in reported], [one.reduce for one in reported]
        self._entries = entries
        self._divide([entry for entry in entries if not has_kernels or entry.tile is None])
        self.measures = False
        self.has_run = False  # whether the passes have run in this step
        device, self._marks = segment.device, any(entry.output.reduce == "or" for entry in entries)
        tensors = [entry.param for entry in segment.entries]
        self.totals = torch.full((len(tensors), len(reported)), math.nan, dtype=torch.float64, device=device)
        counts = np.asarray([-(-extent_of(tensor) // WORD) if self._marks else 0 for tensor in tensors], dtype=np.int64)
        self.first_word = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        self.words = torch.zeros(max(int(self.first_word[-1]), 1), dtype=torch.int32, device=device)
        self._before: list[dict[Leaf, torch.Tensor]] = []
        self._versions: list[int] = []
        self._arrays = [dict(entry.arrays) for entry in segment.entries]
        """The arrays; streamed arrays are elsewhere while passes work on them."""
        self.watched: list[list[torch.Tensor]] = [[tensor] for tensor in tensors]
        """Per parameter, the tensors whose versions count writes to it."""
        self.writes = np.zeros(len(tensors), dtype=np.int64)
        """Versions of these tensors that the step's torch operations have incremented."""

    def _divide(self, rest: list[Traced]) -> None:
        """Let torch evaluate these outputs, and kernels the remaining outputs."""
        self._rest, self._rest_marks = rest, [entry for entry in rest if entry.output.reduce == "or"]
        self.by_kernels = any(entry.output.reduce != "or" for entry in self._entries if entry not in rest)
        """Whether kernels compute reports."""
        leaves = [leaf for entry in rest for leaf in entry.leaves]
        self.reads_gradients = any(kind == "moves" or buffer == "grad" for kind, buffer, _ in leaves)
        """Whether torch evaluates outputs of gradients."""

    def use_torch(self) -> None:
        """Evaluate the reports with torch, because their kernels cannot be built."""
        self._divide([entry for entry in self._entries if entry in self._rest or entry.output.reduce != "or"])

    def bits(self, position: int) -> torch.Tensor:
        """Return the bits of the tensor at this position, int32[words], a view."""
        return self.words[int(self.first_word[position]) : int(self.first_word[position + 1])]

    def carry(self, position: int, other: OutputTables, place: int) -> None:
        """Copy the reports on a tensor that another segment has measured in the same step."""
        if other.has_run and other.names == self.names:
            self.totals[position] = other.totals[place].to(self.totals.device)
            self.has_run = True

    @property
    def by_torch(self) -> list[Traced]:
        """The outputs of this step that torch evaluates."""
        return self._rest if self.measures else self._rest_marks

    @property
    def _sees_writes(self) -> bool:
        """Whether torch operations, in passes or in a streamer, write parameters."""
        return self._marks and bool(self._rest_marks or self._segment.streamer is not None)

    def begin(self) -> None:
        """Before the passes: copy the old values for outputs that torch evaluates."""
        self.has_run = True
        if self.measures and is_host(self.totals.device):
            # Empty tensors are in no range of tiles.
            nothing = [NOTHING[reduce] for reduce in self.reduces]
            self.totals.copy_(torch.tensor(nothing, dtype=torch.float64, device=self.totals.device))
        if self._sees_writes:
            self._versions = [survey(each).versions for each in self.watched]
        self._before = [self._old(position) for position in self._settled()] if self.by_torch else []

    def _settled(self) -> range:
        """Return the positions of tensors, after streamed arrays to be read have arrived."""
        if self.measures and self._segment.streamer is not None:
            self._segment.streamer.settle()
        return range(len(self._arrays))

    @property
    def _leaves(self) -> set[Leaf]:
        return {leaf for entry in self.by_torch for leaf in entry.leaves}

    def _old(self, position: int) -> dict[Leaf, torch.Tensor]:
        """Return the old values that a tensor's outputs read; gradients are left out if there is none."""
        gradient = self._segment.gradients[position] if self._segment.gradients else None
        old: dict[Leaf, torch.Tensor] = {}
        for leaf in self._leaves:
            kind, buffer, array = leaf
            if buffer == "grad" or kind == "moves":
                if gradient is not None:
                    exact = gradient.detach().to(self._segment.device, torch.float64, copy=True)
                    old[leaf] = exact if buffer == "grad" else exact != 0
            elif kind == "changed":
                old[leaf] = self._element(position, buffer, array).clone()
            elif kind != "new":
                old[leaf] = self._number(position, buffer)
        return old

    def _element(self, position: int, buffer: str, array: int) -> torch.Tensor:
        """Return an array of a buffer as integers of the same bits, on the parameter's device."""
        name = self._segment.spec.storages[buffer].arrays(buffer)[array].name
        tensor = self._arrays[position][name].detach()
        return tensor.view(INTEGERS[tensor.dtype.itemsize]).to(self._segment.device)

    def _number(self, position: int, buffer: str) -> torch.Tensor:
        """Return a buffer's numbers, in float64 on the parameter's device."""
        segment = self._segment
        entry, storage = segment.entries[position], segment.spec.storages[buffer]
        arrays = {own.name: self._arrays[position][own.name].to(segment.device) for own in storage.arrays(buffer)}
        return values_of(storage, arrays, buffer, segment.spec.compute, entry.param.shape).to(torch.float64)

    def end(self) -> None:
        """After the passes: evaluate the outputs that no kernel has computed."""
        if self._sees_writes and self._versions:
            self.writes += np.asarray([survey(each).versions for each in self.watched]) - np.asarray(self._versions)
        before, self._before = self._before, []
        applied = self._segment.control.skip == 0
        for position in self._settled() if before else ():
            loads = before[position]
            for leaf in self._leaves:
                kind, buffer, array = leaf
                if kind == "new":
                    loads[leaf] = self._number(position, buffer)
                elif kind == "update":
                    now, old = self._number(position, buffer), loads[leaf]
                    loads[leaf] = torch.where(now == old, 0.0, now - old)
                elif kind == "changed":
                    loads[leaf] = self._element(position, buffer, array) != loads[leaf]
                elif kind == "moves" and leaf in loads:
                    loads[leaf] &= applied.to(loads[leaf].device)
            for entry in self.by_torch:
                if all(leaf in loads for leaf in entry.leaves):
                    self._put(position, entry.output, *evaluated((entry.root,), loads, torch.float64))
        if self.measures:
            self.totals.masked_fill_((self._segment.grads == 0)[:, None], math.nan)

    def _put(self, position: int, output: Output, values: torch.Tensor) -> None:
        if output.reduce == "or":
            self._mark(position, values)
            return
        total: torch.Tensor | float = NOTHING[output.reduce]
        if values.numel():
            total = values.amax() if output.reduce == "max" else values.sum(dtype=torch.float64)
        self.totals[position, self.names.index(output.name)] = total

    def _mark(self, position: int, flags: torch.Tensor) -> None:
        """Set the bits of elements, in the order of the parameter's memory."""
        bits, param = self.bits(position), self._segment.entries[position].param
        if len(bits):
            laid = torch.zeros(len(bits) * WORD, dtype=torch.int32, device=bits.device)
            laid.as_strided(param.shape, param.stride()).copy_(flags)
            lanes = torch.arange(WORD, dtype=torch.int32, device=bits.device)
            bits |= (laid.view(-1, WORD) << lanes).sum(1, dtype=torch.int32)


def chunks_of(counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Split each tensor's tiles into runs of at most `size`: bounds of each run, and bounds of each tensor's runs."""
    runs = -(-counts // size)
    stops, ends = np.cumsum(counts), np.cumsum(runs)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - runs, runs)
    first = np.repeat(stops - counts, runs) + within * size
    last = np.minimum(first + size, np.repeat(stops, runs))
    return np.stack([first, last]), np.stack([ends - runs, ends])
