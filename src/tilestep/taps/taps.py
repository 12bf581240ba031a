"""What an optimizer was asked to give out, and what does it at each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..codegen.spec import KernelSpec
from ..codegen.spec import Taps as KernelTaps
from ..codegen.taps import taps_fit
from ..engine import segment_class
from .changes import Changes
from .stats import Measurer, Stats, StepStats

if TYPE_CHECKING:
    from ..engine import DeviceEngine


_OPTIONS = ("stats", "track_changes")
"""Options that are the optimizer's, and no param group's."""


def require_no_taps(group: Mapping[str, Any]) -> None:
    """Raise for a param group that asks for what only a whole optimizer gives."""
    for key in _OPTIONS:
        if key in group:
            raise ValueError(f"{key} is an option of the optimizer, for all of its parameters: no param group has it")


def names_of(groups: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[int, int]]:
    """A name for each parameter, and the place of each by `id`: as given with named parameters, else "group.index".

    Example:
        >>> names_of([{"params": [torch.zeros(1), torch.zeros(1)]}])[0]
        ['0.0', '0.1']
    """
    names: list[str] = []
    places: dict[int, int] = {}
    for number, group in enumerate(groups):
        given = group.get("param_names")
        for index, param in enumerate(group["params"]):
            if id(param) not in places:
                places[id(param)] = len(names)
                names.append(given[index] if given else f"{number}.{index}")
    return names, places


class Taps:
    """What an optimizer gives out beside its updates; None stands for nothing."""

    def __init__(self, stats: Stats | None, track_changes: bool) -> None:
        if stats is not None and not isinstance(stats, Stats):
            raise TypeError(f"Invalid stats: {stats!r}; it takes tilestep.Stats(every=...), or None")
        if not isinstance(track_changes, bool):
            raise TypeError(f"Invalid track_changes: {track_changes!r}; it is True or False")
        self.asked, self.tracks = stats, track_changes
        self.calls = 0
        """Steps that were called."""
        self.measured: StepStats | None = None
        self.changes = Changes() if track_changes else None
        self._measurer: Measurer | None = None
        self._first: tuple[list[str], torch.Tensor] | None = None

    @classmethod
    def of(cls, stats: Any, track_changes: Any) -> Taps | None:
        """What these ask for; None where that is nothing."""
        return cls(stats, track_changes) if stats is not None or track_changes is not False else None

    @property
    def attached(self) -> tuple[str, ...]:
        """What was asked for, as `combinations.REFUSED` calls it."""
        return (*(("stats",) if self.asked is not None else ()), *(("track_changes",) if self.tracks else ()))

    def again(self) -> Taps:
        """The same for another optimizer: nothing measured yet."""
        return Taps(self.asked, self.tracks)

    def spec(self, spec: KernelSpec, make: Callable[[KernelTaps], KernelSpec], device: torch.device) -> KernelSpec:
        """What kernels are built from that mark changed weights, where they can."""
        if self.tracks and segment_class(device).has_taps and taps_fit(spec):
            return make(KernelTaps(changes=True))
        return spec

    def attach(self, tables: Any, groups: Sequence[Mapping[str, Any]]) -> None:
        """Make room in tables that were just made."""
        engines: Sequence[DeviceEngine] = tables.engines
        for engine in engines:
            for segment in engine.segments:
                segment.tap(stats=self.asked is not None, changes=self.tracks)
        names, places = names_of(groups)
        entries = {
            id(entry): places[id(param)]
            for engine, params in zip(engines, tables.members)
            for entry, param in zip(engine.entries, params)
        }
        before, self._measurer = self._measurer, None
        if self.asked is not None and engines:
            self._measurer = Measurer(engines, entries, names, tables.agreement)
            if before is not None and before.device == self._measurer.device and before.names == names:
                self._measurer.first = before.first
        if self.changes is not None:
            self.changes.attach(tables, names, places)

    def begin(self, engines: Sequence[DeviceEngine], *, captured: bool = False) -> bool:
        """Before a step's passes: decide whether they measure."""
        due = self._is_due or (captured and self.asked is not None)
        looks = due
        for engine in engines:
            for segment in engine.segments:
                assert segment.taps is not None
                segment.taps.measures = due
                looks |= segment.taps.goes_round
        return looks

    @property
    def _is_due(self) -> bool:
        return self.asked is not None and (self.calls + 1) % self.asked.every == 0

    def finish(self, *, captured: bool = False) -> None:
        """After a step's passes: make the table of what was measured."""
        due = self._is_due or (captured and self.asked is not None)
        self.calls += 1
        if due and self._measurer is not None:
            made = self._measurer
            self.measured = StepStats(made.names, made.columns, made.table(), self.calls)

    @property
    def stats(self) -> StepStats:
        """The last finished statistics."""
        if self.asked is None:
            raise RuntimeError("stats: make the optimizer with stats=tilestep.Stats(every=...)")
        if self.measured is None:
            raise RuntimeError(
                f"stats: no step has measured yet; with every={self.asked.every} call number {self.asked.every} of "
                "step() is the first"
            )
        return self.measured

    def first_nonfinite(self, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """Name of the parameter whose gradient was not finite first: in a measured step, else among those there now."""
        if self.asked is None:
            raise RuntimeError("first_nonfinite: make the optimizer with stats=tilestep.Stats(every=...)")
        if self._measurer is not None:
            place = int(self._measurer.first)
            if place >= 0:
                return self._measurer.names[place]
        params = [param for group in groups for param in group["params"]]
        present = [
            (name, param.grad)
            for name, param in zip(names_of(groups)[0], dict.fromkeys(params))
            if param.grad is not None and param.grad.numel()
        ]
        plain = [(name, grad) for name, grad in present if type(grad) is torch.Tensor]
        if not plain:
            return None
        finite = torch.stack([grad.isfinite().all().to(plain[0][1].device) for _, grad in plain]).tolist()
        return next((name for (name, _), is_finite in zip(plain, finite) if not is_finite), None)
