"""Reports of optimizers: statistics of every parameter, and lists of changed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..compat import is_fake
from ..devices import is_host
from ..errors import RuleError
from ..graph import Graph
from ..kernels.spec import KernelSpec, Output
from ..placement import Share
from ..runtime import DeviceEngine
from ..runtime.outputs import OutputTables
from ..runtime.passes import Passes
from .changes import CHANGED, Change, Changes, Names
from .measures import Measurer, Stats, StatsPlot, StepStats, measured_by, taken_names

_NO_STATS = "{} requires an optimizer created with stats=tilestep.Stats(every=...)"

# Options of the optimizer, not of param groups.
_OPTIONS = ("stats", "track_changes", "skip_nonfinite", "skip_above", "track_grad_norm")


def require_no_options(group: Mapping[str, Any]) -> None:
    """Raise for a param group with an option of the optimizer."""
    for key in _OPTIONS:
        if key in group:
            raise ValueError(f"{key} is an option of the optimizer, not of a param group")


def names_of(groups: Sequence[Mapping[str, Any]]) -> Names:
    """Return the parameters' names, and their places by `id`: the given names, otherwise "group.index"."""
    names = Names([], {})
    for number, group in enumerate(groups):
        own = group.get("param_names")
        for index, param in enumerate(group["params"]):
            if id(param) not in names.places:
                names.places[id(param)] = len(names.names)
                names.names.append(own[index] if own else f"{number}.{index}")
    return names


def _passes(engines: Iterable[DeviceEngine]) -> list[Passes]:
    return [passes for engine in engines for passes in engine.passes]


def _counts_versions(param: torch.Tensor) -> bool:
    """Whether a parameter has memory and a version counter."""
    return not (is_lazy(param) or param.is_meta or is_fake(param) or param.is_inference())


class Reports:
    """The reports of an optimizer."""

    def __init__(self, stats: Stats | None, track_changes: bool) -> None:
        if stats is not None and not isinstance(stats, Stats):
            raise TypeError(f"Invalid stats: {stats!r}; it must be tilestep.Stats(every=...) or None")
        if not isinstance(track_changes, bool):
            raise TypeError(f"Invalid track_changes: {track_changes!r}; it must be True or False")
        self.asked, self.tracks = stats, track_changes
        self.calls = 0  # number of `step()` calls
        self.measured: StepStats | None = None
        self.changes = Changes() if track_changes else None
        self.measures = False  # whether the current step measures
        self._measurer: Measurer | None = None
        self._first: tuple[list[str], torch.Tensor] | None = None
        self._room: dict[int, tuple[OutputTables, int]] = {}  # tables and row of each parameter, by `id`

    @property
    def attached(self) -> tuple[str, ...]:
        """The active options, by their names in `combinations.REFUSED`."""
        return (*(("stats",) if self.asked is not None else ()), *(("track_changes",) if self.tracks else ()))

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        """Start to detect writes of other code to these parameters."""
        if self.changes is not None:
            self.changes.watch(filter(_counts_versions, params))

    def outputs(self, graph: Graph) -> tuple[Output, ...]:
        """The outputs of every step; raises RuleError for names that clash."""
        if self.asked is not None and "update" in graph.states:
            raise RuleError(
                f"rule {graph.title}: the statistics of state 'update' would have the names update_norm and "
                "update_max, which describe the step; rename the state"
            )
        if self.asked is not None and (taken := taken_names(graph.states, self.asked)):
            raise RuleError(f"rule {graph.title}: stats have {taken} already; rename the output")
        return (CHANGED,) if self.tracks else ()

    def attach(self, tables: Any, optimizer: Any, spec_of: Callable[..., KernelSpec]) -> None:
        """Allocate outputs in new tables."""
        engines: Sequence[DeviceEngine] = tables.engines
        names, covers_all = names_of(optimizer.param_groups), optimizer.placement.tables_cover_all
        handles = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        before, self._room = self._room, {}
        specs: dict[int, KernelSpec] = {}
        for passes in _passes(engines):
            segment = passes.segment
            passes.leave(() if self.asked is None else measured_by(segment.spec, self.asked))
            outputs = passes.outputs
            assert outputs is not None
            outputs.measures = self.measures
            for position, entry in enumerate(segment.entries):
                key = id(entry.share.param)
                self._room[key], specs[names.places[key]] = (outputs, position), segment.spec
                if self.measures and key in before:
                    outputs.carry(position, *before[key])
        self._measurer = None
        if self.asked is not None and engines:
            if covers_all:
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        place = names.places[id(param)]
                        rule, label = optimizer.rule_of(group), f"({names.names[place]})"
                        specs[place] = specs.get(place) or spec_of(rule, group, param, label=label)
            ordered = [specs[place] for place in sorted(specs)]
            numels = [param.numel() for param in handles.values()]
            self._measurer = Measurer(engines, names.places, names.names, numels, ordered, tables.sharers, self.asked)
            if self._first is not None and self._first[0] == names.names:
                self._measurer.first.copy_(self._first[1])
            self._first = names.names, self._measurer.first
        if self.changes is not None:
            # A sharded optimizer's parameters without a share on this rank are updated by other ranks.
            others = () if covers_all else tables.basis.dormant
            self.changes.attach(tables, list(handles.values()), names, list(filter(_counts_versions, others)))

    def detach(self) -> None:
        """Drop the tables and the state that they keep alive; results are kept."""
        self._room, self._measurer = {}, None

    def begin(self, engines: Sequence[DeviceEngine], *, captured: bool = False) -> bool:
        """Before the passes of a step: decide whether they measure. Returns whether they need more than kernels."""
        is_due = self.asked is not None and (self.calls + 1) % self.asked.every == 0
        self.measures = is_due or (captured and self.asked is not None)
        looks = self.measures
        for passes in _passes(engines):
            assert passes.outputs is not None
            passes.outputs.measures, passes.outputs.has_run = self.measures, False
            looks |= bool(passes.outputs.by_torch)
        return looks

    def finish(self) -> None:
        """After the passes of a step: make the table if the step measured."""
        self.calls += 1
        measures, self.measures = self.measures, False
        measurer = self._measurer
        if measures and measurer is not None:
            self.measured = StepStats(measurer.names, measurer.columns, measurer.table(), self.calls)

    @property
    def stats(self) -> StepStats:
        """The last finished statistics; empty before the first."""
        if self.asked is None:
            raise RuntimeError(_NO_STATS.format("stats"))
        if self.measured is None:
            return StepStats((), (), torch.empty((0, 0), dtype=torch.float64, device="cpu"), 0)
        self.measured.follow()
        return self.measured

    def first_nonfinite(
        self,
        groups: Sequence[Mapping[str, Any]],
        present: Callable[[], Iterable[tuple[Any, torch.Tensor]]],
        sharers: Any,
    ) -> str | None:
        """Return the first parameter with a nonfinite gradient: in the first measured step with one, else currently."""
        if self.asked is None:
            raise RuntimeError(_NO_STATS.format("first_nonfinite"))
        names, places = names_of(groups)
        if self.measured is not None:
            # The stream of updates writes `first` after the updates.
            self.measured.follow()
        seen = -1 if self._first is None else int(self._first[1])
        if seen < 0:
            gradients = {places[id(param)]: gradient for param, gradient in present() if gradient.numel()}
            device = next((gradient.device for gradient in gradients.values()), torch.device("cpu"))
            if sharers is not None and self._first is not None:
                device = self._first[1].device
            wrong = torch.zeros(len(names), dtype=torch.float64, device=device)
            for place, gradient in gradients.items():
                wrong[place] = (~gradient.isfinite().all()).to(device, torch.float64, non_blocking=not is_host(device))
            if sharers is not None:
                sharers.largest(wrong)
            flags = wrong.tolist()
            seen = flags.index(1.0) if any(flags) else -1
        return names[seen] if seen >= 0 else None
