// The passes over a block's tiles that keep a NaN or Inf from pairs that take no part, and
// store_rows, which writes a warp's sums and the NaN that the passes found.
//
// A NaN or Inf in a row that a mask or window leaves out must not reappear as 0 · NaN from a
// product. The fast pass assumes that all numbers are finite. If one of its sums is not finite, the
// locate pass finds the sums that a NaN or Inf reaches through a pair, and the sanitize pass
// recomputes the others. All threads of a block take the same passes.

#pragma once

#include "cuda/attention.h"
#include "cuda/attention_configurations.cuh"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/dtype.cuh"

namespace trifuse::cuda {

constexpr float kInfinity = __builtin_huge_valf(), kNan = __builtin_nanf("");

__device__ __forceinline__ bool finite(float x) { return fabsf(x) < kInfinity; }

template <class Scalar>
constexpr float kLargest = 3.40282347e38f;  // the largest finite number
template <>
inline constexpr float kLargest<__half> = 65504;
template <>
inline constexpr float kLargest<__nv_bfloat16> = 3.38953139e38f;

// Returns whether a mask or window may leave pairs out. Their rows are loaded, unlike rows past the
// lengths, which are zeros in a tile.
constexpr bool is_selective(const AttentionProblem& p) {
  return p.mask_kind != MaskKind::None || p.window_left != kNoBound || p.window_right != kNoBound;
}

// A pass, and how it prepares a tile's numbers.
enum class Mode {
  Fast,      // does not change them; assumes that all are finite
  Locate,    // replaces NaN and Inf by 1, and finite numbers by 0
  Sanitize,  // replaces ±Inf by the largest finite numbers, which keep a score of -inf very low,
             // and NaN by 0
};

// Applies Locate or Sanitize to all numbers of a tile; the caller is thread `thread` of `threads`.
// Padding that no product reads may hold arbitrary values.
template <class Scalar>
__device__ __forceinline__ void prepare_numbers(
    Scalar* data, int count, int thread, int threads, Mode mode) {
  for (int i = thread; i < count; i += threads) {
    const float x = widen(data[i]);
    if (mode == Mode::Locate) data[i] = narrow<Scalar>(finite(x) ? 0.0f : 1.0f);
    else if (!finite(x)) data[i] = narrow<Scalar>(x == x ? copysignf(kLargest<Scalar>, x) : 0.0f);
  }
}

// As prepare_numbers, called by all threads of a block. Needs a barrier before and after.
template <class Scalar>
__device__ __forceinline__ void prepare_tile(const Tile<Scalar>& tile, int rows, Mode mode) {
  prepare_numbers(tile.data, rows * tile.pitch, threadIdx.x, blockDim.x, mode);
}

// Called after a pass by all threads that take part. Returns whether another pass follows, and sets
// its mode. any_found() returns, the same in all threads, whether a thread has a sum that is not
// finite.
template <Masks kMasks = Masks::One, class AnyFound>
__device__ __forceinline__ bool next_pass(
    const AttentionProblem& p, Mode& mode, const AnyFound& any_found) {
  // Any table may leave pairs out.
  if (!(has_tables<kMasks>(p) || is_selective(p)) || mode == Mode::Sanitize) return false;
  if (mode == Mode::Locate) {
    mode = Mode::Sanitize;
    return true;
  }
  mode = Mode::Locate;
  return any_found();
}

// One bit for each of a thread's sums: whether a NaN or Inf reached it. Computed from the sums of a
// pass in Mode::Locate.
template <int C>
struct ReachedSums {
  uint32_t bits[C / 64] = {};

  ReachedSums() = default;
  __device__ __forceinline__ explicit ReachedSums(const float (&count)[C / 8][4]) {
#pragma unroll
    for (int n = 0; n < C / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) bits[n / 8] |= uint32_t(count[n][e] > 0) << (n % 8 * 4 + e);
  }
  __device__ __forceinline__ bool test(int n, int e) const {
    return bits[n / 8] >> (n % 8 * 4 + e) & 1;
  }
};

template <int C>
__device__ __forceinline__ bool any_non_finite(const float (&sums)[C / 8][4]) {
  bool found = false;
#pragma unroll
  for (int n = 0; n < C / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) found |= !finite(sums[n][e]);
  return found;
}

// Writes a warp's rows [first, min(first + 16, length)), columns [first_column, first_column + C):
// sums times a factor for each of the thread's two rows. ±Inf, and sums that a NaN or Inf reached,
// become NaN. The rows pass through `staging`, 16 rows of shared memory that only this warp uses.
template <int C, class Scalar>
__device__ __forceinline__ void store_rows(
    const float (&sums)[C / 8][4], const float (&factor)[2], const ReachedSums<C>& reached,
    const Tile<Scalar>& staging, const HeadRows<Scalar>& to, int first, int length,
    int first_column) {
  constexpr int kChunk = Tile<Scalar>::kChunk;
  const auto finished = [&](int n, int e) {
    const float x = sums[n][e] * factor[e / 2];
    return fabsf(x) == kInfinity || reached.test(n, e) ? kNan : x;
  };
#pragma unroll
  for (int n = 0; n < C / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; e += kTensorCore<Scalar> ? 2 : 1) {
      const int column = sum_column<Scalar>(n, e);
      Scalar* const to = staging.chunk(fragment_row(e), column) + column % kChunk;
      if constexpr (kTensorCore<Scalar>)
        *reinterpret_cast<uint32_t*>(to) = pack<Scalar>(finished(n, e), finished(n, e + 1));
      else *to = narrow<Scalar>(finished(n, e));
    }
  __syncwarp();
  for (int i = lane(); i < 16 * C / kChunk; i += 32) {
    const int row = i / (C / kChunk), column = i % (C / kChunk) * kChunk;
    const int count = to.columns - first_column - column;
    if (first + row >= length || count <= 0) continue;
    const Scalar* source = staging.chunk(row, column);
    Scalar* target =
        to.data + (first + row) * to.stride + (first_column + column) * to.column_stride;
    if (to.aligned && count >= kChunk) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
    } else {
      for (int j = 0; j < min(count, kChunk); ++j) target[j * to.column_stride] = source[j];
    }
  }
}

}  // namespace trifuse::cuda
