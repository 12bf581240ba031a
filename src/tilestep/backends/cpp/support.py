"""The hand-written part of generated C++: conversions, NaN-propagating functions, the launch record, tables, tiles."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...kernels.spec import CLIP, INVERSE_SCALE, MAX_DIMS, NORM, SKIP, UNSCALE
from ...storage import BLOCK

_COUNTS = ("tensors", "tiles", "tile_size", "threads", "hyper_count")
_TABLES = {
    "tile_tensor": "const int32_t*",
    "first_tile": "const int64_t*",
    "numel": "const int64_t*",
    "columns": "const int64_t*",
    "sizes": "const int64_t*",
    "grads": "const int64_t*",
    "addresses": "const int64_t*",
    "layout_index": "const int64_t*",
    "layouts": "const int64_t*",
    "control": "const double*",
    "group": "const int32_t*",
    "hyper": "const double*",
    "step": "float*",
    "rows": "void*",
    "partials": "double*",
    "sums": "double*",
    "global_parts": "double*",
    "totals": "const double*",
    "scalar_states": "const int64_t*",
    "report_partials": "double*",
    "report_sums": "double*",
    "words": "uint32_t*",
    "first_word": "const int64_t*",
    "streams": "const int64_t*",
}
_VIEW = {
    "tile_tensor": "const int32_t*",
    **dict.fromkeys(("first_tile", "tile_count", "extents", "blocks", "parts"), "const int64_t*"),
}
_SLICES = {"views": "const View*", **dict.fromkeys(("starts", "spans", "slots", "parts"), "const int64_t*")}
"""The fields of the records that functions take, with their C++ types; before tables come counts."""


def _fields(counts: Iterable[str], tables: Iterable[str]) -> list[tuple[str, Any]]:
    """The fields of a record for ctypes."""
    return [*((name, ctypes.c_int64) for name in counts), *((name, ctypes.c_void_p) for name in tables)]


def _structure(title: str, counts: Sequence[str], tables: Mapping[str, str]) -> str:
    """The same record in C++."""
    numbers = [f"  int64_t {', '.join(counts)};"] if counts else []
    pointers = [f"  {kind} {name};" for name, kind in tables.items()]
    return "\n".join([f"struct {title} {{", *numbers, *pointers, "};"])


class Launch(ctypes.Structure):
    """The arguments of every generated function, by address.

    tensors, tiles, tile_size, threads: counts. tile_tensor[tiles]: the tensor of each tile. first_tile[tensors]: its
    first tile. numel[tensors]: elements, as tiles count them. columns[tensors]: elements of a row of blocks.
    sizes[tensors][]: rows, columns, then those the rule asks for. grads[tensors]: gradient addresses, 0 for a tensor
    without one.
    addresses[arrays][tensors]: addresses of the other arrays. layout_index[tensors]: -1, or the row of `layouts`.
    layouts[][1 + MAX_DIMS * (2 + arrays)]: dims, sizes, strides of the gradient, strides of each array; where numbers
    are rounded at random, those of the whole tensor too, and streams[tensors][2] has a key and the first element's
    index there.
    control: norm, skip, inverse loss scale, unscale gradients (see optimizer/control.py). group[tensors],
    hyper[groups][hyper_count]. step[tensors].
    rows[tensors][columns]. partials[tiles][reductions], sums[tensors][reductions]. global_parts[tensors][slots],
    totals[slots]. scalar_states[states]: address of one array [tensors] each.
    report_partials[tiles][columns], report_sums[tensors][columns]: outputs that are numbers of tensors. words: a bit
    for each element, of which first_word[tensors] says where a tensor's begin.
    """

    _fields_ = _fields(_COUNTS, _TABLES)


def _vector_functions(of_one: Sequence[str], of_two: Sequence[str]) -> str:
    """Prototypes of functions for which glibc's libmvec has vector variants."""
    lines = []
    for scalar, suffix in (("float", "f"), ("double", "")):
        for name in (*of_one, *of_two):
            arguments = ", ".join([scalar] * (1 + (name in of_two)))
            lines += ["#pragma omp declare simd notinbranch", f"{scalar} {name}{suffix}({arguments}) noexcept;"]
    return "\n".join(lines)


_SINCE_2_35 = (
    *("exp2", "expm1", "log2", "log1p", "log10", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("asinh", "acosh", "atanh", "erf", "erfc"),
)

STANDARD = """
// The parts of the standard library in use: reading its headers would be a third of a kernel's build time.
#if defined(__has_include)
#if __has_include(<features.h>)
#include <features.h>
#endif
#endif

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __UINTPTR_TYPE__ uintptr_t;
namespace std {
#define OF_ONE(name) \\
  inline float name(float x) { return __builtin_##name##f(x); } \\
  inline double name(double x) { return __builtin_##name(x); } \\
  template <class T> inline double name(T x) { return __builtin_##name(static_cast<double>(x)); }
#define OF_TWO(name) \\
  inline float name(float x, float y) { return __builtin_##name##f(x, y); } \\
  inline double name(double x, double y) { return __builtin_##name(x, y); } \\
  template <class T, class U> inline double name(T x, U y) { \\
    return __builtin_##name(static_cast<double>(x), static_cast<double>(y)); \\
  }
OF_ONE(fabs) OF_ONE(sqrt) OF_ONE(floor) OF_ONE(ceil) OF_ONE(nearbyint) OF_ONE(trunc)
OF_ONE(exp) OF_ONE(exp2) OF_ONE(expm1) OF_ONE(log) OF_ONE(log2) OF_ONE(log1p) OF_ONE(log10)
OF_ONE(sin) OF_ONE(cos) OF_ONE(tan) OF_ONE(asin) OF_ONE(acos) OF_ONE(atan)
OF_ONE(sinh) OF_ONE(cosh) OF_ONE(tanh) OF_ONE(asinh) OF_ONE(acosh) OF_ONE(atanh)
OF_ONE(erf) OF_ONE(erfc) OF_ONE(lgamma)
OF_TWO(pow) OF_TWO(fmod) OF_TWO(atan2) OF_TWO(copysign)
#undef OF_ONE
#undef OF_TWO
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline void* memcpy(void* to, const void* from, __SIZE_TYPE__ bytes) { return __builtin_memcpy(to, from, bytes); }
inline void* memset(void* to, int byte, __SIZE_TYPE__ bytes) { return __builtin_memset(to, byte, bytes); }
}  // namespace std
"""

ELEMENTS = """
struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };

template <class To, class From> inline To as(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float read(const float& element) { return element; }
inline double read(const double& element) { return element; }
inline float read(const int8_t& element) { return element; }
inline float read(const uint8_t& element) { return element; }
inline float read(const bfloat16& element) { return as<float>(static_cast<uint32_t>(element.bits) << 16); }
inline float read(const float16& element) {
  // The exponent is rebiased by a product, which is exact for subnormal numbers too.
  const uint32_t magnitude = static_cast<uint32_t>(element.bits & 0x7FFF) << 13;
  const uint32_t finite = as<uint32_t>(as<float>(magnitude) * 0x1.0p+112f);
  const uint32_t bits = magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : finite;
  return as<float>(bits | (static_cast<uint32_t>(element.bits & 0x8000) << 16));
}

inline void write(float& element, float value) { element = value; }
inline void write(double& element, double value) { element = value; }
inline void write(bfloat16& element, float value) {
  const uint32_t bits = as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  element.bits = static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}
inline void write(float16& element, float value) {
  const uint32_t wide = as<uint32_t>(value);
  const uint32_t sign = wide & 0x80000000u;
  const uint32_t magnitude_bits = wide & 0x7FFFFFFFu;
  const float scaled = (as<float>(magnitude_bits) * 0x1.0p+112f) * 0x1.0p-110f;
  uint32_t bias = (wide + wide) & 0xFF000000u;
  bias = bias < 0x71000000u ? 0x71000000u : bias;
  const uint32_t bits = as<uint32_t>(as<float>((bias >> 1) + 0x07800000u) + scaled);
  const uint32_t finite = ((bits >> 13) & 0x00007C00u) + (bits & 0x00000FFFu);
  const uint32_t result = magnitude_bits > 0x7F800000u ? 0x7E00u : finite;
  element.bits = static_cast<uint16_t>((sign >> 16) | result);
}
"""
"""Elements of each type as numbers, and numbers rounded to them; every NaN is one of the same bits."""

PRELUDE = f"""
{STANDARD.strip()}

#define MAX_DIMS {MAX_DIMS}

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
extern "C" {{
{_vector_functions(("exp", "log", "sin", "cos"), ("pow",))}
#if __GLIBC_PREREQ(2, 35)
{_vector_functions(_SINCE_2_35, ("atan2",))}
#endif
}}
#endif

namespace {{

{_structure("Launch", _COUNTS, _TABLES)}

enum Control {{ NORM = {NORM}, SKIP = {SKIP}, INVERSE_SCALE = {INVERSE_SCALE}, UNSCALE = {UNSCALE}, CLIP = {CLIP} }};

{ELEMENTS.strip()}

// Conversions of storage formats.
inline bfloat16 to_bfloat16(float value) {{
  bfloat16 element;
  write(element, value);
  return element;
}}
inline float16 to_float16(float value) {{
  float16 element;
  write(element, value);
  return element;
}}
inline int32_t bits_of(float value) {{ return as<int32_t>(value); }}
inline int32_t bits_of(const bfloat16& element) {{ return static_cast<int16_t>(element.bits); }}
inline int32_t bits_of(const float16& element) {{ return static_cast<int16_t>(element.bits); }}
inline int32_t bits_of(const int16_t& element) {{ return element; }}
inline int32_t bits_of(const int8_t& element) {{ return element; }}
inline int32_t bits_of(const uint8_t& element) {{ return element; }}
inline int64_t bits_of(double value) {{ return as<int64_t>(value); }}
inline float float_of(int32_t bits) {{ return as<float>(bits); }}

// Both values are computed already. It selects bits, because the vectorizer gives up on some nests of branches.
template <class T, class Bits> inline T select_bits(bool condition, T if_true, T if_false) {{
  Bits chosen, other;
  std::memcpy(&chosen, &if_true, sizeof(T));
  std::memcpy(&other, &if_false, sizeof(T));
  const Bits mask = Bits(0) - static_cast<Bits>(condition);
  chosen = (chosen & mask) | (other & ~mask);
  std::memcpy(&if_true, &chosen, sizeof(T));
  return if_true;
}}
inline float fused(float left, float right, float plus) {{
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(left, right, plus);
#else
  return static_cast<float>(static_cast<double>(left) * right + plus);
#endif
}}
inline float select(bool condition, float if_true, float if_false) {{
  return select_bits<float, uint32_t>(condition, if_true, if_false);
}}
inline int32_t select(bool condition, int32_t if_true, int32_t if_false) {{
  return select_bits<int32_t, uint32_t>(condition, if_true, if_false);
}}
inline double select(bool condition, double if_true, double if_false) {{
  return select_bits<double, uint64_t>(condition, if_true, if_false);
}}
template <class T> inline T maximum(T left, T right) {{ return select((left > right) | (left != left), left, right); }}
template <class T> inline T minimum(T left, T right) {{ return select((left < right) | (left != left), left, right); }}
#pragma omp declare reduction(maximum_of_all : float, double : omp_out = maximum(omp_out, omp_in)) \\
  initializer(omp_priv = -INFINITY)
#pragma omp declare reduction(minimum_of_all : float, double : omp_out = minimum(omp_out, omp_in)) \\
  initializer(omp_priv = INFINITY)
// Selects, because the scalar rest of a loop would branch for a difference, and fuse other products.
template <class T> inline T sign_of(T value) {{ return select(value > 0, T(1), select(value < 0, T(-1), T(0))); }}
// Not std::lgamma, which writes the sign to a variable that all threads share.
#ifdef __GLIBC__
extern "C" float lgammaf_r(float, int*) noexcept;
extern "C" double lgamma_r(double, int*) noexcept;
inline float log_gamma(float value) {{ int sign; return lgammaf_r(value, &sign); }}
inline double log_gamma(double value) {{ int sign; return lgamma_r(value, &sign); }}
#else
template <class T> inline T log_gamma(T value) {{ return std::lgamma(value); }}
#endif
template <class T> inline T remainder_of(T left, T right) {{
  const T rest = std::fmod(left, right);
  return (rest != 0 && ((rest < 0) != (right < 0))) ? rest + right : rest;
}}

struct Add {{
  static constexpr double neutral = 0;
  static double combine(double total, double part) {{ return total + part; }}
}};
struct Larger {{
  static constexpr double neutral = -INFINITY;
  static double combine(double total, double part) {{ return maximum(total, part); }}
}};
struct Smaller {{
  static constexpr double neutral = INFINITY;
  static double combine(double total, double part) {{ return minimum(total, part); }}
}};

// Combines a column of tiles `first` to `stop` in order. Not inline: a kernel has many, each of them a loop to compile.
template <class Operation>
__attribute__((noinline)) double total_of(const double* column, int64_t width, int64_t first, int64_t stop,
                                          double total = Operation::neutral) {{
  for (int64_t tile = first; tile < stop; ++tile) total = Operation::combine(total, column[tile * width]);
  return total;
}}

// Asks for the lines of `count` elements that are worked on four blocks later. Processors foresee a few streams by
// themselves, and less well the nearer these lie to the same place of a page.
template <int64_t count, class T> inline void ask_ahead(const T* array, int64_t first) {{
  const uintptr_t begin = reinterpret_cast<uintptr_t>(array) + (first + {4 * BLOCK}) * sizeof(T);
#pragma GCC unroll 8
  for (uintptr_t byte = 0; byte < count * sizeof(T); byte += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(begin + byte));
}}

// 32 truth values as the bits of a word.
inline uint32_t packed(const uint8_t* flags) {{
  uint32_t bits = 0;
  for (int part = 0; part < 4; ++part) {{
    uint64_t eight = 0;
#pragma GCC unroll 8
    for (int flag = 0; flag < 8; ++flag) eight |= static_cast<uint64_t>(flags[8 * part + flag]) << (8 * flag);
    bits |= static_cast<uint32_t>((eight * 0x0102040810204080ull) >> 56) << (8 * part);
  }}
  return bits;
}}

// Calls `visit` with 0 to `count` and the offsets in an array of a strided tensor's elements from `first` on.
template <class Visit>
inline void walk(const int64_t* layout, int64_t first, int64_t count, int64_t array, const Visit& visit) {{
  const int64_t dims = layout[0];
  const int64_t *sizes = layout + 1, *strides = sizes + MAX_DIMS * (1 + array);
  int64_t coordinates[MAX_DIMS], offset = 0;
  for (int64_t dim = dims - 1; dim >= 0; --dim) {{
    coordinates[dim] = first % sizes[dim];
    first /= sizes[dim];
    offset += coordinates[dim] * strides[dim];
  }}
  for (int64_t j = 0; j < count;) {{
    const int64_t last = dims - 1, left = dims ? sizes[last] - coordinates[last] : 1;
    const int64_t stop = left < count - j ? j + left : count, step = dims ? strides[last] : 0;
    for (int64_t begin = j; j < stop; ++j) visit(j, offset + (j - begin) * step);
    if (!dims) break;
    offset -= coordinates[last] * step;
    coordinates[last] = 0;
    for (int64_t dim = last - 1; dim >= 0; --dim) {{
      offset += strides[dim];
      if (++coordinates[dim] < sizes[dim]) break;
      offset -= coordinates[dim] * strides[dim];
      coordinates[dim] = 0;
    }}
  }}
}}

// Copies consecutive elements to `spare`; if it is `filled`, with zeros after them.
template <bool filled, class T, class Spare, int64_t size>
__attribute__((noinline)) T* copied(T* array, Spare (&spare)[size], const int64_t* layout, int64_t first,
                                    int64_t count, int64_t position) {{
  if (layout)
    walk(layout, first, count, position, [&](int64_t j, int64_t offset) {{ spare[j] = array[offset]; }});
  else
    std::memcpy(spare, array + first, count * sizeof(T));
  if (filled) std::memset(spare + count, 0, (size - count) * sizeof(T));
  return spare;
}}
// Consecutive elements: in the array, or in `spare`.
template <class T, class Spare, int64_t size>
inline T* run_of(T* array, Spare (&spare)[size], bool copies, const int64_t* layout, int64_t first, int64_t count,
                 int64_t position) {{
  return copies ? copied<true>(array, spare, layout, first, count, position) : array + first;
}}

// Writes `spare` back to an array.
template <class T>
__attribute__((noinline)) void put_back(T* array, const T* spare, const int64_t* layout, int64_t first, int64_t count,
                                        int64_t position) {{
  if (layout)
    walk(layout, first, count, position, [&](int64_t j, int64_t offset) {{ array[offset] = spare[j]; }});
  else
    std::memcpy(array + first, spare, count * sizeof(T));
}}

// The indices in the whole tensor of consecutive elements up to `stop`, in halves.
inline void indices_of(int32_t* __restrict low, int32_t* __restrict high, int64_t origin, const int64_t* layout,
                       int64_t first, int64_t count, int64_t stop, int64_t array) {{
  if (layout) {{
    walk(layout, first, count, array, [&](int64_t j, int64_t offset) {{
      low[j] = static_cast<int32_t>(origin + offset);
      high[j] = static_cast<int32_t>((origin + offset) >> 32);
    }});
    for (int64_t j = count; j < stop; ++j) low[j] = high[j] = 0;
    return;
  }}
  const uint32_t start = static_cast<uint32_t>(origin + first);
  const int32_t above = static_cast<int32_t>((origin + first) >> 32);
#pragma omp simd
  for (uint32_t j = 0; j < static_cast<uint32_t>(stop); ++j) {{
    low[j] = static_cast<int32_t>(start + j);
    high[j] = above + (start + j < start);
  }}
}}

// Sets the bits of changed weights, of consecutive elements.
template <int64_t size>
inline void mark(uint32_t* words, const uint8_t (&flags)[size], const int64_t* layout, int64_t first, int64_t count,
                 int64_t array) {{
  const auto set = [&](int64_t j, int64_t offset) {{
    if (flags[j]) __atomic_fetch_or(&words[offset >> 5], 1u << (offset & 31), __ATOMIC_RELAXED);
  }};
  if (layout) {{
    walk(layout, first, count, array, set);
  }} else if (first % 32 != 0) {{
    for (int64_t j = 0; j < count; ++j) set(j, first + j);
  }} else {{
    for (int64_t j = 0; j < count; j += 32) {{
      const uint32_t bits = packed(flags + j);
      if (bits == 0) continue;
      uint32_t* word = words + (first + j) / 32;
      // A row of blocks may end inside of a word that another thread has the rest of.
      if (count - j < 32)
        __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
      else
        *word |= bits;
    }}
  }}
}}

}}  // namespace
"""


BLOCKS_PRELUDE = f"""
namespace {{

// The largest measure of a short block's numbers; the rest of the block becomes 0.
template <class Measure> inline uint32_t largest_of(float (&numbers)[{BLOCK}], int64_t count, Measure measure) {{
  uint32_t largest = 0;
  for (int64_t j = 0; j < count; ++j) {{
    const uint32_t size = measure(numbers[j]);
    largest = size > largest ? size : largest;
  }}
  std::memset(numbers + count, 0, ({BLOCK} - count) * sizeof(float));
  return largest;
}}

// Two numbers of four bits in each byte, the first one in its lower half.
template <class T> inline void unpack(uint8_t (&codes)[{BLOCK}], const T* bytes) {{
#pragma omp simd
  for (int64_t j = 0; j < {BLOCK // 2}; ++j) {{
    codes[2 * j] = bytes[j] & 15;
    codes[2 * j + 1] = static_cast<uint8_t>(bytes[j]) >> 4;
  }}
}}
template <class T> inline void pack(T* bytes, const uint8_t (&codes)[{BLOCK}]) {{
#pragma omp simd
  for (int64_t j = 0; j < {BLOCK // 2}; ++j) bytes[j] = static_cast<uint8_t>(codes[2 * j] | codes[2 * j + 1] << 4);
}}

}}  // namespace
"""


class ViewTables(ctypes.Structure):
    """How the tensors are cut up along rows and columns in one view.

    tiles: how many. tile_tensor[tiles]. first_tile[tensors], tile_count[tensors]. extents[tensors][3]: matrices, rows,
    columns. blocks[tensors][3]: how many of each are in a tile. parts[tensors][2]: where the tensor's parts of row
    reductions and of column reductions begin.
    """

    _fields_ = _fields(["tiles"], _VIEW)


class SliceLaunch(ctypes.Structure):
    """The second argument of functions that work on slices.

    views[]. starts[kinds][tensors + 1]: where a tensor's slices begin in an array that holds those of all tensors.
    spans[pairs][tensors][2]: in an array of slices that are finer, elements in a coarser slice with what lies between
    them, and their distance. slots[], parts[]: addresses of the arrays that passes hand on, and of what tiles leave.
    """

    _fields_ = _fields([], _SLICES)


_BOUNDS = """
namespace {

inline int64_t smaller_of(int64_t left, int64_t right) { return right < left ? right : left; }
inline int64_t larger_of(int64_t left, int64_t right) { return left < right ? right : left; }

// The first of ascending numbers that is larger.
inline const int64_t* first_above(const int64_t* begin, const int64_t* end, int64_t number) {
  while (begin < end) {
    const int64_t* middle = begin + (end - begin) / 2;
    if (number < *middle)
      end = middle;
    else
      begin = middle + 1;
  }
  return begin;
}

"""

_CUTS = """
// Which matrices, rows and columns a tile covers, and where it lies among the tiles of its tensor.
struct Cut {
  int64_t rows, columns, row_tiles, column_tiles, row_tile, column_tile;
  int64_t matrix_begin, matrix_end, row_begin, row_end, column_begin, column_end;
};

inline Cut cut_of(const View& view, int64_t t, int64_t tile) {
  const int64_t* extents = view.extents + t * 3;
  const int64_t* blocks = view.blocks + t * 3;
  Cut cut;
  cut.rows = extents[1];
  cut.columns = extents[2];
  cut.row_tiles = (cut.rows + blocks[1] - 1) / blocks[1];
  cut.column_tiles = (cut.columns + blocks[2] - 1) / blocks[2];
  // An empty tensor has no tiles, and may have slices: the columns of no rows.
  const int64_t across = larger_of(cut.column_tiles, 1), down = larger_of(cut.row_tiles, 1);
  cut.column_tile = tile % across;
  cut.row_tile = tile / across % down;
  cut.matrix_begin = tile / (across * down) * blocks[0];
  cut.matrix_end = smaller_of(cut.matrix_begin + blocks[0], extents[0]);
  cut.row_begin = cut.row_tile * blocks[1];
  cut.row_end = smaller_of(cut.row_begin + blocks[1], cut.rows);
  cut.column_begin = cut.column_tile * blocks[2];
  cut.column_end = smaller_of(cut.column_begin + blocks[2], cut.columns);
  return cut;
}

// Combines the parts that tiles have left of slices `begin` to `end` of one tensor, in tile order: part k of slice
// o * inner + x lies at (o * count + k) * inner + x.
template <class T, class Operation>
inline void combine_range(const T* parts, T* out, int64_t count, int64_t inner, int64_t begin, int64_t end) {
  constexpr int64_t longest = 1024;
  double totals[longest];
  for (int64_t slice = begin; slice < end;) {
    const int64_t offset = slice % inner;
    const int64_t run = smaller_of(smaller_of(end - slice, inner - offset), longest);
    const T* first = parts + slice / inner * count * inner + offset;
    for (int64_t x = 0; x < run; ++x) totals[x] = Operation::neutral;
    for (int64_t k = 0; k < count; ++k)
      for (int64_t x = 0; x < run; ++x) totals[x] = Operation::combine(totals[x], first[k * inner + x]);
    for (int64_t x = 0; x < run; ++x) out[slice + x] = static_cast<T>(totals[x]);
    slice += run;
  }
}

// The results of a reduction to slices, from the parts that the tiles of a view have left.
template <class T, class Operation>
inline void combine_parts(const Launch* launch, const Slices* slices, int64_t view_index, int64_t kind, int64_t slot,
                          bool along_rows) {
  constexpr int64_t step = 4096;
  const View& view = slices->views[view_index];
  const int64_t* starts = slices->starts + kind * (launch->tensors + 1);
  const T* parts = reinterpret_cast<const T*>(slices->parts[slot]);
  T* out = reinterpret_cast<T*>(slices->slots[slot]);
  const int64_t total = starts[launch->tensors];
#pragma omp parallel for schedule(static) num_threads(launch->threads)
  for (int64_t begin = 0; begin < total; begin += step) {
    const int64_t end = smaller_of(begin + step, total);
    int64_t t = first_above(starts, starts + launch->tensors + 1, begin) - starts - 1;
    for (int64_t at = begin; at < end; ++t) {
      const int64_t stop = smaller_of(end, starts[t + 1]);
      if (launch->grads[t] != 0 && stop > at) {
        const Cut cut = cut_of(view, t, 0);
        const T* own = parts + view.parts[t * 2 + (along_rows ? 0 : 1)];
        combine_range<T, Operation>(own, out + starts[t], along_rows ? cut.column_tiles : cut.row_tiles,
                                    along_rows ? 1 : cut.columns, at - starts[t], stop - starts[t]);
      }
      at = stop;
    }
  }
}

}  // namespace
"""

_RECORDS = f"{_structure('View', ['tiles'], _VIEW)}\n\n{_structure('Slices', [], _SLICES)}\n"

SLICES_PRELUDE = _BOUNDS + _RECORDS + _CUTS
