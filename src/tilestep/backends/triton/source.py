"""The Triton backend: a program as one Python module; scalar, tile, row and column passes as kernels."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from functools import partial

from ...graph import SCALAR_LEVELS, ScalarPass, TilePass, Value, scalar_needs
from ...kernels.outputs import Traced
from ...kernels.spec import CLIP, INVERSE_SCALE, MAX_DIMS, NORM, KernelSpec, describe
from ...storage import BLOCK, Array, Leaf, codec_of, dtype_name, read_arrays
from ..decision import gradient_scale
from ..emit import scalar_source
from ..outputs import PassOutputs
from .text import (
    BLOCKS_SHAPE,
    HELPERS,
    POINTERS,
    REDUCTIONS,
    TileBody,
    TritonNames,
    along_rows,
    format_functions,
    head,
    is_16_bits,
    narrowed,
    number_function,
    pointer_to,
    random_functions,
    random_pointers,
    tile_pointers,
    writer_of,
)


def scalar_kernel(spec: KernelSpec, index: int, scalar_pass: ScalarPass) -> list[str]:
    """The kernel of a scalar pass."""
    states = [f"{name}_state" for name in spec.program.graph.scalar_states]
    pointers = [*POINTERS["scalar"], *states]
    columns = max(len(spec.program.columns), 1)
    needed = scalar_needs(scalar_pass)
    writer = writer_of("float64", "    ", TritonNames(pointers))
    numbers = ", ".join(f"tl.load(control + {place})" for place in (NORM, INVERSE_SCALE, CLIP))
    places = {
        "reduction": f"tl.load(sums + t * {spec.reduction_count} + {{}}, mask=active, other=0.0)",
        "total": "tl.load(totals + {})",
        "size": f"tl.load(sizes + t * {len(spec.sizes)} + {{}}, mask=active, other=1).to(tl.float64)",
        "hyper": "tl.load(base + {}, mask=active, other=0.0)",
        "step": "next_step",
        "machine_epsilon": f"tl.full((BLOCK,), {spec.machine_epsilon!r}, tl.float64)",
        "gradient_scale": f"gradient_scale_of({numbers}, {{}})",
    }
    loaded = {
        name: f"tl.load({name}_state + t, mask=active, other=0.0).to(tl.float64)"
        for name in spec.program.graph.scalar_states
    }
    for value in needed:
        text = scalar_source(spec, value, places, loaded)
        if text:
            writer.name(value, text)
    writer.write(needed)
    lines = [
        *head(f"{spec.name}_scalar_pass_{index}", pointers, "BLOCK: tl.constexpr"),
        "    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "    inside = t < tl.load(counts)",
        "    active = inside & (tl.load(grads + t, mask=inside, other=0) != 0)",
        "    skip = tl.load(control + 1) != 0.0",
        "    next_step = tl.load(step + t, mask=active, other=0.0).to(tl.float64) + tl.where(skip, 0.0, 1.0)",
        f"    base = hyper + tl.load(group + t, mask=active, other=0) * {len(spec.hypers)}",
        *writer.lines,
    ]
    wide = "tl.zeros((BLOCK,), tl.float64)"
    for column, value in scalar_pass.rows:
        rounded = f"({writer[value]} + {wide}).to(tl.{dtype_name(spec.compute)})"
        lines.append(f"    tl.store(rows + t * {columns} + {column}, {rounded}, mask=active)")
    for slot, value in scalar_pass.global_reductions:
        place = f"global_parts + t * {spec.global_count} + {slot}"
        neutral = "0.0" if value.operation == "global_sum" else "float('-inf')"
        lines.append(
            f"    tl.store({place}, tl.where(active, {writer[value.args[0]]} + {wide}, {neutral}), mask=inside)"
        )
    if scalar_pass.is_last:
        for name, value in scalar_pass.stores.items():
            stored = f"({writer[value]} + {wide}).to(tl.{dtype_name(spec.scalar_dtype(name))})"
            lines.append(f"    tl.store({name}_state + t, {stored}, mask=active & (skip == 0))")
        lines.append("    tl.store(step + t, next_step.to(tl.float32), mask=active)")
    return lines


_TOGETHER = 4
"""Neighbours that are combined before they are accumulated: a thread has at least as many, and keeps one number for
all of them. With a number for each element, a kernel's registers would leave room for few programs."""


class OutputText:
    """Writes what a kernel does for a pass's outputs, around its math, which also returns `seen_moves`."""

    def __init__(self, math: TileMath, outputs: PassOutputs) -> None:
        self._math, self._outputs, self._in_blocks = math, outputs, outputs.spec.has_blocks
        self.reports = bool(outputs.reports)
        self._param = outputs.spec.storages["param"]
        if outputs.moves is not None:
            math.writer.write(outputs.move_values)
            math.results["seen_moves"] = math.writer[outputs.moves]

    def _totals(self) -> dict[str, str]:
        """The variables of accumulators, and how many elements each is of; block passes have more for masked tiles."""
        return {"report": "TILE", **({"report_rest": str(BLOCK)} if self._in_blocks else {})}

    def accumulators(self, indent: str) -> list[str]:
        """Initial accumulators, and whether the step is applied."""
        if not self.reports:
            return []
        lines = []
        for name, size in self._totals().items():
            for slot, entry in self._outputs.reports:
                kind = "int32" if entry.root.is_bool else self._math.type
                first = "float('-inf')" if entry.output.reduce == "max" and entry.root.operation != "abs" else "0"
                lines.append(f"{indent}{name}_{slot} = tl.full(({size} // {_TOGETHER},), {first}, tl.{kind})")
        shape = "one_block.shape" if self._in_blocks else "(TILE,)"
        return [*lines, f"{indent}seen_keep = (tl.zeros({shape}, tl.float64) + skip) == 0.0"]

    def before(self, body: TileBody, *, strided: bool) -> None:
        """Load what the pass itself does not load, and keep the old elements of the parameter's arrays."""
        outputs, lines, indent = self._outputs, body.lines, body.indent
        body.in_pairs = True
        body.keeps = "seen_keep" if self.reports and body.mask else ""
        loaded = {buffer: name for name, buffer in reversed(self._math.inputs)}
        for name in outputs.of("old", "update", *(["new"] if body.keeps else [])):
            lines.append(f"{indent}seen_old_{name} = {loaded.get(name) or body.load(name)}")
        arrays = self._param.arrays("param")
        lines += [f"{indent}seen_was_{place} = {body.loaded(arrays[place])}" for place in outputs.compared]
        if outputs.marks and not self._scatters(body, strided):
            # With an address and a byte for each element, of which the first of eight counts: the layout of a tensor of
            # bytes is another, and its numbers would be moved between threads with two barriers.
            bytes_ = "words.to(tl.pointer_type(tl.uint8), bitcast=True) + seen_first * 4 + start // 8"
            byte, eight = "lane // 8", "8"
            masked = " & mask" if body.mask else ""
            if self._in_blocks:
                byte, eight, masked = f"(block_lane * {BLOCK // 8} + lane // 8)", along_rows(8), " & (block_lane >= 0)"
            lines += [
                f"{indent}seen_place = tl.multiple_of(tl.max_contiguous({bytes_} + {byte}, {eight}), {eight})",
                f"{indent}seen_there = (lane % 8 == 0){masked}",
                f"{indent}seen_had = tl.load(seen_place, mask=seen_there, other=0).to(tl.int32)",
            ]

    def _scatters(self, body: TileBody, strided: bool) -> bool:
        """Whether bits are set one by one, because elements do not begin at a byte."""
        return strided or (self._in_blocks and bool(body.mask))

    def after(self, body: TileBody, *, strided: bool) -> None:
        """Write the outputs of elements that were written: accumulate them, and set bits."""
        outputs, lines, indent = self._outputs, body.lines, body.indent
        writer = writer_of(self._math.type, indent, self._math.names.within())
        writer.lines, leaf, rest = lines, partial(self._leaf, body), body.mask and self._in_blocks
        names: dict[Leaf, str] = {}
        for slot, entry in outputs.reports:
            how, root = _accumulated(entry)
            term = outputs.write(writer, root, leaf, names)
            if body.mask and not entry.ignores_zeros:
                neutral = "float('-inf')" if entry.output.reduce == "max" else "0.0"
                term = f"{body.mask} & ({term})" if root.is_bool else f"tl.where({body.mask}, {term}, {neutral})"
            total = f"{'report_rest' if rest else 'report'}_{slot}"
            lines.append(f"{indent}{total} = {how}({total}, {term})")
        if outputs.marks:
            # 8 neighbours, which one or two threads have, are a byte; one whose bits are set is not written. Neighbours
            # that lie apart: bits count along the parameter's memory, as in the other kernel.
            shape = BLOCKS_SHAPE if self._in_blocks else "(TILE,)"
            packed = [
                "seen_set = tl.reshape(tl.where(seen_flag, 1 << lane % 8, 0), (TILE // 8, 8))",
                "seen_set = tl.broadcast_to(tl.sum(seen_set, 1, keep_dims=True), (TILE // 8, 8))",
                f"seen_bits = tl.reshape(seen_set, {shape}) | seen_had",
                "tl.store(seen_place, seen_bits.to(tl.uint8), mask=seen_there & (seen_bits != seen_had))",
            ]
            at = "at_1" if strided else "index"
            bit = f"words + seen_first + ({at} >> 5), 1 << ({at} & 31).to(tl.int32)"
            scattered = [f'tl.atomic_or({bit}, mask=seen_flag, sem="relaxed")']
            chosen = scattered if self._scatters(body, strided) else packed
            flag = f"seen_flag = {outputs.write(writer, outputs.marks, leaf, names)}"
            lines += [indent + line for line in (flag, *chosen)]

    def _leaf(self, body: TileBody, kind: str, buffer: str, place: int) -> str:
        """The expression of what an output reads; 0 or false where elements are masked, the old where skipped."""
        inside, mask = " & ".join(filter(None, (body.keeps, body.mask))), body.mask
        storage = self._outputs.spec.storages[buffer]
        codec = codec_of(storage)
        if kind == "old":
            return f"seen_old_{buffer}"
        if kind == "update":
            update = f"new_{buffer} - seen_old_{buffer}"
            return f"tl.where({inside}, {update}, 0.0)" if inside else update
        if kind == "moves" and self._outputs.moves is None:
            return "tl.full((1,), 0, tl.int1)"
        if kind in ("changed", "moves"):
            element = f"{storage.arrays(buffer)[place].name}_element"
            now = self._kept(buffer) if codec.is_element else element
            flag = "seen_moves" if kind == "moves" else f"differs({now}, seen_was_{place})"
            return f"{inside} & {flag}" if inside else flag
        kept = f"{self._kept(buffer)}.to(tl.{self._math.type})" if codec.is_element else f"new_{buffer}"
        if codec.has_blocks:
            elements = ", ".join(f"{array.name}_element" for array in read_arrays(storage, buffer))
            kept = f"join_{storage.title}({elements}).to(tl.{self._math.type})"
        old = f"seen_old_{buffer}" if body.keeps else "0.0"
        kept = f"tl.where({inside}, {kept}, {old})" if inside else kept
        # Codes behind a short block are not those of 0.
        return f"tl.where({mask}, {kept}, 0.0)" if codec.has_blocks and mask else kept

    def _kept(self, name: str) -> str:
        """The expression that is stored to a buffer of one array."""
        spec = self._outputs.spec
        if name in spec.draws:
            return f"{name}_element"
        return narrowed(f"new_{name}", spec.storages[name].arrays(name)[0], self._math.type, in_pairs=True)

    def partials(self, indent: str) -> list[str]:
        """Store the program's accumulators."""
        lines = [f"{indent}report_row = report_partials + tile.to(tl.int64) * {self._outputs.width}"]
        for slot, entry in self._outputs.reports:
            combine = "maximum" if entry.output.reduce == "max" else "add"
            total, *rest = (f"tl.reduce({name}_{slot}, 0, {combine})" for name in self._totals())
            total = f"{combine}({total}, {rest[0]})" if rest else total
            lines.append(f"{indent}tl.store(report_row + {slot}, {total}.to(tl.{self._math.type}))")
        return lines if self.reports else []


def output_pointers(outputs: PassOutputs) -> list[str]:
    """Pointer parameters for the outputs of a pass."""
    kinds = (("reports", outputs.reports), ("marks", outputs.marks))
    return [name for kind, wanted in kinds if wanted for name in POINTERS[kind]]


def _accumulated(entry: Traced) -> tuple[str, Value]:
    """The function that accumulates an output of elements, and what it takes."""
    root = entry.root
    if entry.output.reduce == "max":
        return "add_largest", root
    if root.operation == "mul" and root.args[0] is root.args[1]:
        return "add_squares", root.args[0]
    return "add_count" if root.is_bool else "add_values", root


_AROUND_ARRAYS = ("array", "address", "element")


class TileMath:
    """One tile pass: its math as a function, with arguments and results."""

    def __init__(self, spec: KernelSpec, tile: TilePass, name: str) -> None:
        self.spec, self.tile, self.name = spec, tile, f"{spec.name}_{name}"
        self.unscales = spec.program.unscales(tile)
        self.type = dtype_name(spec.compute)
        self.draws = spec.draws_in(tile)
        self.arrays: list[Array] = [spec.grad, *spec.arrays]
        around = [f"{array.name}_{what}" for array in self.arrays for what in _AROUND_ARRAYS]
        self.names = TritonNames([self.name, *around, *(f"new_{name}" for name in tile.stores)])
        self.writer = writer_of(self.type, "    ", self.names, is_16_bits(spec, tile), spec.has_blocks)
        self.inputs: list[tuple[str, str]] = []
        self.element_inputs: set[int] = set()
        self.slices: list[tuple[str, Value]] = []
        self.scalars: list[tuple[str, int]] = []
        kept_elsewhere = {id(value) for value in tile.slices()}
        for value in tile.values():
            buffer = tile.buffer_of(value)
            if buffer is not None:
                self.inputs.append((self._argument(value, buffer), buffer))
                self.element_inputs.add(id(value))
            elif id(value) in kept_elsewhere:
                self.slices.append((self._argument(value, value.name or describe(value)), value))
            elif tile.leaves(value) and value.operation != "constant" and id(value) in spec.program.columns:
                column = spec.program.columns[id(value)]
                self.scalars.append((self._argument(value, value.name or describe(value)), column))
        self.writer.write(tile.values())
        self.results = {f"new_{name}": self.writer[value] for name, value in tile.stores.items()}
        self.results.update({f"kept_{slot}": self.writer[value] for slot, value in tile.kept})
        self.results.update({f"term_{slot}": self.writer[value.args[0]] for slot, value in tile.reductions})
        self.results.update({f"share_{slot}": self.writer[value.args[0]] for slot, value in tile.parts})

    def _argument(self, value: Value, wanted: str) -> str:
        name = self.names.fresh(wanted)
        self.writer.bind(value, f"({name} != 0)" if value.is_bool else name)
        return name

    @property
    def arguments(self) -> str:
        """The function's arguments in order."""
        return ", ".join(name for name, _ in (*self.inputs, *self.slices, *self.scalars))

    def math(self) -> list[str]:
        """The function."""
        returned = ", ".join(self.results.values()) + ("," if len(self.results) == 1 else "")
        return ["@triton.jit", f"def {self.name}({self.arguments}):", *self.writer.lines, f"    return {returned}"]

    def call(self, indent: str) -> str:
        """The statement that calls it."""
        unpack = ", ".join(self.results) + ("," if len(self.results) == 1 else "")
        return f"{indent}{unpack} = {self.name}({self.arguments})"

    def load_inputs(self, body: TileBody) -> None:
        """Write the loads of the pass's inputs."""
        for name, buffer in self.inputs:
            body.lines.append(f"{body.indent}{name} = {body.load(buffer)}")

    def store_results(self, body: TileBody) -> None:
        """Write the stores of the pass's outputs, and of unscaled gradients."""
        for name in self.tile.stores:
            body.store(name, f"new_{name}")
        if self.unscales:
            raw = next((name for name, buffer in self.inputs if buffer == "grad"), None) or body.load("grad")
            body.lines.append(f"{body.indent}if UNSCALE:")
            body.indent += "    "
            body.store("grad", f"{raw} * inverse_scale")
            body.indent = body.indent[:-4]

    def used(self) -> list[tuple[int, Array]]:
        """Position and array of all buffers that this pass reads or writes."""
        buffers = [*self.tile.reads(), *self.tile.stores]
        touched = {array.name for name in buffers for array in self.spec.storages[name].arrays(name)}
        if self.unscales:
            touched.add(self.spec.grad.name)
        return [(position, array) for position, array in enumerate(self.arrays) if array.name in touched]

    def element_index(self, indent: str, place: str, of: str = "element") -> list[str]:
        """Lines for the indices of elements in the whole tensor, if the pass needs them."""
        if not self.draws:
            return []
        lines = [f"{of}_index = origin + ({place})"]
        lines += [f"{of}_low = {of}_index.to(tl.int32)", f"{of}_high = ({of}_index >> 32).to(tl.int32)"]
        return [indent + line for line in lines]

    @property
    def walked(self) -> list[tuple[int, Array | None]]:
        """As `used`, with the whole tensor's strides as an array of their own if the pass needs indices."""
        return [*self.used(), *([(len(self.arrays), None)] if self.draws else [])]

    @property
    def layout_width(self) -> int:
        """Entries of a row of the layout table."""
        return 1 + MAX_DIMS * (1 + len(self.arrays) + bool(self.spec.draws))

    def table_loads(self) -> list[str]:
        """Loads of the numbers of the tensor and of its addresses."""
        lines = [f"    row = rows + t * {max(len(self.spec.program.columns), 1)}"]
        lines += [f"    {name} = tl.load(row + {column})" for name, column in self.scalars]
        if self.unscales:
            lines.append(f"    inverse_scale = tl.load(control + 2).to(tl.{self.type})")
        if self.draws:
            # The last scalar pass has counted the step.
            later = int(self.tile.stage < len(self.spec.program.scalars) - 1)
            lines += [
                "    stream = tl.load(streams + t * 2)",
                "    origin = tl.load(streams + t * 2 + 1)",
                f"    steps_taken = tl.load(step + t).to(tl.int32) + {later}",
                "    key_0, key_1 = stream_keys(stream.to(tl.int32), (stream >> 32).to(tl.int32), steps_taken)",
            ]
        for position, array in self.used():
            if position:
                address = f"tl.load(addresses + t * {len(self.arrays) - 1} + {position - 1})"
                lines.append(f"    {array.name}_address = {address}")
        return lines


def finish_kernel(
    spec: KernelSpec, tile: TilePass, title: str, pointers: list[str], constants: str, stop: str
) -> list[str]:
    """The kernel that combines the tiles' parts of each tensor, in tile order."""
    count = spec.reduction_count
    lines = [
        *head(f"{spec.name}_{title}", pointers, constants),
        "    t = tl.program_id(0).to(tl.int64)",
        "    if tl.load(grads + t) == 0:",
        "        return",
        "    first = tl.load(first_tile + t)",
        f"    stop = {stop}",
        "    lane = tl.arange(0, BLOCK)",
    ]
    for slot, reduction in tile.reductions:
        neutral, combine = REDUCTIONS[reduction.operation]
        lines += [
            f"    total_{slot} = tl.full((BLOCK,), {neutral}, tl.float64)",
            "    start = first",
            "    while start < stop:",
            "        place = start + lane",
            f"        part = tl.load(partials + place * {count} + {slot}, mask=place < stop, other={neutral})",
            f"        total_{slot} = {combine}(total_{slot}, part)",
            "        start += BLOCK",
            f"    tl.store(sums + t * {count} + {slot}, tl.reduce(total_{slot}, 0, {combine}))",
        ]
    return lines


SLICE_POINTERS = [
    "grads",
    "addresses",
    "tile_base",
    "tile_tensor",
    "first_tile",
    "extents",
    "part_starts",
    "starts",
    "spans",
    "rows",
    "control",
    "layout_index",
    "partials",
]
"""Pointer parameters of a pass over slices, before those of `slice_pointers`."""

STRIDED_POINTERS = ["layouts", "tile_list"]

FINISH_POINTERS = ["partials", "sums", "grads", "first_tile", "tile_count"]

_NAMES = ("MATRICES", "ROWS", "COLUMNS", "HELD", "STAGES", "UNSCALE")
_SLICE_CONSTANTS = ", ".join(f"{name}: tl.constexpr" for name in _NAMES)
"""The sides of a tile, the rows of a sub-block, the sub-blocks in flight, whether gradients are unscaled."""

_SHAPE = "(MATRICES, HELD, COLUMNS)"

_COLUMNS_INSIDE = "(matrix < matrices_left) & (column < columns_left)"

_CODES = "(MATRICES * HELD * COLUMNS // WIDE, WIDE)"
"""The shape of a sub-block with a row for each block, as block formats take it; `WIDE` if a tile has fewer columns."""

_BLOCK_LANES = (
    f"    WIDE: tl.constexpr = COLUMNS if COLUMNS < {BLOCK} else {BLOCK}",
    "    block_lane = tl.arange(0, MATRICES * HELD * COLUMNS // WIDE)[:, None]",
    "    block_matrix = block_lane // (HELD * (COLUMNS // WIDE))",
    "    block_across = block_lane // (COLUMNS // WIDE) % HELD",
    "    block_column = block_lane % (COLUMNS // WIDE) * WIDE",
    "    block_line = block_matrix * height.to(tl.int32) + block_across",
    "    lane = block_column + tl.arange(0, WIDE)[None, :]",
    f"    per_row = (width + {BLOCK - 1}) // {BLOCK}",
)


def slice_pointers(spec: KernelSpec, tile: TilePass) -> list[str]:
    """The arrays of slots and parts that a pass takes, as names of pointer parameters: `slot_<n>`, `parts_<n>`."""
    slots = spec.program.slices.slots
    read = [slots[id(value)] for value in tile.slices()]
    return [
        *random_pointers(spec),
        *(f"slot_{slot}" for slot in dict.fromkeys([*read, *(slot for slot, _ in tile.kept)])),
        *(f"parts_{slot}" for slot, _ in tile.parts),
    ]


def slice_kernels(spec: KernelSpec, tile: TilePass) -> list[list[str]]:
    """The functions of a pass that reads, computes or works on slices."""
    kernel = _SliceKernel(spec, tile)
    parts = [kernel.math(), kernel.kernel()]
    if tile.over is None:
        parts.append(kernel.strided_kernel())
    if tile.reductions:
        stop = "first + tl.load(tile_count + t)"
        title = f"{tile.title}_finish"
        parts.append(finish_kernel(spec, tile, title, FINISH_POINTERS, "BLOCK: tl.constexpr", stop))
    return parts


def _walked_to(positions: Iterable[int]) -> list[str]:
    """Offsets of elements in strided arrays: indices, dimension by dimension from the last one, times strides."""
    chosen = list(positions)
    return [
        *(f"at_{position} = index * 0" for position in chosen),
        "dims = tl.load(layout)",
        "for back in tl.range(0, loop_bound(dims)):",
        "    dim = dims - 1 - back",
        "    size = tl.maximum(tl.load(layout + 1 + dim), 1)",
        "    coordinate = index % size",
        "    index = index // size",
        *(
            f"    at_{position} += coordinate * tl.load(layout + {1 + MAX_DIMS * (1 + position)} + dim)"
            for position in chosen
        ),
    ]


class _SliceKernel(TileMath):
    """The kernels that load and store around the math of one pass over rows and columns.

    A program walks its tile a few rows at a time. What it holds at once, and so how many programs are in flight, does
    not grow with the tile; loads from the tables and what is left of columns are paid once a tile.
    """

    def __init__(self, spec: KernelSpec, tile: TilePass) -> None:
        super().__init__(spec, tile, f"{tile.title}_math")
        self.all_slices = spec.program.slices
        self.row_parts, self.column_parts = tile.parts_of("row"), tile.parts_of("column")
        self.whole_tile = set(self.element_inputs)
        """The values that have an element for each of the tile, by identity; others are broadcast along a side."""
        self.whole_tile.update(id(value) for _, value in self.slices if self.tile.place(value) in ("own", "other"))
        for value in tile.values():
            if not tile.leaves(value) and any(id(arg) in self.whole_tile for arg in value.args):
                self.whole_tile.add(id(value))
        in_blocks = [name for name in (*tile.reads(), *tile.stores) if codec_of(spec.storages[name]).has_blocks]
        self.block_arrays = {array.name for name in in_blocks for array in spec.storages[name].arrays(name)}

    def _kind(self, slot: int) -> int:
        return self.all_slices.kinds.index(self.all_slices.overs[slot])

    def _prologue(self) -> list[str]:
        """All table loads, and which matrices, rows and columns the tile covers."""
        slots = [*(self.all_slices.slots[id(value)] for _, value in self.slices), *(slot for slot, _ in self.tile.kept)]
        kinds = sorted({self._kind(slot) for slot in slots})
        lines = [
            "    skip = tl.load(control + 1)",
            "    grad_address = tl.load(grads + t)",
            "    layout_row = tl.load(layout_index + t)",
            "    matrices = tl.load(extents + t * 3)",
            "    height = tl.load(extents + t * 3 + 1)",
            "    width = tl.load(extents + t * 3 + 2)",
            "    local = (tile - tl.load(first_tile + t)).to(tl.int32)",
            *self.table_loads(),
        ]
        count = len(self.all_slices.kinds)
        lines += [f"    start_{kind} = tl.load(starts + t * {count} + {kind})" for kind in kinds]
        for _, value in self.slices:
            if self.tile.place(value) == "other":
                slot, spans = self.all_slices.slots[id(value)], self.all_slices.spans
                pair = spans.index((self.tile.over, self.all_slices.overs[slot]))
                lines.append(f"    span_{slot} = tl.load(spans + (t * {len(spans)} + {pair}) * 2)")
                lines.append(f"    inner_{slot} = tl.load(spans + (t * {len(spans)} + {pair}) * 2 + 1)")
        if self.row_parts:
            lines.append("    row_parts = tl.load(part_starts + t * 2)")
        if self.column_parts:
            lines.append("    column_parts = tl.load(part_starts + t * 2 + 1)")
        return [
            *lines,
            "    column_tiles = ((width + COLUMNS - 1) // COLUMNS).to(tl.int32)",
            "    row_tiles = ((height + ROWS - 1) // ROWS).to(tl.int32)",
            "    rest = local // column_tiles",
            "    column_tile = (local % column_tiles).to(tl.int64)",
            "    row_tile = (rest % row_tiles).to(tl.int64)",
            "    matrix_tile = (rest // row_tiles).to(tl.int64)",
            "    first_matrix = matrix_tile * MATRICES",
            "    first_column = column_tile * COLUMNS",
            "    first_line = first_matrix * height + row_tile * ROWS",
            "    corner = first_line * width + first_column",
            "    matrices_left = tl.minimum(matrices - first_matrix, MATRICES).to(tl.int32)",
            "    rows_left = tl.minimum(height - row_tile * ROWS, ROWS).to(tl.int32)",
            "    columns_left = tl.minimum(width - first_column, COLUMNS).to(tl.int32)",
            "    pitch = width.to(tl.int32)",
            "    matrix = tl.arange(0, MATRICES)[:, None, None]",
            "    across = tl.arange(0, HELD)[None, :, None]",
            "    column = tl.arange(0, COLUMNS)[None, None, :]",
            "    line = matrix * height.to(tl.int32) + across",
            *(_BLOCK_LANES if self.block_arrays else ()),
            *(["    pair_lane = block_column // 2 + tl.arange(0, WIDE // 2)[None, :]"] if self._has_pairs else []),
        ]

    @property
    def _has_pairs(self) -> bool:
        return any(array.elements == 2 for _, array in self.used())

    def kernel(self) -> list[str]:
        """The kernel over tensors that lie row by row: a loop over full rows that are aligned, one for all others."""
        pointers = [*SLICE_POINTERS, *slice_pointers(self.spec, self.tile)]
        together = " | ".join(f"{array.name}_address" for _, array in self.used() if array.elements < BLOCK) or "0"
        unit = self._unit()
        plain = " & (layout_row < 0)" if self.tile.over is None else ""
        lines = [
            *head(f"{self.spec.name}_{self.tile.title}", pointers, _SLICE_CONSTANTS),
            "    tile = tl.load(tile_base) + tl.program_id(0)",
            "    t = tl.load(tile_tensor + tl.program_id(0)).to(tl.int64)",
            *self._prologue(),
            f"    if (skip == 0.0) & (grad_address != 0){plain}:",
            *self._before_loops("        "),
            "        aligned = (matrices_left == MATRICES) & (columns_left == COLUMNS)",
            f"        aligned = aligned & (width % {unit} == 0) & ((({together}) & 15) == 0)",
            # Not multiple_of(width): that promise would hold in the masked loop too, which then reads past rows.
            f"        even_pitch = pitch // {unit} * {unit}",
            "        even_place = line * even_pitch + column",
            f"        even_corner = first_line * (width // {unit} * {unit}) + first_column",
            "        whole = tl.where(aligned, rows_left // HELD * HELD, 0)",
            "        for start in tl.range(0, loop_bound(whole), HELD, num_stages=STAGES):",
            "            place = start * even_pitch + even_place",
        ]
        if self.block_arrays:
            lines.append("            code_place = (start + block_line) * even_pitch + lane")
        for _, array in self.used():
            base, corner = f"tl.multiple_of({pointer_to(array)}, 16)", "even_corner"
            lines.append(f"            {array.name}_array = {base} + {self._place_of(array, corner, 'even_pitch')}")
        lines += self._element_indices("            ", "even_corner")
        lines += self._work("            ", masked=False)
        lines += [
            "        odd_place = line * pitch + column",
            "        for start in tl.range(loop_bound(whole), loop_bound(rows_left), HELD):",
        ]
        lines += self._masks("            ")
        for _, array in self.used():
            place = self._place_of(array, "corner", "pitch")
            lines.append(f"            {array.name}_array = {pointer_to(array)} + {place}")
        lines += self._element_indices("            ", "corner")
        lines += self._work("            ", masked=True)
        return lines + self._after_loops("        ")

    def _place_of(self, array: Array, corner: str, pitch: str) -> str:
        """Offsets of a sub-block's entries in an array of a tensor that is contiguous by rows."""
        if array.elements == BLOCK:
            return f"(first_line + (start + block_line)) * per_row + (first_column + block_column) // {BLOCK}"
        if array.elements == 2:
            return f"{corner} // 2 + ((start + block_line) * ({pitch} // 2) + pair_lane)"
        return f"{corner} + code_place" if array.name in self.block_arrays else f"{corner} + place"

    def _element_indices(self, indent: str, corner: str) -> list[str]:
        lines = self.element_index(indent, f"{corner} + place")
        return lines + self.element_index(indent, f"{corner} + code_place", "code") if self.block_arrays else lines

    def _unit(self) -> int:
        """Elements of the narrowest array in 16 bytes."""
        sizes = [array.dtype.itemsize / array.elements for _, array in self.used() if array.elements < BLOCK]
        return int(16 / min(sizes, default=4))

    def _masks(self, indent: str) -> list[str]:
        lines = [
            "place = start * pitch + odd_place",
            "inside = (matrix < matrices_left) & (across < rows_left - start)",
            "mask = inside & (column < columns_left)",
        ]
        if self.block_arrays:
            lines += [
                "code_place = (start + block_line) * pitch + lane",
                "block_inside = (block_matrix < matrices_left) & (block_across < rows_left - start)",
                "block_mask = block_inside & (block_column < columns_left)",
                "code_mask = block_inside & (lane < columns_left)",
            ]
        if self._has_pairs:
            lines.append("pair_mask = block_inside & (pair_lane * 2 < columns_left)")
        return [indent + line for line in lines]

    def strided_kernel(self) -> list[str]:
        """The kernel over tensors that must be walked by coordinates."""
        pointers = [*SLICE_POINTERS, *STRIDED_POINTERS, *slice_pointers(self.spec, self.tile)]
        return [
            *head(f"{self.spec.name}_{self.tile.title}_strided", pointers, _SLICE_CONSTANTS),
            "    tile = tl.load(tile_list + tl.program_id(0))",
            "    t = tl.load(tile_tensor + tile).to(tl.int64)",
            *self._prologue(),
            "    if (skip == 0.0) & (grad_address != 0):",
            *self._before_loops("        "),
            "        odd_place = line * pitch + column",
            "        for start in tl.range(0, loop_bound(rows_left), HELD):",
            *self._masks("            "),
            *self._located("            "),
            *self._work("            ", masked=True),
            *self._after_loops("        "),
        ]

    def _located(self, indent: str) -> list[str]:
        lines = [f"layout = layouts + layout_row * {self.layout_width}", "index = corner + place"]
        lines += self._walked_arrays(None)
        if self.block_arrays:
            lines.append("index = corner + code_place")
            lines += self._walked_arrays("code")
        return [indent + line for line in lines]

    def _walked_arrays(self, index: str | None) -> list[str]:
        """Pointers into arrays of an entry for each element: of buffers in blocks with `index`, else of others."""
        arrays = [
            (position, array)
            for position, array in self.walked
            if array is None or (array.elements == 1 and (array.name in self.block_arrays) is (index is not None))
        ]
        lines = _walked_to(position for position, _ in arrays)
        places = {array: f"at_{position}" for position, array in arrays if array is not None}
        if index is not None:
            others = [array for _, array in self.used() if array.elements > 1]
            places.update({array: f"({self._place_of(array, 'corner', 'pitch')})" for array in others})
        lines += [f"{array.name}_array = {pointer_to(array)} + {place}" for array, place in places.items()]
        if index is None:
            return lines + self.element_index("", f"at_{len(self.arrays)}")
        return lines + self.element_index("", f"at_{len(self.arrays)}", index)

    def _before_loops(self, indent: str) -> list[str]:
        """Loads that all rows of the tile share, and the accumulators of columns and of the tile."""
        lines = [
            f"{indent}{name} = {self._load_slice(value, masked=True)}"
            for name, value in self.slices
            if self.tile.place(value) in ("column", "matrix")
        ]
        for name, reduction in self._accumulated():
            neutral = REDUCTIONS[reduction.operation][0]
            lines.append(f"{indent}all_{name} = tl.full({_SHAPE}, {neutral}, tl.{self.type})")
        return lines

    def _accumulated(self) -> list[tuple[str, Value]]:
        """Names of the values that are reduced over the tile or its columns, with the reduction."""
        return [
            *((f"share_{slot}", reduction) for slot, reduction in self.column_parts),
            *((f"term_{slot}", reduction) for slot, reduction in self.tile.reductions),
        ]

    def _work(self, indent: str, *, masked: bool) -> list[str]:
        lines: list[str] = []
        body = TileBody(self.spec, lines, indent, lambda name: f"{name}_array", "mask" if masked else "")
        body.shapes = (_SHAPE, _CODES) if self.block_arrays else None
        self.load_inputs(body)
        for name, value in self.slices:
            if self.tile.place(value) not in ("column", "matrix"):
                lines.append(f"{indent}{name} = {self._load_slice(value, masked)}")
        lines.append(self.call(indent))
        self.store_results(body)
        for slot, _ in self.tile.kept:
            pointer = f"slot_{slot} + start_{self._kind(slot)} + corner + place"
            masked_by = ", mask=mask" if masked else ""
            lines.append(f"{indent}tl.store({pointer}, kept_{slot}.to(tl.{self.type}){masked_by})")
        for slot, reduction in self.row_parts:
            term = f"share_{slot}"
            if masked:
                term = f"tl.where(mask, {term}, {REDUCTIONS[reduction.operation][0]})"
            elif id(reduction.args[0]) not in self.whole_tile:
                term = f"({term} + tl.zeros({_SHAPE}, tl.{self.type}))"
            part = _reduced(reduction, term, 2)
            masked_by = ", mask=inside" if masked else ""
            pointer = f"parts_{slot} + row_parts + column_tile * (matrices * height) + first_line + (line + start)"
            lines.append(f"{indent}tl.store({pointer}, {part}{masked_by})")
        for name, reduction in self._accumulated():
            neutral, combine = REDUCTIONS[reduction.operation]
            term = f"tl.where(mask, {name}, {neutral})" if masked else name
            lines.append(f"{indent}all_{name} = {combine}(all_{name}, {term})")
        return lines

    def _load_slice(self, value: Value, masked: bool) -> str:
        slot = self.all_slices.slots[id(value)]
        pointer, mask = {
            "own": ("corner + place", "mask"),
            "row": ("first_line + (line + start)", "inside"),
            "column": ("(first_matrix * width + first_column) + (matrix * pitch + column)", _COLUMNS_INSIDE),
            "matrix": ("first_matrix + matrix", "matrix < matrices_left"),
            "other": (f"((corner + place) // span_{slot} * inner_{slot} + (corner + place) % inner_{slot})", "mask"),
        }[self.tile.place(value)]
        masked_by = f", mask={mask}, other=0.0" if masked else ""
        return f"tl.load(slot_{slot} + start_{self._kind(slot)} + {pointer}{masked_by})"

    def _after_loops(self, indent: str) -> list[str]:
        """Store the accumulators."""
        lines = []
        for slot, reduction in self.column_parts:
            line = "((first_matrix + matrix) * row_tiles + row_tile)"
            place = f"parts_{slot} + column_parts + {line} * width + first_column + column"
            part = _reduced(reduction, f"all_share_{slot}", 1)
            lines.append(f"{indent}tl.store({place}, {part}, mask={_COLUMNS_INSIDE})")
        for slot, reduction in self.tile.reductions:
            total = _reduced(reduction, f"all_term_{slot}", None)
            place = f"partials + tile * {self.spec.reduction_count} + {slot}"
            lines.append(f"{indent}tl.store({place}, {total}.to(tl.float64))")
        return lines


def _reduced(reduction: Value, term: str, axis: int | None) -> str:
    kept = ", keep_dims=True" if axis is not None else ""
    if reduction.operation == "reduce_sum":
        return f"tl.sum({term}, {axis}{kept})"
    return f"tl.reduce({term}, {axis}, {REDUCTIONS[reduction.operation][1]}{kept})"


_LONGEST_LINE = 120
_NO_BREAK = "\0=\0"

_CONSTANTS = "TILE: tl.constexpr, SPAN: tl.constexpr, UNSCALE: tl.constexpr"
"""Constants of a tile pass: elements of a block, elements of a program, whether gradients are unscaled."""

_BLOCK_CONSTANTS = ", STAGES: tl.constexpr, RUNS: tl.constexpr"
"""Further constants of passes over blocks: tiles of whole blocks in flight, and a thread's runs of neighbours in a
block."""


_PARTS = (("part", "TILE"), ("rest", BLOCK))
"""Accumulators of a reduction over block tiles: of whole tiles and of masked ones, and their sizes."""


class _Kernel(TileMath):
    """The kernels that load and store around the math of one tile pass."""

    def __init__(self, spec: KernelSpec, index: int, tile: TilePass) -> None:
        super().__init__(spec, tile, f"math_{index}")
        self.index = index
        outputs = PassOutputs(spec, tile)
        self.outputs = OutputText(self, outputs) if outputs else None
        self.measures = bool(outputs.reports)
        self.output_pointers = output_pointers(outputs)

    @property
    def title(self) -> str:
        return f"{self.spec.name}_tile_pass_{self.index}"

    @property
    def _constants(self) -> str:
        return _CONSTANTS + (_BLOCK_CONSTANTS if self.spec.has_blocks else "")

    def _lanes(self) -> list[str]:
        if not self.spec.has_blocks:
            return ["    lane = tl.arange(0, TILE)"]
        # Runs are far from each other, so that threads beside each other have neighbours; what is worked out once for a
        # block is so once for all runs of a thread. One run is no dimension: Triton would move halves of bytes.
        places = {"block_lane": f"TILE // {BLOCK}", "one_block": "1"}
        lanes = {"pair_lane": BLOCK // 2, "lane": BLOCK}
        run = "tl.arange(0, RUNS)[None, :, None]"
        return [
            "    if RUNS == 1:",
            *(f"        {name} = tl.arange(0, {size})[:, None]" for name, size in places.items()),
            *(f"        {name} = tl.arange(0, {size})[None, :]" for name, size in lanes.items()),
            "    else:",
            *(f"        {name} = tl.arange(0, {size})[:, None, None]" for name, size in places.items()),
            *(
                f"        {name} = {run} * ({size} // RUNS) + tl.arange(0, {size} // RUNS)[None, None, :]"
                for name, size in lanes.items()
            ),
        ]

    def _whole_pointers(self, indent: str) -> list[str]:
        """Pointers to the elements of a tile that lies inside its tensor."""
        lines = []
        sizes = (array.dtype.itemsize for _, array in self.used() if array.elements == 1)
        # A pass may read nothing but pairs of codes.
        widest = max(sizes, default=1)
        for _, array in self.used():
            # Of blocks a thread has as many neighbours of each array: numbers would change threads otherwise.
            aligned = 16 * array.dtype.itemsize // widest if self.spec.has_blocks else 16
            base, start = f"tl.multiple_of({pointer_to(array)}, {aligned})", "tl.multiple_of(start, TILE)"
            place = f"{base} + {start} + lane"
            if self.spec.has_blocks:
                place = f"{base} + ({start} + block_lane * {BLOCK} + lane)"
            if array.elements == BLOCK:
                place = f"{pointer_to(array)} + (start // {BLOCK} + block_lane)"
            if array.elements == 2:
                base = f"tl.multiple_of({pointer_to(array)}, {aligned // 2})"
                place = f"{base} + ({start} // 2 + block_lane * {BLOCK // 2} + pair_lane)"
            lines.append(f"{indent}{array.name}_array = {place}")
        lane = f"block_lane * {BLOCK} + lane" if self.spec.has_blocks else "lane"
        return lines + self.element_index(indent, f"start + {lane}")

    def _whole_loop(self, indent: str) -> list[str]:
        """The range of tiles that lie inside their tensor, and the head of the loop over them."""
        if not self.spec.has_blocks:
            return [
                f"{indent}start = begin",
                f"{indent}whole = tl.where(aligned, stop - TILE + 1, begin)",
                f"{indent}while start < whole:",
                *self._whole_pointers(f"{indent}    "),
            ]
        return [
            f"{indent}whole = tl.where(aligned, begin + (stop - begin) // TILE * TILE, begin)",
            f"{indent}for start in tl.range(loop_bound(begin), loop_bound(whole), TILE, num_stages=STAGES):",
            *self._whole_pointers(f"{indent}    "),
        ]

    def _masks(self, indent: str) -> list[str]:
        """The mask of a tile's elements, and their indices; a row of the tensor begins a new block."""
        if not self.spec.has_blocks:
            return [f"{indent}mask = lane < stop - start", f"{indent}index = start + lane"]
        lines = [
            f"block = start // {BLOCK} + one_block",
            f"block_mask = block * {BLOCK} < stop",
            # In 32 bits, whose division is a few instructions: blocks of a tensor are fewer.
            "first_line = (block.to(tl.int32) // per_row.to(tl.int32)).to(tl.int64)",
            f"first_column = (block - first_line * per_row) * {BLOCK}",
            "line_column = first_column + lane",
            "mask = block_mask & (line_column < columns_of_row)",
            "index = first_line * columns_of_row + line_column",
        ]
        if any(array.elements == 2 for array in self.arrays):
            lines += [
                "packed_columns = (columns_of_row + 1) // 2",
                "pair_mask = block_mask & (first_column // 2 + pair_lane < packed_columns)",
            ]
        return [f"{indent}{line}" for line in lines]

    def _block_pointers(self, indent: str) -> list[str]:
        """Pointers to a tile's entries in arrays with an entry for several elements."""
        lines = []
        for _, array in self.used():
            if array.elements == BLOCK:
                lines.append(f"{indent}{array.name}_array = {pointer_to(array)} + block")
            elif array.elements == 2:
                first = f"{pointer_to(array)} + (first_line * packed_columns + first_column // 2)"
                lines.append(f"{indent}{array.name}_array = {first} + pair_lane")
        return lines

    def _call(self, indent: str, offset: Callable[[str], str], mask: str, *, strided: bool = False) -> list[str]:
        lines: list[str] = []
        body = TileBody(self.spec, lines, indent, offset, mask)
        self.load_inputs(body)
        if self.outputs is not None:
            self.outputs.before(body, strided=strided)
        lines.append(self.call(indent))
        # What all elements of a buffer become is a number for each lane then. Not by a broadcast: Triton would move it
        # behind instructions that take four elements at a time.
        lanes = "block_lane + lane" if self.spec.has_blocks and not mask else "lane"
        alike = [f"new_{name}" for name, value in self.tile.stores.items() if value.level in SCALAR_LEVELS]
        lines += [f"{indent}{name} = tl.where({lanes} >= 0, {name}, float('nan'))" for name in alike]
        self.store_results(body)
        if self.outputs is not None:
            self.outputs.after(body, strided=strided)
        for slot, reduction in self.tile.reductions:
            neutral, combine = REDUCTIONS[reduction.operation]
            term = f"tl.where({mask}, term_{slot}, {neutral})" if mask else f"term_{slot}"
            part = f"rest_{slot}" if mask and self.spec.has_blocks else f"part_{slot}"
            lines.append(f"{indent}{part} = {combine}({part}, {term})")
        return lines

    def _accumulators(self, indent: str) -> list[str]:
        """Initial accumulators; block passes have their own for masked tiles."""
        shapes = {"part": "(TILE,)"}
        if self.spec.has_blocks:  # a row for each block; with a mask one block, as its indices take registers
            shapes = {"part": BLOCKS_SHAPE, "rest": "lane.shape"}
        parts = [
            f"{indent}{name}_{slot} = tl.full({shape}, {REDUCTIONS[reduction.operation][0]}, tl.{self.type})"
            for slot, reduction in self.tile.reductions
            for name, shape in shapes.items()
        ]
        return [*(self.outputs.accumulators(indent) if self.outputs is not None else ()), *parts]

    def _partials(self, indent: str) -> list[str]:
        lines = self.outputs.partials(indent) if self.outputs is not None else []
        for slot, reduction in self.tile.reductions:
            combine = REDUCTIONS[reduction.operation][1]
            total = f"tl.reduce(part_{slot}, 0, {combine})"
            if self.spec.has_blocks:
                both = [f"tl.reduce(tl.reshape({name}_{slot}, ({size},)), 0, {combine})" for name, size in _PARTS]
                total = f"{combine}({both[0]}, {both[1]})"
            total = f"{total}.to(tl.float64)"
            lines.append(f"{indent}tl.store(partials + tile * {self.spec.reduction_count} + {slot}, {total})")
        return lines

    @property
    def _runs(self) -> str:
        """Whether a program has work: where it reports, in a skipped step too."""
        return "(grad_address != 0)" if self.measures else "(skip == 0.0) & (grad_address != 0)"

    def _prologue(self, tile: str) -> list[str]:
        """All table loads before the first branch: they overlap; a return between them would serialize them."""
        return [
            f"    tile = {tile}",
            "    t = tl.load(tile_tensor + tile).to(tl.int64)",
            "    skip = tl.load(control + 1)",
            "    grad_address = tl.load(grads + t)",
            "    layout_row = tl.load(layout_index + t)",
            "    begin = (tile - tl.load(first_tile + t)) * SPAN",
            "    stop = tl.minimum(begin + SPAN, tl.load(numel + t))",
            *(["    columns_of_row = tl.load(columns + t)"] if self.spec.has_blocks else []),
            *self.table_loads(),
            *(["    seen_first = tl.load(first_word + t)"] if "first_word" in self.output_pointers else ()),
        ]

    def _rows(self) -> list[str]:
        if not self.spec.has_blocks:
            return []
        return [f"        per_row = tl.maximum((columns_of_row + {BLOCK - 1}) // {BLOCK}, 1)"]

    def kernel(self) -> list[str]:
        """The kernel over all tensors that are walked in memory order.

        A program walks SPAN elements of one tensor in tiles: the chain of table loads is paid once a span, and the loop
        keeps registers, and with them the number of programs in flight, as for one tile.
        """
        pointers = tile_pointers(self.spec, self.output_pointers)
        lines = [*head(self.title, pointers, self._constants), *self._prologue("tl.program_id(0)")]
        alike = [array for _, array in self.used() if array.elements != BLOCK]
        together = " | ".join(f"{array.name}_address" for array in alike) or "grad_address"
        # Rows that end inside of a block are walked with a mask.
        is_even = ["        aligned = aligned & (columns_of_row >= tl.load(numel + t))"] if self.spec.has_blocks else []
        lines += [
            *self._lanes(),
            f"    if {self._runs} & (layout_row < 0):",
            f"        aligned = (({together}) & 15) == 0",
            *is_even,
            *(["        aligned = aligned & (skip == 0.0)"] if self.measures else []),
            *self._rows(),
            *self._accumulators("        "),
            *self._whole_loop("        "),
        ]
        lines += self._call("            ", lambda name: f"{name}_array", "")
        lines += ["        start = whole" if self.spec.has_blocks else "            start += TILE"]
        lines += ["        while start < stop:"]
        if self.spec.has_blocks:
            lines += self._masks("            ")
            plain = [array for _, array in self.used() if array.elements == 1]
            lines += [f"            {array.name}_array = {pointer_to(array)} + index" for array in plain]
            lines += [*self._block_pointers("            "), *self.element_index("            ", "index")]
        else:
            lines.append("            mask = lane < stop - start")
            lines += self.element_index("            ", "start + lane")
            lines += [
                f"            {array.name}_array = {pointer_to(array)} + start + lane" for _, array in self.used()
            ]
        lines += self._call("            ", lambda name: f"{name}_array", "mask")
        return [*lines, f"            start += {self._masked}", *self._partials("        ")]

    @property
    def _masked(self) -> str:
        """Elements of a masked block."""
        return str(BLOCK) if self.spec.has_blocks else "TILE"

    def strided_kernel(self) -> list[str]:
        """The kernel over the tiles of tensors that must be walked by coordinates."""
        pointers = tile_pointers(self.spec, self.output_pointers, strided=True)
        lines = [
            *head(f"{self.title}_strided", pointers, self._constants),
            *self._prologue("tl.load(tile_list + tl.program_id(0))"),
            *self._lanes(),
            f"    if {self._runs}:",
            f"        layout = layouts + layout_row * {self.layout_width}",
            *self._rows(),
            *self._accumulators("        "),
            "        start = begin",
            "        while start < stop:",
        ]
        used = [(position, array) for position, array in self.walked if array is None or array.elements == 1]
        inside = [*self._masks(""), *_walked_to(position for position, _ in used)]
        for position, array in used:
            if array is not None:
                inside.append(f"{array.name}_array = {pointer_to(array)} + at_{position}")
        inside += [*self._block_pointers(""), *self.element_index("", f"at_{len(self.arrays)}")]
        lines += [f"            {line}" for line in inside]
        lines += self._call("            ", lambda name: f"{name}_array", "mask", strided=True)
        return [*lines, f"            start += {self._masked}", *self._partials("        ")]

    def finish(self) -> list[str]:
        """The kernel that adds up the tile partials of each tensor, in tile order."""
        stop = "first + (tl.load(numel + t) + SPAN - 1) // SPAN"
        constants = "SPAN: tl.constexpr, BLOCK: tl.constexpr"
        return finish_kernel(self.spec, self.tile, f"finish_{self.index}", POINTERS["finish"], constants, stop)


def source(spec: KernelSpec) -> str:
    """The whole module of a spec."""
    quick = all(is_16_bits(spec, tile) for tile in spec.program.tiles if tile is not None)
    parts = format_functions(spec.storages.values(), quick)
    parts += random_functions(spec.draws.values()) if spec.draws else []
    for index, (scalar_pass, tile) in enumerate(zip(spec.program.scalars, spec.program.tiles)):
        parts.append(scalar_kernel(spec, index, scalar_pass))
        for tile_pass in (*spec.program.slices_before(index), tile):
            if tile_pass is not None and tile_pass.view is not None:
                parts += slice_kernels(spec, tile_pass)
        if tile is not None and tile.view is None:
            kernel = _Kernel(spec, index, tile)
            parts += [kernel.math(), kernel.kernel(), kernel.strided_kernel()]
            if tile.reductions:
                parts.append(kernel.finish())
    return module_text(spec.header("#", "Triton"), parts)


def module_text(header: str, parts: Iterable[Iterable[str]]) -> str:
    """A module of functions, with what they call."""
    listed = [list(part) for part in parts]
    if any("gradient_scale_of(" in line for part in listed for line in part):
        listed.insert(0, number_function("gradient_scale_of", gradient_scale))
    body = "\n\n\n".join("\n".join(part) for part in listed) + "\n"
    helpers = ", ".join(name for name in HELPERS if re.search(rf"(?<![.\w]){name}\b", body))
    imports = "import triton\nimport triton.language as tl"
    if helpers:
        imports += f"\n\nfrom tilestep.backends.triton.support import {helpers}"
    lines = f"{header}\n{imports}\n\n\n{body}".split("\n")
    return "\n".join(part for line in lines for part in _folded(line))


def _folded(line: str) -> list[str]:
    """A long call, definition or import in lines of at most 120 columns, each inside its parentheses."""
    starts = ("def ", "@triton.jit", "from ")
    if len(line) <= _LONGEST_LINE or not (line.startswith(starts) or "_math_" in line):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    if line.startswith("from ") and "(" not in line:
        line = line.replace(" import ", " import (", 1) + ")"
    results, equals, call = line.partition(" = ")
    if equals and len(results) + call.find(",") > _LONGEST_LINE - 3:
        # Too many results for the line that the call's parentheses begin in: they get their own.
        begin = len(results) - len(results.lstrip())
        line = f"{results[:begin]}({results[begin:]}){_NO_BREAK}{call}"
    lines = textwrap.wrap(
        line, _LONGEST_LINE, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, tabsize=4
    )
    return [part.replace(_NO_BREAK, " = ") for part in lines]
