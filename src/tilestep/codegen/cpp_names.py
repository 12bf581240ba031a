"""Names that are free in generated C++: not the language's, not a macro's, not those of the code around."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .emit import Names

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
linux typeof unix
"""

_AROUND = """
Launch Control bfloat16 float16 int16_t int32_t int64_t uint16_t uint32_t uint64_t std
read write to_bfloat16 to_float16 bits_of float_of select maximum minimum sign_of remainder_of locate gradient_scale_of
math_errhandling
launch tiles tile tile_pass scalar_pass t begin rest end row rows layout chunk chunk_end i at first stop
unscale inverse_scale skip same_as next_step hyper column
Slices View Cut Add Larger Smaller cut_of combine_parts combine_range base cut line matrix plain r slices view x
block count pair columns per_row j is_odd
offset_of random stream origin steps_taken stream_key_0 stream_key_1 key_0 key_1
"""

_RESERVED = frozenset((*_KEYWORDS.split(), *_AROUND.split()))

_MACRO_OR_SLOT = re.compile(
    r"[A-Z][A-Z0-9_].*|_[A-Z_].*|(join|keep|measure|split)_.*|(chunk|column|part|parts|random|row|slot|span|total)_[0-9]+|tap_.*"
)
"""What begins with capitals may be a macro (INFINITY, M_PIf64) or a control number; join, split, keep and
measure are functions of storage formats; numbered ones are reductions'."""


class CppNames(Names):
    """Hands out identifiers for a C++ function.

    Example:
        >>> names = CppNames(["param_array"])
        >>> [names.fresh(wanted) for wanted in ("update", "update", "new", "M_PI", "param_array", "\u03b2")]
        ['update', 'update_2', 'new_2', 'M_PI_', 'param_array_2', 'beta']
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        super().__init__(_RESERVED.union(taken))

    def is_kept(self, name: str) -> bool:
        """Whether this is a macro's name or a reduction's."""
        return _MACRO_OR_SLOT.fullmatch(name) is not None

    def spelled(self, wanted: str) -> str:
        """The wanted name as an identifier that no macro can be."""
        base = super().spelled(wanted)
        return f"{base}_" if self.is_kept(base) else base
