// Element types of tensors inside a kernel: conversions, and loads and stores of eight at a time.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "dtype.h"

namespace trifuse::cuda {

// The type that a kernel computes in.
template <class Scalar>
using Accumulator = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

// Rounds to nearest even.
template <class Scalar>
__device__ __forceinline__ Scalar narrow(Accumulator<Scalar> x) {
  if constexpr (std::is_same_v<Scalar, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else if constexpr (std::is_same_v<Scalar, __half>) return __float2half_rn(x);
  else return x;
}

template <class Scalar>
__device__ __forceinline__ Accumulator<Scalar> rounded(Accumulator<Scalar> x) {
  return widen(narrow<Scalar>(x));
}

// Eight neighbouring elements of a row as stored in memory: of type Scalar or, with kEither and
// `wide`, of its Accumulator. kAligned loads all eight, 16 bytes at a time; otherwise only the
// first `count` are loaded, and the others are zeros.
template <class Scalar, bool kEither = true>
class Eight {
 public:
  using T = Accumulator<Scalar>;

  template <bool kAligned>
  __device__ __forceinline__ void load(const void* row, bool wide, int64_t column, int64_t count) {
    wide_ = wide;
    if (is_wide(wide)) load_as<kAligned>(static_cast<const T*>(row) + column, count);
    else load_as<kAligned>(static_cast<const Scalar*>(row) + column, count);
  }

  // Takes elements of type Scalar, a 16-bit type, that were loaded elsewhere.
  __device__ __forceinline__ void take(const uint4& elements) {
    piece_[0] = elements;
    wide_ = false;
  }

  __device__ __forceinline__ void get(T (&values)[8]) const {
    if (is_wide(wide_)) get_as<T>(values);
    else get_as<Scalar>(values);
  }

 private:
  static constexpr int kPieces = 8 * (kEither ? sizeof(T) : sizeof(Scalar)) / 16;

  __device__ static constexpr bool is_wide(bool wide) {
    return std::is_same_v<Scalar, T> || (kEither && wide);
  }

  template <bool kAligned, class As>
  __device__ __forceinline__ void load_as(const As* from, int64_t count) {
    if constexpr (kAligned) {
#pragma unroll
      for (int i = 0; i < int(8 * sizeof(As) / 16); ++i)
        piece_[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const As value = i < count ? from[i] : narrow<As>(0);
        memcpy(reinterpret_cast<unsigned char*>(piece_) + i * sizeof(As), &value, sizeof(As));
      }
    }
  }

  template <class As>
  __device__ __forceinline__ void get_as(T (&values)[8]) const {
    if constexpr (std::is_same_v<As, __nv_bfloat16>) {  // the upper half of a float
      const uint32_t words[4] = {piece_[0].x, piece_[0].y, piece_[0].z, piece_[0].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[2 * i] = __uint_as_float(words[i] << 16);
        values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        As value;
        memcpy(&value, reinterpret_cast<const unsigned char*>(piece_) + i * sizeof(As), sizeof(As));
        values[i] = widen(value);
      }
    }
  }

  uint4 piece_[kPieces];
  bool wide_;
};

// Stores eight values as type As, rounded to nearest even; unless kAligned, only the first `count`.
template <class As, bool kAligned>
__device__ __forceinline__ void store_eight_as(
    As* to, const Accumulator<As> (&values)[8], int64_t count) {
  if constexpr (kAligned) {
    uint4 piece[8 * sizeof(As) / 16];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const As value = narrow<As>(values[i]);
      memcpy(reinterpret_cast<unsigned char*>(piece) + i * sizeof(As), &value, sizeof(As));
    }
#pragma unroll
    for (int i = 0; i < int(8 * sizeof(As) / 16); ++i) reinterpret_cast<uint4*>(to)[i] = piece[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) to[i] = narrow<As>(values[i]);
  }
}

// Calls run<Scalar>() with the type of a call.
template <class Run>
inline void for_type(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::Float32: return run.template operator()<float>();
    case DType::BFloat16: return run.template operator()<__nv_bfloat16>();
    case DType::Float16: return run.template operator()<__half>();
    case DType::Float64: return run.template operator()<double>();
  }
}

}  // namespace trifuse::cuda
