"""What tile passes in Triton put out beside the update."""

from __future__ import annotations

from ..storage import codec_of, dtype_name
from .taps import FAR, NEAR, SPLIT, PassTaps
from .triton_math import TileMath
from .triton_text import POINTERS, TileBody

_BYTES_INSIDE = "tap_lane * 8 < stop - start"

_TOGETHER = 4
"""Neighbours that are combined before they are accumulated: a thread has at least as many, and keeps one number for
them. With a number for each element, a kernel's registers leave room for few programs."""


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
        """What sums and extremes begin with, and which elements a step keeps."""
        if not self.stats:
            return []
        kind = f"tl.{self._math.type}"
        made = [f"{indent}tap_{slot} = tl.zeros((TILE // {_TOGETHER},), {kind})" for slot in self._taps.slots]
        return [*made, f"{indent}tap_keep = (tl.zeros((TILE,), tl.float64) + skip) == 0.0"]

    def _known(self, buffer: str) -> str | None:
        return next((name for name, own in self._math.inputs if own == buffer), None)

    def before(self, body: TileBody, *, strided: bool) -> None:
        """Load what the pass itself does not, and remember what the parameter's arrays had."""
        taps, lines, indent = self._taps, body.lines, body.indent
        if self.stats:
            body.store_mask = "tap_keep & mask" if body.mask else "tap_keep"
            wanted = [*(["grad"] if taps.grad else []), *taps.buffers]
            lines += [f"{indent}tap_old_{name} = {self._known(name) or body.load(name)}" for name in wanted]
        arrays = self._spec.storages["param"].arrays("param")
        lines += [f"{indent}tap_was_{place} = {body.loaded(arrays[place])}" for place in taps.compared]
        if taps.changes and not strided:
            inside = f", mask={_BYTES_INSIDE}, other=0" if body.mask else ""
            bytes_ = "tap_words.to(tl.pointer_type(tl.uint8), bitcast=True)"
            lines += [f"{indent}tap_lane = tl.arange(0, TILE // 8)"]
            lines += [f"{indent}tap_place = {bytes_} + tap_first * 4 + start // 8 + tap_lane"]
            lines += [f"{indent}tap_byte = tl.load(tap_place{inside})"]

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
            lines.append(f"{indent}tap_flag = ({flag}).to(tl.int32)")
            lines += [indent + line for line in (self._scattered() if strided else self._packed(bool(body.mask)))]

    def _compared(self, place: int) -> str:
        storage = self._spec.storages["param"]
        array = storage.arrays("param")[place]
        now = self._kept("param") if codec_of(storage).is_plain else f"{array.name}_element"
        return f"differs({now}, tap_was_{place})"

    def _kept(self, name: str) -> str:
        """The expression of what is stored of a plain buffer."""
        return f"(new_{name}).to(tl.{dtype_name(self._spec.storages[name].arrays(name)[0].dtype)})"

    def _sums(self, inside: str, mask: str) -> list[str]:
        taps, kind = self._taps, f"tl.{self._math.type}"
        lines: list[str] = []

        def add(column: str, term: str) -> None:
            slot = taps.columns.slot(column)
            lines.append(f"tap_{slot} += tl.sum({_grouped(term)}, 1)")

        def extreme(column: str, term: str) -> None:
            slot = taps.columns.slot(column)
            together = f"tl.reduce({_grouped(f'tl.abs({term})')}, 1, larger)"
            lines.append(f"tap_{slot} = larger(tap_{slot}, {together})")

        def after(name: str) -> None:
            kept = f"new_{name}"
            if codec_of(self._spec.storages[name]).is_plain:
                kept = f"{self._kept(name)}.to({kind})"
            lines.append(f"tap_now_{name} = tl.where({inside}, {kept}, tap_old_{name})")

        if taps.grad:
            add("grad_squares", "tap_old_grad * tap_old_grad")
            extreme("grad_max", "tap_old_grad")
            zero = "tap_old_grad == 0.0"
            add("grad_zeros", f"({f'{mask} & ({zero})' if mask else zero}).to({kind})")
        if "param" in taps.buffers:
            after("param")
            add("param_squares", "tap_now_param * tap_now_param")
            extreme("param_max", "tap_now_param")
            lines.append(f"tap_update = tl.where({inside}, new_param - tap_old_param, 0.0)")
            add("update_squares", "tap_update * tap_update")
            extreme("update_max", "tap_update")
            moved = "tap_update != 0.0" if taps.moves is None else "(tap_moves != 0.0) | (tap_update != 0.0)"
            same = " & ".join(f"(tap_other_{place} == 0)" for place in taps.compared)
            add("lost", f"({inside} & ({moved}) & {same}).to({kind})")
        for name in taps.states:
            after(name)
            lines.append(f"tap_large = tl.abs(tap_now_{name}) >= {SPLIT!r}")
            lines.append(f"tap_scaled = tap_now_{name} * tl.where(tap_large, {FAR!r}, {NEAR!r})")
            lines.append("tap_square = tap_scaled * tap_scaled")
            add(f"{name}_near", "tl.where(tap_large, 0.0, tap_square)")
            add(f"{name}_far", "tl.where(tap_large, tap_square, 0.0)")
            extreme(f"{name}_max", f"tap_now_{name}")
        return lines

    @staticmethod
    def _packed(masked: bool) -> list[str]:
        """8 neighbours, which one thread has in half precision, are a byte; one whose bits are set is not written."""
        changed = "(tap_byte | tap_bits) != tap_byte"
        changed = f"({_BYTES_INSIDE}) & ({changed})" if masked else changed
        flags = "tl.reshape(tap_flag, (TILE // 8, 8)) << tl.arange(0, 8)[None, :]"
        return [
            f"tap_bits = tl.sum({flags}, 1).to(tl.uint8)",
            f"tl.store(tap_place, tap_byte | tap_bits, mask={changed})",
        ]

    @staticmethod
    def _scattered() -> list[str]:
        """Neighbours lie apart: bits count along the parameter's memory, as in the other kernel."""
        place = "tap_words + tap_first + (at_1 >> 5)"
        bit = "tap_flag << (at_1 & 31).to(tl.int32)"
        return [f'tl.atomic_or({place}, {bit}, mask=tap_flag != 0, sem="relaxed")']

    def partials(self, indent: str) -> list[str]:
        """Leave what the program has accumulated."""
        if not self.stats:
            return []
        columns = self._taps.columns
        lines = []
        for slot in self._taps.slots:
            total = f"tl.reduce(tap_{slot}, 0, larger)" if columns.is_extreme(slot) else f"tl.sum(tap_{slot}, 0)"
            lines.append(f"{indent}tl.store(tap_partials + tile.to(tl.int64) * {len(columns)} + {slot}, {total})")
        return lines


def _grouped(term: str) -> str:
    return f"tl.reshape({term}, (TILE // {_TOGETHER}, {_TOGETHER}))"
