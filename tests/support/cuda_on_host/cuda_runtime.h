// Stands in for the toolkit's header when the kernels are compiled for the host: the language
// extensions, vector types and intrinsics that csrc/cuda uses. Anything else isn't modelled.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "grid.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
using std::max;
using std::min;

// Vector types -----------------------------------------------------------------------------------

#define VECTOR_TYPES(name, T)                                                        \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                 \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
  constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }                      \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR_TYPES(int, int)
VECTOR_TYPES(uint, unsigned)
VECTOR_TYPES(float, float)
VECTOR_TYPES(double, double)
VECTOR_TYPES(longlong, long long)
#undef VECTOR_TYPES

// Barriers, shuffles, votes -----------------------------------------------------------------------

constexpr unsigned kFullMask = 0xFFFFFFFF;

#define __syncthreads()                                                       \
  ::cuda_on_host::meet(                                                       \
      ::cuda_on_host::current->block->barriers[0], ::cuda_on_host::threads(), \
      {"__syncthreads", __LINE__})

inline void __syncwarp(unsigned mask = kFullMask) {
  cuda_on_host::Lanes<int>("__syncwarp", mask, 0);
}

namespace cuda_on_host {

// Returns the value of lane `from` if it is in the same segment, else the lane's own value.
template <class T>
T shuffle(const char* what, unsigned mask, T value, int from, int width) {
  const Lanes<T> lanes(what, mask, value);
  const int lane = current->lane();
  if (from / width != lane / width || from < 0) return value;
  if (!(mask >> from & 1)) throw Error(std::string(what) + " from a lane outside of its mask.");
  return lanes[from];
}

}  // namespace cuda_on_host

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int first = cuda_on_host::current->lane() / width * width;
  return cuda_on_host::shuffle("__shfl_sync", mask, value, first + from % width, width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int from = cuda_on_host::current->lane() ^ bits;
  return cuda_on_host::shuffle("__shfl_xor_sync", mask, value, from, width);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int from = int(cuda_on_host::current->lane()) - int(by);
  return cuda_on_host::shuffle("__shfl_up_sync", mask, value, from, width);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int from = cuda_on_host::current->lane() + by;
  return cuda_on_host::shuffle("__shfl_down_sync", mask, value, from, width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const cuda_on_host::Lanes<int> lanes("__ballot_sync", mask, predicate);
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) result |= unsigned(lanes[lane] != 0) << lane;
  return result;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}

inline int __syncthreads_or(int predicate) {
  return vote(
      cuda_on_host::current->block->barriers[0], cuda_on_host::threads(), {"__syncthreads_or"},
      predicate != 0);
}

// Memory ------------------------------------------------------------------------------------------

namespace cuda_on_host {

// Throws an error about an access of so many bytes; it is in grid.cpp.
[[noreturn]] void misaligned(size_t bytes);

template <class T>
T* aligned(T* p) {
  if (reinterpret_cast<uintptr_t>(p) % alignof(T)) misaligned(sizeof(T));
  return p;
}

}  // namespace cuda_on_host

// clang-format off
// Loads and stores with cache hints, which have no effect here.
#define LOAD_HINT(name) \
  template <class T>    \
  T name(const T* p) {  \
    return *cuda_on_host::aligned(p); \
  }
LOAD_HINT(__ldg) LOAD_HINT(__ldca) LOAD_HINT(__ldcg) LOAD_HINT(__ldcs) LOAD_HINT(__ldlu)
LOAD_HINT(__ldcv)
#undef LOAD_HINT
#define STORE_HINT(name) \
  template <class T>     \
  void name(T* p, T value) { \
    *cuda_on_host::aligned(p) = value; \
  }
STORE_HINT(__stwb) STORE_HINT(__stcg) STORE_HINT(__stcs) STORE_HINT(__stwt)
#undef STORE_HINT

// Threads take turns only where they wait, so memory is always in order.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { cuda_on_host::spin(); }

#define ATOMIC(name, result)               \
  template <class T>                       \
  T name(T* p, std::type_identity_t<T> value) { \
    cuda_on_host::made_progress();         \
    const T old = *cuda_on_host::aligned(p); \
    *p = result;                           \
    return old;                            \
  }
ATOMIC(atomicAdd, old + value)
ATOMIC(atomicSub, old - value)
ATOMIC(atomicExch, value)
ATOMIC(atomicMax, std::max(old, value))
ATOMIC(atomicMin, std::min(old, value))
ATOMIC(atomicOr, old | value)
ATOMIC(atomicAnd, old & value)
// clang-format on
#undef ATOMIC

template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  cuda_on_host::made_progress();
  const T old = *cuda_on_host::aligned(p);
  if (old == expected) *p = value;
  return old;
}

// Arithmetic --------------------------------------------------------------------------------------

inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return std::max({a, b, c}); }
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xFFFF, b & 0xFFFF);
}
inline unsigned __vminu2(unsigned a, unsigned b) {
  return std::min(a >> 16, b >> 16) << 16 | std::min(a & 0xFFFF, b & 0xFFFF);
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __ffs(int x) { return x ? std::countr_zero(unsigned(x)) + 1 : 0; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return (uint64_t(high) << 32 | low) >> (by & 31);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> 4 * i & 0xF;
    const unsigned byte = bytes >> 8 * (pick & 7) & 0xFF;
    result |= (pick & 8 ? (byte >> 7 ? 0xFF : 0) : byte) << 8 * i;
  }
  return result;
}

inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? std::min(x, 1.0f) : 0.0f; }

namespace cuda_on_host {

// Returns a result of the special function unit: off by up to `ulps` units in the last place, up or
// down depending on the argument's bits; denormals are 0.
inline float approximate(double exact, double ulps, float argument) {
  const float near = exact;
  if (!std::isnormal(near)) return std::isfinite(near) ? std::copysign(0.0f, near) : near;
  const uint32_t hash = std::bit_cast<uint32_t>(argument) * 2654435769u;
  const double share = hash / 2147483648.0 - 1;  // in [-1, 1)
  return exact + share * ulps * std::ldexp(1.0, std::ilogb(near) - 23);
}

}  // namespace cuda_on_host

// Errors as in the CUDA C++ Programming Guide's table of intrinsics.
inline float rsqrtf(float x) { return cuda_on_host::approximate(1 / std::sqrt(double(x)), 2, x); }
inline float __expf(float x) {
  const double ulps = 2 + std::floor(std::abs(1.173 * double(x)));
  return cuda_on_host::approximate(std::exp(double(x)), ulps, x);
}
inline float __logf(float x) { return cuda_on_host::approximate(std::log(double(x)), 3, x); }
inline float __log2f(float x) { return cuda_on_host::approximate(std::log2(double(x)), 2, x); }
inline float __fdividef(float a, float b) {
  return cuda_on_host::approximate(double(a) / double(b), 2, b);
}
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
