"""Names that are free in generated Triton: not Python's, not a helper's, not those of the kernels around."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .emit import Names
from .triton_text import HELPERS, POINTERS

_AROUND = """
triton tl range float
t tile row skip mask inside inverse_scale grad_address layout_row layout back dims dim size coordinate index
lane begin start stop whole aligned first part active next_step base
tile_base extents part_starts starts spans tile_count row_parts column_parts
matrices height width local rest column_tiles row_tiles column_tile row_tile matrix_tile matrix across column line
first_matrix first_column first_line corner even_corner matrices_left rows_left columns_left pitch even_pitch
place even_place odd_place
random stream origin steps_taken stream_keys key_0 key_1 element_index
block block_lane block_mask pair_lane pair_mask columns_of_row per_row line_column first_column packed_columns
"""

_RESERVED = frozenset((*_AROUND.split(), *HELPERS, *(name for names in POINTERS.values() for name in names)))

_CONSTANT_OR_SLOT = re.compile(
    r"[A-Z][A-Z0-9_]*|(join|split)_.*|(all_share|all_term|at|inner|kept|part|parts|random|share|slot|span|start|term|total)_[0-9]+|tap_.*"
)
"""What is in capitals may be a constant of a kernel; join and split are functions of storage formats; numbered ones are
its slots, reductions and arrays."""


class TritonNames(Names):
    """Hands out identifiers for a Triton function and the kernels that call it.

    A kernel's own variable that takes a rule's name loses the rule's value, and one that a loop carries changes its
    type. A test reads the generated kernels and names what is missing from this list.

    Example:
        >>> names = TritonNames(["param_array"])
        >>> [names.fresh(wanted) for wanted in ("update", "update", "size", "SPAN", "start_1", "param_array")]
        ['update', 'update_2', 'size_2', 'SPAN_', 'start_1_', 'param_array_2']
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        super().__init__(_RESERVED.union(taken))

    def is_kept(self, name: str) -> bool:
        """Whether this is a constant's name or a slot's."""
        return _CONSTANT_OR_SLOT.fullmatch(name) is not None

    def spelled(self, wanted: str) -> str:
        """The wanted name as an identifier that is no constant of a kernel."""
        base = super().spelled(wanted)
        return f"{base}_" if self.is_kept(base) else base
