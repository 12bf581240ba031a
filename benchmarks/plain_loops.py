"""Clip and AdamW as loops written by hand in C++, for each format that `formats.py` measures on a CPU.

The same storage and the same arithmetic as tilestep's, as one would write them for one rule and one format: OpenMP over
pieces of all tensors, vectors by `#pragma omp simd`, blocks of 128 in arrays of a fixed length. Compiled with the flags
of tilestep's own kernels; nothing of its generated code is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilestep.backends.cpp.compile import load_library, wide_vectors

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>

struct Tensor {
  int64_t rows, columns;
  uint16_t* grad;
  uint16_t* param;
  void* master;  // float32, or int8 corrections
  void* first;
  uint16_t* first_scales;
  void* second;
  uint16_t* second_scales;
};
struct Step {
  int64_t tensors, pieces, threads;
  const Tensor* list;
  const int64_t* piece_tensor;  // a piece: up to 16,384 elements of one tensor, whole rows of blocks or parts of one
  const int64_t* piece_begin;
  double* sums;  // a number for each piece
  float lr, beta1, beta2, eps, weight_decay, max_norm, steps;
};

namespace {

constexpr int64_t PIECE = 16384;
struct Whole { static constexpr int64_t value = 128; };
struct Part { int64_t value; };

inline float of_bits(uint32_t bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline uint32_t bits_of(float x) { uint32_t bits; std::memcpy(&bits, &x, 4); return bits; }
inline float wide(uint16_t bits) { return of_bits(uint32_t(bits) << 16); }
inline uint16_t narrow(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded;
}
inline float smaller(float a, float b) { return a < b ? a : b; }
inline float larger(float a, float b) { return a > b ? a : b; }

struct Update {
  float clip, decay, rate, one_minus_beta1, beta2, one_minus_beta2, root, eps;
  inline void operator()(float grad, float& param, float& first, float& second) const {
    grad *= clip;
    first += one_minus_beta1 * (grad - first);
    second = beta2 * second + one_minus_beta2 * grad * grad;
    param = param * decay - rate * (first / (std::sqrt(second) / root + eps));
  }
};

// Scales of blocks: a bfloat16, infinite where a block holds something larger than 2^123.
template <class N> inline float largest(N count, const float* x) {
  uint32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t j = 0; j < count.value; ++j) {
    const uint32_t size = bits_of(x[j]) & 0x7FFFFFFF;
    most = size > most ? size : most;
  }
  return of_bits(most);
}
inline uint16_t scale_of(float most) { return narrow(most > 0x1p123f ? most * 32 : most); }
inline float divisor(uint16_t scale) { return wide(scale) == 0 ? 1 : wide(scale); }
inline float unit_of(float divisor, uint32_t least) {
  const uint32_t exponent = bits_of(divisor) & 0x7F800000;
  return of_bits(0x7F000000 - (exponent > least ? exponent : least));
}

// x / scale as a whole number of `levels`, 2 x / (1 + |x|): eight bits, or four plus 8.
template <int levels> struct Signed {
  template <class N, class C> static void load(N count, const C* codes, uint16_t scale, float* x) {
    const float factor = wide(scale);
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) {
      const float code = codes[j];
      x[j] = code / (2 * levels - std::fabs(code)) * factor;
    }
  }
  template <class N, class C> static uint16_t store(N count, C* codes, const float* x) {
    const uint16_t scale = scale_of(largest(count, x));
    const float unit = unit_of(divisor(scale), 0), one = divisor(scale) * unit;
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) {
      const float scaled = x[j] * unit;
      const float share = scaled / (one + std::fabs(scaled)) * float(2 * levels);
      codes[j] = static_cast<C>(bits_of(smaller(share, levels) + 12582912.0f));
    }
    return scale;
  }
};

// The root of x / scale: x = q (1 + q) / 2.
template <int levels> struct Root {
  template <class N> static void load(N count, const uint8_t* codes, uint16_t scale, float* x) {
    const float unit = wide(scale) * float(0.5 / (levels * levels));
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) {
      const float code = codes[j], root = code * (code + levels) * unit;
      x[j] = root * root;
    }
  }
  template <class N> static uint16_t store(N count, uint8_t* codes, const float* x) {
    const uint16_t scale = narrow(std::sqrt(largest(count, x)));
    const float unit = unit_of(divisor(scale), 67u << 23), one = divisor(scale) * unit;
    const float square = unit * 64 * unit, steps = 0.5f * levels / std::sqrt(one);
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) {
      const float root = std::sqrt(larger(x[j] * square, 0x1p-96f));
      const float number = smaller(std::sqrt(root + one) * steps, 1.5f * levels) - 0.5f * levels;
      codes[j] = static_cast<uint8_t>(bits_of(larger(number, x[j] > 0 ? 1 : 0) + 12582912.0f));
    }
    return scale;
  }
};

template <bool has_sign> struct Float8 {
  template <class N> static void load(N count, const uint8_t* codes, uint16_t scale, float* x) {
    const float unit = wide(scale) * (1 / 448.0f);
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) {
      const uint32_t code = codes[j];
      x[j] = of_bits((code & 0x80) << 24 | (code & 0x7F) << 20) * 0x1p120f * unit;
    }
  }
  template <class N> static uint16_t store(N count, uint8_t* codes, const float* x) {
    const uint16_t scale = scale_of(largest(count, x));
    const float unit = unit_of(divisor(scale), 0), one = divisor(scale) * unit * (1 / 448.0f);
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) {
      const float number = x[j] * unit / one;
      const uint32_t size = bits_of(smaller(std::fabs(number), 448.0f) * 0x1p-120f) & 0x7FFFFFFF;
      const uint32_t code = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20;
      const uint32_t sign = has_sign ? bits_of(number) >> 31 << 7 : 0;
      codes[j] = static_cast<uint8_t>(sign | (!has_sign && x[j] > 0 && code < 1 ? 1 : code));
    }
    return scale;
  }
};

// Codes as they lie in memory: a byte each, or two in one.
template <class Codes, class C> struct Bytes {
  template <class N> static void load(N count, const void* all, int64_t at, int64_t, uint16_t scale, float* x) {
    Codes::load(count, static_cast<const C*>(all) + at, scale, x);
  }
  template <class N> static uint16_t store(N count, void* all, int64_t at, int64_t, const float* x) {
    return Codes::store(count, static_cast<C*>(all) + at, x);
  }
};
template <class Codes, class C, int offset> struct Pairs {
  template <class N> static void load(N count, const void* all, int64_t, int64_t at, uint16_t scale, float* x) {
    const uint8_t* pairs = static_cast<const uint8_t*>(all) + at;
    C codes[128];
#pragma omp simd
    for (int64_t j = 0; j < (count.value + 1) / 2; ++j) {
      codes[2 * j] = static_cast<C>((pairs[j] & 15) - offset);
      codes[2 * j + 1] = static_cast<C>((pairs[j] >> 4) - offset);
    }
    Codes::load(count, codes, scale, x);
  }
  template <class N> static uint16_t store(N count, void* all, int64_t, int64_t at, const float* x) {
    uint8_t* pairs = static_cast<uint8_t*>(all) + at;
    C codes[128];
    const uint16_t scale = Codes::store(count, codes, x);
    if (count.value & 1) codes[count.value] = 0;
#pragma omp simd
    for (int64_t j = 0; j < (count.value + 1) / 2; ++j)
      pairs[j] = static_cast<uint8_t>(((codes[2 * j] + offset) & 15) | (codes[2 * j + 1] + offset) << 4);
    return scale;
  }
};

struct Bfloat16 {
  template <class N> static void load(N count, const Tensor& t, int64_t at, float* x) {
    const uint16_t* param = t.param + at;
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) x[j] = wide(param[j]);
  }
  template <class N> static void store(N count, const Tensor& t, int64_t at, const float* x) {
    uint16_t* param = t.param + at;
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) param[j] = narrow(x[j]);
  }
};
struct Corrected {
  template <class N> static void load(N count, const Tensor& t, int64_t at, float* x) {
    const uint16_t* param = t.param + at;
    const int8_t* low = static_cast<const int8_t*>(t.master) + at;
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) {
      const float high = wide(param[j]), number = of_bits(bits_of(high) + (uint32_t(int32_t(low[j])) << 8));
      x[j] = number != number ? high : number;
    }
  }
  template <class N> static void store(N count, const Tensor& t, int64_t at, const float* x) {
    uint16_t* param = t.param + at;
    int8_t* low = static_cast<int8_t*>(t.master) + at;
#pragma omp simd
    for (int64_t j = 0; j < count.value; ++j) {
      const uint16_t high = narrow(x[j]);
      const uint32_t rest = bits_of(x[j]) - (uint32_t(high) << 16) + 0x4B400000;
      const float middle = 0x1.8p31f, most = middle + 127 * 256, least = middle - 127 * 256;
      const float counted = larger(smaller(of_bits(rest) + (middle - 0x1.8p23f), most), least);
      param[j] = high;
      low[j] = static_cast<int8_t>(x[j] != x[j] ? 0 : bits_of(counted));
    }
  }
};

template <class Param, class First, class Second, class N>
void block(N count, const Tensor& t, const Update& numbers, int64_t block, int64_t at, int64_t pair) {
  const Update update = numbers;  // what is stored could be another
  const uint16_t* from = t.grad + at;
  float grad[128], param[128], first[128], second[128];
#pragma omp simd
  for (int64_t j = 0; j < count.value; ++j) grad[j] = wide(from[j]);
  Param::load(count, t, at, param);
  First::load(count, t.first, at, pair, t.first_scales[block], first);
  Second::load(count, t.second, at, pair, t.second_scales[block], second);
#pragma omp simd
  for (int64_t j = 0; j < count.value; ++j) update(grad[j], param[j], first[j], second[j]);
  Param::store(count, t, at, param);
  t.first_scales[block] = First::store(count, t.first, at, pair, first);
  t.second_scales[block] = Second::store(count, t.second, at, pair, second);
}

// Pieces of tensors whose states are in blocks.
template <class Param, class First, class Second> struct Blocks {
  static void piece(const Tensor& t, const Update& update, int64_t begin) {
    const int64_t per_row = (t.columns + 127) / 128, all = t.rows * per_row;
    const int64_t end = begin / 128 + PIECE / 128 < all ? begin / 128 + PIECE / 128 : all;
    for (int64_t b = begin / 128; b < end; ++b) {
      const int64_t row = b / per_row, column = b % per_row * 128, at = row * t.columns + column;
      const int64_t pair = row * ((t.columns + 1) / 2) + column / 2;
      if (t.columns - column >= 128)
        block<Param, First, Second>(Whole(), t, update, b, at, pair);
      else
        block<Param, First, Second>(Part{t.columns - column}, t, update, b, at, pair);
    }
  }
};

inline float number(float x) { return x; }
inline float number(uint16_t x) { return wide(x); }
inline void keep(float& to, float x) { to = x; }
inline void keep(uint16_t& to, float x) { to = narrow(x); }

// Pieces of tensors with states of one number each, with or without float32 masters.
template <class S, bool has_master> struct Elements {
  static void piece(const Tensor& t, const Update& numbers, int64_t begin) {
    const Update update = numbers;  // what is stored could be another
    const int64_t all = t.rows * t.columns, end = begin + PIECE < all ? begin + PIECE : all;
    const uint16_t* __restrict grad = t.grad;
    uint16_t* __restrict low = t.param;
    float* __restrict master = static_cast<float*>(t.master);
    S* __restrict first = static_cast<S*>(t.first);
    S* __restrict second = static_cast<S*>(t.second);
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      float param = has_master ? master[i] : wide(low[i]), m = number(first[i]), v = number(second[i]);
      update(wide(grad[i]), param, m, v);
      if (has_master) master[i] = param;
      low[i] = narrow(param);
      keep(first[i], m);
      keep(second[i], v);
    }
  }
};

template <class Pieces> void step(const Step* s) {
#pragma omp parallel for schedule(static) num_threads(s->threads)
  for (int64_t piece = 0; piece < s->pieces; ++piece) {
    const Tensor& t = s->list[s->piece_tensor[piece]];
    const int64_t begin = s->piece_begin[piece], all = t.rows * t.columns;
    const int64_t end = begin + PIECE < all ? begin + PIECE : all;
    const uint16_t* grad = t.grad;
    double sum = 0;
    for (int64_t chunk = begin; chunk < end; chunk += 1024) {
      const int64_t stop = chunk + 1024 < end ? chunk + 1024 : end;
      float part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t i = chunk; i < stop; ++i) part += wide(grad[i]) * wide(grad[i]);
      sum += part;
    }
    s->sums[piece] = sum;
  }
  double total = 0;
  for (int64_t piece = 0; piece < s->pieces; ++piece) total += s->sums[piece];
  const double clip = s->max_norm / (std::sqrt(total) + 1e-6);
  const double root = std::sqrt(1 - std::pow(double(s->beta2), s->steps));
  const Update update = {float(clip > 1 ? 1 : clip), float(1 - double(s->lr) * s->weight_decay),
                         float(s->lr / (1 - std::pow(double(s->beta1), s->steps))), 1 - s->beta1, s->beta2,
                         1 - s->beta2, float(root), s->eps};
#pragma omp parallel for schedule(static) num_threads(s->threads)
  for (int64_t piece = 0; piece < s->pieces; ++piece)
    Pieces::piece(s->list[s->piece_tensor[piece]], update, s->piece_begin[piece]);
}

typedef Bytes<Signed<127>, int8_t> Int8First;
typedef Bytes<Root<255>, uint8_t> Int8Second;

}  // namespace

extern "C" {
void float32_states(const Step* s) { step<Elements<float, false>>(s); }
void bfloat16_states(const Step* s) { step<Elements<uint16_t, false>>(s); }
void bfloat16_states_float32_masters(const Step* s) { step<Elements<uint16_t, true>>(s); }
void int8_states(const Step* s) { step<Blocks<Bfloat16, Int8First, Int8Second>>(s); }
void int8_states_int8_masters(const Step* s) { step<Blocks<Corrected, Int8First, Int8Second>>(s); }
void float8_e4m3_states_int8_masters(const Step* s) {
  step<Blocks<Corrected, Bytes<Float8<true>, uint8_t>, Bytes<Float8<false>, uint8_t>>>(s);
}
void int4_states_int8_masters(const Step* s) {
  step<Blocks<Corrected, Pairs<Signed<7>, int8_t, 8>, Pairs<Root<15>, uint8_t, 0>>>(s);
}
}
"""

_PIECE = 16384
_MASTERS = ("master_param", "correction_param")


class _Tensor(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "columns")]
    _fields_ += [
        (name, ctypes.c_void_p)
        for name in ("grad", "param", "master", "first", "first_scales", "second", "second_scales")
    ]


class _Step(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("tensors", "pieces", "threads")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("list", "piece_tensor", "piece_begin", "sums")]
    _fields_ += [
        (name, ctypes.c_float) for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "max_norm", "steps")
    ]


def plain_step(
    name: str, params: Sequence[torch.Tensor], optimizer: Any, max_norm: float
) -> tuple[Callable[[], None], list[dict[str, torch.Tensor]]]:
    """A step of the loop for a format, with copies of parameters and states as an optimizer has them now.

    Args:
        name: as in `formats.CHOICES`.
        params: matrices in bfloat16 with gradients, which are read where they are.
        optimizer: tilestep's AdamW of these parameters, after a step.
        max_norm: what the norm of all gradients is clipped to.

    Returns:
        the call, and the copies for each parameter.
    """
    library = load_library("plain-loops", SOURCE, wide_vectors())
    function = getattr(library, name.replace(", ", "_").replace(" ", "_"))
    copies, records = [], (_Tensor * len(params))()
    for param, record in zip(params, records):
        state = {key: value for key, value in optimizer.state[param].items() if isinstance(value, torch.Tensor)}
        copy = {"param": _cloned(param), **{key: _cloned(value) for key, value in state.items()}}
        copies.append(copy)
        record.rows, record.columns = param.shape
        record.grad, record.param = param.grad.data_ptr(), copy["param"].data_ptr()
        record.master = next((copy[key].data_ptr() for key in _MASTERS if key in copy), None)
        for field, key in (("first", "exp_avg"), ("second", "exp_avg_sq")):
            setattr(record, field, (copy[key] if key in copy else copy[f"{key}_codes"]).data_ptr())
            scales = next((copy[other] for other in copy if other.startswith(f"{key}_scales")), None)
            setattr(record, f"{field}_scales", None if scales is None else scales.data_ptr())
    # Tiles count as if rows were of whole blocks.
    counts = [rows * -(-columns // 128) * 128 for rows, columns in (param.shape for param in params)]
    pieces = [(place, begin) for place, count in enumerate(counts) for begin in range(0, count, _PIECE)]
    piece_tensor, piece_begin = (torch.tensor(column, dtype=torch.int64) for column in zip(*pieces))
    sums = torch.zeros(len(pieces), dtype=torch.float64)
    group = optimizer.param_groups[0]
    step = _Step(len(params), len(pieces), torch.get_num_threads(), ctypes.addressof(records))
    step.piece_tensor, step.piece_begin, step.sums = (x.data_ptr() for x in (piece_tensor, piece_begin, sums))
    (step.beta1, step.beta2), step.max_norm = group["betas"], max_norm
    step.lr, step.eps, step.weight_decay = group["lr"], group["eps"], group["weight_decay"]
    step.steps = float(optimizer.state[params[0]]["step"])
    kept = (records, piece_tensor, piece_begin, sums)

    def run() -> None:
        assert kept
        step.steps += 1
        function(ctypes.byref(step))

    return run, copies


_PAGE = 4096


def _cloned(values: torch.Tensor) -> torch.Tensor:
    """A copy that lies at the same place of a page: how fast a plain loop is hangs on that, by a third and more."""
    memory = torch.empty(values.nbytes + _PAGE, dtype=torch.uint8)
    skipped = (values.data_ptr() - memory.data_ptr()) % _PAGE
    return memory[skipped : skipped + values.nbytes].view(values.dtype).view(values.shape).copy_(values.detach())


def disagreement(copies: Sequence[dict[str, torch.Tensor]], params: Sequence[torch.Tensor], optimizer: Any) -> float:
    """The share of parameters and codes that are not the optimizer's; raises where 1 in 10,000 is off by more than one.

    Elements of 16 bits are compared by their bits, numbers of 32 bits to 2e-5 of the largest; corrections of parameters
    may be any, as they are of other numbers where the parameter is another.
    """
    other, far, total = 0, 0, 0
    for copy, param in zip(copies, params):
        state = {"param": param.detach(), **optimizer.state[param]}
        for key, values in copy.items():
            ours = state[key]
            if not values.dim() or key in _MASTERS:
                continue
            if values.dtype is torch.float32:
                torch.testing.assert_close(values, ours, rtol=2e-4, atol=2e-5 * float(ours.abs().max()))
                continue
            pairs = [(_whole(values), _whole(ours))]
            if f"{key}_scales4" in copy:
                pairs = [(left >> places & 15, right >> places & 15) for left, right in pairs for places in (0, 4)]
            for left, right in pairs:
                apart = (left - right).abs()
                other, far = other + int((apart > 0).sum()), far + int((apart > 1).sum())
                total += apart.numel()
    if far > total * 1e-4:
        raise AssertionError(f"{far} of {total} codes are more than one off")
    return other / max(total, 1)


def _whole(values: torch.Tensor) -> torch.Tensor:
    """Codes as integers; of a floating dtype their bits, in the order of the numbers."""
    if not values.dtype.is_floating_point:
        return values.int()
    bits = values.view({1: torch.int8, 2: torch.int16}[values.dtype.itemsize]).int()
    return torch.where(bits < 0, -(bits & (0x7F if values.dtype.itemsize == 1 else 0x7FFF)), bits)
