"""What tile passes in Triton put out beside the update."""

from __future__ import annotations

from ..storage import codec_of
from .taps import FAR, NEAR, PassTaps
from .triton_math import TileMath
from .triton_text import POINTERS, TileBody, narrowed

_TOGETHER = 4
"""Neighbours that are combined before they are accumulated: a thread has at least as many, and keeps one number for
them. With a number for each element, a kernel's registers leave room for few programs."""

_NEAR_HOLDS = 2.0**126
"""Up to which sum a program's squares of small magnitudes are those of all of its elements."""


class TapText:
    """Writes the statements of a pass's taps around its math, which also gives `tap_moves`: what is added."""

    def __init__(self, math: TileMath, taps: PassTaps) -> None:
        self._math, self._taps, self.stats = math, taps, taps.stats
        self._spec = taps.spec
        if taps.moves is not None:
            math.writer.write(taps.move_values)
            math.results["tap_moves"] = math.writer[taps.moves]

    @property
    def pointers(self) -> list[str]:
        """Its pointer parameters."""
        return (POINTERS["stats"] if self.stats else []) + (POINTERS["changes"] if self._taps.changes else [])

    def prologue(self) -> list[str]:
        """Loads from the tables."""
        return ["    tap_first = tl.load(first_word + t)"] if self._taps.changes else []

    def accumulators(self, indent: str) -> list[str]:
        """What sums, counts and extremes begin with, and whether a step is kept."""
        if not self.stats:
            return []
        kinds = {slot: "int32" if self._counts(slot) else self._math.type for slot in self._taps.slots}
        made = [f"{indent}tap_{slot} = tl.zeros((TILE // {_TOGETHER},), tl.{kind})" for slot, kind in kinds.items()]
        return [*made, f"{indent}tap_keep = (tl.zeros((TILE,), tl.float64) + skip) == 0.0"]

    def _counts(self, slot: int) -> bool:
        return self._taps.columns.names[slot] in ("grad_zeros", "lost")

    def _known(self, buffer: str) -> str | None:
        return next((name for name, own in self._math.inputs if own == buffer), None)

    def before(self, body: TileBody, *, strided: bool) -> None:
        """Load what the pass itself does not, and remember what the parameter's arrays had.

        What is walked without a mask is of a step that is kept: the others are walked with one.
        """
        taps, lines, indent = self._taps, body.lines, body.indent
        body.in_pairs = True
        if self.stats:
            body.store_mask = "tap_keep & mask" if body.mask else ""
            wanted = [*(["grad"] if taps.grad else []), *taps.buffers]
            lines += [f"{indent}tap_old_{name} = {self._known(name) or body.load(name)}" for name in wanted]
        arrays = self._spec.storages["param"].arrays("param")
        lines += [f"{indent}tap_was_{place} = {body.loaded(arrays[place])}" for place in taps.compared]
        if taps.changes and not strided:
            # With an address and a byte for each element, of which the first of eight counts: the layout of a tensor of
            # bytes is another, and its numbers would be moved between threads with two barriers.
            bytes_ = "tap_words.to(tl.pointer_type(tl.uint8), bitcast=True) + tap_first * 4 + start // 8"
            lines += [
                f"{indent}tap_place = tl.multiple_of(tl.max_contiguous({bytes_} + lane // 8, 8), 8)",
                f"{indent}tap_there = (lane % 8 == 0)" + (" & mask" if body.mask else ""),
                f"{indent}tap_had = tl.load(tap_place, mask=tap_there, other=0).to(tl.int32)",
            ]

    def after(self, body: TileBody, *, strided: bool) -> None:
        """Accumulate, and mark changed weights."""
        taps, lines, indent = self._taps, body.lines, body.indent
        inside = body.store_mask
        for place in taps.compared:
            lines.append(f"{indent}tap_other_{place} = {self._compared(place)}")
        if self.stats:
            lines += [indent + line for line in self._sums(inside, body.mask)]
        if taps.changes:
            flag = f"tap_other_0 & {inside}" if inside else "tap_other_0"
            lines.append(f"{indent}tap_flag = {flag}")
            lines += [indent + line for line in (self._scattered() if strided else self._packed())]

    def _compared(self, place: int) -> str:
        storage = self._spec.storages["param"]
        array = storage.arrays("param")[place]
        now = self._kept("param") if codec_of(storage).is_element else f"{array.name}_element"
        return f"differs({now}, tap_was_{place})"

    def _kept(self, name: str) -> str:
        """The expression of what is stored of a buffer that is one array."""
        if name in self._spec.draws:
            return f"{name}_element"
        return narrowed(f"new_{name}", self._spec.storages[name].arrays(name)[0], self._math.type, in_pairs=True)

    def _sums(self, inside: str, mask: str) -> list[str]:
        taps, kind = self._taps, f"tl.{self._math.type}"
        lines: list[str] = []

        def accumulate(how: str, column: str, term: str) -> None:
            slot = taps.columns.slot(column)
            lines.append(f"tap_{slot} = {how}(tap_{slot}, {term})")

        def where_kept(value: str, otherwise: str) -> str:
            return f"tl.where({inside}, {value}, {otherwise})" if inside else value

        def after(name: str) -> None:
            is_element = codec_of(self._spec.storages[name]).is_element
            kept = f"{self._kept(name)}.to({kind})" if is_element else f"new_{name}"
            lines.append(f"tap_now_{name} = {where_kept(kept, f'tap_old_{name}')}")

        if taps.grad:
            accumulate("add_squares", "grad_squares", "tap_old_grad")
            accumulate("add_largest", "grad_max", "tap_old_grad")
            zero = "tap_old_grad == 0.0"
            accumulate("add_count", "grad_zeros", f"{mask} & ({zero})" if mask else zero)
        if "param" in taps.buffers:
            after("param")
            accumulate("add_squares", "param_squares", "tap_now_param")
            accumulate("add_largest", "param_max", "tap_now_param")
            lines.append(f"tap_update = {where_kept('new_param - tap_old_param', '0.0')}")
            accumulate("add_squares", "update_squares", "tap_update")
            accumulate("add_largest", "update_max", "tap_update")
            moved = "tap_update != 0.0" if taps.moves is None else "tap_moves | (tap_update != 0.0)"
            same = [f"(tap_other_{place} == 0)" for place in taps.compared]
            accumulate("add_count", "lost", " & ".join([*([f"({inside})"] if inside else []), f"({moved})", *same]))
        for name in taps.states:
            after(name)
            for column, scale in (("near", NEAR), ("far", FAR)):
                accumulate("add_squares", f"{name}_{column}", f"tap_now_{name} * {scale!r}")
            accumulate("add_largest", f"{name}_max", f"tap_now_{name}")
        return lines

    @staticmethod
    def _packed() -> list[str]:
        """8 neighbours, which one or two threads have, are a byte; one whose bits are set is not written."""
        return [
            "tap_set = tl.reshape(tl.where(tap_flag, 1 << lane % 8, 0), (TILE // 8, 8))",
            "tap_set = tl.broadcast_to(tl.sum(tap_set, 1, keep_dims=True), (TILE // 8, 8))",
            "tap_bits = tl.reshape(tap_set, (TILE,)) | tap_had",
            "tl.store(tap_place, tap_bits.to(tl.uint8), mask=tap_there & (tap_bits != tap_had))",
        ]

    @staticmethod
    def _scattered() -> list[str]:
        """Neighbours lie apart: bits count along the parameter's memory, as in the other kernel."""
        place = "tap_words + tap_first + (at_1 >> 5)"
        bit = "1 << (at_1 & 31).to(tl.int32)"
        return [f'tl.atomic_or({place}, {bit}, mask=tap_flag, sem="relaxed")']

    def partials(self, indent: str) -> list[str]:
        """Leave what the program has accumulated."""
        if not self.stats:
            return []
        columns, totals = self._taps.columns, {}
        for slot in self._taps.slots:
            combine = "maximum" if columns.is_extreme(slot) else "add"
            totals[slot] = f"tl.reduce(tap_{slot}, 0, {combine}).to(tl.{self._math.type})"
        lines = [f"tap_row = tap_partials + tile.to(tl.int64) * {len(columns)}"]
        for name in self._taps.states:
            # Squares of large magnitudes stand for all where those of small ones are too large for the type.
            near, far = columns.slot(f"{name}_near"), columns.slot(f"{name}_far")
            lines += [f"tap_{slot} = {totals[slot]}" for slot in (near, far)]
            lines.append(f"tap_holds = (tap_{near} < {_NEAR_HOLDS!r}) | (tap_{near} != tap_{near})")
            totals[near], totals[far] = (
                f"tl.where(tap_holds, {each})" for each in (f"tap_{near}, 0.0", f"0.0, tap_{far}")
            )
        lines += [f"tl.store(tap_row + {slot}, {total})" for slot, total in totals.items()]
        return [indent + line for line in lines]
