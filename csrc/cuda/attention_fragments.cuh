// Fragments of the attention kernels: how a warp's numbers lie in its registers, and its products.
//
// A warp owns 16 of its block's rows: queries, or keys in the kernel that sums over queries.
// Scores and weights are 16 x N matrices, and so are sums, whose columns in float32 are ordered by
// sum_column. Each thread holds N / 2 numbers of a matrix in an array f[N / 8][4], in the layout of
// mma.m16n8k16's accumulators:
//
//   column   8n, +1    +2, +3    +4, +5    +6, +7
//   row  0  | lane 0  | lane 1  | lane 2  | lane 3  |  f[n][0], f[n][1]
//   row  1  | lane 4  | lane 5  | lane 6  | lane 7  |
//     ...
//   row  7  | lane 28 | lane 29 | lane 30 | lane 31 |
//   row  8  | lane 0  | lane 1  | lane 2  | lane 3  |  f[n][2], f[n][3]
//     ...
//   row 15  | lane 28 | lane 29 | lane 30 | lane 31 |
//
// Operand a (16 x 16) of the next product has the same layout, two numbers to a register: registers
// 0 and 1 hold columns 0 to 7 of rows lane / 4 and lane / 4 + 8, registers 2 and 3 hold columns 8
// to 15. So weights go from one product to the next without leaving the thread. A lane holds column
// lane / 4 of operand b (16 x 8): register 0 has rows 2 (lane % 4) and the next, register 1 the
// rows 8 below. A wgmma has 64 rows: warp w of the four holds rows 16 w to 16 w + 15, in this
// layout.
//
// float32 products are ordinary fused multiply-adds, one term after the other and rounded as in
// eager torch, on the same layout, so the code between two products is the same for all types.

#pragma once

#include <type_traits>

#include "cuda/attention_tile.cuh"
#include "cuda/dtype.cuh"
#include "cuda/ptx.cuh"

namespace trifuse::cuda {

template <class Scalar>
constexpr bool kTensorCore = sizeof(Scalar) == 2;

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }

// Row and column of element f[n][e] of a thread's fragment f of a 16 x N tile.
__device__ __forceinline__ int fragment_row(int e) { return lane() / 4 + e / 2 * 8; }
__device__ __forceinline__ int fragment_column(int n, int e) {
  return 8 * n + lane() % 4 * 2 + e % 2;
}

// Products ----------------------------------------------------------------------------------------

template <int C>
__device__ __forceinline__ void set_to_zero(float (&sums)[C / 8][4]) {
#pragma unroll
  for (int n = 0; n < C / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] = 0;
}

template <class Scalar>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t result;
  if constexpr (std::is_same_v<Scalar, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&result, &pair, 4);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&result, &pair, 4);
  }
  return result;
}

// c (16, N) += a bᵀ, with a (16, depth) and b (N, depth); `depth` is a multiple of 16.
template <int N, class Scalar>
__device__ __forceinline__ void multiply_rows(
    float (&c)[N / 8][4], const Tile<Scalar>& a, const Tile<Scalar>& b, int depth) {
  if constexpr (kTensorCore<Scalar>) {
#pragma unroll 4
    for (int k = 0; k < depth; k += 16) {
      uint32_t row[4];
      ldmatrix(row, a.chunk(lane() % 16, k + lane() / 16 * 8));
#pragma unroll
      for (int n = 0; n < N / 8; n += 2) {
        uint32_t m[4];
        ldmatrix(m, b.chunk(8 * n + lane() / 16 * 8 + lane() % 8, k + lane() / 8 % 2 * 8));
        mma<Scalar>(c[n], row, {m[0], m[1]});
        mma<Scalar>(c[n + 1], row, {m[2], m[3]});
      }
    }
  } else {
#pragma unroll 2
    for (int k = 0; k < depth; k += 4) {
      float4 row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row[r] = *reinterpret_cast<const float4*>(a.chunk(fragment_row(2 * r), k));
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 x = *reinterpret_cast<const float4*>(b.chunk(fragment_column(n, i), k));
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& sum = c[n][2 * r + i];
            sum = fmaf(row[r].x, x.x, sum);
            sum = fmaf(row[r].y, x.y, sum);
            sum = fmaf(row[r].z, x.z, sum);
            sum = fmaf(row[r].w, x.w, sum);
          }
        }
    }
  }
}

// acc (16, C) += weights (16, N) times columns [first, min(first + C, columns)) of b (N, columns);
// `columns` is a multiple of 16. sum_column gives the column of an element of acc.
template <int N, int C, class Scalar>
__device__ __forceinline__ void multiply_weights(
    float (&acc)[C / 8][4], const float (&weights)[N / 8][4], const Tile<Scalar>& b, int first,
    int columns) {
  if constexpr (kTensorCore<Scalar>) {
#pragma unroll
    for (int k = 0; k < N / 16; ++k) {
      uint32_t row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        row[i] =
            pack<Scalar>(weights[2 * k + i / 2][i % 2 * 2], weights[2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int j = 0; j < C / 16; ++j) {
        if (first + 16 * j >= columns) break;
        uint32_t m[4];
        ldmatrix_transposed(m, b.chunk(16 * k + lane() % 16, first + 16 * j + lane() / 16 * 8));
        mma<Scalar>(acc[2 * j], row, {m[0], m[1]});
        mma<Scalar>(acc[2 * j + 1], row, {m[2], m[3]});
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float w[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        w[r] = __shfl_sync(kAllLanes, weights[k / 8][2 * r + k % 2], k % 8 / 2, 4);
#pragma unroll
      for (int j = 0; j < C / 16; ++j) {
        if (first + 16 * j >= columns) break;
        const float4 x =
            *reinterpret_cast<const float4*>(b.chunk(k, first + 16 * j + lane() % 4 * 4));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          acc[2 * j][2 * r] = fmaf(w[r], x.x, acc[2 * j][2 * r]);
          acc[2 * j][2 * r + 1] = fmaf(w[r], x.y, acc[2 * j][2 * r + 1]);
          acc[2 * j + 1][2 * r] = fmaf(w[r], x.z, acc[2 * j + 1][2 * r]);
          acc[2 * j + 1][2 * r + 1] = fmaf(w[r], x.w, acc[2 * j + 1][2 * r + 1]);
        }
      }
    }
  }
}

template <class Scalar>
__device__ __forceinline__ int sum_column(int n, int e) {
  if constexpr (kTensorCore<Scalar>) return fragment_column(n, e);
  else return n / 2 * 16 + lane() % 4 * 4 + n % 2 * 2 + e % 2;
}

// Multiplies sums by a factor for each of the thread's two rows.
template <int C>
__device__ __forceinline__ void multiply_by(float (&sums)[C / 8][4], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < C / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] *= factor[e / 2];
}
}  // namespace trifuse::cuda
