"""What decides the steps of all engines on one device, what only the host can decide, the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..backends.registry import apply_limit, build_decider, deciding_function
from ..control_numbers import UNSCALE
from ..linalg.batches import MatrixBatches, SkippedValues
from ..norm import NormTable
from .capturing import require
from .control import StepInputs, fresh_control
from .segment import Entry, Segment


def require_no_branches(segments: Sequence[Segment], *, alone: bool) -> None:
    """Raise `CaptureError` if the host has to decide what a step needs, or to wait in it, where no graph can let it."""
    for segment in segments:
        matrices, rule = segment.matrices, segment.spec.program.graph.title
        if matrices is None or not matrices.waits or matrices.skipped_values is not None:
            continue
        require(
            matrices.plain() is not None, f"every step of rule {rule} decomposes matrices, for which the host waits"
        )
        require(
            alone,
            f"the host decides at each step of rule {rule} which matrix operations it needs; capture the step alone, "
            "tilestep.capture(optimizer): its replay() decides, and runs outside the graph the steps that it must",
        )


@contextmanager
def nothing_skipped(segments: Sequence[Segment]) -> Iterator[None]:
    """A block in which the host decides nothing: steps do all that some need, unless `HostBranches` leaves it out."""
    undecided = [
        segment.matrices for segment in segments if segment.matrices and segment.matrices.skipped_values is None
    ]
    for matrices in undecided:
        matrices.skipped_values = {}
    try:
        yield
    finally:
        for matrices in undecided:
            matrices.skipped_values = None


@dataclass
class _Part:
    """A segment whose steps differ; `active` tensors take part in the captured one."""

    matrices: MatrixBatches
    skipped_values: SkippedValues
    active: np.ndarray
    may_skip: bool = False


class HostBranches:
    """What a captured step leaves out, of all segments of an engine.

    Some work is needed in some steps alone, by conditions on hyperparameters and the step count. A CUDA graph does the
    same at every replay, so it leaves that work out. The host evaluates the conditions without waiting, and
    only where it is sure that a step needs none of it is the graph replayed; other steps run outside of the graph.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._parts: list[_Part] = []
        self._segments = [segment for segment in segments if segment.matrices and segment.matrices.waits]
        for segment in self._segments:
            assert segment.matrices is not None
            skipped_values = segment.matrices.plain()
            assert skipped_values is not None
            self._parts.append(_Part(segment.matrices, skipped_values, segment.matrices.active))

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """A block in which steps leave it out, whatever they need: their capture."""
        for part in self._parts:
            part.matrices.skipped_values = part.skipped_values
        try:
            yield
        finally:
            for segment, part in zip(self._segments, self._parts):
                part.matrices.skipped_values = None
                part.active, part.may_skip = part.matrices.active, segment.may_skip

    def suffices(self) -> bool:
        """Whether the captured step is what the next step should be; nothing is waited for."""
        return all(part.matrices.suffices(part.skipped_values, part.active) for part in self._parts)

    def replayed(self) -> None:
        """The captured step was launched."""
        for part in self._parts:
            part.matrices.replayed(part.active, part.may_skip)


class NormedEngine(Protocol):
    """An engine, as far as the norm of its gradients is concerned."""

    device: torch.device
    entries: list[Entry]
    grads: torch.Tensor


class Decider:
    """The control numbers of a device, and the kernels that write them."""

    def __init__(self, device: torch.device) -> None:
        self.control = fresh_control(device)
        self.overflow = torch.zeros((), dtype=torch.float32, device=device)
        self.joint: JointNorm | None = None
        """The norm pass over all gradients, if several engines have them."""
        self.kernels: dict[Any, Any] = {}
        self._decide = deciding_function(self.control, self.kernels)
        self._was_trivial = True
        self._plain_control = self.control[: UNSCALE + 1].clone()

    def decide(self, decision: StepInputs, *, captured: bool = False) -> None:
        """Write the control numbers of a step."""
        is_trivial = not decision.needs_norm and decision.is_trivial
        if is_trivial and captured:
            # The host cannot know whether a graph was replayed, and what it has decided.
            self.control[: UNSCALE + 1].copy_(self._plain_control)
            return
        if is_trivial and self._was_trivial:
            return
        self._was_trivial = is_trivial
        self._decide(self.control, decision)
        if decision.limits:
            self._apply_limits(decision)

    def _apply_limits(self, decision: StepInputs, *, build_only: bool = False) -> None:
        for limit in decision.limits:
            assert decision.memory is not None
            memory = decision.memory.of(limit, self.control.device)
            apply_limit(self.control, limit, memory, decision.loss, self.kernels, build_only=build_only)

    def build(self, decision: StepInputs) -> None:
        """Build the kernel that decides such steps."""
        if not decision.is_trivial:
            build_decider(self.control, decision, self.kernels)
            if self.control.is_cuda:
                self._apply_limits(decision, build_only=True)


class JointNorm:
    """The norm pass over the gradients of several engines on one device, to the bit what one engine's would be."""

    def __init__(self, entries: Sequence[Entry], engines: Sequence[NormedEngine]) -> None:
        self._engines = list(engines)
        device = engines[0].device
        known = {id(entry): place for place, entry in enumerate(each for engine in engines for each in engine.entries)}
        self._entries = list(entries)
        self._order = torch.tensor([known[id(entry)] for entry in entries], dtype=torch.int64, device=device)
        self._norm = SharedNorm(device, entries)
        self._power_sum = torch.zeros(1, dtype=torch.float64, device=device)
        self._pieces: dict[int, list[tuple[NormTable, NormTable, torch.Tensor]]] = {}
        self.is_put = False
        """Whether `put` was called for every engine, with the gradients that the next step uses."""

    @property
    def takes_pieces(self) -> bool:
        """Whether engines' gradients can be summed one after the other."""
        return all(table.has_tiles for table in self._norm.tables)

    def put(self, engine: NormedEngine) -> None:
        """Sum the gradients of one engine, whose address table is up to date."""
        place = self._engines.index(engine)
        if place not in self._pieces:
            self._pieces[place] = self._piece(engine)
        for own, whole, places in self._pieces[place]:
            own.put_tiles(engine.grads, whole, places)

    def _piece(self, engine: NormedEngine) -> list[tuple[NormTable, NormTable, torch.Tensor]]:
        """For each share: a table of the engine's tensors, the whole table, and the places of the tiles there."""
        at = {id(entry): place for place, entry in enumerate(self._entries)}
        own = [at[id(entry)] for entry in engine.entries]
        found = []
        for share, whole in zip(self._norm.shares, self._norm.tables):
            numels, total = _numels(engine.entries, share), sum(_numels(self._entries, share))
            dtypes = [entry.grad_dtype for entry in engine.entries]
            places = whole.places_of([place for place, numel in zip(own, numels) if numel])
            found.append((NormTable(engine.device, numels, dtypes, total), whole, places))
        return found

    def _addresses(self) -> torch.Tensor:
        return torch.cat([engine.grads for engine in self._engines])[self._order]

    def norm(self) -> torch.Tensor:
        """As `DeviceEngine.norm`."""
        was_put, self.is_put = self.is_put, False
        self._norm.launch(None if was_put else self._addresses(), self._power_sum)
        return self._power_sum

    def norm_partials(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As `DeviceEngine.norm_partials`."""
        if not self.is_put:
            return self._norm.tables[0].launch_tiles(self._addresses())
        tiles = self._norm.tables[0].tiles_put()
        self.is_put = tiles is None
        return tiles


class SharedNorm:
    """The norm pass over tensors that count differently: a table for each share, all reading one address table."""

    def __init__(self, device: torch.device, entries: Sequence[Entry]) -> None:
        self.shares = sorted({entry.norm_share for entry in entries})
        dtypes = [entry.grad_dtype for entry in entries]
        self.tables = [NormTable(device, _numels(entries, share), dtypes) for share in self.shares]
        self._weights = torch.tensor(self.shares, dtype=torch.float64, device=device)
        self._sums = [torch.zeros(1, dtype=torch.float64, device=device) for _ in self.shares]

    def launch(self, addresses: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the sum of squares, each tensor's times its share; without addresses from the tiles that are there."""
        alone = self.shares == [1.0]
        for table, total in zip(self.tables, [out] if alone else self._sums):
            if addresses is None:
                table.finish(total)
            else:
                table.launch(addresses, total)
        if not alone:
            torch.sum(torch.cat(self._sums) * self._weights, 0, keepdim=True, out=out)


def _numels(entries: Sequence[Entry], share: float) -> list[int]:
    """Elements of the tensors that count so much; 0 for others."""
    return [entry.param.numel() if entry.norm_share == share else 0 for entry in entries]


def norm_table(device: torch.device, entries: Sequence[Entry]) -> NormTable:
    """The norm pass over tensors that all count once."""
    return NormTable(device, [entry.param.numel() for entry in entries], [entry.grad_dtype for entry in entries])
