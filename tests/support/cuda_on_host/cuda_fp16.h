// Stands in for the toolkit's header: __half and its conversions, rounding to nearest even.

#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }
inline __half __float2half_rn(float x) { return std::bit_cast<__half>(static_cast<_Float16>(x)); }
inline float2 __half22float2(__half2 x) { return {__half2float(x.x), __half2float(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {__float2half_rn(x), __float2half_rn(y)};
}
