"""The hand-written part of generated C++ files that work on rows and columns: their tables, tiles and sums of parts."""

from __future__ import annotations

import ctypes


class ViewTables(ctypes.Structure):
    """How the tensors are cut up along rows and columns in one view; the same fields as `struct View` in C++.

    tiles: how many. tile_tensor[tiles]. first_tile[tensors], tile_count[tensors]. extents[tensors][3]: matrices, rows,
    columns. blocks[tensors][3]: how many of each are in a tile. parts[tensors][2]: where the tensor's parts of row
    reductions and of column reductions begin.
    """

    _fields_ = (
        ("tiles", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("tile_tensor", "first_tile", "tile_count", "extents", "blocks", "parts")
        ),
    )


class SliceLaunch(ctypes.Structure):
    """The second argument of functions that work on slices; the same fields as `struct Slices` in C++.

    views[]. starts[kinds][tensors + 1]: where a tensor's slices begin in an array that holds those of all tensors.
    spans[pairs][tensors][2]: in an array of slices that are finer, elements in a coarser slice with what lies between
    them, and their distance. slots[], parts[]: addresses of the arrays that passes hand on, and of what tiles leave.
    """

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("views", "starts", "spans", "slots", "parts"))


SLICES_PRELUDE = """
#include <algorithm>

namespace {

struct View {
  int64_t tiles;
  const int32_t* tile_tensor;
  const int64_t* first_tile;
  const int64_t* tile_count;
  const int64_t* extents;
  const int64_t* blocks;
  const int64_t* parts;
};

struct Slices {
  const View* views;
  const int64_t* starts;
  const int64_t* spans;
  const int64_t* slots;
  const int64_t* parts;
};

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
  const int64_t across = std::max<int64_t>(cut.column_tiles, 1), down = std::max<int64_t>(cut.row_tiles, 1);
  cut.column_tile = tile % across;
  cut.row_tile = tile / across % down;
  cut.matrix_begin = tile / (across * down) * blocks[0];
  cut.matrix_end = std::min(cut.matrix_begin + blocks[0], extents[0]);
  cut.row_begin = cut.row_tile * blocks[1];
  cut.row_end = std::min(cut.row_begin + blocks[1], cut.rows);
  cut.column_begin = cut.column_tile * blocks[2];
  cut.column_end = std::min(cut.column_begin + blocks[2], cut.columns);
  return cut;
}

struct Add {
  static constexpr double neutral = 0;
  static double combine(double total, double part) { return total + part; }
};
struct Larger {
  static constexpr double neutral = -INFINITY;
  static double combine(double total, double part) { return maximum(total, part); }
};
struct Smaller {
  static constexpr double neutral = INFINITY;
  static double combine(double total, double part) { return minimum(total, part); }
};

// Combines what tiles have left of slices `begin` to `end` of one tensor, in tile order: part k of slice
// o * inner + x lies at (o * count + k) * inner + x.
template <class T, class Operation>
inline void combine_range(const T* parts, T* out, int64_t count, int64_t inner, int64_t begin, int64_t end) {
  constexpr int64_t longest = 1024;
  double totals[longest];
  for (int64_t slice = begin; slice < end;) {
    const int64_t offset = slice % inner;
    const int64_t run = std::min(std::min(end - slice, inner - offset), longest);
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
    const int64_t end = std::min(begin + step, total);
    int64_t t = std::upper_bound(starts, starts + launch->tensors + 1, begin) - starts - 1;
    for (int64_t at = begin; at < end; ++t) {
      const int64_t stop = std::min(end, starts[t + 1]);
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
