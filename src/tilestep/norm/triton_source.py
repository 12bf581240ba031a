"""The Triton source of the norm (one program per tile, and one program that finishes) and of the scaling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._version import __version__
from ..backends.decision import clip_coefficient
from ..backends.emit import code, nested
from ..backends.triton.source import module_text
from ..backends.triton.text import number_function
from ..storage import dtype_name
from .tiles import DTYPES, Order

FINISH_BLOCK = 8192  # partial results that the finishing program reads at a time


def tile_shape(elements: int) -> tuple[int, int, int]:
    """The elements of a tile, the elements of a loop step, and the warps of a program."""
    return (16384, 2048, 4) if elements < 2**28 else (32768, 2048, 4)


_ELEMENT = {
    torch.bfloat16: "tl.bfloat16, 2, tl.float32",
    torch.float16: "tl.float16, 2, tl.float32",
    torch.float32: "tl.float32, 4, tl.float32",
    torch.float64: "tl.float64, 8, tl.float64",
}
"""Element type, its size in bytes, and the type of the arithmetic."""

_CONTRIBUTION = {
    Order.SQUARES: "value * value",
    Order.ABSOLUTE: "tl.abs(value)",
    Order.POWER: "tl.exp2(tl.cast(power, value.dtype) * tl.log2(tl.abs(value)))",
    Order.NONZERO: "(value != 0).to(value.dtype)",
    Order.LARGEST: "ordered_bits(value)",
    Order.SMALLEST: "tl.where(value == value, ordered_bits(value), -1)",
}
_NOTHING = {
    Order.LARGEST: "ordered_bits(tl.zeros((STEP,), WIDE))",
    Order.SMALLEST: "ordered_bits(tl.full((STEP,), float('inf'), WIDE))",
}
_ROOT = {Order.SQUARES: "root_of_squares(result)", Order.POWER: "tl.exp2(tl.log2(result) / power)"}

_FUNCTIONS = """
    @triton.jit
    def ordered_bits(value):
        # Non-negative floats are ordered as their bits are, and the bits of a NaN are above all others.
        if value.dtype == tl.float64:
            return tl.abs(value).to(tl.int64, bitcast=True)
        else:
            return tl.abs(value).to(tl.int32, bitcast=True)


    @triton.jit
    def from_bits(bits):
        # -1, which stands for NaN in a minimum, is a NaN as a float too.
        if bits.dtype == tl.int64:
            return bits.to(tl.float64, bitcast=True)
        elif bits.dtype == tl.int32:
            return bits.to(tl.float32, bitcast=True)
        else:
            return bits


    @triton.jit
    def root_of_squares(total):
        # The largest sum stands for a larger one.
        return tl.where(total >= 1.7976931348623157e308, float("inf"), tl.sqrt(total))


    @triton.jit
    def add(left, right):
        return left + right
"""

_RESCUE = """
    if not (total < float("inf")):
        # Finite elements may have squares that are not; an overflow check relies on the difference. Again, but smaller.
        largest = ordered_bits(nothing)
        smaller = nothing
        place = count * 0
        while place < count:
            kept = place + offset < count
            large = tl.load(pointer + place + offset, mask=kept, other=0).to(WIDE)
            largest = tl.maximum(largest, ordered_bits(large))
            # 2 ** -80, and below 2 ** 160 for the squares.
            small = large * 8.271806125530277e-25
            smaller += small * small
            place += STEP
        if from_bits(tl.max(largest)) < float("inf"):
            if nothing.dtype == tl.float64:
                total = tl.full((), 1.7976931348623157e308, tl.float64)
            else:
                total = tl.sum(smaller).to(tl.float64) * 1.461501637330903e48
"""

_RESCUE_TOTAL = """
    if result == float("inf"):
        # Finite float64 tiles may not sum up to infinity either.
        largest = tl.zeros((BLOCK,), tl.float64)
        begin = count * 0
        while begin < count:
            offset = begin + tl.arange(0, BLOCK)
            largest = tl.maximum(largest, tl.load(partials + offset, mask=offset < count, other=0))
            begin += BLOCK
        result = tl.minimum(result, tl.maximum(tl.max(largest), 1.7976931348623157e308))
"""

_TILE = """
    tile = tl.program_id(0)
    tensor = tl.load(tile_tensor + tile)
    address = tl.load(addresses + tensor)
    row = table + 3 * tensor
    begin = (tile - tl.load(row + 1)) * TILE
    count = tl.load(row) - begin
    code = tl.load(row + 2)
"""


def _tile_function(name: str, number: str, body: str) -> list[str]:
    """A function of a tile, with one more argument."""
    return code(f"""
        @triton.jit
        def {name}(
            address,
            begin,
            count,
            {number},
            ELEMENT: tl.constexpr,
            SIZE: tl.constexpr,
            WIDE: tl.constexpr,
            TILE: tl.constexpr,
            STEP: tl.constexpr,
        ):
            offset = tl.arange(0, STEP)
            start = address + begin * SIZE
            pointer = start.to(tl.pointer_type(ELEMENT))
            count = tl.minimum(count, TILE).to(tl.int32)
            {nested(code(body))}
    """)


def norm_source(dtypes: Sequence[torch.dtype], order: Order) -> str:
    """Source of `norm_tiles` and `norm_finish` for these dtypes and this kind of norm."""
    bits, is_smallest = order in (Order.LARGEST, Order.SMALLEST), order is Order.SMALLEST
    extreme = "tl.minimum" if is_smallest else "tl.maximum"
    combine = extreme if bits or order is Order.NONZERO else "add"
    absent = "float('inf')" if is_smallest else "0"
    reduce = {"tl.minimum": "tl.min", "tl.maximum": "tl.max", "add": "tl.sum"}
    total = "tl.zeros((BLOCK,), tl.float64)"
    if bits:
        # 0x7FF0000000000000 is infinity.
        total = f"tl.full((BLOCK,), {0x7FF0000000000000 if is_smallest else 0}, tl.int64)"
    store, reset = "partials + tile, result", list[str]()
    if order is Order.NONZERO:
        # As in torch, tensors with a nonzero are counted. All tiles of a tensor write the same 1, the finish clears it.
        store = "partials + tensor, result, mask=result > 0"
        reset = ["tl.store(partials + offset, tl.zeros((BLOCK,), tl.float64), mask=kept)"]
    rescue = code(_RESCUE) if order is Order.SQUARES else []
    rescue_total = code(_RESCUE_TOTAL) if order is Order.SQUARES and torch.float64 in dtypes else []
    tile_value = f"""
        nothing = {_NOTHING.get(order, "tl.zeros((STEP,), WIDE)")}
        total = nothing
        place = count * 0
        if start % 16 == 0:
            aligned = tl.multiple_of(start.to(tl.pointer_type(ELEMENT)), 16)
            # Two steps together: their loads overlap, and nothing in the loop branches.
            while place + 2 * STEP <= count:
                here = aligned + tl.multiple_of(place, STEP)
                left = tl.load(here + offset).to(WIDE)
                right = tl.load(here + STEP + offset).to(WIDE)
                total = {combine}({combine}(total, contribution(left, power)), contribution(right, power))
                place += 2 * STEP
            if place + STEP <= count:
                here = aligned + tl.multiple_of(place, STEP)
                total = {combine}(total, contribution(tl.load(here + offset).to(WIDE), power))
                place += STEP
        while place < count:
            kept = place + offset < count
            value = tl.load(pointer + place + offset, mask=kept, other=0).to(WIDE)
            total = {combine}(total, tl.where(kept, contribution(value, power), nothing))
            place += STEP
        total = from_bits({reduce[combine]}(total)).to(tl.float64)
        {nested(rescue)}
        return total
    """
    kernels = code(f"""
        @triton.jit
        def contribution(value, power):
            return {_CONTRIBUTION[order]}


        {nested(_tile_function("tile_value", "power", tile_value))}


        @triton.jit(do_not_specialize_on_alignment=["addresses", "table", "tile_tensor", "partials"])
        def norm_tiles(addresses, table, tile_tensor, partials, power: "fp64", TILE: tl.constexpr, STEP: tl.constexpr):
            {nested(code(_TILE))}
            result = tl.full((), {absent}, tl.float64)
            if address != 0:
                {nested(_branches(dtypes, "result = tile_value(address, begin, count, power"))}
            tl.store({store})


        @triton.jit
        def finish_step(total, partials, begin, count, power, BLOCK: tl.constexpr):
            offset = begin + tl.arange(0, BLOCK)
            kept = offset < count
            part = tl.load(partials + offset, mask=kept, other={absent})
            {nested(reset)}
            return {f"{extreme}(total, contribution(part, power))" if bits else "total + part"}


        @triton.jit(do_not_specialize_on_alignment=["partials", "size", "out"])
        def norm_finish(partials, size, out, power: "fp64", ROOT: tl.constexpr, BLOCK: tl.constexpr):
            count = tl.load(size)
            total = {total}
            begin = count * 0
            while begin < count:
                # Two steps together: their loads overlap.
                total = finish_step(total, partials, begin, count, power, BLOCK)
                total = finish_step(total, partials, begin + BLOCK, count, power, BLOCK)
                begin += 2 * BLOCK
            result = from_bits({reduce[extreme] if bits else "tl.sum"}(total))
            {nested(rescue_total)}
            if ROOT:
                result = {_ROOT.get(order, "result")}
            tl.store(out, result)
    """)
    title = _title(f"Norm of many tensors, order {order.name.lower()}", dtypes)
    imports = ["", "import triton", "import triton.language as tl", "", ""]
    return "\n".join([title, *imports, *code(_FUNCTIONS), "", "", *kernels]) + "\n"


def scale_source(dtypes: Sequence[torch.dtype], *, limit_on_device: bool) -> str:
    """Source of `scale_tiles`, which multiplies by min(1, limit / (norm + 1e-6))."""
    limit = "tl.load(limit).to(tl.float64)" if limit_on_device else "limit"
    parameter = "limit" if limit_on_device else 'limit: "fp64"'
    scale_tile = """
        factor = factor.to(WIDE)
        place = count * 0
        if start % 16 == 0:
            aligned = tl.multiple_of(start.to(tl.pointer_type(ELEMENT)), 16)
            while place + STEP <= count:
                here = aligned + tl.multiple_of(place, STEP) + offset
                tl.store(here, (tl.load(here).to(WIDE) * factor).to(ELEMENT))
                place += STEP
        while place < count:
            kept = place + offset < count
            here = pointer + place + offset
            tl.store(here, (tl.load(here, mask=kept, other=0).to(WIDE) * factor).to(ELEMENT), mask=kept)
            place += STEP
    """
    kernel = code(f"""
        @triton.jit(do_not_specialize_on_alignment=["addresses", "table", "tile_tensor", "norm", "limit"])
        def scale_tiles(
            addresses, table, tile_tensor, norm, {parameter}, TILE: tl.constexpr, STEP: tl.constexpr
        ):
            coefficient = tl.sum(clip_coefficient(tl.load(norm).to(tl.float64), {limit}), 0)
            # A NaN is not 1: it is written everywhere, as multiplying by it would.
            if coefficient != 1:
                {nested(code(_TILE))}
                if address != 0:
                    {nested(_branches(dtypes, "scale_tile(address, begin, count, coefficient"))}
    """)
    title = _title("Scaling of many tensors by a clip coefficient", dtypes)
    coefficient = number_function("clip_coefficient", clip_coefficient)
    return module_text(title, [coefficient, _tile_function("scale_tile", "factor", scale_tile), kernel])


def _title(title: str, dtypes: Sequence[torch.dtype]) -> str:
    names = ", ".join(map(dtype_name, dtypes))
    return f'"""{title}, for {names}. Generated by tilestep {__version__}."""'


def _branches(dtypes: Sequence[torch.dtype], call: str) -> list[str]:
    """The call for each dtype, chosen by the tensor's dtype code; no choice for a single dtype."""
    calls = {DTYPES.index(dtype): f"{call}, {_ELEMENT[dtype]}, TILE, STEP)" for dtype in dtypes}
    if len(calls) == 1:
        return list(calls.values())
    chosen = [line for place, each in calls.items() for line in (f"elif code == {place}:", f"    {each}")]
    return [chosen[0].removeprefix("el"), *chosen[1:]]
