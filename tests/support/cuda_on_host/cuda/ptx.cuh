// Stands in for csrc/cuda/ptx.cuh: a model of each of its instructions.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace trifuse::cuda {

using cuda_on_host::current;
using cuda_on_host::Error;

constexpr unsigned kAllLanes = 0xFFFFFFFF;

inline unsigned char* shared_memory() {
  return reinterpret_cast<unsigned char*>(current->block->shared());
}

template <int from>
uint32_t spread_bits(uint32_t x) {
  return __byte_perm(x, 0, from ? 0xBB99 : 0xAA88);
}

// Copies ------------------------------------------------------------------------------------------

inline const void* in_shared_memory(const void* p, const char* what) {
  const auto offset = static_cast<const std::byte*>(p) - current->block->shared();
  const auto size = static_cast<std::ptrdiff_t>(current->block->size);
  if (offset < 0 || offset + 16 > size || offset % 16)
    throw Error(
        std::string(what) + " of 16 bytes at offset " + std::to_string(offset) + " of " +
        std::to_string(size) + " of shared memory.");
  return p;
}

// Copies as late as possible: the destination is poisoned until the copy is waited for.
inline void cp_async(void* to, const void* from, int valid = 16) {
  in_shared_memory(to, "cp_async");
  if (reinterpret_cast<uintptr_t>(from) % 16) throw Error("cp_async from where isn't aligned.");
  if (valid < 0 || valid > 16) throw Error("cp_async of " + std::to_string(valid) + " bytes.");
  std::memset(to, cuda_on_host::kPoison, 16);
  current->copies.push_back({to, from, 16, static_cast<size_t>(valid)});
}

inline void cp_async_commit() {
  current->groups.push_back(std::move(current->copies));
  current->copies.clear();
}

template <int groups>
void cp_async_wait() {
  auto& committed = current->groups;
  while (committed.size() > groups) {
    for (const auto& copy : committed.front()) {
      std::memset(copy.to, 0, copy.bytes);
      std::memcpy(copy.to, copy.from, copy.valid);
    }
    committed.erase(committed.begin());
  }
}

// Reads a byte, so that an address without memory faults.
inline void prefetch(const void* p) {
  [[maybe_unused]] const char read = *static_cast<const volatile char*>(p);
}

// Matrices ----------------------------------------------------------------------------------------

inline void ldmatrix(uint32_t (&matrix)[4], const void* row) {
  const cuda_on_host::Lanes<const void*> rows(
      "ldmatrix", kAllLanes, in_shared_memory(row, "ldmatrix"));
  const unsigned lane = current->lane();
  for (int i = 0; i < 4; ++i)
    matrix[i] = static_cast<const uint32_t*>(rows[8 * i + lane / 4])[lane % 4];
}

inline void ldmatrix_transposed(uint32_t (&matrix)[4], const void* row) {
  const cuda_on_host::Lanes<const void*> rows(
      "ldmatrix_transposed", kAllLanes, in_shared_memory(row, "ldmatrix_transposed"));
  const unsigned lane = current->lane();
  for (int i = 0; i < 4; ++i) {
    const auto element = [&](unsigned r) {
      return uint32_t{static_cast<const uint16_t*>(rows[8 * i + r])[lane / 4]};
    };
    matrix[i] = element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
  }
}

inline float widen_bits(uint16_t bits, bool half) {
  return half ? __half2float({bits}) : __bfloat162float({bits});
}

struct Fragments {
  uint32_t a[4], b[2];
};

// Tensor cores add a few exact products at a time to the sum and truncate the result to float32, as
// measured by Fasi et al., "Numerical behavior of NVIDIA tensor cores" (2021).
constexpr int kProductsAtATime = 8;

inline float cut_off(double sum) {
  const float near = static_cast<float>(sum);
  const bool away = std::isfinite(near) && std::abs(static_cast<double>(near)) > std::abs(sum);
  return away ? std::bit_cast<float>(std::bit_cast<uint32_t>(near) - 1) : near;
}

// Adds one product of tiles, K deep: `a_of(row, k)` and `b_of(k, column)` give the factors.
template <int K, class A, class B>
void add_product(float (&d)[4], const A& a_of, const B& b_of) {
  const unsigned lane = current->lane();
  for (int i = 0; i < 4; ++i) {
    const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int first = 0; first < K; first += kProductsAtATime) {
      double sum = d[i];
      for (int k = first; k < first + kProductsAtATime; ++k)
        sum += static_cast<double>(a_of(row, k)) * b_of(k, column);
      d[i] = cut_off(sum);
    }
  }
}

template <class Scalar>
void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<Scalar, __nv_bfloat16> || std::is_same_v<Scalar, __half>);
  const cuda_on_host::Lanes<Fragments> lanes(
      "mma", kAllLanes, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto half = [](uint32_t pair, int which) {
    return widen_bits(which ? pair >> 16 : pair & 0xFFFF, std::is_same_v<Scalar, __half>);
  };
  const unsigned lane = current->lane();
  float rows[2][16], columns[2][16];
  for (int k = 0; k < 16; ++k) {
    const int of = k % 8 / 2;
    const Fragments row = lanes[lane / 4 * 4 + of];
    for (int r = 0; r < 2; ++r) rows[r][k] = half(row.a[r + k / 8 * 2], k % 2);
    for (int c = 0; c < 2; ++c)
      columns[c][k] = half(lanes[(lane % 4 * 2 + c) * 4 + of].b[k / 8], k % 2);
  }
  add_product<16>(
      d, [&](int row, int k) { return rows[row / 8][k]; },
      [&](int k, int column) { return columns[column % 2][k]; });
}

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const cuda_on_host::Lanes<Fragments> lanes(
      "mma_tf32", kAllLanes, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const auto tf32 = [](uint32_t bits) { return std::bit_cast<float>(bits & 0xFFFFE000); };
  add_product<8>(
      d, [&](int row, int k) { return tf32(lanes[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]); },
      [&](int k, int column) { return tf32(lanes[column * 4 + k % 4].b[k / 4]); });
}

// Special functions -------------------------------------------------------------------------------

inline float exp2_approximate(float x) {
  if (x == 0) return 1;  // the PTX manual promises it
  return cuda_on_host::approximate(std::exp2(static_cast<double>(x)), 2, x);
}

inline float tanh_approximate(float x) {
  return cuda_on_host::approximate(std::tanh(static_cast<double>(x)), 4096, x);
}

// Between blocks and warps ------------------------------------------------------------------------

inline void let_next_kernel_begin() {}
inline void wait_for_previous_kernel() {}  // a launch ends before the next begins

inline void add_release(uint32_t* p, uint32_t value) { atomicAdd(p, value); }

// Waiting threads call this in a loop: others take their turns in between.
inline uint32_t load_acquire(const uint32_t* p) {
  cuda_on_host::spin();
  return *cuda_on_host::aligned(p);
}

inline void named_barrier(int number, int threads) {
  meet(current->block->barriers[number], threads, {"named_barrier"});
}
inline void named_barrier_arrive(int number, int threads) {
  arrive(current->block->barriers[number], threads, {"named_barrier"});
}
inline bool named_barrier_or(int number, int threads, bool predicate) {
  return vote(current->block->barriers[number], threads, {"named_barrier_or"}, predicate);
}

}  // namespace trifuse::cuda
