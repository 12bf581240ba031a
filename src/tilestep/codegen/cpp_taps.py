"""What tile passes in C++ put out beside the update."""

from __future__ import annotations

from collections.abc import Mapping

from ..storage import Array, codec_of
from .cpp_text import TILES_OF_TENSORS, TileBody
from .emit import Writer
from .taps import FAR, NEAR, SPLIT, PassTaps


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
        """What a tile begins with."""
        lines = [f"    double tap_part_{slot} = 0;" for slot in self._slots]
        if self._taps.changes:
            lines.append("    uint32_t* tap_words = launch->tap_words + launch->first_word[t];")
        return lines

    def chunk_lines(self, scalar: str, *, skipped: bool = False) -> list[str]:
        """What a chunk begins with."""
        lines = [f"        {scalar} tap_{slot} = 0;" for slot in self._slots]
        if self._taps.changes and not skipped:
            lines.append("        uint8_t tap_flags[1024] = {0};")
        return lines

    @property
    def clause(self) -> str:
        """The reductions of a chunk's loop, for OpenMP."""
        names: dict[str, list[str]] = {"maximum_of_all": [], "+": []}
        for slot in self._slots:
            names["maximum_of_all" if self._columns.is_extreme(slot) else "+"].append(f"tap_{slot}")
        return "".join(f" reduction({how} : {', '.join(each)})" for how, each in names.items() if each)

    def loads(self, body: TileBody, known: Mapping[str, str]) -> list[str]:
        """The numbers of buffers before the step, those that the pass has read already by their names."""
        wanted = [*(["grad"] if self.grad else []), *self._taps.buffers] if self.stats else []
        return [f"{body.indent}const auto tap_old_{name} = {known.get(name) or body.load(name)};" for name in wanted]

    def before(self, body: TileBody) -> list[str]:
        """What is remembered of an element before it is written."""
        compared = [
            f"{body.indent}const auto tap_was_{place} = bits_of({body.element(array)});"
            for place, array in enumerate(self._arrays)
        ]
        return [*self.loads(body, {}), *compared]

    def after(self, body: TileBody, inner: Writer) -> list[str]:
        """What becomes of an element that was written."""
        lines = [
            f"{body.indent}const bool tap_other_{place} = bits_of({body.element(array)}) != tap_was_{place};"
            for place, array in enumerate(self._arrays)
        ]
        if self._taps.changes:
            lines.append(f"{body.indent}tap_flags[i - chunk] = tap_other_0;")
            if body.is_strided:
                place = body.index[self._arrays[0].name]
                bit = f"__atomic_fetch_or(&tap_words[{place} >> 5], 1u << ({place} & 31), __ATOMIC_RELAXED)"
                lines[-1] = f"{body.indent}if (tap_other_0) {bit};"
        if not self.stats:
            return lines
        start = len(inner.lines)
        inner.write(self._taps.move_values)
        moved = inner.lines[start:]
        del inner.lines[start:]
        lines += moved
        for name in self._taps.buffers:
            storage = self._spec.storages[name]
            value = inner[self.tile.stores[name]]
            kept = f"read({body.element(storage.arrays(name)[0])})" if codec_of(storage).is_element else value
            lines.append(f"{body.indent}const auto tap_now_{name} = {kept};")
        if "param" in self._taps.buffers:
            lines.append(f"{body.indent}const auto tap_update = {inner[self.tile.stores['param']]} - tap_old_param;")
            moves = "" if self._taps.moves is None else f" | {inner[self._taps.moves]}"
            same = " & ".join(f"!tap_other_{place}" for place in range(len(self._arrays)))
            lines.append(f"{body.indent}const bool tap_lost = ((tap_update != 0){moves}) & {same};")
        return lines + self.sums("now", body.indent)

    def sums(self, which: str | None, indent: str) -> list[str]:
        """The accumulation of an element, after the step ("now") or of what a skipped one leaves (None)."""
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
        return [indent + line for line in lines]

    def after_chunk(self, *, strided: bool = False, skipped: bool = False) -> list[str]:
        """What a chunk leaves."""
        lines = []
        for slot in self._slots:
            part = f"tap_part_{slot}"
            largest = f"{part} = maximum({part}, double(tap_{slot}));"
            lines.append("        " + (largest if self._columns.is_extreme(slot) else f"{part} += tap_{slot};"))
        if self._taps.changes and not strided and not skipped:
            lines += [
                "        for (int64_t word = 0; word * 32 < chunk_end - chunk; ++word) {",
                "          const uint32_t bits = packed(tap_flags + word * 32);",
                "          if (bits != 0) tap_words[chunk / 32 + word] |= bits;",
                "        }",
            ]
        return lines

    def partials(self) -> list[str]:
        """What a tile leaves."""
        width = len(self._columns)
        return [f"    launch->tap_partials[tile * {width} + {slot}] = tap_part_{slot};" for slot in self._slots]

    def finish(self) -> list[str]:
        """The totals of each tensor, of its tiles in their order."""
        if not self._slots:
            return []
        width = len(self._columns)
        lines = [*TILES_OF_TENSORS]
        for slot in self._slots:
            part = f"launch->tap_partials[tile * {width} + {slot}]"
            extreme = self._columns.is_extreme(slot)
            combined = f"total = maximum(total, {part});" if extreme else f"total += {part};"
            lines.append("    {")
            lines.append("      double total = 0;")
            lines.append(f"      for (int64_t tile = first; tile < stop; ++tile) {combined}")
            lines.append(f"      launch->tap_totals[t * {width} + {slot}] = total;")
            lines.append("    }")
        return [*lines, "  }"]
