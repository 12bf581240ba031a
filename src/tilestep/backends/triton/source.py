"""The Triton backend: a program as one Python module; scalar, tile, row and column passes as kernels."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from ...graph import SCALAR_LEVELS, ScalarPass, TilePass, Value
from ...kernels.outputs import Traced
from ...kernels.spec import CLIP, INVERSE_SCALE, MAX_DIMS, NORM, KernelSpec, describe
from ...storage import BLOCK, Array, Leaf, codec_of, dtype_name, read_arrays
from ..decision import gradient_scale
from ..emit import code, nested, write_scalars
from ..outputs import PassOutputs
from .text import (
    BLOCKS_SHAPE,
    HELPERS,
    REDUCTIONS,
    TileBody,
    TritonNames,
    TritonWriter,
    along_rows,
    format_functions,
    head,
    is_16_bits,
    narrowed,
    number_function,
    pointer_to,
    pointers_of,
    random_functions,
)


def scalar_kernel(spec: KernelSpec, index: int, scalar_pass: ScalarPass) -> list[str]:
    """The kernel of a scalar pass."""
    states = spec.program.graph.scalar_states
    pointers = [*pointers_of("scalar"), *(f"{name}_state" for name in states)]
    writer = TritonWriter("float64", TritonNames(pointers))
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
    loaded = {name: f"tl.load({name}_state + t, mask=active, other=0.0).to(tl.float64)" for name in states}
    write_scalars(writer, spec, scalar_pass, places, loaded)
    wide = "tl.zeros((BLOCK,), tl.float64)"
    stores = []
    for column, value in scalar_pass.rows:
        rounded = f"({writer[value]} + {wide}).to(tl.{dtype_name(spec.compute)})"
        stores.append(f"tl.store(rows + t * {spec.columns} + {column}, {rounded}, mask=active)")
    for slot, value in scalar_pass.global_reductions:
        place = f"global_parts + t * {spec.global_count} + {slot}"
        neutral = "0.0" if value.operation == "global_sum" else "float('-inf')"
        stores.append(f"tl.store({place}, tl.where(active, {writer[value.args[0]]} + {wide}, {neutral}), mask=inside)")
    if scalar_pass.is_last:
        for name, value in scalar_pass.stores.items():
            stored = f"({writer[value]} + {wide}).to(tl.{dtype_name(spec.scalar_dtype(name))})"
            stores.append(f"tl.store({name}_state + t, {stored}, mask=active & (skip == 0))")
        stores.append("tl.store(step + t, next_step.to(tl.float32), mask=active)")
    return code(f"""
        {head(f"{spec.name}_scalar_pass_{index}", pointers, "BLOCK")}
            t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = t < tl.load(counts)
            active = inside & (tl.load(grads + t, mask=inside, other=0) != 0)
            skip = tl.load(control + 1) != 0.0
            next_step = tl.load(step + t, mask=active, other=0.0).to(tl.float64) + tl.where(skip, 0.0, 1.0)
            base = hyper + tl.load(group + t, mask=active, other=0) * {len(spec.hypers)}
            {nested([*writer.lines, *stores])}
    """)


_TOGETHER = 4
"""Neighbours that are combined before they are accumulated: a thread has at least as many, and keeps one number for
all of them. With a number for each element, a kernel's registers would leave room for few programs."""


class OutputText:
    """Writes the code for a pass's outputs, around its math, which also returns `seen_moves`."""

    def __init__(self, math: TileMath) -> None:
        self._math, self.outputs, self._in_blocks = math, PassOutputs(math.spec, math.tile), math.spec.has_blocks
        self._param = math.spec.storages["param"]
        if self.outputs.moves is not None:
            math.writer.write(self.outputs.move_values)
            math.results["seen_moves"] = math.writer[self.outputs.moves]
        kinds = {"reports": self.outputs.reports, "marks": self.outputs.marks}
        self.pointers = pointers_of(*(kind for kind, is_used in kinds.items() if is_used))

    def _totals(self) -> Iterator[tuple[str, int, str, Traced]]:
        """Accumulators (name, slot, size), which block passes also have for masked tiles; and the outputs in them."""
        sizes = {"report": "TILE", **({"report_rest": str(BLOCK)} if self._in_blocks else {})}
        return ((name, slot, size, entry) for name, size in sizes.items() for slot, entry in self.outputs.reports)

    def accumulators(self) -> list[str]:
        """Initial accumulators, and whether the step is applied."""
        lines = []
        for name, slot, size, entry in self._totals():
            kind = "int32" if entry.root.is_bool else self._math.type
            first = "float('-inf')" if entry.output.reduce == "max" and entry.root.operation != "abs" else "0"
            lines.append(f"{name}_{slot} = tl.full(({size} // {_TOGETHER},), {first}, tl.{kind})")
        shape = "one_block.shape" if self._in_blocks else "(TILE,)"
        return [*lines, f"seen_keep = (tl.zeros({shape}, tl.float64) + skip) == 0.0"] if lines else []

    def before(self, body: TileBody, *, scatters: bool) -> list[str]:
        """Load arrays that the pass does not load, and keep the old elements of the parameter's arrays."""
        outputs = self.outputs
        loaded = {buffer: name for name, buffer in reversed(self._math.inputs)}
        names = outputs.of("old", "update", *(["new"] if body.keeps else []))
        lines = [f"seen_old_{name} = {loaded.get(name) or body.load(name)}" for name in names]
        arrays = self._param.arrays("param")
        lines += [f"seen_was_{place} = {body.loaded(arrays[place])}" for place in outputs.compared]
        if outputs.marks and not scatters:
            # With an address and a byte for each element, of which the first of eight counts: the layout of a tensor of
            # bytes is another, and its numbers would be moved between threads with two barriers.
            bytes_ = "words.to(tl.pointer_type(tl.uint8), bitcast=True) + seen_first * 4 + start // 8"
            byte, eight = "lane // 8", "8"
            masked = " & mask" if body.mask else ""
            if self._in_blocks:
                byte, eight, masked = f"(block_lane * {BLOCK // 8} + lane // 8)", along_rows(8), " & (block_lane >= 0)"
            lines += [
                f"seen_place = tl.multiple_of(tl.max_contiguous({bytes_} + {byte}, {eight}), {eight})",
                f"seen_there = (lane % 8 == 0){masked}",
                "seen_had = tl.load(seen_place, mask=seen_there, other=0).to(tl.int32)",
            ]
        return lines

    def after(self, body: TileBody, *, scatters: bool, strided: bool) -> list[str]:
        """Write the outputs of stored elements: accumulate them, and set bits; with `scatters` bit by bit."""
        outputs, leaf, names = self.outputs, partial(self._leaf, body), dict[Leaf, str]()
        writer = TritonWriter(self._math.type, self._math.names.within())
        for slot, entry in outputs.reports:
            how, root = _accumulated(entry)
            term = outputs.write(writer, root, leaf, names)
            if body.mask and not entry.ignores_zeros:
                neutral = "float('-inf')" if entry.output.reduce == "max" else "0.0"
                term = f"{body.mask} & ({term})" if root.is_bool else f"tl.where({body.mask}, {term}, {neutral})"
            total = f"report{'_rest' if body.mask and self._in_blocks else ''}_{slot}"
            writer.lines.append(f"{total} = {how}({total}, {term})")
        if outputs.marks:
            writer.lines.append(f"seen_flag = {outputs.write(writer, outputs.marks, leaf, names)}")
            # 8 neighbours, which one or two threads have, are a byte; one whose bits are set is not written. Neighbours
            # that lie apart: bits count along the parameter's memory, as in the other kernel.
            at = "at_1" if strided else "index"
            bit = f"words + seen_first + ({at} >> 5), 1 << ({at} & 31).to(tl.int32)"
            packed = f"""
                seen_set = tl.reshape(tl.where(seen_flag, 1 << lane % 8, 0), (TILE // 8, 8))
                seen_set = tl.broadcast_to(tl.sum(seen_set, 1, keep_dims=True), (TILE // 8, 8))
                seen_bits = tl.reshape(seen_set, {BLOCKS_SHAPE if self._in_blocks else "(TILE,)"}) | seen_had
                tl.store(seen_place, seen_bits.to(tl.uint8), mask=seen_there & (seen_bits != seen_had))
            """
            one_by_one = [f'tl.atomic_or({bit}, mask=seen_flag, sem="relaxed")']
            writer.lines += one_by_one if scatters else code(packed)
        return writer.lines

    def _leaf(self, body: TileBody, kind: str, buffer: str, place: int) -> str:
        """The expression of a value that an output reads; 0 or false for masked elements, the old value if skipped."""
        inside, mask = " & ".join(filter(None, (body.keeps, body.mask))), body.mask
        storage = self._math.spec.storages[buffer]
        codec = codec_of(storage)
        if kind == "old":
            return f"seen_old_{buffer}"
        if kind == "update":
            update = f"new_{buffer} - seen_old_{buffer}"
            return f"tl.where({inside}, {update}, 0.0)" if inside else update
        if kind == "moves" and self.outputs.moves is None:
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
        # Codes past a short block do not stand for 0.
        return f"tl.where({mask}, {kept}, 0.0)" if codec.has_blocks and mask else kept

    def _kept(self, name: str) -> str:
        """The expression stored to a buffer of one array."""
        spec = self._math.spec
        if name in spec.draws:
            return f"{name}_element"
        return narrowed(f"new_{name}", spec.storages[name].arrays(name)[0], self._math.type, in_pairs=True)

    def partials(self) -> list[str]:
        """Store the program's accumulators."""
        lines = [f"report_row = report_partials + tile.to(tl.int64) * {self.outputs.width}"]
        for slot, entry in self.outputs.reports:
            combine = "maximum" if entry.output.reduce == "max" else "add"
            names = [name for name, place, *_ in self._totals() if place == slot]
            total, *rest = (f"tl.reduce({name}_{slot}, 0, {combine})" for name in names)
            total = f"{combine}({total}, {rest[0]})" if rest else total
            lines.append(f"tl.store(report_row + {slot}, {total}.to(tl.{self._math.type}))")
        return lines if self.outputs.reports else []


def _accumulated(entry: Traced) -> tuple[str, Value]:
    """The function that accumulates an output of elements, and its arguments."""
    root = entry.root
    if entry.output.reduce == "max":
        return "add_largest", root
    if root.operation == "mul" and root.args[0] is root.args[1]:
        return "add_squares", root.args[0]
    return "add_count" if root.is_bool else "add_values", root


class TileMath:
    """One tile pass: its math as a function, with arguments and results, and the tables of its kernels."""

    def __init__(self, spec: KernelSpec, tile: TilePass, name: str) -> None:
        self.spec, self.tile, self.name = spec, tile, f"{spec.name}_{name}"
        self.unscales = spec.program.unscales(tile)
        self.type = dtype_name(spec.compute)
        self.draws = spec.draws_in(tile)
        self.arrays: list[Array] = [spec.grad, *spec.arrays]
        around = [f"{array.name}_{suffix}" for array in self.arrays for suffix in ("array", "address", "element")]
        self.names = TritonNames([self.name, *around, *(f"new_{name}" for name in tile.stores)])
        self.writer = TritonWriter(self.type, self.names, is_16_bits(spec, tile), spec.has_blocks)
        self.inputs: list[tuple[str, str]] = []
        self.slices: list[tuple[str, Value]] = []
        self.scalars: list[tuple[str, int]] = []
        kept_elsewhere = {id(value) for value in tile.slices()}
        for value in tile.values():
            buffer, column = tile.buffer_of(value), spec.program.columns.get(id(value))
            if buffer is not None:
                self.inputs.append((self._argument(value, buffer), buffer))
            elif id(value) in kept_elsewhere:
                self.slices.append((self._argument(value), value))
            elif tile.leaves(value) and value.operation != "constant" and column is not None:
                self.scalars.append((self._argument(value), column))
        self.writer.write(tile.values())
        self.results = {f"new_{name}": self.writer[value] for name, value in tile.stores.items()}
        self.results.update({f"kept_{slot}": self.writer[value] for slot, value in tile.kept})
        self.results.update({f"term_{slot}": self.writer[value.args[0]] for slot, value in tile.reductions})
        self.results.update({f"share_{slot}": self.writer[value.args[0]] for slot, value in tile.parts})
        self.used = spec.touched(tile)
        self.walked: list[tuple[int, Array | None]] = [*self.used, *([(len(self.arrays), None)] if self.draws else [])]
        """Touched arrays, with the whole tensor's strides as an array of their own if the pass needs indices."""
        self.layout = f"layout = layouts + layout_row * {1 + MAX_DIMS * (1 + len(self.arrays) + bool(spec.draws))}"

    def _argument(self, value: Value, hint: str = "") -> str:
        name = self.names.fresh(hint or value.name or describe(value))
        self.writer.bind(value, f"({name} != 0)" if value.is_bool else name)
        return name

    @property
    def arguments(self) -> str:
        """The function's arguments in order."""
        return ", ".join(name for name, _ in (*self.inputs, *self.slices, *self.scalars))

    def math(self) -> list[str]:
        """The function."""
        return code(f"""
            @triton.jit
            def {self.name}({self.arguments}):
                {nested(self.writer.lines)}
                return {_listed(self.results.values())}
        """)

    def call(self) -> str:
        """The statement that calls it."""
        return f"{_listed(self.results)} = {self.name}({self.arguments})"

    def load_inputs(self, body: TileBody) -> list[str]:
        """The loads of the pass's inputs."""
        return [f"{name} = {body.load(buffer)}" for name, buffer in self.inputs]

    def store_results(self, body: TileBody) -> list[str]:
        """The stores of the pass's outputs, and of unscaled gradients."""
        lines = [line for name in self.tile.stores for line in body.store(name, f"new_{name}")]
        if self.unscales:
            raw = next((name for name, buffer in self.inputs if buffer == "grad"), None) or body.load("grad")
            lines += ["if UNSCALE:", *(f"    {line}" for line in body.store("grad", f"{raw} * inverse_scale"))]
        return lines

    def element_index(self, place: str, of: str = "element") -> list[str]:
        """Lines for the indices of elements in the whole tensor, if the pass needs them."""
        low_and_high = [f"{of}_low = {of}_index.to(tl.int32)", f"{of}_high = ({of}_index >> 32).to(tl.int32)"]
        return [f"{of}_index = origin + ({place})", *low_and_high] if self.draws else []

    def table_loads(self) -> list[str]:
        """Loads of the tensor's numbers and addresses."""
        lines = [f"row = rows + t * {self.spec.columns}"]
        lines += [f"{name} = tl.load(row + {column})" for name, column in self.scalars]
        if self.unscales:
            lines.append(f"inverse_scale = tl.load(control + 2).to(tl.{self.type})")
        if self.draws:
            lines += [
                "stream = tl.load(streams + t * 2)",
                "origin = tl.load(streams + t * 2 + 1)",
                f"steps_taken = tl.load(step + t).to(tl.int32) + {self.spec.steps_later(self.tile)}",
                "key_0, key_1 = stream_keys(stream.to(tl.int32), (stream >> 32).to(tl.int32), steps_taken)",
            ]
        addresses = f"addresses + t * {len(self.arrays) - 1}"
        used = [(position, array) for position, array in self.used if position]
        return [*lines, *(f"{a.name}_address = tl.load({addresses} + {position - 1})" for position, a in used)]

    def finish(self, name: str, kind: str, constants: str, stop: str) -> list[str]:
        """The kernel that combines the partial results of each tensor's tiles up to `stop`, in tile order."""
        count, sums = self.spec.reduction_count, []
        for slot, reduction in self.tile.reductions:
            neutral, combine = REDUCTIONS[reduction.operation]
            sums += code(f"""
                total_{slot} = tl.full((BLOCK,), {neutral}, tl.float64)
                start = first
                while start < stop:
                    place = start + lane
                    part = tl.load(partials + place * {count} + {slot}, mask=place < stop, other={neutral})
                    total_{slot} = {combine}(total_{slot}, part)
                    start += BLOCK
                tl.store(sums + t * {count} + {slot}, tl.reduce(total_{slot}, 0, {combine}))
            """)
        return code(f"""
            {head(f"{self.spec.name}_{name}", pointers_of(kind), constants)}
                t = tl.program_id(0).to(tl.int64)
                if tl.load(grads + t) == 0:
                    return
                first = tl.load(first_tile + t)
                stop = first + {stop}
                lane = tl.arange(0, BLOCK)
                {nested(sums)}
        """)


def _listed(names: Iterable[str]) -> str:
    """Names or values as a tuple."""
    listed = list(names)
    return ", ".join(listed) + ("," if len(listed) == 1 else "")


def _walked_to(positions: Iterable[int]) -> list[str]:
    """Offsets of elements in strided arrays: indices, dimension by dimension from the last one, times strides."""
    chosen = list(positions)
    strides = {position: f"tl.load(layout + {1 + MAX_DIMS * (1 + position)} + dim)" for position in chosen}
    return code(f"""
        {nested(f"at_{position} = index * 0" for position in chosen)}
        dims = tl.load(layout)
        for back in tl.range(0, loop_bound(dims)):
            dim = dims - 1 - back
            size = tl.maximum(tl.load(layout + 1 + dim), 1)
            coordinate = index % size
            index = index // size
            {nested(f"at_{position} += coordinate * {stride}" for position, stride in strides.items())}
    """)


_SHAPE = "(MATRICES, HELD, COLUMNS)"

_COLUMNS_INSIDE = "(matrix < matrices_left) & (column < columns_left)"

_CODES = "(MATRICES * HELD * COLUMNS // WIDE, WIDE)"
"""The shape of a sub-block with a row for each block, as block formats take it; `WIDE` if a tile has fewer columns."""

_BLOCK_LANES = f"""
    WIDE: tl.constexpr = COLUMNS if COLUMNS < {BLOCK} else {BLOCK}
    block_lane = tl.arange(0, MATRICES * HELD * COLUMNS // WIDE)[:, None]
    block_matrix = block_lane // (HELD * (COLUMNS // WIDE))
    block_across = block_lane // (COLUMNS // WIDE) % HELD
    block_column = block_lane % (COLUMNS // WIDE) * WIDE
    block_line = block_matrix * height.to(tl.int32) + block_across
    lane = block_column + tl.arange(0, WIDE)[None, :]
    per_row = (width + {BLOCK - 1}) // {BLOCK}
"""


class _SliceKernel(TileMath):
    """The kernels that load and store around the math of one pass over rows and columns.

    A program walks its tile a few rows at a time. What it holds at once, and so how many programs are in flight, does
    not grow with the tile; loads from the tables and what is left of columns are paid once a tile.
    """

    def __init__(self, spec: KernelSpec, tile: TilePass) -> None:
        super().__init__(spec, tile, f"{tile.title}_math")
        self.all_slices, self.slots = spec.program.slices, spec.program.slices.slots
        self.row_parts, self.column_parts = tile.parts_of("row"), tile.parts_of("column")
        self.whole_tile = {id(value) for value in tile.values() if tile.buffer_of(value) is not None}
        """The values that have an element for each of the tile, by identity; others are broadcast along a side."""
        self.whole_tile.update(id(value) for _, value in self.slices if tile.place(value) in ("own", "other"))
        for value in tile.values():
            if not tile.leaves(value) and any(id(arg) in self.whole_tile for arg in value.args):
                self.whole_tile.add(id(value))
        in_blocks = [name for name in (*tile.reads(), *tile.stores) if codec_of(spec.storages[name]).has_blocks]
        self.block_arrays = {array.name for name in in_blocks for array in spec.storages[name].arrays(name)}
        self.has_pairs = any(array.elements == 2 for _, array in self.used)
        self.reduced = [
            *((f"share_{slot}", reduction) for slot, reduction in self.column_parts),
            *((f"term_{slot}", reduction) for slot, reduction in tile.reductions),
        ]
        """Names of the values that are reduced over the tile or its columns, with the reduction."""
        kept = [slot for slot, _ in tile.kept]
        read = dict.fromkeys([*(self.slots[id(value)] for value in tile.slices()), *kept])
        self.kinds = {slot: self.all_slices.kinds.index(self.all_slices.overs[slot]) for slot in read}
        self.pointers = [
            *pointers_of(*(["random"] if spec.draws else [])),
            *(f"slot_{slot}" for slot in read),
            *(f"parts_{slot}" for slot, _ in tile.parts),
        ]
        """The arrays of slots and of parts that the pass takes, behind the tables of all such passes."""

    def _head(self, suffix: str, *further: str) -> str:
        pointers = [*pointers_of("slices", *further), *self.pointers]
        # The sides of a tile, the rows of a sub-block, the sub-blocks in flight, whether gradients are unscaled.
        return head(
            f"{self.spec.name}_{self.tile.title}{suffix}", pointers, "MATRICES ROWS COLUMNS HELD STAGES UNSCALE"
        )

    def _prologue(self) -> list[str]:
        """All table loads, and the matrices, rows and columns of the tile."""
        kinds, count, spans = sorted(set(self.kinds.values())), len(self.all_slices.kinds), self.all_slices.spans
        tables = [f"start_{kind} = tl.load(starts + t * {count} + {kind})" for kind in kinds]
        for _, value in self.slices:
            if self.tile.place(value) == "other":
                slot = self.slots[id(value)]
                span = f"spans + (t * {len(spans)} + {spans.index((self.tile.over, self.all_slices.overs[slot]))}) * 2"
                tables += [f"span_{slot} = tl.load({span})", f"inner_{slot} = tl.load({span} + 1)"]
        tables += ["row_parts = tl.load(part_starts + t * 2)"] if self.row_parts else []
        tables += ["column_parts = tl.load(part_starts + t * 2 + 1)"] if self.column_parts else []
        pairs = ["pair_lane = block_column // 2 + tl.arange(0, WIDE // 2)[None, :]"] if self.has_pairs else []
        return code(f"""
            skip = tl.load(control + 1)
            grad_address = tl.load(grads + t)
            layout_row = tl.load(layout_index + t)
            matrices = tl.load(extents + t * 3)
            height = tl.load(extents + t * 3 + 1)
            width = tl.load(extents + t * 3 + 2)
            local = (tile - tl.load(first_tile + t)).to(tl.int32)
            {nested([*self.table_loads(), *tables])}
            column_tiles = ((width + COLUMNS - 1) // COLUMNS).to(tl.int32)
            row_tiles = ((height + ROWS - 1) // ROWS).to(tl.int32)
            rest = local // column_tiles
            column_tile = (local % column_tiles).to(tl.int64)
            row_tile = (rest % row_tiles).to(tl.int64)
            matrix_tile = (rest // row_tiles).to(tl.int64)
            first_matrix = matrix_tile * MATRICES
            first_column = column_tile * COLUMNS
            first_line = first_matrix * height + row_tile * ROWS
            corner = first_line * width + first_column
            matrices_left = tl.minimum(matrices - first_matrix, MATRICES).to(tl.int32)
            rows_left = tl.minimum(height - row_tile * ROWS, ROWS).to(tl.int32)
            columns_left = tl.minimum(width - first_column, COLUMNS).to(tl.int32)
            pitch = width.to(tl.int32)
            matrix = tl.arange(0, MATRICES)[:, None, None]
            across = tl.arange(0, HELD)[None, :, None]
            column = tl.arange(0, COLUMNS)[None, None, :]
            line = matrix * height.to(tl.int32) + across
            {nested([*(code(_BLOCK_LANES) if self.block_arrays else ()), *pairs])}
        """)

    def kernel(self) -> list[str]:
        """The kernel over row-major tensors: a loop over full, aligned rows, and another loop for the rest."""
        together = " | ".join(f"{array.name}_address" for _, array in self.used if array.elements < BLOCK) or "0"
        # Elements of the narrowest array in 16 bytes.
        sizes = [array.dtype.itemsize / array.elements for _, array in self.used if array.elements < BLOCK]
        unit = int(16 / min(sizes, default=4))
        aligned = {
            array: f"tl.multiple_of({pointer_to(array)}, 16) + {self._place_of(array, 'even_corner', 'even_pitch')}"
            for _, array in self.used
        }
        others = {array: f"{pointer_to(array)} + {self._place_of(array, 'corner', 'pitch')}" for _, array in self.used}
        codes = ["code_place = (start + block_line) * even_pitch + lane"] if self.block_arrays else []
        # Not multiple_of(width): that promise would hold in the masked loop too, which then reads past rows.
        return code(f"""
            {self._head("")}
                tile = tl.load(tile_base) + tl.program_id(0)
                t = tl.load(tile_tensor + tl.program_id(0)).to(tl.int64)
                {nested(self._prologue())}
                if (skip == 0.0) & (grad_address != 0){" & (layout_row < 0)" if self.tile.over is None else ""}:
                    {nested(self._before_loops())}
                    aligned = (matrices_left == MATRICES) & (columns_left == COLUMNS)
                    aligned = aligned & (width % {unit} == 0) & ((({together}) & 15) == 0)
                    even_pitch = pitch // {unit} * {unit}
                    even_place = line * even_pitch + column
                    even_corner = first_line * (width // {unit} * {unit}) + first_column
                    whole = tl.where(aligned, rows_left // HELD * HELD, 0)
                    for start in tl.range(0, loop_bound(whole), HELD, num_stages=STAGES):
                        place = start * even_pitch + even_place
                        {nested([*codes, *_arrays(aligned)])}
                        {nested(self._element_indices("even_corner"))}
                        {nested(self._work(masked=False))}
                    odd_place = line * pitch + column
                    for start in tl.range(loop_bound(whole), loop_bound(rows_left), HELD):
                        {nested([*self._masks(), *_arrays(others)])}
                        {nested(self._element_indices("corner"))}
                        {nested(self._work(masked=True))}
                    {nested(self._after_loops())}
        """)

    def _place_of(self, array: Array, corner: str, pitch: str) -> str:
        """Offsets of a sub-block's entries in an array of a tensor that is contiguous by rows."""
        if array.elements == BLOCK:
            return f"(first_line + (start + block_line)) * per_row + (first_column + block_column) // {BLOCK}"
        if array.elements == 2:
            return f"{corner} // 2 + ((start + block_line) * ({pitch} // 2) + pair_lane)"
        return f"{corner} + code_place" if array.name in self.block_arrays else f"{corner} + place"

    def _element_indices(self, corner: str) -> list[str]:
        codes = self.element_index(f"{corner} + code_place", "code") if self.block_arrays else []
        return self.element_index(f"{corner} + place") + codes

    def _masks(self) -> list[str]:
        blocks = """
            code_place = (start + block_line) * pitch + lane
            block_inside = (block_matrix < matrices_left) & (block_across < rows_left - start)
            block_mask = block_inside & (block_column < columns_left)
            code_mask = block_inside & (lane < columns_left)
        """
        return [
            "place = start * pitch + odd_place",
            "inside = (matrix < matrices_left) & (across < rows_left - start)",
            "mask = inside & (column < columns_left)",
            *(code(blocks) if self.block_arrays else ()),
            *(["pair_mask = block_inside & (pair_lane * 2 < columns_left)"] if self.has_pairs else ()),
        ]

    def strided_kernel(self) -> list[str]:
        """The kernel over tensors with gaps, walked by coordinates."""
        codes = ["index = corner + code_place", *self._walked_arrays("code")] if self.block_arrays else []
        return code(f"""
            {self._head("_strided", "strided")}
                tile = tl.load(tile_list + tl.program_id(0))
                t = tl.load(tile_tensor + tile).to(tl.int64)
                {nested(self._prologue())}
                if (skip == 0.0) & (grad_address != 0):
                    {nested(self._before_loops())}
                    odd_place = line * pitch + column
                    for start in tl.range(0, loop_bound(rows_left), HELD):
                        {nested(self._masks())}
                        {self.layout}
                        index = corner + place
                        {nested([*self._walked_arrays("element"), *codes])}
                        {nested(self._work(masked=True))}
                    {nested(self._after_loops())}
        """)

    def _walked_arrays(self, index: str) -> list[str]:
        """Pointers into arrays with one entry per element: for a "code" buffers in blocks, else the other buffers."""
        of_codes = index == "code"
        arrays = [
            (position, array)
            for position, array in self.walked
            if array is None or (array.elements == 1 and (array.name in self.block_arrays) is of_codes)
        ]
        places = {array: f"at_{position}" for position, array in arrays if array is not None}
        if of_codes:
            others = [array for _, array in self.used if array.elements > 1]
            places.update({array: f"({self._place_of(array, 'corner', 'pitch')})" for array in others})
        pointers = {array: f"{pointer_to(array)} + {place}" for array, place in places.items()}
        walked = _walked_to(position for position, _ in arrays)
        return [*walked, *_arrays(pointers), *self.element_index(f"at_{len(self.arrays)}", index)]

    def _before_loops(self) -> list[str]:
        """Loads shared by all rows of the tile, and the accumulators of columns and of the tile."""
        shared = [pair for pair in self.slices if self.tile.place(pair[1]) in ("column", "matrix")]
        lines = [f"{name} = {self._load_slice(value, masked=True)}" for name, value in shared]
        neutrals = {name: REDUCTIONS[reduction.operation][0] for name, reduction in self.reduced}
        return lines + [f"all_{name} = tl.full({_SHAPE}, {it}, tl.{self.type})" for name, it in neutrals.items()]

    def _work(self, *, masked: bool) -> list[str]:
        body = TileBody(self.spec, "mask" if masked else "", (_SHAPE, _CODES) if self.block_arrays else None)
        slices = [pair for pair in self.slices if self.tile.place(pair[1]) not in ("column", "matrix")]
        lines = [*self.load_inputs(body), *(f"{name} = {self._load_slice(value, masked)}" for name, value in slices)]
        lines += [self.call(), *self.store_results(body)]
        for slot, _ in self.tile.kept:
            pointer = f"slot_{slot} + start_{self.kinds[slot]} + corner + place"
            lines.append(f"tl.store({pointer}, kept_{slot}.to(tl.{self.type}){', mask=mask' if masked else ''})")
        for slot, reduction in self.row_parts:
            term = f"share_{slot}"
            if masked:
                term = f"tl.where(mask, {term}, {REDUCTIONS[reduction.operation][0]})"
            elif id(reduction.args[0]) not in self.whole_tile:
                term = f"({term} + tl.zeros({_SHAPE}, tl.{self.type}))"
            pointer = f"parts_{slot} + row_parts + column_tile * (matrices * height) + first_line + (line + start)"
            mask = ", mask=inside" if masked else ""
            lines.append(f"tl.store({pointer}, {_reduced(reduction, term, 2)}{mask})")
        for name, reduction in self.reduced:
            neutral, combine = REDUCTIONS[reduction.operation]
            term = f"tl.where(mask, {name}, {neutral})" if masked else name
            lines.append(f"all_{name} = {combine}(all_{name}, {term})")
        return lines

    def _load_slice(self, value: Value, masked: bool) -> str:
        slot = self.slots[id(value)]
        pointer, mask = {
            "own": ("corner + place", "mask"),
            "row": ("first_line + (line + start)", "inside"),
            "column": ("(first_matrix * width + first_column) + (matrix * pitch + column)", _COLUMNS_INSIDE),
            "matrix": ("first_matrix + matrix", "matrix < matrices_left"),
            "other": (f"((corner + place) // span_{slot} * inner_{slot} + (corner + place) % inner_{slot})", "mask"),
        }[self.tile.place(value)]
        masked_by = f", mask={mask}, other=0.0" if masked else ""
        return f"tl.load(slot_{slot} + start_{self.kinds[slot]} + {pointer}{masked_by})"

    def _after_loops(self) -> list[str]:
        """Store the accumulators."""
        lines = []
        for slot, reduction in self.column_parts:
            line = "((first_matrix + matrix) * row_tiles + row_tile)"
            place = f"parts_{slot} + column_parts + {line} * width + first_column + column"
            lines.append(f"tl.store({place}, {_reduced(reduction, f'all_share_{slot}', 1)}, mask={_COLUMNS_INSIDE})")
        for slot, reduction in self.tile.reductions:
            total = _reduced(reduction, f"all_term_{slot}", None)
            place = f"partials + tile * {self.spec.reduction_count} + {slot}"
            lines.append(f"tl.store({place}, {total}.to(tl.float64))")
        return lines


def _arrays(pointers: Mapping[Array, str]) -> list[str]:
    """Statements that name pointers to elements of arrays."""
    return [f"{array.name}_array = {pointer}" for array, pointer in pointers.items()]


def _reduced(reduction: Value, term: str, axis: int | None) -> str:
    kept = ", keep_dims=True" if axis is not None else ""
    if reduction.operation == "reduce_sum":
        return f"tl.sum({term}, {axis}{kept})"
    return f"tl.reduce({term}, {axis}, {REDUCTIONS[reduction.operation][1]}{kept})"


class _Kernel(TileMath):
    """The kernels that load and store around the math of one tile pass."""

    def __init__(self, spec: KernelSpec, index: int, tile: TilePass) -> None:
        super().__init__(spec, tile, f"math_{index}")
        self.index, self.in_blocks = index, spec.has_blocks
        self.outputs = OutputText(self)
        self.measures = bool(self.outputs.outputs.reports)

    def _head(self, suffix: str, *further: str) -> str:
        optional = [*(["blocks"] if self.in_blocks else []), *(["random"] if self.spec.draws else []), *further]
        pointers = [*pointers_of("tile"), *self.outputs.pointers, *pointers_of(*optional)]
        # Elements of a block, elements of a program, whether gradients are unscaled; of passes over blocks tiles of
        # whole blocks in flight, and a thread's runs of neighbours in a block.
        constants = "TILE SPAN UNSCALE" + (" STAGES RUNS" if self.in_blocks else "")
        return head(f"{self.spec.name}_tile_pass_{self.index}{suffix}", pointers, constants)

    def _prologue(self) -> list[str]:
        """All table loads before the first branch, so that they overlap; a return between them would serialize them."""
        first_word = ["seen_first = tl.load(first_word + t)"] if "first_word" in self.outputs.pointers else []
        return code(f"""
            t = tl.load(tile_tensor + tile).to(tl.int64)
            skip = tl.load(control + 1)
            grad_address = tl.load(grads + t)
            layout_row = tl.load(layout_index + t)
            begin = (tile - tl.load(first_tile + t)) * SPAN
            stop = tl.minimum(begin + SPAN, tl.load(numel + t))
            {nested(["columns_of_row = tl.load(columns + t)"] if self.in_blocks else [])}
            {nested([*self.table_loads(), *first_word])}
            {nested(self._lanes() if self.in_blocks else ["lane = tl.arange(0, TILE)"])}
        """)

    def _lanes(self) -> list[str]:
        # Runs are far from each other, so that threads beside each other have neighbours; what is worked out once for a
        # block is so once for all runs of a thread. One run is no dimension: Triton would move halves of bytes.
        places = {"block_lane": f"TILE // {BLOCK}", "one_block": "1"}
        lanes = {"pair_lane": BLOCK // 2, "lane": BLOCK}
        run = "tl.arange(0, RUNS)[None, :, None] * ({size} // RUNS) + tl.arange(0, {size} // RUNS)[None, None, :]"
        return code(f"""
            if RUNS == 1:
                {nested(f"{name} = tl.arange(0, {size})[:, None]" for name, size in places.items())}
                {nested(f"{name} = tl.arange(0, {size})[None, :]" for name, size in lanes.items())}
            else:
                {nested(f"{name} = tl.arange(0, {size})[:, None, None]" for name, size in places.items())}
                {nested(f"{name} = {run.format(size=size)}" for name, size in lanes.items())}
        """)

    def _whole_pointers(self) -> list[str]:
        """Pointers to the elements of a tile that lies inside its tensor."""
        sizes = (array.dtype.itemsize for _, array in self.used if array.elements == 1)
        # A pass may read pairs of codes only.
        widest, pointers = max(sizes, default=1), {}
        start, lane = "tl.multiple_of(start, TILE)", f"block_lane * {BLOCK} + lane" if self.in_blocks else "lane"
        for _, array in self.used:
            # In blocks a thread has equally many neighbours of each array; else numbers would move between threads.
            aligned = 16 * array.dtype.itemsize // widest // array.elements if self.in_blocks else 16
            base = f"tl.multiple_of({pointer_to(array)}, {aligned})"
            pointers[array] = f"{base} + ({start} + {lane})" if self.in_blocks else f"{base} + {start} + {lane}"
            if array.elements == BLOCK:
                pointers[array] = f"{pointer_to(array)} + (start // {BLOCK} + block_lane)"
            if array.elements == 2:
                pointers[array] = f"{base} + ({start} // 2 + block_lane * {BLOCK // 2} + pair_lane)"
        return [*_arrays(pointers), *self.element_index(f"start + {lane}")]

    def _masks(self) -> list[str]:
        """The mask of a tile's elements, and their indices; a row of the tensor begins a new block."""
        if not self.in_blocks:
            return ["mask = lane < stop - start", "index = start + lane"]
        pairs = """
            packed_columns = (columns_of_row + 1) // 2
            pair_mask = block_mask & (first_column // 2 + pair_lane < packed_columns)
        """
        # Lines in 32 bits, whose division is a few instructions: blocks of a tensor are fewer.
        return code(f"""
            block = start // {BLOCK} + one_block
            block_mask = block * {BLOCK} < stop
            first_line = (block.to(tl.int32) // per_row.to(tl.int32)).to(tl.int64)
            first_column = (block - first_line * per_row) * {BLOCK}
            line_column = first_column + lane
            mask = block_mask & (line_column < columns_of_row)
            index = first_line * columns_of_row + line_column
            {nested(code(pairs) if any(array.elements == 2 for array in self.arrays) else [])}
        """)

    def _block_pointers(self) -> list[str]:
        """Pointers to a tile's entries in arrays with an entry for several elements."""
        places = {BLOCK: "block", 2: "(first_line * packed_columns + first_column // 2) + pair_lane"}
        shared = [array for _, array in self.used if array.elements in places]
        return _arrays({array: f"{pointer_to(array)} + {places[array.elements]}" for array in shared})

    def _work(self, mask: str, *, strided: bool = False) -> list[str]:
        """Load, call, store, and accumulate."""
        keeps = "seen_keep" if self.measures and mask else ""
        body = TileBody(self.spec, mask, None, keeps, in_pairs=bool(self.outputs.outputs))
        # Whether bits are set one by one, because elements do not begin at a byte boundary.
        scatters = strided or (self.in_blocks and bool(mask))
        # What all elements of a buffer become is a number for each lane then. Not by a broadcast: Triton would move it
        # behind instructions that take four elements at a time.
        lanes = "block_lane + lane" if self.in_blocks and not mask else "lane"
        alike = [f"new_{name}" for name, value in self.tile.stores.items() if value.level in SCALAR_LEVELS]
        lines = [
            *self.load_inputs(body),
            *self.outputs.before(body, scatters=scatters),
            self.call(),
            *(f"{name} = tl.where({lanes} >= 0, {name}, float('nan'))" for name in alike),
            *self.store_results(body),
            *self.outputs.after(body, scatters=scatters, strided=strided),
        ]
        for slot, reduction in self.tile.reductions:
            neutral, combine = REDUCTIONS[reduction.operation]
            term = f"tl.where({mask}, term_{slot}, {neutral})" if mask else f"term_{slot}"
            part = f"rest_{slot}" if mask and self.in_blocks else f"part_{slot}"
            lines.append(f"{part} = {combine}({part}, {term})")
        return lines

    def _before_loops(self) -> list[str]:
        """Initial accumulators; block passes have separate accumulators for masked tiles."""
        shapes = {"part": "(TILE,)"}
        if self.in_blocks:  # a row for each block; with a mask one block, as its indices take registers
            shapes = {"part": BLOCKS_SHAPE, "rest": "lane.shape"}
        per_row = f"per_row = tl.maximum((columns_of_row + {BLOCK - 1}) // {BLOCK}, 1)"
        parts = [
            f"{name}_{slot} = tl.full({shape}, {REDUCTIONS[reduction.operation][0]}, tl.{self.type})"
            for slot, reduction in self.tile.reductions
            for name, shape in shapes.items()
        ]
        return [*([per_row] if self.in_blocks else []), *self.outputs.accumulators(), *parts]

    def _after_loops(self) -> list[str]:
        lines = self.outputs.partials()
        for slot, reduction in self.tile.reductions:
            combine, totals = REDUCTIONS[reduction.operation][1], [f"part_{slot}"]
            if self.in_blocks:
                sizes = {"part": "TILE", "rest": BLOCK}
                totals = [f"tl.reshape({name}_{slot}, ({size},))" for name, size in sizes.items()]
            total, *rest = (f"tl.reduce({each}, 0, {combine})" for each in totals)
            total = f"{combine}({total}, {rest[0]})" if rest else total
            lines.append(f"tl.store(partials + tile * {self.spec.reduction_count} + {slot}, {total}.to(tl.float64))")
        return lines

    @property
    def _runs(self) -> str:
        """Whether a program has work: a pass that reports also runs in a skipped step."""
        return "(grad_address != 0)" if self.measures else "(skip == 0.0) & (grad_address != 0)"

    def kernel(self) -> list[str]:
        """The kernel over all tensors in memory order.

        A program walks SPAN elements of one tensor in tiles: the chain of table loads is paid once a span, and the loop
        keeps registers, and with them the number of programs in flight, as for one tile.
        """
        alike = [array for _, array in self.used if array.elements != BLOCK]
        together = " | ".join(f"{array.name}_address" for array in alike) or "grad_address"
        # Rows that end inside a block need a mask.
        is_even = ["aligned = aligned & (columns_of_row >= tl.load(numel + t))"] if self.in_blocks else []
        applied = ["aligned = aligned & (skip == 0.0)"] if self.measures else []
        whole = """
            start = begin
            whole = tl.where(aligned, stop - TILE + 1, begin)
            while start < whole:
        """
        step, rest, place = ["start += TILE"], [], "start + lane"
        masks = ["mask = lane < stop - start", *self.element_index(place)]
        if self.in_blocks:
            whole = """
                whole = tl.where(aligned, begin + (stop - begin) // TILE * TILE, begin)
                for start in tl.range(loop_bound(begin), loop_bound(whole), TILE, num_stages=STAGES):
            """
            step, rest, masks, place = [], ["start = whole"], self._masks(), "index"
        plain = {array: f"{pointer_to(array)} + {place}" for _, array in self.used if array.elements == 1}
        indices = self.element_index("index") if self.in_blocks else []
        return code(f"""
            {self._head("")}
                tile = tl.program_id(0)
                {nested(self._prologue())}
                if {self._runs} & (layout_row < 0):
                    aligned = (({together}) & 15) == 0
                    {nested([*is_even, *applied, *self._before_loops()])}
                    {nested(code(whole))}
                        {nested([*self._whole_pointers(), *self._work(""), *step])}
                    {nested(rest)}
                    while start < stop:
                        {nested([*masks, *_arrays(plain), *self._block_pointers(), *indices, *self._work("mask")])}
                        start += {BLOCK if self.in_blocks else "TILE"}
                    {nested(self._after_loops())}
        """)

    def strided_kernel(self) -> list[str]:
        """The kernel over tiles of tensors with gaps, walked by coordinates."""
        walked = [(position, array) for position, array in self.walked if array is None or array.elements == 1]
        arrays = {array: f"{pointer_to(array)} + at_{position}" for position, array in walked if array is not None}
        pointers = [*_walked_to(position for position, _ in walked), *_arrays(arrays), *self._block_pointers()]
        indices = self.element_index(f"at_{len(self.arrays)}")
        return code(f"""
            {self._head("_strided", "strided")}
                tile = tl.load(tile_list + tl.program_id(0))
                {nested(self._prologue())}
                if {self._runs}:
                    {self.layout}
                    {nested(self._before_loops())}
                    start = begin
                    while start < stop:
                        {nested([*self._masks(), *pointers, *indices, *self._work("mask", strided=True)])}
                        start += {BLOCK if self.in_blocks else "TILE"}
                    {nested(self._after_loops())}
        """)


def source(spec: KernelSpec) -> str:
    """The whole module of a spec."""
    quick = all(is_16_bits(spec, tile) for tile in spec.program.tiles if tile is not None)
    parts = format_functions(spec.storages.values(), quick)
    parts += random_functions(spec.draws.values()) if spec.draws else []
    for index, scalar_pass in enumerate(spec.program.scalars):
        parts.append(scalar_kernel(spec, index, scalar_pass))
        for tile in spec.program.passes_of(index):
            kernel: _SliceKernel | _Kernel
            if tile.view is None:
                kernel, name, kind = _Kernel(spec, index, tile), f"finish_{index}", "finish"
                constants, stop = "SPAN BLOCK", "(tl.load(numel + t) + SPAN - 1) // SPAN"
            else:
                kernel, name, kind = _SliceKernel(spec, tile), f"{tile.title}_finish", "finish slices"
                constants, stop = "BLOCK", "tl.load(tile_count + t)"
            parts += [kernel.math(), kernel.kernel()]
            # Only slices along rows and columns hold elements of a parameter.
            parts += [kernel.strided_kernel()] if tile.over is None else []
            parts += [kernel.finish(name, kind, constants, stop)] if tile.reductions else []
    return module_text(spec.header("#", "Triton"), parts)


def module_text(header: str, parts: Iterable[Iterable[str]]) -> str:
    """A module of functions, with the functions that they call."""
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


_LONGEST_LINE = 120
_NO_BREAK = "\0=\0"


def _folded(line: str) -> list[str]:
    """A long call, definition or import, wrapped inside its parentheses to lines of at most 120 columns."""
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
