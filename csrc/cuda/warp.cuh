// Sums and maxima over a warp or a block, in a fixed order.

#pragma once

#include "cuda/ptx.cuh"

namespace trifuse::cuda {

// Sum over segments of `lanes` lanes, a power of 2; every lane gets the result.
template <int lanes = 32, class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int bits = lanes / 2; bits > 0; bits /= 2)
    value += __shfl_xor_sync(kAllLanes, value, bits, lanes);
  return value;
}

template <int lanes = 32>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int bits = lanes / 2; bits > 0; bits /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, bits, lanes));
  return value;
}

// Sums each of `count` values over a team of whole warps, in place. The team is a block, or one of
// at most 15 teams in a block of `block` threads. `scratch` holds `count` values per warp of the
// team. It may be reused after all threads of the team have passed another barrier.
template <int threads, int block = threads, int count, class T>
__device__ __forceinline__ void block_sum(T (&values)[count], T* scratch) {
  constexpr int warps = threads / 32;
#pragma unroll
  for (int i = 0; i < count; ++i) values[i] = warp_sum(values[i]);
  if constexpr (warps > 1) {
    const int warp = threadIdx.x / 32 % warps, lane = threadIdx.x % 32;
    if (lane < count) {
      T mine = values[0];
#pragma unroll
      for (int i = 1; i < count; ++i) mine = lane == i ? values[i] : mine;
      scratch[warp * count + lane] = mine;
    }
    if constexpr (threads == block) __syncthreads();
    else named_barrier(1 + threadIdx.x / threads, threads);
#pragma unroll
    for (int i = 0; i < count; ++i) values[i] = warp_sum<warps>(scratch[lane % warps * count + i]);
  }
}

}  // namespace trifuse::cuda
