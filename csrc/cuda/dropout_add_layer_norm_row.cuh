// What the kernels of dropout_add_layer_norm share: who owns which columns, and the sum of a row.

#pragma once

#include <algorithm>

#include "cuda/dropout_add_layer_norm.h"
#include "cuda/dtype.cuh"
#include "cuda/launch.h"
#include "cuda/philox.cuh"
#include "cuda/warp.cuh"

namespace trifuse::cuda {

// Threads that share a row: a warp, of which a block holds four, or a whole block. Columns go by groups
// of eight neighbours, one call of Philox; thread t owns group t and every `threads`-th after it. That,
// and with it the order of every sum over a row, depends on the width alone.
template <int kThreads>
struct Team {
  static constexpr int kBlock = kThreads > 128 ? kThreads : 128;
  static constexpr int kRows = kBlock / kThreads;  // of a block
  static constexpr int kWarps = kThreads / 32;

  __device__ static int thread() { return threadIdx.x % kThreads; }
  // Calls run(row) for each of the team's rows: those of a grid that is smaller than the matrix walk on.
  template <class Run>
  __device__ static __forceinline__ void for_rows(int64_t rows, const Run& run) {
    int64_t row = int64_t(blockIdx.x) * kRows + threadIdx.x / kThreads;
    for (; row < rows; row += int64_t(gridDim.x) * kRows) run(static_cast<uint32_t>(row));
  }
};

// For rows of any width: a row of more columns than eight for each thread is walked over.
constexpr int kWideThreads = 256;

// On one multiprocessor: they leave 64 registers for each.
constexpr int kResidentThreads = 1024;

// One for every so many rows.
inline unsigned blocks_for(int64_t rows, int64_t rows_of_a_block) {
  return std::min<int64_t>((rows + rows_of_a_block - 1) / rows_of_a_block, 0x7FFFFFFF);
}

// So many eights of numbers in shared memory, the halves of them apart: where lanes access neighbouring
// eights, 16 bytes each at a time, the addresses are neighbours too.
template <class T>
class SharedEights {
 public:
  __device__ __forceinline__ SharedEights(void* memory, int count)
      : four_(static_cast<Four*>(memory)), count_(count) {}

  __device__ __forceinline__ void put(int i, const T (&values)[8]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Four four;
#pragma unroll
      for (int j = 0; j < 4; ++j) four.of[j] = values[4 * half + j];
      four_[i + half * count_] = four;
    }
  }
  __device__ __forceinline__ void get(int i, T (&values)[8]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Four four = four_[i + half * count_];
#pragma unroll
      for (int j = 0; j < 4; ++j) values[4 * half + j] = four.of[j];
    }
  }
  __device__ __forceinline__ void add(int i, const T (&values)[8]) {
    T sums[8];
    get(i, sums);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] += values[j];
    put(i, sums);
  }

 private:
  struct alignas(16) Four {
    T of[4];
  };
  Four* four_;
  int count_;
};

template <bool kAligned, class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ void load_features(
    T (&values)[8], const Vector& vector, int64_t column, int64_t count) {
  Eight<Scalar> eight;
  eight.template load<kAligned>(vector.data, vector.wide, column, count);
  eight.get(values);
}

template <bool kAligned, class Scalar>
__device__ __forceinline__ void load_eight(
    Eight<Scalar>& eight, const Matrix& matrix, uint32_t row, int64_t column, int64_t count) {
  eight.template load<kAligned>(matrix.row(row), matrix.wide, column, count);
}

template <class Scalar, bool kAligned, class T = Accumulator<Scalar>>
__device__ __forceinline__ void store_eight(
    const Matrix& matrix, uint32_t row, int64_t column, const T (&values)[8], int64_t count) {
  store_eight<Scalar, kAligned>(matrix.row(row), matrix.wide, column, values, count);
}

// The sum of a row, s = residual + D (x + x_bias), or what the forward returned of it.
template <class Scalar, bool kAligned>
class RowSum {
 public:
  using T = Accumulator<Scalar>;

  __device__ __forceinline__ RowSum(const DropoutAddLayerNorm& p, uint32_t row)
      : p_(p), row_(row) {}

  // What eight columns take from memory.
  struct Loaded {
    Eight<Scalar> x, other;  // the residual, or the sum where there is no x
  };

  __device__ __forceinline__ void load(Loaded& loaded, int64_t column) const {
    if (p_.x) load_eight<kAligned>(loaded.x, p_.x, row_, column, p_.N - column);
    const Matrix& other = p_.x ? p_.residual : p_.sum;
    if (other) load_eight<kAligned>(loaded.other, other, row_, column, p_.N - column);
  }

  // D of eight columns: bit j for column + j.
  __device__ __forceinline__ uint32_t keep(int64_t column, uint64_t seed) const {
    if (!p_.threshold) return 0xFF;
    return dropout_keep(seed, 0, row_, static_cast<uint32_t>(column / 8), p_.threshold);
  }

  // D times the values: what is dropped is 0 whatever it was, NaN included.
  __device__ __forceinline__ void drop(T (&values)[8], uint32_t keep) const {
    if (!p_.threshold) return;
    const T scale = static_cast<T>(p_.scale);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = keep >> j & 1 ? values[j] * scale : T(0);
  }

  __device__ __forceinline__ void add_up(
      T (&s)[8], const Loaded& loaded, int64_t column, uint32_t keep) const {
    T other[8];
    if (!p_.x) return loaded.other.get(s);
    loaded.x.get(s);
    if (p_.x_bias) {
      load_features<kAligned, Scalar>(other, p_.x_bias, column, p_.N - column);
#pragma unroll
      for (int j = 0; j < 8; ++j) s[j] += other[j];
    }
    drop(s, keep);
    if (p_.residual) {
      loaded.other.get(other);
#pragma unroll
      for (int j = 0; j < 8; ++j) s[j] += other[j];
    }
  }

 private:
  const DropoutAddLayerNorm& p_;
  const uint32_t row_;
};

}  // namespace trifuse::cuda
