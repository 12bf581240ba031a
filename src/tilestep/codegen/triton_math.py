"""What a tile pass computes, as a Triton function of the values that the kernels around it load."""

from __future__ import annotations

from ..graph import TilePass, Value
from ..storage import Array, dtype_name
from .spec import MAX_DIMS, KernelSpec
from .tidy import describe
from .triton_names import TritonNames
from .triton_text import REDUCTIONS, TileBody, decorator, is_16_bits, writer_of


class TileMath:
    """One tile pass: its math as a function, and what it takes and gives."""

    def __init__(self, spec: KernelSpec, tile: TilePass, name: str) -> None:
        self.spec, self.tile, self.name = spec, tile, f"{spec.name}_{name}"
        self.unscales = spec.program.unscales(tile)
        self.type = dtype_name(spec.compute)
        self.draws = spec.draws_in(tile)
        self.arrays: list[Array] = [spec.grad, *spec.arrays]
        around = [f"{array.name}_{what}" for array in self.arrays for what in ("array", "address", "element")]
        self.names = TritonNames([self.name, *around, *(f"new_{name}" for name in tile.stores)])
        self.writer = writer_of(self.type, "    ", self.names, is_16_bits(spec, tile), spec.has_blocks)
        self.inputs: list[tuple[str, str]] = []
        self.element_inputs: set[int] = set()
        self.slices: list[tuple[str, Value]] = []
        self.scalars: list[tuple[str, int]] = []
        kept_elsewhere = {id(value) for value in tile.slices()}
        for value in tile.values():
            buffer = tile.loads.get(id(value))
            if buffer is None and value.operation == "load" and not tile.leaves(value):
                buffer = value.attribute
            if buffer is not None:
                self.inputs.append((self._argument(value, buffer), buffer))
                self.element_inputs.add(id(value))
            elif id(value) in kept_elsewhere:
                self.slices.append((self._argument(value, value.name or describe(value)), value))
            elif tile.leaves(value) and value.operation != "constant" and id(value) in spec.program.columns:
                self.scalars.append((self._argument(value, value.name or describe(value)), self._column(value)))
        self.writer.write(tile.values())
        self.results = {f"new_{name}": self.writer[value] for name, value in tile.stores.items()}
        self.results.update({f"kept_{slot}": self.writer[value] for slot, value in tile.kept})
        self.results.update({f"term_{slot}": self.writer[value.args[0]] for slot, value in tile.reductions})
        self.results.update({f"share_{slot}": self.writer[value.args[0]] for slot, value in tile.parts})

    def _column(self, value: Value) -> int:
        return self.spec.program.columns[id(value)]

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
        """Write the loads of the buffers it takes."""
        for name, buffer in self.inputs:
            body.lines.append(f"{body.indent}{name} = {body.load(buffer)}")

    def store_results(self, body: TileBody) -> None:
        """Write the stores of the buffers it gives, and of gradients without their loss scale."""
        for name in self.tile.stores:
            body.store(name, f"new_{name}")
        if self.unscales:
            raw = next((name for name, buffer in self.inputs if buffer == "grad"), None) or body.load("grad")
            body.lines.append(f"{body.indent}if UNSCALE:")
            body.indent += "    "
            body.store("grad", f"{raw} * inverse_scale")
            body.indent = body.indent[:-4]

    def used(self) -> list[tuple[int, Array]]:
        """Position and array of everything this pass touches."""
        buffers = [*self.tile.reads(), *self.tile.stores]
        touched = {array.name for name in buffers for array in self.spec.storages[name].arrays(name)}
        if self.unscales:
            touched.add(self.spec.grad.name)
        return [(position, array) for position, array in enumerate(self.arrays) if array.name in touched]

    def element_index(self, indent: str, place: str) -> list[str]:
        """The line that says where elements at a place of the tensor are in the whole, if that is asked for."""
        return [f"{indent}element_index = origin + ({place})"] if self.draws else []

    @property
    def walked(self) -> list[tuple[int, Array | None]]:
        """As `used`, with the place of the whole tensor's strides among the arrays' if that is asked for."""
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
    """The kernel that combines what tiles have left of each tensor, in tile order."""
    count = spec.reduction_count
    lines = decorator(pointers)
    lines.append(f"def {spec.name}_{title}({', '.join(pointers)}, {constants}):")
    lines += [
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
