// Rotary position embeddings on a CPU.
//
// A task owns the heads of one token (or whatever the innermost dimension of heads is). It reads
// and writes each once, and the cosines and sines of the token.
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

// Rotates one head. Position: the type of cos and sin; Product: that to which products are rounded.
template <class Scalar, class Position, class Product>
void rotate(
    const Scalar* x, const Position* cos, const Position* sin, bool transposed, int64_t R,
    Scalar* out) {
  const int64_t half = R / 2;
  const auto product = [](auto a, Position b) { return rounded<Product>(a * wide(b)); };
  if (transposed) {
#pragma GCC ivdep  // out may be x: each iteration reads the numbers that it replaces
    for (int64_t i = 0; i < half; ++i) {
      const auto first = wide(x[i]), second = wide(x[i + half]);
      out[i] = narrow<Scalar>(product(first, cos[i]) + product(second, sin[i + half]));
      out[i + half] = narrow<Scalar>(product(second, cos[i + half]) - product(first, sin[i]));
    }
  } else {
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) {
      const auto first = wide(x[i]), second = wide(x[i + half]);
      out[i] = narrow<Scalar>(product(first, cos[i]) - product(second, sin[i]));
      out[i + half] =
          narrow<Scalar>(product(second, cos[i + half]) + product(first, sin[i + half]));
    }
  }
}

#ifndef __clang__
#pragma GCC pop_options
#endif

template <class Scalar, class Position, class Product>
void run(const RotaryProblem& p, int64_t task) {
  const int64_t i = task / p.size[1], j = task % p.size[1];
  const auto at = [&](auto* data, const int64_t* stride, int64_t k) {
    return data + i * stride[0] + j * stride[1] + k * stride[2];
  };
  for (int64_t k = 0; k < p.size[2]; ++k) {
    const auto* x = at(static_cast<const Scalar*>(p.x), p.x_stride, k);
    auto* out = at(static_cast<Scalar*>(p.out), p.out_stride, k);
    rotate<Scalar, Position, Product>(
        x, at(static_cast<const Position*>(p.cos), p.cos_stride, k),
        at(static_cast<const Position*>(p.sin), p.sin_stride, k), p.transposed, p.R, out);
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

}  // namespace

RotaryKernel rotary() { return {run_any}; }

}  // namespace trifuse::CPU_CAPABILITY
