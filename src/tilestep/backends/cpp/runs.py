"""The code for runs of consecutive elements, in place or copied, and for a pass's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...graph import TilePass
from ...kernels.spec import KernelSpec
from ...storage import BLOCK, Array, Leaf, codec_of, read_arrays
from ..emit import Writer, code, nested
from ..outputs import PassOutputs
from .text import C_TYPES, NEUTRALS, CppWriter, Reduced, accumulate, clause_of

MAX_COLUMNS = 2048
"""The most elements of a row that a tile of a pass over rows and columns has."""

_RUN = 1024
"""Elements of a run, which are summed in the compute type before that sum is added to a float64 sum."""

_PREFETCHED = 64
"""Elements of a run that prefetches: its cache lines fit into a processor's buffers."""


class RunBody:
    """Writes what a pass does with up to `size` elements that follow each other: `count`, from `first` on.

    Where they lie with gaps they are copied, so that one loop does for all tensors. In blocks loops are of exactly 128
    over numbers of one width: a loop over codes of a byte and numbers of four computes as many numbers at once as a
    vector has bytes, and runs out of registers. So each buffer is made numbers in a loop of its own, and made codes in
    another; short blocks are copied too.

    scalars: has spelled what a pass takes from others. gaps: whether tensors may lie with gaps. rest: writes what
    else a pass over rows and columns does with an element `i`.
    """

    def __init__(
        self,
        spec: KernelSpec,
        tile: TilePass,
        scalars: Writer,
        *,
        gaps: bool,
        rest: Callable[[Writer], list[str]] | None = None,
    ) -> None:
        self.spec, self.tile, self.rest, self.gaps = spec, tile, rest, gaps
        self.scalar, self.unscales, self.outputs = (
            C_TYPES[spec.compute],
            spec.program.unscales(tile),
            OutputText(spec, tile),
        )
        self.writer = CppWriter(self.scalar, scalars.names.within())
        self.writer.expressions.update(scalars.expressions)
        self.reduced = [Reduced(value, slot, spec.reduction_count) for slot, value in tile.reductions]
        """The reductions that the update itself needs."""
        together = [*self.reduced, *([] if self.outputs.is_separate else self.outputs.reported)]
        self.clause = {one.chunk: one.reduction for one in together}
        self.clause.update({f"row_{slot}": value for slot, value in tile.parts_of("row")} if rest else {})
        """The reductions of its loop, by their variables."""
        buffers = [*tile.reads(), *tile.stores]
        touches_blocks = any(codec_of(spec.storages[name]).has_blocks for name in buffers)
        self.in_blocks = touches_blocks if tile.view else spec.has_blocks
        self.in_place = not (self.in_blocks or gaps)
        self.prefetches = not (self.in_blocks or rest or self.clause)
        self.size = (
            BLOCK
            if self.in_blocks
            else _PREFETCHED
            if self.prefetches and self.in_place
            else MAX_COLUMNS
            if rest
            else _RUN
        )
        self.place = "i - first" if self.in_place else "j"
        """An element's index in the run."""
        self.storages = {name: spec.storages[name] for name in dict.fromkeys(buffers)}
        if self.unscales:
            self.storages.setdefault("grad", spec.storages["grad"])
        self.kept = [name for name in tile.stores if codec_of(self.storages[name]).has_blocks]
        self.reads = list(dict.fromkeys([*tile.reads(), *self.outputs.reads]))
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
            lines += code(f"""
                if (unscale) {{
                  {nested([*unscaled, *self._back([self.spec.grad])])}
                }}
            """)
        lines += [line for name in self.kept for line in self._keep(name)]
        return [*lines, *self.outputs.last(self), *self._back(self.written)]

    def numbers(self, names: Iterable[str]) -> list[str]:
        """In blocks: arrays for the numbers of buffers with a separate conversion loop; filled if they are read."""
        apart = [name for name in names if not self._is_computed_with(name)]
        room = [f"float {name}_values[{BLOCK}];" for name in apart]
        read = [name for name in self.reads if name in apart]
        # Codes become products. A compiler that unrolls these loops wholly fuses them with what follows, in one kernel
        # of a rule and not in another, unless they may be read in memory here.
        codes = [name for name in read if codec_of(self.spec.storages[name]).has_blocks]
        joined = [line for name in read for line in self.join(name)]
        return [*room, *joined, *(f'asm("" : "+m"({name}_values));' for name in codes)]

    def begin(self, arrays: Iterable[Array]) -> list[str]:
        """Pointers to the elements of arrays."""
        prefetched = self.spec.touched(self.tile) if self.prefetches else []
        lines = [f"ask_ahead<{_PREFETCHED}>({array.name}_array, first);" for _, array in prefetched]
        if self.in_place:
            return lines
        arrays = list(arrays)
        begun = [line for array in arrays for line in self._begin(array)]
        if self.in_blocks:
            return [f"const bool copies = layout != nullptr || count < {BLOCK};", *begun]
        # Only loops over blocks run past the elements of a short block.
        copied = [f"{a.name}_run = copied<false>({a.name}_array, {a.name}_spare, {self._at(a)});" for a in arrays]
        return code(f"""
            {nested(begun)}
            if (layout != nullptr) {{
              {nested(copied)}
            {nested(["} else {"] if lines else [])}
              {nested(lines)}
            }}
        """)

    def loop(self, clause: str, statements: Iterable[str], *, exact: bool = False) -> list[str]:
        """A loop over all elements; an exact loop over a block runs past the end of a short block."""
        head = f"int64_t j = 0; j < {BLOCK if exact else 'count'}; ++j"
        if self.in_place:
            head = "int64_t i = first; i < first + count; ++i"
        return code(f"""
            #pragma omp simd{clause}
            for ({head}) {{
              {nested(["const int64_t i = first + j;"] if self.rest and not self.in_place else [])}
              {nested(statements)}
            }}
        """)

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
        kind, name = C_TYPES[array.dtype], array.name
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
        return f"(layout == nullptr ? {_PREFETCHED} : {self.size})" if self.prefetches and self.gaps else str(self.size)

    def _each(self, statement: str) -> list[str]:
        head = f"int64_t j = 0; j < {BLOCK if self.in_blocks else 'count'}; ++j"
        if self.in_place:
            head = "int64_t i = first; i < first + count; ++i"
        return ["#pragma omp simd", f"for ({head}) {statement}"]

    def join(self, name: str, entry: str = "entry") -> list[str]:
        """The statements that convert the stored codes of a block to numbers; "kept" for codes from before the step."""
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
        inner, outputs, exact = self.writer, self.outputs, self.in_blocks and self.rest is None
        inner.lines += outputs.before(self)
        for value in self.tile.values():
            buffer = self.tile.buffer_of(value)
            if buffer is not None:
                inner.name(value, self.load(buffer), buffer)
        inner.write(self.tile.values())
        for one in self.reduced:
            term = inner[one.reduction.args[0]]
            if exact:
                term = f"select(j < count, {self.scalar}({term}), {self.scalar}({NEUTRALS[one.reduction.operation]}))"
            inner.lines.append(accumulate(one.reduction, one.chunk, term))
        for name, value in self.tile.stores.items():
            number = inner[value]
            computed = self._is_computed_with(name)
            inner.lines.append(self._store(name, number) if computed else f"{name}_values[j] = {number};")
            if name in self.kept:
                inner.lines += [
                    f"const uint32_t {name}_size = measure_{self.storages[name].title}({name}_values[j]);",
                    f"{name}_largest = {name}_size > {name}_largest ? {name}_size : {name}_largest;",
                ]
        inner.lines += self.rest(inner) if self.rest is not None else []
        outputs.after(self, inner)
        largest = "".join(f" reduction(max : {name}_largest)" for name in self.kept)
        return [
            *(f"uint32_t {name}_largest = 0;" for name in self.kept),
            *outputs.run_lines(self),
            *self.loop(clause_of(self.clause) + largest, inner.lines, exact=exact),
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
            *(f"{C_TYPES[scale.dtype]} {scale.name}_kept;" for scale in scales),
            f"if (count < {BLOCK}) {name}_largest = largest_of({name}_values, count, measure_{storage.title});",
            f"keep_{storage.title}({of_block}, {name}_largest);",
            *(f"{scale.name}_array[block] = {scale.name}_kept;" for scale in scales),
            *([f"uint8_t {target}[{BLOCK}];"] if codes.elements == 2 else []),
            *self._each(f"{target}[j] = split_{storage.title}({of_block}, {name}_values[j]{self._random(name)});"),
            *([f"pack({codes.name}_run, {target});"] if codes.elements == 2 else []),
        ]


class OutputText:
    """Writes the code of a run for a pass's outputs: before elements are written, and after."""

    def __init__(self, spec: KernelSpec, tile: TilePass) -> None:
        self._outputs = outputs = PassOutputs(spec, tile)
        self.reported = [Reduced(entry.reduction, slot, outputs.width, "report_") for slot, entry in outputs.reports]
        self._scalar, self._storages = C_TYPES[spec.compute], spec.storages
        self._old = outputs.of("old", "update")
        self.reads = outputs.of("old", "update", *(["new"] if self.reported else []))
        """The buffers of which the numbers before the step are needed, or after a skipped one."""
        self._given = outputs.of("new", "update")
        arrays = self._storages["param"].arrays("param")
        self._arrays = [(place, arrays[place]) for place in outputs.compared]
        self.is_separate = bool(outputs) and (spec.has_blocks or bool(tile.reductions))
        """Whether outputs have a loop of their own: types in a loop change how it cuts a sum of the rule into lanes."""
        kept = [name for name in self._given if not (spec.has_blocks or codec_of(self._storages[name]).is_element)]
        self._remembered = [*dict.fromkeys([*(["param"] if "param" in self._given else []), *kept])]
        """The buffers of which loops apart remember the numbers that the rule gives."""

    def tile_lines(self) -> list[str]:
        """The first statements of a tile."""
        return ["uint32_t* seen_words = launch->words + launch->first_word[t];"] if self._outputs.marks else []

    def run_lines(self, body: RunBody) -> list[str]:
        """The first statements of a run: values kept until all elements are stored, and flags."""
        lines: list[str] = []
        if self.is_separate:
            kinds = [(f"old_{name}", self._scalar) for name in self._old]
            kinds += [(f"given_{name}", self._scalar) for name in self._remembered]
            kinds += [(f"bits_{place}", f"decltype(bits_of({body.array(array)}[0]))") for place, array in self._arrays]
            kinds += [("moves", self._scalar)] if self._outputs.moves is not None else []
            lines += [f"{kind} seen_{name}s[{body.size}];" for name, kind in kinds]
        if self._outputs.marks:
            lines += [f"uint8_t seen_flags[{body.size}];", f"std::memset(seen_flags, 0, {body.longest});"]
        return lines

    def before(self, body: RunBody) -> list[str]:
        """The statements that remember an element before it is written."""
        seen = [(self._scalar, f"old_{name}", body.load(name)) for name in self._old]
        seen += [("auto", f"bits_{place}", f"bits_of({body.element(array)})") for place, array in self._arrays]
        if self.is_separate:
            return [f"seen_{name}s[{body.place}] = {value};" for _, name, value in seen]
        return [f"const {kind} seen_{name} = {value};" for kind, name, value in seen]

    def after(self, body: RunBody, writer: Writer) -> None:
        """Write the outputs of a stored element, or keep it until the whole run is stored."""
        writer.write(self._outputs.move_values)
        moves = None if self._outputs.moves is None else writer[self._outputs.moves]
        given = {name: writer[self._outputs.tile.stores[name]] for name in self._given}
        if not self.is_separate:
            self._accumulate(body, writer, given, moves)
            return
        writer.lines += [f"seen_given_{name}s[{body.place}] = {given[name]};" for name in self._remembered]
        writer.lines += [f"seen_movess[{body.place}] = {moves};"] if moves is not None else []

    def last(self, body: RunBody) -> list[str]:
        """The last statements of a run: the loop of outputs, if they have a separate loop."""
        lines: list[str] = []
        if self.is_separate:
            writer, place = CppWriter(self._scalar, body.writer.names.within()), body.place
            names = [*(f"old_{name}" for name in self._old), *(f"bits_{array}" for array, _ in self._arrays)]
            writer.lines += [f"const auto seen_{name} = seen_{name}s[{place}];" for name in names]
            given = {name: f"{name}_values[j]" for name in self._given}
            given.update({name: f"seen_given_{name}s[{place}]" for name in self._remembered})
            moves = None if self._outputs.moves is None else f"(seen_movess[{place}] != 0)"
            self._accumulate(body, writer, given, moves)
            lines += [line for name in self._given if name in body.kept for line in body.join(name, "kept")]
            lines += body.loop(self._clause(), writer.lines)
        if self._outputs.marks:
            array = body.position(self._storages["param"].arrays("param")[0])
            lines.append(f"mark(seen_words, seen_flags, layout, first, count, {array});")
        return lines

    def _clause(self) -> str:
        return clause_of({one.chunk: one.reduction for one in self.reported})

    def _accumulate(self, body: RunBody, writer: Writer, given: Mapping[str, str], moves: str | None) -> None:
        """Write the outputs of a stored element; `given` are numbers before rounding."""

        def leaf(kind: str, buffer: str, place: int) -> str:
            arrays = self._storages[buffer].arrays(buffer)
            is_element = codec_of(self._storages[buffer]).is_element
            return {
                "old": f"seen_old_{buffer}",
                "new": f"read({body.element(arrays[0])})" if is_element else given.get(buffer, ""),
                "update": f"{given.get(buffer)} - seen_old_{buffer}",
                "changed": f"bits_of({body.element(arrays[place])}) != seen_bits_{place}",
                "moves": moves or "false",
            }[kind]

        names = self._reduce(writer, leaf)
        if self._outputs.marks:
            flag = self._outputs.write(writer, self._outputs.marks, leaf, names)
            writer.lines.append(f"seen_flags[{body.place}] = {flag};")

    def _reduce(self, writer: Writer, leaf: Callable[[str, str, int], str]) -> dict[Leaf, str]:
        names: dict[Leaf, str] = {}
        for one, (_, entry) in zip(self.reported, self._outputs.reports):
            term = self._outputs.write(writer, entry.root, leaf, names)
            writer.lines.append(accumulate(one.reduction, one.chunk, term))
        return names

    def skipped(self, body: RunBody) -> list[str]:
        """The statements of a run in a skipped step, whose elements do not change."""
        storages = {name: self._storages[name] for name in self.reads}
        arrays = [array for name, storage in storages.items() for array in read_arrays(storage, name)]
        writer = CppWriter(self._scalar, body.writer.names.within())
        writer.lines += [f"const {self._scalar} seen_old_{name} = {body.load(name)};" for name in self.reads]
        stays = {"old": "seen_old_{}", "new": "seen_old_{}", "update": "0"}
        self._reduce(writer, lambda kind, buffer, place: stays.get(kind, "false").format(buffer))
        return [*body.begin(arrays), *body.numbers(storages), *body.loop(self._clause(), writer.lines)]
