// Rotary position embeddings on a CPU.
//
// A task owns one row of the innermost dimension of heads: in most layouts, the heads of a token.
// It reads and writes each head once, and reads the cosines and sines of the row.
//
// Floor: the bytes of x and out at the machine's copy rate.

#include <c10/util/BFloat16.h>

#include <algorithm>
#include <type_traits>

#include "cpu/kernels.h"

namespace trifuse::CPU_CAPABILITY {
namespace {

// Rounds each product and sum, as torch's separate operations do. Without this, a compiler may fuse
// both into one operation, if the instruction set has it.
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

// The bits of a bfloat16, converted without c10's branch for NaN, so that compilers can vectorise
// the loops below.
struct Bits {
  uint16_t bits;
};

inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
inline float wide(Bits x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16); }

// Rounds a number to a type, in the upper half of its bits if the type is bfloat16.
template <class To, class T>
inline T rounded(T x) {
  if constexpr (std::is_same_v<To, Bits>) {
    const auto bits = __builtin_bit_cast(uint32_t, x);
    const uint32_t to_even = bits + 0x7FFF + (bits >> 16 & 1);
    const uint32_t quiet = bits | 1 << 22;  // a NaN stays one
    return __builtin_bit_cast(float, (x == x ? to_even : quiet) & 0xFFFF0000);
  } else {
    return x;
  }
}

template <class To, class T>
inline To narrow(T x) {
  const T kept = rounded<To>(x);
  if constexpr (std::is_same_v<To, Bits>)
    return {static_cast<uint16_t>(__builtin_bit_cast(uint32_t, kept) >> 16)};
  else return kept;
}

// Rotates a head's halves. `second_position` is where the cosines and sines of the second half
// begin. Position: the type of cos and sin; Product: that to which products are rounded.
template <class Scalar, class Position, class Product>
void rotate_halves(
    const Scalar* x, const Position* cos, const Position* sin, int64_t second_position,
    bool transposed, int64_t half, Scalar* out) {
  const auto product = [](auto a, Position b) { return rounded<Product>(a * wide(b)); };
  if (transposed) {
#pragma GCC ivdep  // out may be x: each iteration reads the numbers that it replaces
    for (int64_t i = 0, j = second_position; i < half; ++i, ++j) {
      const auto first = wide(x[i]), second = wide(x[i + half]);
      out[i] = narrow<Scalar>(product(first, cos[i]) + product(second, sin[j]));
      out[i + half] = narrow<Scalar>(product(second, cos[j]) - product(first, sin[i]));
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = 0, j = second_position; i < half; ++i, ++j) {
      const auto first = wide(x[i]), second = wide(x[i + half]);
      out[i] = narrow<Scalar>(product(first, cos[i]) - product(second, sin[i]));
      out[i + half] = narrow<Scalar>(product(second, cos[j]) + product(first, sin[j]));
    }
  }
}

// Sorts `count` pairs of neighbours into two halves.
template <class T>
void split(const T* pairs, int64_t count, T* halves) {
  for (int64_t i = 0; i < count; ++i) {
    halves[i] = pairs[2 * i];
    halves[i + count] = pairs[2 * i + 1];
  }
}

// Rotates pairs of neighbours, as halves of a buffer. (From a loop over the pairs themselves, GCC
// makes instructions that round a product and a sum at once, even where it may not.)
template <class Scalar, class Position, class Product>
void rotate_neighbours(
    const Scalar* x, const Position* cos, const Position* sin, bool per_pair, bool transposed,
    int64_t pairs, Scalar* out) {
  constexpr int64_t most = 64;
  Scalar turned[2 * most];
  Position cosines[2 * most], sines[2 * most];
  for (int64_t i = 0; i < pairs; i += most) {
    const int64_t count = std::min(pairs - i, most);
    split(x + 2 * i, count, turned);
    if (!per_pair) {
      split(cos + 2 * i, count, cosines);
      split(sin + 2 * i, count, sines);
    }
    rotate_halves<Scalar, Position, Product>(
        turned, per_pair ? cos + i : cosines, per_pair ? sin + i : sines, per_pair ? 0 : count,
        transposed, count, turned);
    for (int64_t k = 0; k < count; ++k) {
      out[2 * (i + k)] = turned[k];
      out[2 * (i + k) + 1] = turned[k + count];
    }
  }
}

template <class Scalar, class Position, class Product>
void run(const RotaryProblem& p, int64_t task) {
  const int64_t i = task / p.size[1], j = task % p.size[1], half = p.R / 2;
  const auto at = [&](auto* data, const int64_t* stride, int64_t k) {
    return data + i * stride[0] + j * stride[1] + k * stride[2];
  };
  for (int64_t k = 0; k < p.size[2]; ++k) {
    const auto* x = at(static_cast<const Scalar*>(p.x), p.x_stride, k);
    auto* out = at(static_cast<Scalar*>(p.out), p.out_stride, k);
    const auto* cos = at(static_cast<const Position*>(p.cos), p.cos_stride, k);
    const auto* sin = at(static_cast<const Position*>(p.sin), p.sin_stride, k);
    if (p.interleaved) {
      rotate_neighbours<Scalar, Position, Product>(
          x, cos, sin, p.per_pair, p.transposed, half, out);
    } else {
      rotate_halves<Scalar, Position, Product>(
          x, cos, sin, p.per_pair ? 0 : half, p.transposed, half, out);
    }
    if (out != x) std::copy(x + p.R, x + p.E, out + p.R);
  }
}

void run_any(const RotaryProblem& p, int64_t task) {
  switch (p.dtype) {
    case DType::Float32: return run<float, float, float>(p, task);
    case DType::Float64: return run<double, double, double>(p, task);
    case DType::BFloat16:
      if (p.wide_positions) return run<Bits, float, float>(p, task);
      if (p.products_rounded) return run<Bits, Bits, Bits>(p, task);
      return run<Bits, Bits, float>(p, task);
    case DType::Float16: return;  // the callers don't pass any
  }
}

#ifndef __clang__
#pragma GCC pop_options
#endif

}  // namespace

RotaryKernel rotary() { return {run_any}; }

}  // namespace trifuse::CPU_CAPABILITY
