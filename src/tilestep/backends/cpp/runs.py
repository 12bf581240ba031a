"""The code for runs of consecutive elements, in place or copied, and for the statistics of taps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...graph import TilePass
from ...storage import BLOCK, Array, codec_of, dtype_name, read_arrays
from ..emit import Writer
from ..spec import KernelSpec
from ..taps import FAR, NEAR, SPLIT, PassTaps
from .text import C_TYPES, TILES_OF_TENSORS, accumulate, arrays_of, neutral, scalar_type


def touches_blocks(spec: KernelSpec, tile: TilePass) -> bool:
    """Whether a pass reads or stores a buffer in blocks."""
    return any(codec_of(spec.storages[name]).has_blocks for name in (*tile.reads(), *tile.stores))


def write_math(tile: TilePass, writer: Writer, load: Callable[[str], str]) -> None:
    """Write the math of one element, from the expressions of the buffers it reads."""
    for value in tile.values():
        buffer = tile.buffer_of(value)
        if buffer is not None:
            writer.name(value, load(buffer), buffer)
    writer.write(tile.values())


_ASKED = 64
"""Elements of a run that prefetches: its cache lines fit into a processor's buffers."""


class RunBody:
    """Writes what a pass does with up to `size` elements that follow each other: `count`, from `first` on.

    Where they lie with gaps they are copied, so that one loop does for all tensors. In blocks loops are of exactly 128
    over numbers of one width: a loop over codes of a byte and numbers of four computes as many numbers at once as a
    vector has bytes, and runs out of registers. So each buffer is made numbers in a loop of its own, and made codes in
    another; short blocks are copied too.

    writer: has spelled what a pass takes from others. gaps: whether tensors may lie with gaps. clause: its loop's
    reductions, for OpenMP. rest: writes what else it does with an element `i`. taps: what it puts out beside.
    """

    def __init__(
        self,
        spec: KernelSpec,
        tile: TilePass,
        writer: Writer,
        size: int,
        *,
        gaps: bool,
        unscales: bool = False,
        clause: str = "",
        rest: Callable[[Writer, str], None] | None = None,
        taps: TapText | None = None,
    ) -> None:
        self.spec, self.tile, self.writer, self.unscales, self.clause = spec, tile, writer, unscales, clause
        self.rest, self.taps, self.gaps = rest, taps, gaps
        self.in_blocks = touches_blocks(spec, tile) if tile.view else spec.has_blocks
        self.in_place = not (self.in_blocks or gaps)
        self.asks = not (self.in_blocks or rest or clause or (taps is not None and taps.clause))
        self.size = BLOCK if self.in_blocks else _ASKED if self.asks and self.in_place else size
        self.storages = {name: spec.storages[name] for name in dict.fromkeys([*tile.reads(), *tile.stores])}
        if unscales:
            self.storages.setdefault("grad", spec.storages["grad"])
        self.kept = [name for name in tile.stores if codec_of(self.storages[name]).has_blocks]
        self.reads = list(dict.fromkeys([*tile.reads(), *(taps.reads if taps is not None else ())]))
        self.written = [a for name in tile.stores for a in self.storages[name].arrays(name) if a.elements < BLOCK]

    def lines(self) -> list[str]:
        """The statements of a run."""
        lines = self.begin([array for name, storage in self.storages.items() for array in storage.arrays(name)])
        apart = [name for name in self.storages if not self._is_computed_with(name)]
        lines += [*self._indices(), *self.numbers(apart), *self._math()]
        for name in self.tile.stores:
            if name in apart and name not in self.kept:
                lines += self._each(self._store(name, f"{name}_values[j]"))
        if self.unscales:
            grad = self.element(self.spec.grad)
            unscaled = self._each(f"write({grad}, read({grad}) * inverse_scale);")
            unscaled += self._back([self.spec.grad])
            lines += ["if (unscale) {", *(line if line[0] == "#" else f"  {line}" for line in unscaled), "}"]
        lines += [line for name in self.kept for line in self._keep(name)]
        lines += self.taps.apart(self) if self.taps is not None and self.in_blocks else []
        return [*lines, *self._back(self.written)]

    def numbers(self, names: Iterable[str]) -> list[str]:
        """In blocks: arrays for the numbers of buffers with a conversion loop of their own; read ones are filled."""
        apart = [name for name in names if not self._is_computed_with(name)]
        room = [f"float {name}_values[{BLOCK}];" for name in apart]
        read = [name for name in self.reads if name in apart]
        # Codes become products. A compiler that unrolls these loops wholly fuses them with what follows, in one kernel
        # of a rule and not in another, unless they may be read in memory here.
        codes = [name for name in read if codec_of(self.spec.storages[name]).has_blocks]
        joined = [line for name in read for line in self._join(name)]
        return [*room, *joined, *(f'asm("" : "+m"({name}_values));' for name in codes)]

    def begin(self, arrays: Iterable[Array]) -> list[str]:
        """Pointers to the elements of arrays."""
        asked = arrays_of(self.spec, self.tile, self.unscales) if self.asks else []
        lines = [f"ask_ahead<{_ASKED}>({array.name}_array, first);" for array in asked]
        if self.in_place:
            return lines
        arrays = list(arrays)
        begun = [line for array in arrays for line in self._begin(array)]
        if self.in_blocks:
            return [f"const bool copies = layout != nullptr || count < {BLOCK};", *begun]
        # Loops over blocks go beyond the elements of a short one, others do not.
        copied = [f"  {a.name}_run = copied<false>({a.name}_array, {a.name}_spare, {self._at(a)});" for a in arrays]
        elsewhere = ["} else {", *(f"  {line}" for line in lines)] if lines else []
        return [*begun, "if (layout != nullptr) {", *copied, *elsewhere, "}"]

    def loop(self, clause: str, statements: Iterable[str], *, exact: bool = False) -> list[str]:
        """A loop over all elements; an exact one over a block goes beyond the end of a short block."""
        if self.in_place:
            head = ["for (int64_t i = first; i < first + count; ++i) {"]
        else:
            head = [f"for (int64_t j = 0; j < {BLOCK if exact else 'count'}; ++j) {{"]
            head += ["  const int64_t i = first + j;"] if self.rest is not None else []
        return [f"#pragma omp simd{clause}", *head, *statements, "}"]

    def array(self, array: Array) -> str:
        """The name of the pointer to an array's elements."""
        return f"{array.name}_array" if self.in_place else f"{array.name}_run"

    def element(self, array: Array) -> str:
        """The expression of an array's element."""
        return f"{self.array(array)}[{'i' if self.in_place else 'j'}]"

    def load(self, name: str) -> str:
        """The expression of a buffer's value."""
        if not self._is_computed_with(name):
            return f"{name}_values[j]"
        storage = self.spec.storages[name]
        function = "read" if codec_of(storage).is_element else f"join_{storage.title}"
        return f"{function}({', '.join(map(self.element, read_arrays(storage, name)))})"

    def position(self, array: Array) -> int:
        """The index of an array's strides in a layout."""
        return [self.spec.grad, *self.spec.arrays].index(array)

    def _is_computed_with(self, name: str) -> bool:
        """Whether a buffer's elements are read and written in the loop that computes."""
        storage = self.spec.storages[name]
        direct = codec_of(storage).is_plain and storage.arrays(name)[0].dtype is self.spec.compute
        return direct or not self.in_blocks

    def _at(self, array: Array) -> str:
        """The last arguments of `run_of` and `put_back`, which locate an array's part of the run."""
        return "nullptr, pair, pairs, 0" if array.elements == 2 else f"layout, first, count, {self.position(array)}"

    def _begin(self, array: Array) -> list[str]:
        kind, name = C_TYPES[dtype_name(array.dtype)], array.name
        if array.elements == BLOCK:
            is_read = any(array in read_arrays(self.spec.storages[read], read) for read in self.reads)
            return [f"const {kind} {name}_entry = {name}_array[block];"] if is_read else []
        size = self.size // array.elements
        run, ahead = f"{name}_array + first", []
        if self.in_blocks:
            run = f"run_of({name}_array, {name}_spare, copies, {self._at(array)})"
            ahead = [f"ask_ahead<{size}>({name}_run, 0);"]
        return [f"{kind} {name}_spare[{size}];", f"auto* __restrict {name}_run = {run};", *ahead]

    def _back(self, arrays: Iterable[Array]) -> list[str]:
        """The statements that write copies back."""
        if self.in_place:
            return []
        back = [f"put_back({a.name}_array, {a.name}_spare, {self._at(a)});" for a in arrays]
        where = "copies" if self.in_blocks else "layout != nullptr"
        return [f"if ({where}) {{", *(f"  {line}" for line in back), "}"] if back else []

    def _indices(self) -> list[str]:
        if not self.spec.draws_in(self.tile):
            return []
        stop = BLOCK if self.in_blocks else "count"
        indices = f"indices_of(low, high, origin, layout, first, count, {stop}, {1 + len(self.spec.arrays)});"
        return [f"int32_t low[{self.size}], high[{self.size}];", indices]

    def _random(self, name: str) -> str:
        halves = f"low[{self.place}], high[{self.place}]"
        return f", random_{self.spec.draws[name]}(key_0, key_1, {halves})" if name in self.spec.draws else ""

    @property
    def longest(self) -> str:
        """The most elements that a run of the tensor at hand has: with gaps many, because to copy them has a start."""
        return f"(layout == nullptr ? {_ASKED} : {self.size})" if self.asks and self.gaps else str(self.size)

    @property
    def place(self) -> str:
        """An element's index in the run."""
        return "i - first" if self.in_place else "j"

    def _each(self, statement: str) -> list[str]:
        if self.in_place:
            return ["#pragma omp simd", f"for (int64_t i = first; i < first + count; ++i) {statement}"]
        return ["#pragma omp simd", f"for (int64_t j = 0; j < {BLOCK if self.in_blocks else 'count'}; ++j) {statement}"]

    def kept_numbers(self, name: str) -> list[str]:
        """The statements that convert the stored codes of a block to numbers."""
        return self._join(name, "kept")

    def _join(self, name: str, entry: str = "entry") -> list[str]:
        storage, elements, lines = self.spec.storages[name], [], []
        for array in read_arrays(storage, name):
            if array.elements == 2:
                lines += [f"uint8_t {array.name}_codes[{BLOCK}];"] if entry == "entry" else []
                lines += [f"unpack({array.name}_codes, {array.name}_run);"]
            element = {BLOCK: entry, 2: "codes[j]"}.get(array.elements, "run[j]")
            elements.append(f"{array.name}_{element}")
        function = "read" if codec_of(storage).is_element else f"join_{storage.title}"
        return [*lines, *self._each(f"{name}_values[j] = {function}({', '.join(elements)});")]

    def _math(self) -> list[str]:
        scalar, inner, taps = scalar_type(self.spec), self.writer, self.taps
        inner.lines += taps.before(self) if taps is not None else []
        write_math(self.tile, inner, self.load)
        for slot, reduction in self.tile.reductions:
            term = inner[reduction.args[0]]
            if self.in_blocks and self.rest is None:
                term = f"select(j < count, {scalar}({term}), {scalar}({neutral(reduction)}))"
            inner.lines.append("  " + accumulate(reduction, f"chunk_{slot}", term))
        for name, value in self.tile.stores.items():
            number = inner[value]
            computed = self._is_computed_with(name)
            inner.lines.append("  " + (self._store(name, number) if computed else f"{name}_values[j] = {number};"))
            if name in self.kept:
                inner.lines += [
                    f"  const uint32_t {name}_size = measure_{self.storages[name].title}({name}_values[j]);",
                    f"  {name}_largest = {name}_size > {name}_largest ? {name}_size : {name}_largest;",
                ]
        if self.rest is not None:
            self.rest(inner, "  ")
        inner.lines += taps.after(self, inner) if taps is not None else []
        largest = "".join(f" reduction(max : {name}_largest)" for name in self.kept)
        measures = taps is not None and not self.in_blocks
        clauses = f"{self.clause}{taps.clause if taps is not None and measures else ''}{largest}"
        return [
            *(f"uint32_t {name}_largest = 0;" for name in self.kept),
            *(taps.run_lines(self, scalar) if taps is not None else ()),
            *self.loop(clauses, inner.lines, exact=self.in_blocks and self.rest is None),
            *(taps.after_run(self) if taps is not None and measures else ()),
        ]

    def _store(self, name: str, value: str) -> str:
        """The statement that stores a buffer's new value."""
        storage = self.storages[name]
        function = "write" if codec_of(storage).is_plain else f"split_{storage.title}"
        elements = ", ".join(map(self.element, storage.arrays(name)))
        return f"{function}({elements}, {value}{self._random(name)});"

    def _keep(self, name: str) -> list[str]:
        """The statements that store the scales of a block and its elements divided by them."""
        storage = self.storages[name]
        arrays = storage.arrays(name)
        scales = [array for array in arrays if array.elements == BLOCK]
        of_block = ", ".join(f"{array.name}_kept" for array in scales)
        (codes,) = [array for array in arrays if array.elements != BLOCK]
        target = f"{codes.name}_{'kept' if codes.elements == 2 else 'run'}"
        return [
            *(f"{C_TYPES[dtype_name(scale.dtype)]} {scale.name}_kept;" for scale in scales),
            f"if (count < {BLOCK}) {name}_largest = largest_of({name}_values, count, measure_{storage.title});",
            f"keep_{storage.title}({of_block}, {name}_largest);",
            *(f"{scale.name}_array[block] = {scale.name}_kept;" for scale in scales),
            *([f"uint8_t {target}[{BLOCK}];"] if codes.elements == 2 else []),
            *self._each(f"{target}[j] = split_{storage.title}({of_block}, {name}_values[j]{self._random(name)});"),
            *([f"pack({codes.name}_run, {target});"] if codes.elements == 2 else []),
        ]


class TapText:
    """Writes the statements of a pass's taps, from the innermost loop to the tensor's totals."""

    def __init__(self, taps: PassTaps) -> None:
        self._taps, self.stats, self.grad, self.tile = taps, taps.stats, taps.grad, taps.tile
        self._spec, self._columns = taps.spec, taps.columns
        self._arrays: list[Array] = []
        if taps.compared:
            listed = self._spec.storages["param"].arrays("param")
            self._arrays = [listed[place] for place in taps.compared]

    @property
    def _slots(self) -> list[int]:
        return self._taps.slots if self.stats else []

    def tile_lines(self) -> list[str]:
        """The first statements of a tile."""
        lines = [f"    double tap_part_{slot} = 0;" for slot in self._slots]
        if self._taps.changes:
            lines.append("    uint32_t* tap_words = launch->tap_words + launch->first_word[t];")
        return lines

    def run_lines(self, body: RunBody, scalar: str, *, skipped: bool = False) -> list[str]:
        """The first statements of a run."""
        lines = [f"{scalar} tap_{slot} = 0;" for slot in self._slots]
        if skipped:
            return lines
        if body.in_blocks:  # what is remembered of elements until all are stored
            lines += [f"{scalar} tap_{name}s[{BLOCK}];" for name in self._remembered]
            lines += [
                f"decltype(bits_of({body.array(array)}[0])) tap_bits_{place}[{BLOCK}];"
                for place, array in enumerate(self._arrays)
            ]
            lines += [f"uint8_t tap_moved[{BLOCK}];"] if self._taps.moves is not None else []
        flags = [f"uint8_t tap_flags[{body.size}];", f"std::memset(tap_flags, 0, {body.longest});"]
        return lines + (flags if self._taps.changes else [])

    @property
    def clause(self) -> str:
        """The reductions of a chunk's loop, for OpenMP."""
        names: dict[str, list[str]] = {"maximum_of_all": [], "+": []}
        for slot in self._slots:
            names["maximum_of_all" if self._columns.is_extreme(slot) else "+"].append(f"tap_{slot}")
        return "".join(f" reduction({how} : {', '.join(variables)})" for how, variables in names.items() if variables)

    @property
    def reads(self) -> list[str]:
        """The buffers of which statistics need the numbers before the step."""
        return [*(["grad"] if self.grad else []), *self._taps.buffers] if self.stats else []

    @property
    def _remembered(self) -> list[str]:
        names = [f"old_{name}" for name in self.reads if name in ("grad", "param")]
        return [*names, "new_param"] if self.stats and "param" in self._taps.buffers else names

    def _loads(self, body: RunBody) -> list[str]:
        scalar = scalar_type(self._spec)
        return [f"  const {scalar} tap_old_{name} = {body.load(name)};" for name in self.reads]

    def before(self, body: RunBody) -> list[str]:
        """The statements that remember an element before it is written."""
        bits = [f"bits_of({body.element(array)})" for array in self._arrays]
        if body.in_blocks:
            old = [name for name in self.reads if name in ("grad", "param")]
            kept = [f"  tap_bits_{place}[j] = {was};" for place, was in enumerate(bits)]
            return [*(f"  tap_old_{name}s[j] = {body.load(name)};" for name in old), *kept]
        return [*self._loads(body), *(f"  const auto tap_was_{place} = {was};" for place, was in enumerate(bits))]

    def after(self, body: RunBody, inner: Writer) -> list[str]:
        """The statements that measure an element once it is written, or in blocks remember it until all are."""
        lines: list[str] = []
        moves = None
        if self.stats:
            start = len(inner.lines)
            inner.write(self._taps.move_values)
            lines = inner.lines[start:]
            del inner.lines[start:]
            moves = None if self._taps.moves is None else inner[self._taps.moves]
        new = inner[self.tile.stores["param"]] if "param" in self._taps.buffers else ""
        if not body.in_blocks:
            values = {name: inner[self.tile.stores[name]] for name in self._taps.buffers}
            return [*lines, *self._measured(body, values, moves)]
        lines += [f"  tap_new_params[j] = {new};"] if self.stats and new else []
        return [*lines, *([f"  tap_moved[j] = {moves};"] if moves is not None else [])]

    def apart(self, body: RunBody) -> list[str]:
        """A loop of its own over a block's elements when all are stored."""
        in_blocks = [name for name in self._taps.states if name in body.kept] if self.stats else []
        remembered = [f"  const auto tap_{name} = tap_{name}s[j];" for name in self._remembered if name != "new_param"]
        remembered += [f"  const auto tap_was_{place} = tap_bits_{place}[j];" for place in range(len(self._arrays))]
        values = {"param": "tap_new_params[j]", **{name: f"{name}_values[j]" for name in self._taps.states}}
        moves = "bool(tap_moved[j])" if self._taps.moves is not None else None
        return [
            *(line for name in in_blocks for line in body.kept_numbers(name)),
            *body.loop(self.clause, [*remembered, *self._measured(body, values, moves)]),
            *self.after_run(body),
        ]

    def _measured(self, body: RunBody, values: Mapping[str, str], moves: str | None) -> list[str]:
        """The statements that measure an element that was written."""
        lines = [
            f"  const bool tap_other_{place} = bits_of({body.element(array)}) != tap_was_{place};"
            for place, array in enumerate(self._arrays)
        ]
        if self._taps.changes:
            lines.append(f"  tap_flags[{body.place}] = tap_other_0;")
        if not self.stats:
            return lines
        for name in self._taps.buffers:
            storage = self._spec.storages[name]
            is_element = codec_of(storage).is_element
            kept = f"read({body.element(storage.arrays(name)[0])})" if is_element else values[name]
            lines.append(f"  const {scalar_type(self._spec)} tap_now_{name} = {kept};")
        if "param" in self._taps.buffers:
            lines.append(f"  const auto tap_update = {values['param']} - tap_old_param;")
            moved = "" if moves is None else f" | {moves}"
            same = " & ".join(f"!tap_other_{place}" for place in range(len(self._arrays)))
            lines.append(f"  const bool tap_lost = ((tap_update != 0){moved}) & {same};")
        return lines + self._sums("now")

    def _sums(self, which: str | None) -> list[str]:
        """The statements that accumulate an element, after the step ("now") or in a skipped step (None)."""
        lines: list[str] = []
        if not self.stats:
            return lines
        kept = which or "old"

        def add(column: str, term: str) -> None:
            lines.append(f"tap_{self._columns.slot(column)} += {term};")

        def extreme(column: str, term: str) -> None:
            name = f"tap_{self._columns.slot(column)}"
            lines.append(f"{name} = maximum({name}, std::fabs({term}));")

        if self.grad:
            add("grad_squares", "tap_old_grad * tap_old_grad")
            extreme("grad_max", "tap_old_grad")
            add("grad_zeros", "tap_old_grad == 0")
        if "param" in self._taps.buffers:
            add("param_squares", f"tap_{kept}_param * tap_{kept}_param")
            extreme("param_max", f"tap_{kept}_param")
            if which:
                add("update_squares", "tap_update * tap_update")
                extreme("update_max", "tap_update")
                add("lost", "tap_lost")
        for name in self._taps.states:
            number = f"tap_{kept}_{name}"
            lines.append(f"const bool tap_large_{name} = std::fabs({number}) >= {SPLIT!r}f;")
            scale = f"(tap_large_{name} ? {FAR!r}f : {NEAR!r}f)"
            lines.append(f"const auto tap_scaled_{name} = {number} * {scale};")
            square = f"tap_scaled_{name} * tap_scaled_{name}"
            add(f"{name}_near", f"tap_large_{name} ? 0 : {square}")
            add(f"{name}_far", f"tap_large_{name} ? {square} : 0")
            extreme(f"{name}_max", number)
        return [f"  {line}" for line in lines]

    def after_run(self, body: RunBody, *, skipped: bool = False) -> list[str]:
        """The last statements of a run."""
        lines = []
        for slot in self._slots:
            part = f"tap_part_{slot}"
            largest = f"{part} = maximum({part}, double(tap_{slot}));"
            lines.append(largest if self._columns.is_extreme(slot) else f"{part} += tap_{slot};")
        if self._taps.changes and not skipped:
            lines.append(f"mark(tap_words, tap_flags, layout, first, count, {body.position(self._arrays[0])});")
        return lines

    def skipped(self, body: RunBody) -> list[str]:
        """The statements of a run in a skipped step: statistics of the gradient and of what stays."""
        storages = {name: self._spec.storages[name] for name in self.reads}
        return [
            *body.begin([array for name, storage in storages.items() for array in read_arrays(storage, name)]),
            *body.numbers(storages),
            *self.run_lines(body, scalar_type(self._spec), skipped=True),
            *body.loop(self.clause, [*self._loads(body), *self._sums(None)]),
            *self.after_run(body, skipped=True),
        ]

    def partials(self) -> list[str]:
        """The statements that write a tile's partial results."""
        width = len(self._columns)
        return [f"    launch->tap_partials[tile * {width} + {slot}] = tap_part_{slot};" for slot in self._slots]

    def finish(self) -> list[str]:
        """The loop that combines the tiles of each tensor in order."""
        if not self._slots:
            return []
        width = len(self._columns)
        lines = [*TILES_OF_TENSORS]
        for slot in self._slots:
            operation = "Larger" if self._columns.is_extreme(slot) else "Add"
            total = f"total_of<{operation}>(launch->tap_partials + {slot}, {width}, first, stop, 0)"
            lines.append(f"    launch->tap_totals[t * {width} + {slot}] = {total};")
        return [*lines, "  }"]
