"""Cutting a graph into passes: scalar passes over tensors, tile passes over elements, cut at reductions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .ir import SCALAR_LEVELS, Graph, Level, Value
from .matrices import is_matrix_work
from .matrix_passes import MatrixProgram, plan, stage_of
from .operations import ACROSS, REDUCTIONS
from .passes import ScalarPass, TilePass
from .slices import SliceCutter, Slices


@dataclass
class Program:
    """A graph cut into passes, in the order they run: scalar pass k, then tile pass k, then what spans tensors.

    Args:
        library: work on whole matrices between tile passes, and its scratch arrays.
        slices: passes over rows, columns and other slices, which run between scalar pass k and tile pass k.
    """

    graph: Graph  # the rule's graph
    scalars: list[ScalarPass]  # the scalar passes
    tiles: list[TilePass | None]  # the tile passes; None where a scalar pass has no tile work before the next
    columns: dict[int, int]  # row-table column of each scalar value that tile passes use, by identity
    reductions: dict[int, int]  # every reduction with its slot, by identity
    across: dict[int, int]  # every reduction over all tensors with its slot, by identity
    library: MatrixProgram = field(default_factory=MatrixProgram)
    slices: Slices = field(default_factory=Slices)

    @property
    def buffers(self) -> list[str]:
        """Element buffers in order: param, grad, then states that are not scalars."""
        scalar = set(self.graph.scalar_states)
        return ["param", "grad", *(name for name in self.graph.states if name not in scalar)]

    def slices_before(self, index: int) -> list[TilePass]:
        """The passes over slices between scalar pass and tile pass `index`."""
        return self.slices.passes[index] if self.slices.passes else []

    def tile_passes(self) -> list[TilePass]:
        """Every pass over elements or slices, in the order they run."""
        return [
            here
            for index, tile in enumerate(self.tiles)
            for here in (*self.slices_before(index), tile)
            if here is not None
        ]

    def unscales(self, tile: TilePass) -> bool:
        """Whether this is the pass that also writes gradients back without their loss scale."""
        return self.tiles[self.unscaling_pass] is tile

    @property
    def unscaling_pass(self) -> int:
        """The tile pass that also writes gradients back without their loss scale: none after it reads them."""
        reading = [
            index
            for index, tile in enumerate(self.tiles)
            if tile is not None and any("grad" in here.reads() for here in [tile, *self.slices_before(index)])
        ]
        return reading[-1] if reading else max(index for index, tile in enumerate(self.tiles) if tile is not None)


def partition(graph: Graph, exact: Iterable[str] = ()) -> Program:
    """Cut a graph into passes.

    Example:
        >>> from tilestep.graph import trace
        >>> from tilestep.rules import registry
        >>> cut = partition(trace(registry["Lion"], registry["Lion"].hyperparameters))
        >>> len(cut.tiles), cut.tiles[0].reads()
        (1, ['param', 'exp_avg', 'grad'])
    """
    stages = _stages(graph)
    last = max((stages[id(value)] for value in graph.outputs.values()), default=0)
    scalars = [ScalarPass() for _ in range(last + 1)]
    tiles = [TilePass(title=f"tile_pass_{stage}", stage=stage, stages=stages) for stage in range(last + 1)]
    cutter = SliceCutter(graph, stages, tiles)
    reductions: dict[int, int] = {}
    across: dict[int, int] = {}
    for value in graph.values():
        if value.operation in REDUCTIONS and value.level is Level.SLICE:
            cutter.reduce(value)
        elif value.operation in REDUCTIONS:
            reductions[id(value)] = len(reductions)
            source = cutter.at(stages[id(value)] - 1, value.args[0].over)
            source.reductions.append((reductions[id(value)], value))
        elif value.operation in ACROSS:
            across[id(value)] = len(across)
            scalars[stages[id(value)] - 1].across.append((across[id(value)], value))
    for name, value in graph.outputs.items():
        if name in graph.scalar_states:
            scalars[last].stores[name] = value
        elif name in graph.slice_states:
            cutter.store(name, value)
        elif name in graph.matrix_states:
            continue  # stored by a matrix pass
        else:
            tiles[last].stores[name] = value
    library = plan(graph, stages, tiles)
    _store_early(tiles, stages, set(exact), bool(library.passes))
    slices = cutter.finish()
    scalars[last].is_last = True
    columns = _columns(scalars, [*tiles, *(tile for here in slices.passes for tile in here)], stages)
    _library_columns(library, columns, scalars, stages)
    used: list[TilePass | None] = [None if tile.is_empty else tile for tile in tiles]
    return Program(graph, scalars, used, columns, reductions, across, library, slices)


def _stages(graph: Graph) -> dict[int, int]:
    stages: dict[int, int] = {}
    for value in graph.values():
        if is_matrix_work(value):
            stages[id(value)] = stage_of(value, stages)
            continue
        stage = max((stages[id(arg)] for arg in value.args), default=0)
        stages[id(value)] = stage + (value.operation in REDUCTIONS or value.operation in ACROSS)
    return stages


def _store_early(tiles: list[TilePass], stages: dict[int, int], exact: set[str], has_matrices: bool) -> None:
    """Move stores to the first pass that knows the value, where no later pass needs the old one.

    With matrix work between the passes also those of buffers that round, if no later pass needs the new value either.
    """
    last = tiles[-1]
    for name, value in list(last.stores.items()):
        stage = stages[id(value)]
        if stage >= len(tiles) - 1 or value.level in SCALAR_LEVELS or is_matrix_work(value):
            continue
        if name not in exact and not has_matrices:
            continue
        if id(value) not in {id(node) for tile in tiles[: stage + 1] for node in tile.values()}:
            continue
        later = tiles[stage + 1 :]
        for tile in later:
            tile.loads[id(value)] = name
        del last.stores[name]
        rounds = name not in exact and any(name in tile.reads() for tile in later)
        if rounds or any(_needs_old(tile, name) for tile in later):
            for tile in later:
                del tile.loads[id(value)]
            last.stores[name] = value
        else:
            tiles[stage].stores[name] = value


def _needs_old(tile: TilePass, name: str) -> bool:
    return any(
        node.operation == "load" and node.attribute == name and id(node) not in tile.loads for node in tile.values()
    )


def _columns(scalars: list[ScalarPass], tiles: list[TilePass], stages: dict[int, int]) -> dict[int, int]:
    columns: dict[int, int] = {}
    for tile in tiles:
        for value in tile.values():
            if value.level in SCALAR_LEVELS and value.operation != "constant" and id(value) not in columns:
                columns[id(value)] = len(columns)
                scalars[stages[id(value)]].rows.append((columns[id(value)], value))
    return columns


def _library_columns(
    library: MatrixProgram, columns: dict[int, int], scalars: list[ScalarPass], stages: dict[int, int]
) -> None:
    """Columns for the scalar values that matrices are computed with."""
    numbers = {id(value) for value in library.numbers()}
    for here in library.passes:
        for arg in [arg for value in here.values for arg in value.args] if here else ():
            known = id(arg) in columns or id(arg) in numbers or arg.operation == "constant"
            if arg.level in SCALAR_LEVELS and not known:
                columns[id(arg)] = len(columns)
                scalars[stages[id(arg)]].rows.append((columns[id(arg)], arg))


def scalar_needs(scalar: ScalarPass) -> list[Value]:
    """Every value a scalar pass computes or reads, in order."""
    roots = [
        *(value for _, value in scalar.rows),
        *(value.args[0] for _, value in scalar.across),
        *scalar.stores.values(),
    ]
    order: list[Value] = []
    seen: set[int] = set()

    def visit(value: Value) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if value.operation not in REDUCTIONS and value.operation not in ACROSS:
            for arg in value.args:
                visit(arg)
        order.append(value)

    for root in roots:
        visit(root)
    return order
