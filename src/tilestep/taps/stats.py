"""Statistics of every parameter, summed up by the update kernels while they have all of it in registers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..codegen.taps import FAR, NEAR
from ..engine.capturing import is_capturing
from ..engine.control import INVERSE_SCALE
from ..placements.local import is_whole

if TYPE_CHECKING:
    from ..engine import DeviceEngine
    from ..engine.segment import Entry, Segment


_COLUMNS = (
    "grad_norm",
    "grad_max",
    "param_norm",
    "param_max",
    "update_norm",
    "update_max",
    "update_ratio",
    "zero_fraction",
    "lost_fraction",
)

_ONE_MESSAGE = 64
"""Ranks up to which extremes travel with the sums, each in a place of its own; more ranks send two messages."""


@dataclass(frozen=True)
class Stats:
    """Have steps measure every parameter: `tilestep.AdamW(..., stats=tilestep.Stats(every=10))`.

    The update kernel of such a step also sums up what it has read and computed; steps between are those without
    statistics. A step in a CUDA graph measures at every replay. `optimizer.stats` has the numbers.

    Args:
        every: measure each so many calls of `step()`, the first time at call number `every`.

    Raises:
        ValueError: for something else than a whole number from 1 on.

    Example:
        >>> import torch, tilestep
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = tilestep.SGD([("weight", weight)], lr=0.5, stats=tilestep.Stats(every=1))
        >>> weight.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
        >>> optimizer.step()
        >>> measured = optimizer.stats.read()["weight"]
        >>> measured["grad_norm"], measured["grad_max"], measured["update_norm"], measured["zero_fraction"]
        (5.0, 4.0, 2.5, 0.5)
    """

    every: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"Invalid every: {self.every!r}; steps are measured each 1, 2, 3, ... of them")


class StepStats(Mapping[str, Mapping[str, torch.Tensor]]):
    """The statistics of one step: a table on the device, and `read` for the host.

    A mapping from names to mappings from columns to device scalars. Columns, for each parameter: `grad_norm` and
    `grad_max` of its unscaled, unclipped gradient; `param_norm` and `param_max` after the step; `update_norm` and
    `update_max` of what the step adds, before it is rounded to the stored dtype; `update_ratio`, the update's norm by
    the parameter's; `zero_fraction` of gradients that are 0; `lost_fraction` of elements whose update was lost to
    rounding; `<state>_norm` and `<state>_max` of each state after the step. A norm is a 2-norm, a maximum one of
    magnitudes. A skipped step has the gradient's columns, an update of 0 and what was kept. NaN stands for what a
    parameter does not have: of one without a gradient all columns.

    Attributes:
        names: of the parameters: those given, else `"group.index"`.
        columns: of the table.
        table: float64[names, columns] on the device, not waited for.
        step: which call of `step()` was measured.
    """

    def __init__(self, names: Sequence[str], columns: Sequence[str], table: torch.Tensor, step: int) -> None:
        self.names, self.columns, self.table, self.step = tuple(names), tuple(columns), table, step
        self._host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if table.is_cuda and not is_capturing():
            self._host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            self._host.copy_(table, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> dict[str, dict[str, float]]:
        """The numbers on the host; waits for no more than the copy that the step itself has started.

        Of a step in a CUDA graph it gives those of the last replay.
        """
        if self._copied is not None:
            self._copied.synchronize()
        host = self.table.cpu() if self._host is None else self._host
        return {name: dict(zip(self.columns, row)) for name, row in zip(self.names, host.tolist())}

    def __getitem__(self, name: str) -> dict[str, torch.Tensor]:
        if name not in self.names:
            raise KeyError(f"no parameter is called {name!r}; there are {', '.join(self.names[:5])}, ...")
        return dict(zip(self.columns, self.table[self.names.index(name)].unbind()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"StepStats(step={self.step}, {len(self.names)} parameters, {', '.join(self.columns)})"


class _Part:
    """The rows and columns of one segment in the table of all parameters."""

    def __init__(self, segment: Segment, rows: Sequence[int], raw: Sequence[str], device: torch.device) -> None:
        self.segment = segment
        own = segment.taps
        assert own is not None
        self.taps = own
        self.rows = torch.tensor(rows, device=device)
        self.columns = torch.tensor([raw.index(name) for name in own.columns.names], device=device)
        graph = segment.spec.program.graph
        self.numbers = list(graph.scalar_states)
        self.small = [*graph.slice_states, *graph.matrix_states] if _all_here(segment.entries) else []

    def small_states(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and largest magnitude of a state of rows, columns or a matrix, for each tensor."""
        tensors = [{**entry.arrays, **entry.matrices}[name] for entry in self.segment.entries]
        exact = [tensor.detach().to(torch.float64) for tensor in tensors]
        return torch.stack(torch._foreach_norm(exact)), torch.stack(torch._foreach_norm(exact, math.inf))


def _all_here(entries: Sequence[Entry]) -> bool:
    return all(is_whole(entry.handle) and entry.share == 1 for entry in entries)


class Measurer:
    """Makes the table of all parameters of what segments have put out."""

    def __init__(
        self, engines: Sequence[DeviceEngine], places: Mapping[int, int], names: Sequence[str], agreement: Any
    ) -> None:
        self._engines, self.names, self._agreement = list(engines), list(names), agreement
        segments = [segment for engine in engines for segment in engine.segments]
        self.device = engines[0].device
        states: list[str] = []
        raw = ["grad_squares", "grad_max", "grad_zeros", "param_squares", "param_max", "update_squares"]
        raw += ["update_max", "lost"]
        numel = torch.full((len(names),), math.nan, dtype=torch.float64)
        share = torch.ones(len(names), dtype=torch.float64)
        for segment in segments:
            assert segment.taps is not None
            graph = segment.spec.program.graph
            for state in graph.states:
                if state not in states:
                    states.append(state)
            raw += [name for name in segment.taps.columns.names if name not in raw]
            for entry in segment.entries:
                numel[places[id(entry)]], share[places[id(entry)]] = entry.handle.numel(), entry.share
        self._raw = raw
        self._numel, self._share = numel.to(self.device), share.to(self.device)[:, None]
        self._parts = [
            _Part(segment, [places[id(entry)] for entry in segment.entries], raw, self.device) for segment in segments
        ]
        kept = [state for state in states if any(self._has(part, state) for part in self._parts)]
        self._states = kept
        self.columns = [*_COLUMNS, *(f"{state}_{what}" for state in kept for what in ("norm", "max"))]
        is_sum = [not name.endswith("_max") for name in raw]
        self._sums = torch.tensor([place for place, adds in enumerate(is_sum) if adds], device=self.device)
        self._extremes = torch.tensor([place for place, adds in enumerate(is_sum) if not adds], device=self.device)
        self._nothing = torch.full((), math.nan, dtype=torch.float64, device=self.device)
        self.first = torch.full((), -1, dtype=torch.int64, device=self.device)
        """Place of the parameter whose gradient was the first that was not finite; -1 for none."""

    @staticmethod
    def _has(part: _Part, state: str) -> bool:
        return state in part.taps.columns.states or state in part.numbers or state in part.small

    def table(self) -> torch.Tensor:
        """float64[parameters, columns] of the step that has just been launched, on the device."""
        raw = self._together(self._collected())
        column = dict(zip(self._raw, raw.unbind(1)))
        inverse = self._engines[0].control[INVERSE_SCALE]
        self._note_first(column)
        update, param = column["update_squares"].sqrt(), column["param_squares"].sqrt()
        made = [
            column["grad_squares"].sqrt() * inverse,
            column["grad_max"] * inverse,
            param,
            column["param_max"],
            update,
            column["update_max"],
            update / param,
            column["grad_zeros"] / self._numel,
            column["lost"] / self._numel,
        ]
        for state in self._states:
            made += self._of_state(state, column)
        return torch.stack(made, 1)

    def _collected(self) -> torch.Tensor:
        """The columns as kernels leave them, of all segments."""
        raw = self._nothing.expand(len(self.names), len(self._raw)).clone()
        for part in self._parts:
            raw[part.rows[:, None], part.columns] = part.taps.totals.to(self.device, non_blocking=True)
        return raw

    def _together(self, raw: torch.Tensor) -> torch.Tensor:
        """What all ranks have of their parts together."""
        if self._agreement is None:
            return raw
        missing = raw.isnan() & raw[:, 2:3].isnan()
        sums = torch.where(missing, 0.0, raw)[:, self._sums] * self._share
        there = (~missing[:, 2]).to(torch.float64)[:, None] * self._share
        extremes = torch.where(missing, 0.0, raw)[:, self._extremes]
        ranks, rank = self._agreement.size, self._agreement.rank
        if ranks <= _ONE_MESSAGE:
            each = extremes.new_zeros((ranks, *extremes.shape))
            each[rank] = extremes
            message = torch.cat([sums.reshape(-1), there.reshape(-1), each.reshape(-1)])
            self._agreement.add(message)
            parts = message.split([sums.numel(), there.numel(), each.numel()])
            sums, there = parts[0].view_as(sums), parts[1].view_as(there)
            extremes = parts[2].view_as(each).amax(0)
        else:
            message = torch.cat([sums.reshape(-1), there.reshape(-1)])
            self._agreement.add(message)
            parts = message.split([sums.numel(), there.numel()])
            sums, there = parts[0].view_as(sums), parts[1].view_as(there)
            self._agreement.largest(extremes)
        whole = raw.clone()
        whole[:, self._sums], whole[:, self._extremes] = sums, extremes
        return torch.where(there > 0, whole, self._nothing)

    def _note_first(self, column: Mapping[str, torch.Tensor]) -> None:
        wrong = ~column["grad_max"].isfinite() & ~column["grad_zeros"].isnan()
        found = torch.where(wrong.any(), wrong.to(torch.int8).argmax(), self.first)
        self.first.copy_(torch.where(self.first < 0, found, self.first))

    def _of_state(self, state: str, column: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Norm and largest magnitude of a state of each parameter."""
        norm = largest = self._nothing.expand(len(self.names))
        if f"{state}_near" in column:
            norm = (column[f"{state}_near"] / NEAR**2 + column[f"{state}_far"] / FAR**2).sqrt()
            largest = column[f"{state}_max"]
        for part in self._parts:
            if state in part.numbers:
                number = part.segment.scalar_states[state].to(self.device, torch.float64).abs()
                norm, largest = norm.index_copy(0, part.rows, number), largest.index_copy(0, part.rows, number)
            elif state in part.small:
                own_norm, own_largest = part.small_states(state)
                norm = norm.index_copy(0, part.rows, own_norm.to(self.device))
                largest = largest.index_copy(0, part.rows, own_largest.to(self.device))
        return [norm, largest]
