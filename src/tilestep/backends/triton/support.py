"""Functions that every generated Triton module calls: precise, NaN-keeping, and working in the interpreter too."""

# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq

from ...compat import NumpyDevice, reduce_by_halves, splat_truths

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
"""Triton's interpreter has no device library: numpy's functions and the simple formulas below stand in for it."""

if INTERPRETED.value:
    reduce_by_halves()
    splat_truths()
    libdevice = NumpyDevice()
else:
    from triton.language.extra import libdevice  # type: ignore[no-redef]


@triton.jit
def maximum(left, right):
    """The larger value, NaN if either is."""
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(left, right):
    """The smaller value, NaN if either is."""
    return tl.minimum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(left, right):
    """The larger of two numbers, NaN if either is; as a reduction's combination."""
    return tl.where((left > right) | (left != left), left, right)


@triton.jit
def smaller(left, right):
    """The smaller of two numbers, NaN if either is; as a reduction's combination."""
    return tl.where((left < right) | (left != left), left, right)


@triton.jit
def add(left, right):
    """The sum; as a reduction's combination."""
    return left + right


@triton.jit
def both(left, right):
    """Logical and; the interpreter broadcasts a scalar condition as a float."""
    if INTERPRETED:
        return tl.where(left, right, 0) != 0
    else:
        return left & right


@triton.jit
def either(left, right):
    """Logical or; see `both`."""
    if INTERPRETED:
        return tl.where(left, 1, right) != 0
    else:
        return left | right


@triton.jit
def loop_bound(number):
    """A bound of a `tl.range`: the interpreter's scalars are arrays of one element, which numpy 2.4 refuses as one."""
    if INTERPRETED:
        return number.handle.data.item()
    else:
        return number


@triton.jit
def alike(left, right):
    """Both as tensors of one shape and type; either may be a plain number."""
    zero = tl.zeros_like(left + right)
    return tl.where(zero == 0, left, zero), tl.where(zero == 0, right, zero)


@triton.jit
def divide(left, right):
    """IEEE division; plain `/` in float32 is two units in the last place off."""
    if INTERPRETED or (left + right).dtype == tl.float64:
        return left / right
    else:
        return tl.math.div_rn(left, right)


@triton.jit
def square_root(value):
    """IEEE square root."""
    if INTERPRETED or value.dtype == tl.float64:
        return tl.sqrt(value)
    else:
        return tl.math.sqrt_rn(value)


_QUOTIENT = tl.constexpr(
    "{ .reg .f32 inverse, guess, minus, rest; rcp.approx.ftz.f32 inverse, $2; mul.rn.f32 guess, $1, inverse;"
    " neg.f32 minus, guess; fma.rn.f32 rest, minus, $2, $1; fma.rn.f32 $0, rest, inverse, guess; }"
)
_ROOT = tl.constexpr(
    "{ .reg .f32 inverse, half, guess, minus, rest; rsqrt.approx.ftz.f32 inverse, $1; mul.rn.f32 guess, $1, inverse;"
    " mul.rn.f32 half, inverse, 0f3F000000; neg.f32 minus, guess; fma.rn.f32 rest, minus, guess, $1;"
    " fma.rn.f32 $0, rest, half, guess; }"
)
_QUICK_QUOTIENT = tl.constexpr("{ .reg .f32 inverse; rcp.approx.ftz.f32 inverse, $2; mul.rn.f32 $0, $1, inverse; }")
_BFLOAT16_PAIR = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")


@triton.jit
def absolute(value):
    """A number without its sign, as part of the operation that takes it: an integer operation otherwise."""
    if INTERPRETED:
        return tl.abs(value)
    else:
        return tl.inline_asm_elementwise("abs.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def quotient(left, right):
    """A quotient of numbers far from the ends of float32: IEEE division without its checks, and a rounding of 2^-45."""
    if INTERPRETED:
        return left / right
    else:
        return tl.inline_asm_elementwise(_QUOTIENT, "=f,f,f", [left, right], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def quick_quotient(left, right):
    """The same, two units in the last place off."""
    if INTERPRETED or (left + right).dtype == tl.float64:
        return left / right
    else:
        return tl.inline_asm_elementwise(
            _QUICK_QUOTIENT, "=f,f,f", [left, right], dtype=tl.float32, is_pure=True, pack=1
        )


_ROUGH_CEILING = tl.constexpr(
    "{ .reg .f32 inverse; rcp.approx.ftz.f32 inverse, $2; fma.rp.f32 $0, $1, inverse, 0f4B400000;"
    " sub.f32 $0, $0, 0f4B400000; }"
)


@triton.jit
def rough_ceiling(left, right):
    """The whole number at or above a quotient of numbers above zero, where roundings may decide between two."""
    if INTERPRETED:
        return tl.ceil(left / right)
    else:
        return tl.inline_asm_elementwise(
            _ROUGH_CEILING, "=f,f,f", [left, right], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def fused(left, right, plus):
    """A product plus a number, rounded once; the interpreter's product is rounded for itself."""
    if INTERPRETED:
        wide = left.to(tl.float64) * right
        return (wide + plus).to(tl.float32)
    else:
        return tl.fma(left, right, plus)


@triton.jit
def root(value):
    """The square root of a number far from the ends of float32: IEEE's without its checks."""
    if INTERPRETED:
        return tl.sqrt(value)
    else:
        return tl.inline_asm_elementwise(_ROOT, "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def at_most(value, bound):
    """A number cut off at a bound; the bound where it is NaN."""
    return tl.where(value < bound, value, bound)


@triton.jit
def block_max(value):
    """The largest unsigned integer of each row; runs of a row may be a third dimension."""
    largest = tl.max(value.to(tl.uint32, bitcast=True), 1, keep_dims=True)
    if len(value.shape) == 3:
        largest = tl.max(largest, 2, keep_dims=True)
    return largest.to(tl.int32, bitcast=True)


def _pack_bytes(place: int) -> str:
    """PTX that packs the byte at `place` of four integers."""
    pair = f"0x00{place + 4}{place}"
    return (
        f"{{ .reg .b32 low, high; prmt.b32 low, $1, $2, {pair}; prmt.b32 high, $3, $4, {pair};"
        " prmt.b32 $0, low, high, 0x5410; }"
    )


_PACK_BYTES = tl.constexpr(tuple(_pack_bytes(place) for place in range(4)))


@triton.jit
def byte_of(bits, dtype: tl.constexpr, place: tl.constexpr = 0):
    """The byte at `place` of each integer, four at a time."""
    if INTERPRETED:
        return (bits >> (8 * place)).to(dtype)
    else:
        return tl.inline_asm_elementwise(
            _PACK_BYTES[place], "=r,r,r,r,r", [bits], dtype=tl.uint8, is_pure=True, pack=4
        ).to(dtype, bitcast=True)


def _spread_bytes(taken: str, away: str) -> tl.constexpr:
    """PTX for four bytes as float32: each in the mantissa of 2^23, less 2^23."""
    registers = ("one", "two", "three", "four")
    spread = " ".join(f"prmt.b32 {name}, bytes, high, 0x744{place};" for place, name in enumerate(registers))
    numbers = " ".join(f"add.f32 ${place}, {name}, {away};" for place, name in enumerate(registers))
    declared = ".reg .b32 bytes, high; .reg .b32 " + ", ".join(registers)
    return tl.constexpr(f"{{ {declared}; {taken} mov.b32 high, 0x4B000000; {spread} {numbers} }}")


_SIGNED_BYTES = _spread_bytes("xor.b32 bytes, $4, 0x80808080;", "0fCB000080")
_BYTES = _spread_bytes("mov.b32 bytes, $4;", "0fCB000000")


@triton.jit
def byte_number(value):
    """Bytes as float32, four at a time."""
    if value.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            _SIGNED_BYTES, "=f,=f,=f,=f,r", [value], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(_BYTES, "=f,=f,=f,=f,r", [value], dtype=tl.float32, is_pure=True, pack=4)


_PLUS = _spread_bytes("mov.b32 bytes, $4;", "$5")


@triton.jit
def bytes_plus(value, number):
    """Bytes plus a multiple of 1/2 below 256, four at a time: one sum for both, as all below 2^23 is exact."""
    if INTERPRETED:
        return value.to(tl.float32) + number
    else:
        return tl.inline_asm_elementwise(
            _PLUS, "=f,=f,=f,=f,r,f,f,f,f", [value, number - 8388608.0], dtype=tl.float32, is_pure=True, pack=4
        )


_FLOAT8_BIAS = tl.constexpr(2.0**-120)
_FLOAT8_NUMBERS = tl.constexpr(
    "{ .reg .b16 low, high, one, two, three, four; .reg .b32 first, second; mov.b32 {low, high}, $4;"
    " cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high; mov.b32 {one, two}, first;"
    " mov.b32 {three, four}, second; cvt.f32.f16 $0, one; cvt.f32.f16 $1, two; cvt.f32.f16 $2, three;"
    " cvt.f32.f16 $3, four; }"
)
_FLOAT8_ELEMENTS = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " mov.b32 $0, {low, high}; }"
)


@triton.jit
def float8_number(number, element):
    """The numbers of bytes that are float8, four at a time where a GPU converts them; elsewhere `number`."""
    if INTERPRETED or not cuda_capability_geq(8, 9):
        return number
    else:
        return tl.inline_asm_elementwise(
            _FLOAT8_NUMBERS, "=f,=f,=f,=f,r", [element], dtype=tl.float32, is_pure=True, pack=4
        )


@triton.jit
def float8_element(element, number):
    """Numbers as bytes that are float8, four at a time where a GPU converts them; elsewhere `element`.

    Denormals are rounded twice, by the float32 with float8's bias first, as others round them.
    """
    return quick_float8_element(element, (number * _FLOAT8_BIAS) * (1 / _FLOAT8_BIAS))


@triton.jit
def quick_float8_element(element, number):
    """The same with one rounding."""
    if INTERPRETED or not cuda_capability_geq(8, 9):
        return element
    else:
        return tl.inline_asm_elementwise(_FLOAT8_ELEMENTS, "=r,f,f,f,f", [number], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def sign(value):
    """-1, 0 or 1; 0 for NaN, as in torch."""
    return (value > 0).to(value.dtype) - (value < 0).to(value.dtype)


@triton.jit
def power(base, exponent):
    """One value to the power of another."""
    base, exponent = alike(base, exponent)
    return libdevice.pow(base, exponent)


@triton.jit
def truncated_remainder(left, right):
    """The remainder with the sign of the dividend."""
    left, right = alike(left, right)
    return libdevice.fmod(left, right)


@triton.jit
def floored_remainder(left, right):
    """The remainder with the sign of the divisor."""
    rest = truncated_remainder(left, right)
    return tl.where((rest != 0) & ((rest < 0) != (right < 0)), rest + right, rest)


@triton.jit
def arc_tangent2(left, right):
    """The angle of a point."""
    left, right = alike(left, right)
    return libdevice.atan2(left, right)


@triton.jit
def with_sign(magnitude, sign_of):
    """A magnitude with another value's sign."""
    magnitude, sign_of = alike(magnitude, sign_of)
    return libdevice.copysign(magnitude, sign_of)


@triton.jit
def is_infinite(value):
    """Whether a value is an infinity."""
    return tl.abs(value) == float("inf")


@triton.jit
def bits_of(value):
    """The bits of numbers or elements as 32-bit integers; narrow ones have their sign extended."""
    if value.dtype == tl.float32:
        return value.to(tl.int32, bitcast=True)
    elif value.dtype.is_floating():
        return value.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        return value.to(tl.int32)


@triton.jit
def differs(left, right):
    """Whether the bits of two elements of one type differ."""
    if left.dtype == tl.float64:
        return left.to(tl.int64, bitcast=True) != right.to(tl.int64, bitcast=True)
    elif left.dtype == tl.bfloat16:
        # As float32, which most of them are converted to anyway.
        return bits_of(to_float32(left)) != bits_of(to_float32(right))
    else:
        return bits_of(left) != bits_of(right)


@triton.jit
def neighbours(values):
    """The first, second, third and fourth of every four values."""
    pairs = tl.reshape(values, (values.numel // 4, 2, 2))
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def add_squares(totals, values):
    """totals[n // 4] plus the squares of the four neighbours in values[n]."""
    first, second, third, fourth = neighbours(values)
    totals = tl.fma(second, second, tl.fma(first, first, totals))
    return tl.fma(fourth, fourth, tl.fma(third, third, totals))


@triton.jit
def add_values(totals, values):
    """totals[n // 4] plus the four neighbours in values[n]."""
    first, second, third, fourth = neighbours(values)
    return totals + ((first + second) + (third + fourth))


@triton.jit
def add_largest(totals, values):
    """The largest of totals[n // 4] and the four neighbours in values[n]."""
    first, second, third, fourth = neighbours(values)
    return maximum(maximum(maximum(first, second), maximum(third, fourth)), totals)


@triton.jit
def add_count(totals, flags):
    """totals[n // 4] plus the number of set flags among the four neighbours in flags[n]."""
    # Triton 3.6 miscounts the `tl.sum` of reshaped flags in some kernels: LAMB's with int8 states.
    first, second, third, fourth = neighbours(flags.to(tl.int32))
    return totals + ((first + second) + (third + fourth))


@triton.jit(do_not_specialize_on_alignment=["partials", "starts", "stops", "extremes", "results"])
def sum_up_reports(
    partials, starts, stops, extremes, results, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Combine runs of a table's rows in a fixed order: sums, or the largest in columns of extremes, -inf of no rows.

    partials[rows][COLUMNS]; starts, stops [runs]; extremes[COLUMNS], 1 for those; results[runs][COLUMNS] in float64.
    """
    run = tl.program_id(0).to(tl.int64)
    start = tl.load(starts + run)
    stop = tl.load(stops + run)
    column = tl.arange(0, WIDTH)[None, :]
    inside = column < COLUMNS
    line = tl.arange(0, BLOCK)[:, None]
    added = tl.zeros((BLOCK, WIDTH), tl.float64)
    largest = tl.full((BLOCK, WIDTH), float("-inf"), tl.float64)
    row = start
    while row < stop:
        there = (row + line < stop) & inside
        part = tl.load(partials + (row + line) * COLUMNS + column, mask=there, other=0.0).to(tl.float64)
        added += part
        largest = larger(largest, tl.where(there, part, float("-inf")))
        row += BLOCK
    is_extreme = tl.load(extremes + tl.arange(0, WIDTH), mask=tl.arange(0, WIDTH) < COLUMNS, other=0.0) != 0.0
    result = tl.where(is_extreme, tl.reduce(largest, 0, larger), tl.sum(added, 0))
    tl.store(results + run * COLUMNS + tl.arange(0, WIDTH), result, mask=tl.arange(0, WIDTH) < COLUMNS)


@triton.jit
def to_float32(value):
    """Elements as float32; by integers in the interpreter, whose conversion of bfloat16 loses denormals."""
    if INTERPRETED and value.dtype == tl.bfloat16:
        return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif not INTERPRETED and (value.dtype == tl.int8 or value.dtype == tl.uint8):
        return byte_number(value)
    elif not INTERPRETED and value.dtype == tl.bfloat16 and value.numel % 128 == 0:
        return tl.inline_asm_elementwise(_BFLOAT16_PAIR, "=f,=f,r", [value], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return value.to(tl.float32)


@triton.jit
def to_bfloat16(value):
    """The bfloat16 nearest to a float32; by integers in the interpreter, whose conversion truncates."""
    if INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(tl.bfloat16)


@triton.jit
def to_bfloat16_pairs(value):
    """The same, two by one instruction: the compiler converts values that are also read one by one, slowly."""
    if INTERPRETED or not cuda_capability_geq(8, 0):
        return to_bfloat16(value)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [value], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.constexpr_function
def halves_of(shape):
    """A shape with the last dimension in pairs."""
    return (*shape[:-1], shape[-1] // 2, 2)


@triton.constexpr_function
def twice_as_long(shape):
    """A shape with the last dimension twice as long."""
    return (*shape[:-1], shape[-1] * 2)


_PACKED_PAIRS = tl.constexpr(
    "{ .reg .b32 one, two, three, four; shl.b32 one, $5, 4; add.u32 one, one, $1; shl.b32 two, $6, 4;"
    " add.u32 two, two, $2; shl.b32 three, $7, 4; add.u32 three, three, $3; shl.b32 four, $8, 4;"
    " add.u32 four, four, $4; prmt.b32 one, one, two, 0x0040; prmt.b32 three, three, four, 0x0040;"
    " prmt.b32 $0, one, three, 0x5410; }"
)


@triton.jit
def packed_pairs(codes):
    """Four-bit codes in rows, two neighbours in a byte."""
    left, right = tl.split(tl.reshape(codes, halves_of(codes.shape)))
    if INTERPRETED:
        return (left + (right << 4)).to(tl.uint8)
    else:
        return tl.inline_asm_elementwise(
            _PACKED_PAIRS, "=r,r,r,r,r,r,r,r,r", [left, right], dtype=tl.uint8, is_pure=True, pack=4
        )


@triton.jit
def nibbles(pairs):
    """The codes that `packed_pairs` has packed."""
    bits = pairs.to(tl.int32)
    return tl.reshape(tl.join(bits & 15, (bits >> 4) & 15), twice_as_long(pairs.shape))


def _spread_nibbles() -> tl.constexpr:
    """PTX for the eight codes in four bytes as float32, plus a number; those in lower halves first."""
    registers = ", ".join(f"bits{place}" for place in range(8))
    lines = [f".reg .b32 upper, {registers}; shr.u32 upper, $8, 16;"]
    for place in range(8):
        source, lane = ("upper", place - 4) if place > 3 else ("$8", place)
        power = (127 + 23 - 4 * lane) << 23
        lines.append(f"lop3.b32 bits{place}, {source}, {0xF << 4 * lane}, {power}, 0xEA;")
        lines.append(f"add.f32 ${place // 2 + place % 2 * 4}, bits{place}, ${9 + 4 * lane};")
    return tl.constexpr("{ " + " ".join(lines) + " }")


_NIBBLES = _spread_nibbles()


@triton.jit
def nibbles_plus(pairs, number: tl.constexpr):
    """The codes that `packed_pairs` has packed, plus a multiple of 1/2 below 16, as float32."""
    if INTERPRETED:
        return nibbles(pairs).to(tl.float32) + number
    else:
        lower, upper = tl.inline_asm_elementwise(
            _NIBBLES,
            "=f,=f,=f,=f,=f,=f,=f,=f,r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
            [pairs, number - 8388608.0, number - 524288.0, number - 32768.0, number - 2048.0],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
        return tl.reshape(tl.join(lower, upper), twice_as_long(pairs.shape))


@triton.jit
def sum_of_partials(partials, partial_count, BLOCK: tl.constexpr):
    """The sum of a norm's tiles in a fixed order; finite tiles never sum up to infinity."""
    count = tl.load(partial_count)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    largest = tl.zeros((BLOCK,), tl.float64)
    begin = count * 0
    while begin < count:
        left = tl.load(partials + begin + lane, mask=begin + lane < count, other=0.0)
        right = tl.load(partials + begin + BLOCK + lane, mask=begin + BLOCK + lane < count, other=0.0)
        total += left
        total += right
        largest = larger(larger(largest, left), right)
        begin += 2 * BLOCK
    result = tl.sum(total)
    # The largest finite float64, or infinity where a tile was.
    bound = larger(tl.max(largest), tl.full((), 1.7976931348623157e308, tl.float64))
    return tl.where(result == float("inf"), smaller(result, bound), result)


@triton.jit(do_not_specialize_on_alignment=["parts", "out", "tile_tensor", "first_tile", "places", "grads"])
def combine_parts(
    parts,
    out,
    tile_tensor,
    first_tile,
    places,
    grads,
    OPERATION: tl.constexpr,
    SLICES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Results of a reduction to slices: part k of slice o * inner + x lies at (o * count + k) * inner + x.

    Parts of neighbouring slices lie side by side: those of rows with all rows of the tensor as `inner`.

    places: int64[tensors, 5], slices of a tensor, parts of a slice, inner, where its parts begin, where its slices do.
    """
    t = tl.load(tile_tensor + tl.program_id(0)).to(tl.int64)
    places += t * 5
    slice_count = tl.load(places)
    part_count = tl.load(places + 1)
    inner = tl.load(places + 2)
    which = (tl.program_id(0) - tl.load(first_tile + t)) * SLICES + tl.arange(0, SLICES)[None, :]
    first = tl.load(places + 3) + which // inner * part_count * inner + which % inner
    k = tl.arange(0, PARTS)[:, None]
    if OPERATION == "reduce_sum":
        neutral = 0.0
    elif OPERATION == "reduce_amax":
        neutral = float("-inf")
    else:
        neutral = float("inf")
    total = tl.full((PARTS, SLICES), neutral, tl.float64)
    if tl.load(grads + t) != 0:
        start = 0
        while start < part_count:
            mask = (which < slice_count) & (start + k < part_count)
            part = tl.load(parts + first + (start + k) * inner, mask=mask, other=neutral).to(tl.float64)
            if OPERATION == "reduce_sum":
                total += part
            elif OPERATION == "reduce_amax":
                total = larger(total, part)
            else:
                total = smaller(total, part)
            start += PARTS
        if OPERATION == "reduce_sum":
            combined = tl.sum(total, 0, keep_dims=True)
        elif OPERATION == "reduce_amax":
            combined = tl.reduce(total, 0, larger, keep_dims=True)
        else:
            combined = tl.reduce(total, 0, smaller, keep_dims=True)
        place = out + tl.load(places + 4) + which
        tl.store(place, combined.to(out.dtype.element_ty), mask=which < slice_count)
