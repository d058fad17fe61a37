// A barrier for blocks that are all resident: in a cooperative launch.

#pragma once

#include "cuda/ptx.cuh"

namespace trifuse::cuda {

// Waits until all of `blocks` blocks have come for the `phase`-th time, counted from 1. Called by all
// threads of each. What they wrote to global memory before can be read after, but not through __ldg.
//
// `arrivals` is 0 at launch and counts on; 2^32 arrivals are enough for any call.
__device__ __forceinline__ void grid_barrier(uint32_t* arrivals, uint32_t blocks, uint32_t phase) {
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
    add_release(arrivals, 1);
    while (load_acquire(arrivals) < blocks * phase) {
    }
  }
  __syncthreads();
}

}  // namespace trifuse::cuda
