"""Passes over rows, columns and other slices: what they compute, keep for other passes, and in which order they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .ir import Graph, Over, Value
from .passes import TilePass
from .views import View, choose_views, slice_word


@dataclass
class Slices:
    """What a program does with slices; nothing for a rule that reduces whole tensors only.

    Args:
        passes: for each stage, what runs between its scalar pass and its tile pass.
        slots: the slot of every slice-level value that passes hand on, by identity: results of reductions, and what a
            pass over slices computed for others.
        spans: what passes are over and what they read, where that is neither one number a row, a column nor a matrix.
    """

    passes: list[list[TilePass]] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    overs: list[Over] = field(default_factory=list)  # for each slot, the dimensions that its slices have not
    views: list[View] = field(default_factory=list)  # every view that a pass cuts its tiles in
    spans: list[tuple[Over | None, Over]] = field(default_factory=list)

    @property
    def kinds(self) -> list[Over]:
        """The kinds of slices there are."""
        return list(dict.fromkeys(self.overs))


class SliceCutter:
    """Sorts the slice-level values of a graph into passes."""

    def __init__(self, graph: Graph, stages: dict[int, int], tiles: Sequence[TilePass]) -> None:
        self.graph, self.stages, self.tiles = graph, stages, tiles
        self.slices = Slices()
        self._passes: dict[tuple[int, Over | None], TilePass] = {(tile.stage, None): tile for tile in tiles}

    def at(self, stage: int, over: Over | None) -> TilePass:
        """The pass over these slices at a stage."""
        if (stage, over) not in self._passes:
            title = f"{slice_word(over, self.graph.dims)}_pass_{stage}"
            self._passes[stage, over] = TilePass(title=title, stage=stage, over=over, stages=self.stages)
        return self._passes[stage, over]

    def reduce(self, reduction: Value) -> None:
        """Let the pass before a reduction to slices compute it."""
        source = self.at(self.stages[id(reduction)] - 1, reduction.args[0].over)
        source.parts.append((self._slot(reduction), reduction))

    def store(self, buffer: str, value: Value) -> None:
        """Write a row or column state in the first pass that knows its value, unless a later one needs the old."""
        over, stage = self.graph.slice_states[buffer], self.stages[id(value)]
        last = len(self.tiles) - 1
        readers = [
            self.stages[id(user)]
            for user in self.graph.values()
            if user.over == over and any(_is_load(arg, buffer) for arg in user.args)
        ]
        self.at(stage if all(reader <= stage for reader in readers) else last, over).stores[buffer] = value

    def finish(self) -> Slices:
        """Decide what passes keep for others, cut the passes in views, and put them in order."""
        for stage in reversed(range(len(self.tiles))):
            done: set[Over | None] = set()
            while waiting := [over for at, over in self._passes if at == stage and over not in done]:
                over = min(waiting, key=_extent)
                done.add(over)
                for value in self._passes[stage, over].slices():
                    self._keep(value)
        self._keep_loads()
        self.slices.passes = [self._ordered(stage) for stage in range(len(self.tiles))]
        return self.slices

    def _slot(self, value: Value) -> int:
        slots = self.slices.slots
        if id(value) not in slots:
            slots[id(value)] = len(slots)
            assert value.over is not None
            self.slices.overs.append(value.over)
        return slots[id(value)]

    def _keep(self, value: Value) -> None:
        """Let the pass that computes a value keep it; a copy of a buffer is placed when its readers are known."""
        if id(value) in self.slices.slots:
            return
        slot = self._slot(value)
        if value.operation != "load":
            self.at(self.stages[id(value)], value.over).kept.append((slot, value))

    def _keep_loads(self) -> None:
        """Copies of states for passes over elements or other slices: before anything is written there."""
        loads = [value for value in self.graph.values() if value.operation == "load" and id(value) in self.slices.slots]
        for value in loads:
            readers = [stage for (stage, _), found in self._passes.items() if any(v is value for v in found.slices())]
            written = [stage for (stage, _), found in self._passes.items() if value.attribute in found.stores]
            self.at(min(readers + written), value.over).kept.append((self._slot(value), value))

    def _ordered(self, stage: int) -> list[TilePass]:
        here = {over: found for (at, over), found in self._passes.items() if at == stage and not found.is_empty}
        ordered: list[TilePass] = []
        for over in sorted(here, key=_extent, reverse=True):
            views = self._views(here[over])
            ordered += [*views[1:], views[0]] if over is not None else views[1:]
        return ordered

    def _views(self, found: TilePass) -> list[TilePass]:
        """The pass itself with a view, then further passes for reductions that need another."""
        read = [value.over for value in found.slices() if value.over is not None and value.over != found.over]
        reduced = [value.over for _, value in found.parts if value.over is not None]
        if found.over is None and not read and not reduced:
            return [found]
        parts, passes = found.parts, [found]
        for index, (view, done) in enumerate(choose_views(found.over, self.graph.dims, reduced, read)):
            if index:
                title = f"{found.title}_{index}"
                here = TilePass(title=title, stage=found.stage, over=found.over, stages=self.stages, loads=found.loads)
                passes.append(here)
            passes[index].view = view
            passes[index].parts = [(slot, value) for slot, value in parts if value.over in done]
            if view not in self.slices.views:
                self.slices.views.append(view)
            spans = [(found.over, over) for over in read if view.place(over) == "other"]
            self.slices.spans += [span for span in dict.fromkeys(spans) if span not in self.slices.spans]
        return passes


def _is_load(value: Value, buffer: str) -> bool:
    return value.operation == "load" and value.attribute == buffer


def _extent(over: Over | None) -> int:
    return 0 if over is None else over[1] - over[0]
