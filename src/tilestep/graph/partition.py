"""Cut a graph into passes: scalar passes over tensors, tile passes over elements or slices, and matrix passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..errors import RuleError
from ..linalg import MATRIX_OPERATIONS
from .ir import GLOBAL_REDUCTIONS, REDUCTIONS, SCALAR_LEVELS, Condition, Graph, Level, Over, Value, ancestors
from .lowering import is_matrix_work


@dataclass
class ScalarPass:
    """Numbers computed once per tensor, in float64."""

    rows: list[tuple[int, Value]] = field(default_factory=list)
    global_reductions: list[tuple[int, Value]] = field(default_factory=list)
    stores: dict[str, Value] = field(default_factory=dict)
    is_last: bool = False  # whether this is the last scalar pass


@dataclass
class TilePass:
    """Work on elements, or on slices (a number per row, column, ...): one launch over the tiles of all tensors."""

    stores: dict[str, Value] = field(default_factory=dict)  # new value of each buffer that the pass writes
    reductions: list[tuple[int, Value]] = field(default_factory=list)
    loads: dict[int, str] = field(default_factory=dict)
    title: str = ""  # its name in generated code
    stage: int = 0  # the scalar pass that it follows
    over: Over | None = None  # the reduced dimensions of its slices; None for a pass over elements
    stages: Mapping[int, int] = field(default_factory=dict, repr=False)
    kept: list[tuple[int, Value]] = field(default_factory=list)
    parts: list[tuple[int, Value]] = field(default_factory=list)  # slot and reduction, a number per slice
    view: View | None = None  # how tiles are cut along rows and columns; None for flat tensors

    @property
    def is_empty(self) -> bool:
        """Whether the pass does nothing."""
        return not (self.stores or self.reductions or self.kept or self.parts)

    def leaves(self, value: Value) -> bool:
        """Whether a value is an input of the pass: a number per tensor, a stored value, or a value of other slices."""
        if id(value) in self.loads or value.level is not Level.SLICE:
            return id(value) in self.loads or value.level in SCALAR_LEVELS
        is_ours = value.over == self.over and value.operation not in REDUCTIONS
        return not is_ours or (value.operation != "load" and self.stages[id(value)] != self.stage)

    def values(self) -> list[Value]:
        """Return the values that the pass computes and reads, in order, down to its leaves."""
        reduced = (reduction.args[0] for _, reduction in (*self.reductions, *self.parts))
        return ancestors([*self.stores.values(), *(value for _, value in self.kept), *reduced], self.leaves)

    def slices(self) -> list[Value]:
        """Return the slice-level values that the pass reads and another pass stores."""
        leaves = [value for value in self.values() if value.level is Level.SLICE and self.leaves(value)]
        return [value for value in leaves if id(value) not in self.loads]

    def reads(self) -> list[str]:
        """Return the buffers that the pass loads."""
        return list(dict.fromkeys(filter(None, map(self.buffer_of, self.values()))))

    def buffer_of(self, value: Value) -> str | None:
        """Return the buffer that the pass loads a value from; None for computed values."""
        if id(value) in self.loads:
            return self.loads[id(value)]
        return value.attribute if value.operation == "load" and not self.leaves(value) else None

    def place(self, value: Value) -> str:
        """Return the place of a slice-level value in the view of the pass; see `View.place`."""
        assert self.view is not None and value.over is not None
        return self.view.place(value.over)

    def parts_of(self, place: str) -> list[tuple[int, Value]]:
        """Return the reductions to slices at a place of the view, with their slots."""
        return [(slot, reduction) for slot, reduction in self.parts if self.place(reduction) == place]


@dataclass(frozen=True)
class View:
    """Arrays as a batch of matrices; tiles are cut along their rows and columns."""

    over: Over | None
    dims: int  # number of remaining dimensions
    rows: Over  # the dimensions that are rows; earlier dimensions index matrices, later dimensions are columns

    def extents(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Return matrices, rows and columns of a tensor of this shape."""
        first, stop = self.over or (0, 0)
        left = [*shape[:first], *shape[stop:]]
        begin, end = self.rows
        return math.prod(left[:begin]), math.prod(left[begin:end]), math.prod(left[end:])

    def place(self, over: Over) -> str:
        """The place of slices reduced over a block: a number per "row", "column" or "matrix"; "own" or "other"."""
        if over == self.over:
            return "own"
        block = _left(over, self.over)
        begin, end = self.rows
        places = {(end, self.dims): "row", (begin, end): "column"}
        return places.get(block, "matrix" if block == (begin, self.dims) else "other")


def _left(block: Over, over: Over | None) -> Over:
    """Renumber a block of dimensions after removing the dimensions of `over` inside it."""
    first, stop = over or (0, 0)
    return block[0], block[1] - (stop - first)


def choose_views(
    over: Over | None, dims: int, reduced: Sequence[Over], read: Sequence[Over]
) -> list[tuple[View, list[Over]]]:
    """The views in which a pass computes its reductions, each with its reductions; the first also suits its reads."""
    first, stop = over or (0, 0)
    left = dims - (stop - first)
    pending = list(dict.fromkeys(reduced))
    views: list[tuple[View, list[Over]]] = []
    while pending or not views:
        view = View(
            over, left, _rows([_left(block, over) for block in pending], [_left(block, over) for block in read], left)
        )
        done = [block for block in pending if view.place(block) in ("row", "column")]
        pending = [block for block in pending if block not in done]
        views.append((view, done))
    return views


def _rows(reduced: Sequence[Over], read: Sequence[Over], dims: int) -> Over:
    """Choose the dimensions to treat as rows: the first reductions must fit, and as many of the reads as possible."""
    column = next((block for block in reduced if block[1] < dims), None)
    if column is not None:
        return column
    columns = [block for block in read if block[1] < dims]
    ends = sorted({block[0] for block in (*reduced, *read) if block[1] == dims}, reverse=True)
    if reduced:
        end = reduced[0][0]
        adjacent = [block[0] for block in columns if block[1] == end]
        return next(iter([*adjacent, *(start for start in ends if start < end)]), 0), end
    if columns:
        return columns[0]
    return (ends[1] if len(ends) > 1 else 0, ends[0]) if ends else (0, 0)


def slice_word(over: Over | None, dims: int) -> str:
    """Return a word for slices reduced over these dimensions."""
    if over is None:
        return "tile"
    words = {(dims - 1, dims): "row", (dims - 2, dims - 1): "column", (dims - 2, dims): "matrix"}
    return words.get(over, f"slice_{over[0]}_{over[1]}")


@dataclass
class Slices:
    """The slice passes of a program; empty for a rule that reduces whole tensors only."""

    passes: list[list[TilePass]] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    overs: list[Over] = field(default_factory=list)  # per slot, the reduced dimensions of its slices
    views: list[View] = field(default_factory=list)  # every view of a pass
    spans: list[tuple[Over | None, Over]] = field(default_factory=list)

    @property
    def kinds(self) -> list[Over]:
        """The kinds of slices in the program."""
        return list(dict.fromkeys(self.overs))


class SliceCutter:
    """Sorts the slice-level values of a graph into passes."""

    def __init__(self, graph: Graph, stages: dict[int, int], tiles: Sequence[TilePass]) -> None:
        self.graph, self.stages, self.tiles = graph, stages, tiles
        self.slices = Slices()
        self._passes: dict[tuple[int, Over | None], TilePass] = {(tile.stage, None): tile for tile in tiles}

    def at(self, stage: int, over: Over | None) -> TilePass:
        """Return the pass over these slices at a stage."""
        if (stage, over) not in self._passes:
            title = f"{slice_word(over, self.graph.dims)}_pass_{stage}"
            self._passes[stage, over] = TilePass(title=title, stage=stage, over=over, stages=self.stages)
        return self._passes[stage, over]

    def reduce(self, reduction: Value) -> None:
        """Assign a reduction to slices to the pass ahead of it."""
        source = self.at(self.stages[id(reduction)] - 1, reduction.args[0].over)
        source.parts.append((self._slot(reduction), reduction))

    def store(self, buffer: str, value: Value) -> None:
        """Write a row or column state in the first pass that knows it, unless a later pass reads the old value."""
        over, stage = self.graph.slice_states[buffer], self.stages[id(value)]
        last = len(self.tiles) - 1
        readers = [
            self.stages[id(user)]
            for user in self.graph.values()
            if user.over == over and any(arg.operation == "load" and arg.attribute == buffer for arg in user.args)
        ]
        self.at(stage if all(reader <= stage for reader in readers) else last, over).stores[buffer] = value

    def finish(self) -> Slices:
        """Decide which values passes store for later passes, cut passes into views, and order them."""
        for stage in reversed(range(len(self.tiles))):
            done: set[Over | None] = set()
            while pending := [over for at, over in self._passes if at == stage and over not in done]:
                over = min(pending, key=_extent)
                done.add(over)
                for value in self._passes[stage, over].slices():
                    is_new = id(value) not in self.slices.slots
                    slot = self._slot(value)
                    if is_new and value.operation != "load":  # copies of buffers are placed below
                        self.at(self.stages[id(value)], value.over).kept.append((slot, value))
        loads = [value for value in self.graph.values() if value.operation == "load" and id(value) in self.slices.slots]
        for value in loads:  # copied for other passes before the buffer is written
            readers = [stage for (stage, _), tile in self._passes.items() if any(v is value for v in tile.slices())]
            written = [stage for (stage, _), tile in self._passes.items() if value.attribute in tile.stores]
            self.at(min(readers + written), value.over).kept.append((self._slot(value), value))
        self.slices.passes = [self._ordered(stage) for stage in range(len(self.tiles))]
        return self.slices

    def _slot(self, value: Value) -> int:
        slots = self.slices.slots
        if id(value) not in slots:
            slots[id(value)] = len(slots)
            assert value.over is not None
            self.slices.overs.append(value.over)
        return slots[id(value)]

    def _ordered(self, stage: int) -> list[TilePass]:
        at_stage = [tile for tile in self._passes.values() if tile.stage == stage and not tile.is_empty]
        ordered: list[TilePass] = []
        for tile in sorted(at_stage, key=lambda tile: -_extent(tile.over)):
            first, *views = self._views(tile)
            ordered += views if tile.over is None else [*views, first]
        return ordered

    def _views(self, tile: TilePass) -> list[TilePass]:
        """Return the pass with a view, then more passes for reductions that need another view."""
        read = [value.over for value in tile.slices() if value.over is not None and value.over != tile.over]
        reduced = [value.over for _, value in tile.parts if value.over is not None]
        if tile.over is None and not read and not reduced:
            return [tile]
        parts, passes = tile.parts, [tile]
        for index, (view, done) in enumerate(choose_views(tile.over, self.graph.dims, reduced, read)):
            if index:
                passes.append(replace(tile, title=f"{tile.title}_{index}", stores={}, reductions=[], kept=[]))
            passes[index].view = view
            passes[index].parts = [(slot, value) for slot, value in parts if value.over in done]
            if view not in self.slices.views:
                self.slices.views.append(view)
            spans = [(tile.over, over) for over in read if view.place(over) == "other"]
            self.slices.spans += [span for span in dict.fromkeys(spans) if span not in self.slices.spans]
        return passes


def _extent(over: Over | None) -> int:
    return 0 if over is None else over[1] - over[0]


@dataclass
class MatrixPass:
    """Work on whole matrices after a tile pass, batched over all tensors of a shape."""

    values: list[Value] = field(default_factory=list)  # computed values, in order
    inputs: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)  # the scratch array of each result, by identity
    states: dict[str, Value] = field(default_factory=dict)  # new values of matrix states, stored at the end
    needed: dict[int, list[Condition]] = field(default_factory=dict)


@dataclass
class MatrixProgram:
    """All matrix work of a program."""

    passes: list[MatrixPass | None] = field(default_factory=list)
    scratch: dict[str, torch.dtype | None] = field(default_factory=dict)

    def numbers(self) -> list[Value]:
        """Return the operands that must be known before the step."""
        values = [value for matrix_pass in self.passes if matrix_pass for value in matrix_pass.values]
        numbers = [arg for value in values for arg in value.args[len(_matrices(value)) :]]
        return list({id(arg): arg for arg in numbers}.values())


def matrix_program(graph: Graph, stages: dict[int, int], tiles: Sequence[TilePass]) -> MatrixProgram:
    """Place matrix work between the tile passes that write its operands and read its results."""
    work = [value for value in graph.values() if is_matrix_work(value)]
    _check(graph, work)
    if not work:
        return MatrixProgram()
    matrices = MatrixProgram([None] * len(tiles))
    results = [value for value in work if value.level is Level.ELEMENT]
    read_later = {id(arg) for node in graph.values() if not is_matrix_work(node) for arg in node.args}
    read_later |= {id(value) for value in graph.outputs.values()}
    conditions = _conditions(graph)
    states = {name: value for name, value in graph.outputs.items() if name in graph.matrix_states}
    ends = {index: [value for value in results if stages[id(value)] == index + 1] for index in range(len(tiles))}
    # The last pass writes new values of matrix states: nothing reads the old values after it.
    final = max(stages[id(value)] - 1 for value in [*results, *filter(is_matrix_work, states.values())])
    ends[final] += filter(is_matrix_work, states.values())
    for index, roots in ends.items():
        inside = _needed(roots, index, stages)
        if not inside:
            continue
        matrix_pass = matrices.passes[index] = MatrixPass([value for value in work if id(value) in inside])
        matrix_pass.needed = {key: uses for key in inside if (uses := conditions[key]) is not None}
        matrix_pass.states = states if index == final else {}
        for value in matrix_pass.values:
            for arg in _matrices(value):
                if is_matrix_work(arg) and id(arg) not in inside:
                    read_later.add(id(arg))
                elif arg.level is Level.ELEMENT and id(arg) not in inside:
                    _add_input(matrices, index, tiles[index], value, arg)
    for value in results:
        if id(value) in read_later:
            _add_output(matrices, value, stages[id(value)], tiles)
    return matrices


def _add_input(matrices: MatrixProgram, index: int, tile: TilePass, value: Value, arg: Value) -> None:
    """Make a tile pass write an operand of matrix work; in the compute dtype if readers want different dtypes."""
    earlier = (each.inputs[id(arg)] for each in matrices.passes[: index + 1] if each and id(arg) in each.inputs)
    name = next(earlier, "")
    if not name:
        name = _scratch(matrices, value)
        tile.stores[name] = arg
    elif matrices.scratch[name] is not _dtype(value):
        matrices.scratch[name] = None
    matrix_pass = matrices.passes[index]
    assert matrix_pass is not None
    matrix_pass.inputs[id(arg)] = name


def _conditions(graph: Graph) -> dict[int, list[Condition] | None]:
    """Return, per value, the conditions under which it is needed, any of which suffices; None for always."""
    needed: dict[int, list[Condition] | None] = {id(value): None for value in graph.outputs.values()}
    for node in reversed(graph.values()):
        selects = node.operation == "where" and node.args[0].level is Level.GROUP
        for place, arg in enumerate(node.args):
            use = [(node.args[0], place == 1)] if selects and place > 0 else needed[id(node)]
            others = needed.setdefault(id(arg), [])
            if use is not None and others is not None:
                needed[id(arg)] = [*others, *(condition for condition in use if condition not in others)]
            else:
                needed[id(arg)] = None
    return needed


def _matrices(value: Value) -> tuple[Value, ...]:
    """Return the operands of matrix work, without numbers that are known before the step."""
    operation = MATRIX_OPERATIONS.get(value.operation)
    return value.args[: operation.operands] if operation else value.args


def _needed(roots: Sequence[Value], index: int, stages: dict[int, int]) -> set[int]:
    """Return the values of the matrix pass after tile pass `index`: results, and intermediates of other shapes."""
    inside: set[int] = set()
    pending = list(roots)
    while pending:
        value = pending.pop()
        inside.add(id(value))
        for arg in _matrices(value):
            is_intermediate = arg.level is Level.MATRIX or stages[id(arg)] == index + 1
            if is_matrix_work(arg) and is_intermediate and id(arg) not in inside:
                pending.append(arg)
    return inside


def _add_output(matrices: MatrixProgram, value: Value, stage: int, tiles: Sequence[TilePass]) -> None:
    """Make a result of matrix work readable by later passes."""
    matrix_pass = matrices.passes[stage - 1]
    assert matrix_pass is not None
    name = matrix_pass.outputs[id(value)] = _scratch(matrices, value)
    for index in range(stage, len(tiles)):
        tiles[index].loads[id(value)] = name
        following = matrices.passes[index]
        if following is not None:
            following.inputs[id(value)] = name


def _scratch(matrices: MatrixProgram, value: Value) -> str:
    name = f"scratch_{len(matrices.scratch)}"
    matrices.scratch[name] = _dtype(value)
    return name


def _dtype(value: Value) -> torch.dtype | None:
    operation = MATRIX_OPERATIONS.get(value.operation)
    return operation.dtype if operation else None


def _check(graph: Graph, work: Sequence[Value]) -> None:
    inside = {id(value) for value in work}
    for node in graph.values():
        if id(node) not in inside and any(arg.level is Level.MATRIX for arg in node.args):
            raise RuleError(
                f"{node.line}: {graph.title} uses {node.operation} on a matrix without the parameter's shape; "
                f"only {', '.join(MATRIX_OPERATIONS)} support it"
            )
    for node in work:
        operation = MATRIX_OPERATIONS.get(node.operation)
        for number in node.args[operation.operands :] if operation else ():
            reached = ancestors([number])
            if any(value.operation == "load" or value.attribute == "step" for value in reached) or (
                number.level > Level.GROUP
            ):
                raise RuleError(
                    f"{node.line}: in rule {graph.title}: the numbers of {node.operation} must be known before the "
                    "step: compute them from hyperparameters only"
                )


@dataclass
class Program:
    """A graph cut into passes, in execution order: scalar pass k, tile pass k, then reductions over all tensors."""

    graph: Graph
    scalars: list[ScalarPass]
    tiles: list[TilePass | None]  # None where a scalar pass has no tile work before the next
    columns: dict[int, int]  # row-table column of each scalar value that tile passes use, by identity
    reductions: dict[int, int]  # every reduction with its slot, by identity
    global_reductions: dict[int, int]  # every reduction over all tensors with its slot, by identity
    matrices: MatrixProgram = field(default_factory=MatrixProgram)
    slices: Slices = field(default_factory=Slices)

    def slices_before(self, index: int) -> list[TilePass]:
        """Return the slice passes between scalar pass `index` and tile pass `index`."""
        return self.slices.passes[index] if self.slices.passes else []

    def passes_of(self, index: int) -> list[TilePass]:
        """Return the passes over elements or slices between scalar pass `index` and the next, in execution order."""
        return [tile for tile in (*self.slices_before(index), self.tiles[index]) if tile is not None]

    def tile_passes(self) -> list[TilePass]:
        """Return every pass over elements or slices, in execution order."""
        return [tile for index in range(len(self.tiles)) for tile in self.passes_of(index)]

    def unscales(self, tile: TilePass) -> bool:
        """Whether this pass also writes unscaled gradients back."""
        return self.tiles[self.unscaling_pass] is tile

    @property
    def unscaling_pass(self) -> int:
        """The tile pass that also writes unscaled gradients back: the last pass that reads gradients."""
        used = [index for index, tile in enumerate(self.tiles) if tile is not None]
        passes = {index: [self.tiles[index], *self.slices_before(index)] for index in used}
        reading = [index for index in used if any(each and "grad" in each.reads() for each in passes[index])]
        return (reading or used)[-1]


def partition(graph: Graph, exact: Iterable[str] = ()) -> Program:
    """Cut a graph into passes."""
    stages = _stages(graph)
    last = max((stages[id(value)] for value in graph.outputs.values()), default=0)
    scalars = [ScalarPass() for _ in range(last + 1)]
    tiles = [TilePass(title=f"tile_pass_{stage}", stage=stage, stages=stages) for stage in range(last + 1)]
    cutter = SliceCutter(graph, stages, tiles)
    reductions: dict[int, int] = {}
    global_reductions: dict[int, int] = {}
    for value in graph.values():
        if value.operation in REDUCTIONS and value.level is Level.SLICE:
            cutter.reduce(value)
        elif value.operation in REDUCTIONS:
            reductions[id(value)] = len(reductions)
            source = cutter.at(stages[id(value)] - 1, value.args[0].over)
            source.reductions.append((reductions[id(value)], value))
        elif value.operation in GLOBAL_REDUCTIONS:
            global_reductions[id(value)] = len(global_reductions)
            scalars[stages[id(value)] - 1].global_reductions.append((global_reductions[id(value)], value))
    for name, value in graph.outputs.items():
        if name in graph.scalar_states:
            scalars[last].stores[name] = value
        elif name in graph.slice_states:
            cutter.store(name, value)
        elif name in graph.matrix_states:
            continue  # stored by a matrix pass
        else:
            tiles[last].stores[name] = value
    matrices = matrix_program(graph, stages, tiles)
    _store_early(tiles, stages, set(exact), bool(matrices.passes))
    slices = cutter.finish()
    scalars[last].is_last = True
    columns = _columns(scalars, [*tiles, *(tile for together in slices.passes for tile in together)], matrices, stages)
    used = [None if tile.is_empty else tile for tile in tiles]
    return Program(graph, scalars, used, columns, reductions, global_reductions, matrices, slices)


def _stages(graph: Graph) -> dict[int, int]:
    stages: dict[int, int] = {}
    for value in graph.values():
        if is_matrix_work(value):
            stages[id(value)] = max(stages[id(arg)] + (not is_matrix_work(arg)) for arg in value.args)
            continue
        stage = max((stages[id(arg)] for arg in value.args), default=0)
        stages[id(value)] = stage + (value.operation in REDUCTIONS or value.operation in GLOBAL_REDUCTIONS)
    return stages


def _store_early(tiles: list[TilePass], stages: dict[int, int], exact: set[str], has_matrices: bool) -> None:
    """Move stores to the first pass that knows the value, unless a later pass needs the old value."""
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
        old = [v for tile in later for v in tile.values() if v.operation == "load" and id(v) not in tile.loads]
        if rounds or any(value.attribute == name for value in old):
            for tile in later:
                del tile.loads[id(value)]
            last.stores[name] = value
        else:
            tiles[stage].stores[name] = value


def _columns(
    scalars: list[ScalarPass], tiles: list[TilePass], matrices: MatrixProgram, stages: dict[int, int]
) -> dict[int, int]:
    """Assign columns to the scalar values that tile and matrix passes use."""
    needed = [value for tile in tiles for value in tile.values()]
    numbers = {id(value) for value in matrices.numbers()}
    for matrix_pass in filter(None, matrices.passes):
        needed += [arg for value in matrix_pass.values for arg in value.args if id(arg) not in numbers]
    columns: dict[int, int] = {}
    for value in needed:
        if value.level in SCALAR_LEVELS and value.operation != "constant" and id(value) not in columns:
            columns[id(value)] = len(columns)
            scalars[stages[id(value)]].rows.append((columns[id(value)], value))
    return columns


def scalar_needs(scalar: ScalarPass) -> list[Value]:
    """Return every value that a scalar pass computes or reads, in order."""
    roots = [
        *(value for _, value in scalar.rows),
        *(value.args[0] for _, value in scalar.global_reductions),
        *scalar.stores.values(),
    ]
    return ancestors(roots, lambda value: value.operation in REDUCTIONS or value.operation in GLOBAL_REDUCTIONS)
