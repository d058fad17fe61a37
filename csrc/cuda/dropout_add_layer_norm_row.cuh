// Shared by dropout_add_layer_norm's kernels: which thread owns which columns, and a row's sum.

#pragma once

#include <algorithm>

#include "cuda/dropout_add_layer_norm.h"
#include "cuda/dtype.cuh"
#include "cuda/launch.h"
#include "cuda/philox.cuh"
#include "cuda/warp.cuh"

namespace trifuse::cuda {

// Returns the number of threads of a block, given that of a team.
constexpr int block_of(int team) { return team == 32 ? 128 : team; }

// Threads that share a row: a whole block, or one of its parts. Columns form groups of eight
// neighbours, one Philox call each. Thread t owns group t and every kThreads-th group after it. So
// the order of a sum over a row depends only on the width and the kind of call.
template <int kThreads, int kBlockThreads = block_of(kThreads)>
struct Team {
  static constexpr int kBlock = kBlockThreads;
  static constexpr int kRows = kBlock / kThreads;  // per block
  static constexpr int kWarps = kThreads / 32;

  __device__ static int thread() { return threadIdx.x % kThreads; }
  // A team's first row, and the distance to its next row if the grid is smaller than the matrix.
  __device__ static int64_t first_row() {
    return int64_t(blockIdx.x) * kRows + threadIdx.x / kThreads;
  }
  __device__ static int64_t step() { return int64_t(gridDim.x) * kRows; }
};

// Threads per team in the kernels that loop over rows of any width.
constexpr int kWideThreads = 256;

// Returns one block per `rows_of_a_block` rows, but at most `most_blocks`.
inline unsigned blocks_for(int64_t rows, int64_t rows_of_a_block, int64_t most_blocks) {
  return std::min(
      (rows + rows_of_a_block - 1) / rows_of_a_block, std::max<int64_t>(most_blocks, 1));
}

// `count` groups of eight numbers in shared memory. The two halves of a group lie apart, so that
// lanes that access neighbouring groups, 16 bytes at a time, access neighbouring addresses.
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
      for (int j = 0; j < 4; ++j) four.values[j] = values[4 * half + j];
      four_[i + half * count_] = four;
    }
  }
  __device__ __forceinline__ void get(int i, T (&values)[8]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Four four = four_[i + half * count_];
#pragma unroll
      for (int j = 0; j < 4; ++j) values[4 * half + j] = four.values[j];
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
    T values[4];
  };
  Four* four_;
  int count_;
};

// The calls that a kernel is compiled for: any call, or the usual ones. These have x, residual and
// weight, no x_bias, and matrices in 16 bits that are not wide. Flags refine the usual calls. A
// kernel for any call would issue too many instructions for its bytes; most of them test which
// tensors the call has.
constexpr int kAnyCalls = 0, kUsualCalls = 1;
constexpr int kWithDropout = 2;
constexpr int kWithWideVectors = 4;  // forward only: all vectors are wide; otherwise none is

inline bool is_usual(const DropoutAddLayerNorm& p) {
  const bool half = p.dtype == DType::BFloat16 || p.dtype == DType::Float16;
  const bool wide = p.residual.wide || p.sum.wide || p.grad_sum.wide || p.grad_residual.wide;
  return half && !wide && p.x && p.residual && p.weight && !p.x_bias && p.N % 8 == 0 && p.N <= 8192;
}

template <int kCalls>
__device__ __forceinline__ bool drops(const DropoutAddLayerNorm& p) {
  return kCalls == kAnyCalls ? p.threshold != 0 : (kCalls & kWithDropout) != 0;
}
// Returns whether a call has `part`. The usual calls have it.
template <int kCalls, class Part>
__device__ __forceinline__ bool has(const Part& part) {
  return kCalls != kAnyCalls || bool(part);
}

template <bool kAligned, class Scalar, int kCalls, class T = Accumulator<Scalar>>
__device__ __forceinline__ void load_features(
    T (&values)[8], const Vector& vector, int64_t column, int64_t count) {
  using As = std::conditional_t<(kCalls & kWithWideVectors) != 0, T, Scalar>;
  Eight<As, kCalls == kAnyCalls> eight;
  eight.template load<kAligned>(vector.data, vector.wide, column, count);
  eight.get(values);
}

// Writes eight columns of a row of a matrix that may be wide.
template <class Scalar, bool kAligned, int kCalls, class T = Accumulator<Scalar>>
__device__ __forceinline__ void store_eight(
    void* row, const Matrix& matrix, int64_t column, const T (&values)[8], int64_t count) {
  if (kCalls == kAnyCalls && matrix.wide)
    store_eight_as<T, kAligned>(static_cast<T*>(row) + column, values, count);
  else store_eight_as<Scalar, kAligned>(static_cast<Scalar*>(row) + column, values, count);
}

// The sum of a row, s = residual + D (x + x_bias): computed, or read if the forward returned it.
template <class Scalar, bool kAligned, int kCalls>
class RowSum {
 public:
  using T = Accumulator<Scalar>;

  __device__ __forceinline__ RowSum(const DropoutAddLayerNorm& p, uint32_t row)
      : p_(p), row_(row), x_(has<kCalls>(p.x) ? p.x.row(row) : nullptr),
        residual_or_sum_(has<kCalls>(residual_or_sum()) ? residual_or_sum().row(row) : nullptr),
        scale_(static_cast<T>(p.scale)) {}

  // Eight columns as loaded from memory.
  struct Loaded {
    Eight<Scalar, false> x;
    Eight<Scalar, kCalls == kAnyCalls> residual_or_sum;  // the sum if there is no x
  };

  __device__ __forceinline__ void load(Loaded& loaded, int64_t column) const {
    const int64_t count = p_.N - column;
    if (has<kCalls>(p_.x)) loaded.x.template load<kAligned>(x_, false, column, count);
    if (has<kCalls>(residual_or_sum()))
      loaded.residual_or_sum.template load<kAligned>(
          residual_or_sum_, residual_or_sum().wide, column, count);
  }

  // Returns which of eight columns D keeps: bit j for column + j.
  __device__ __forceinline__ uint32_t keep(int64_t column, uint64_t seed) const {
    if (!drops<kCalls>(p_)) return 0xFF;
    const uint32_t row = drawn_unit(p_.seed, p_.placed, row_);
    return dropout_keep(seed, 0, row, static_cast<uint32_t>(column / 8), p_.threshold);
  }

  // Multiplies the values by D. A dropped value becomes 0 whatever it was, NaN included.
  __device__ __forceinline__ void drop(T (&values)[8], uint32_t keep) const {
    if (!drops<kCalls>(p_)) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = keep >> j & 1 ? values[j] * scale_ : T(0);
  }

  __device__ __forceinline__ void add_up(
      T (&s)[8], const Loaded& loaded, int64_t column, uint32_t keep) const {
    if (!has<kCalls>(p_.x)) return loaded.residual_or_sum.get(s);
    loaded.x.get(s);
    T addend[8];
    if (kCalls == kAnyCalls && p_.x_bias) {
      load_features<kAligned, Scalar, kCalls>(addend, p_.x_bias, column, p_.N - column);
#pragma unroll
      for (int j = 0; j < 8; ++j) s[j] += addend[j];
    }
    if (!has<kCalls>(p_.residual)) return drop(s, keep);
    loaded.residual_or_sum.get(addend);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (drops<kCalls>(p_)) s[j] = keep >> j & 1 ? s[j] * scale_ + addend[j] : addend[j];
      else s[j] += addend[j];
    }
  }

 private:
  __device__ __forceinline__ const Matrix& residual_or_sum() const {
    return has<kCalls>(p_.x) ? p_.residual : p_.sum;
  }

  const DropoutAddLayerNorm& p_;
  const uint32_t row_;
  const void *const x_, *const residual_or_sum_;
  const T scale_;
};

}  // namespace trifuse::cuda
