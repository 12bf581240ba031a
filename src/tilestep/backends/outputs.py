"""Outputs of tile passes: numbers of each tensor and bits of elements, from stored values."""

from __future__ import annotations

from collections.abc import Callable

from ..graph import Builder, TilePass, Value, ancestors
from ..kernels.outputs import storing, traced
from ..kernels.spec import KernelSpec, Output
from ..storage import Leaf
from .emit import Writer


class PassOutputs:
    """The outputs of one tile pass."""

    def __init__(self, spec: KernelSpec, tile: TilePass) -> None:
        every = traced(spec)
        entries = [entry for entry in every if entry.tile is tile]
        self.spec, self.tile, self.width = spec, tile, len(reports(spec.outputs))
        slots = {name: slot for slot, name in enumerate(reports(spec.outputs))}
        self.reports = [(slots[entry.output.name], entry) for entry in entries if entry.output.reduce != "or"]
        self.marks = next((entry.root for entry in entries if entry.output.reduce == "or"), None)
        """Whether an element's bit is set."""
        self.roots = [entry.root for entry in entries]
        self.leaves = list(dict.fromkeys(leaf for entry in entries for leaf in entry.leaves))
        self.moves = moves_of(spec) if ("moves", "param", 0) in self.leaves else None

    def __bool__(self) -> bool:
        return bool(self.roots)

    def of(self, *kinds: str) -> list[str]:
        """The buffers that have leaves of these kinds."""
        return list(dict.fromkeys(buffer for kind, buffer, _ in self.leaves if kind in kinds))

    @property
    def compared(self) -> list[int]:
        """The indices of the parameter's arrays whose elements are compared with their values before the step."""
        return [array for kind, _, array in self.leaves if kind == "changed"]

    def write(self, writer: Writer, root: Value, leaf: Callable[[str, str, int], str], names: dict[Leaf, str]) -> str:
        """Write a value after its leaves, each into a variable; returns its expression."""
        values = ancestors([root])
        for value in values:
            if value.operation == "load":
                if value.attribute not in names:
                    kind, buffer, _ = value.attribute
                    names[value.attribute] = writer.name(value, leaf(*value.attribute), f"{kind}_{buffer}")
                writer.bind(value, names[value.attribute])
        writer.write(values)
        return writer[root]

    @property
    def move_values(self) -> list[Value]:
        """The values that `moves` is computed from, in order, without values of the pass."""
        if self.moves is None:
            return []
        inside = {id(value) for value in self.tile.values()}
        return [
            value for value in ancestors([self.moves], lambda value: id(value) in inside) if id(value) not in inside
        ]


def reports(outputs: tuple[Output, ...]) -> list[str]:
    """The names of the outputs with one number per tensor, in the order of their table's columns."""
    return [output.name for output in outputs if output.reduce != "or"]


def moves_of(spec: KernelSpec) -> Value | None:
    """Whether the rule adds a nonzero term to the parameter; None if the graph does not show it.

    No product of the rule is used in it: a compiler that finds one used beside a sum does not fuse the two, and
    steps that measure would round otherwise than those that do not.
    """
    tile = storing(spec, "param")
    new = None if tile is None else tile.stores["param"]
    return None if tile is None or new is None or new.operation == "load" else _moves(Builder(), new, tile)


def _moves(build: Builder, value: Value, tile: TilePass) -> Value | None:
    """Whether a sum that begins with the parameter has nonzero terms."""
    if value.operation == "load" and value.attribute == "param" and id(value) not in tile.loads:
        return build.constant(False)
    if tile.leaves(value):
        return None
    if value.operation in ("add", "sub"):
        for kept, term in (value.args, value.args[::-1]) if value.operation == "add" else (value.args,):
            before = _moves(build, kept, tile)
            if before is not None:
                moves = _is_something(build, term, tile)
                return moves if before.operation == "constant" else build.apply("or", before, moves)
    if value.operation == "mul":
        for kept, factor in (value.args, value.args[::-1]):
            if kept.operation == "load" and _moves(build, kept, tile) is not None:
                scales = build.apply("ne", factor, build.constant(1.0))
                return build.apply("and", scales, build.apply("ne", kept, build.constant(0.0)))
    return None


def _is_something(build: Builder, value: Value, tile: TilePass) -> Value:
    """Whether a term is nonzero: for a product, whether all factors are, up to underflow."""
    if not tile.leaves(value):
        if value.operation == "mul":
            return build.apply("and", *(_is_something(build, arg, tile) for arg in value.args))
        if value.operation in ("div", "neg"):
            return _is_something(build, value.args[0], tile)
    return build.apply("ne", value, build.constant(0.0))
