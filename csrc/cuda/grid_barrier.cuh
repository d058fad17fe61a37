// A barrier for blocks that are all resident: in a cooperative launch.

#pragma once

#include "cuda/ptx.cuh"

namespace trifuse::cuda {

// All threads of all blocks arrive, and then wait until all have: as often as they like. What was
// written to global memory before the arrival can be read after the wait by everyone, but not by
// __ldg. What a thread does in between is done while it would wait.
//
// `arrivals` is 0 at launch and counts on; 2^32 arrivals are enough for any call. Blocks have one
// dimension.
class GridBarrier {
 public:
  __device__ GridBarrier(uint32_t* arrivals, uint32_t blocks)
      : arrivals_(arrivals), blocks_(blocks) {}

  __device__ __forceinline__ void arrive() {
    __syncthreads();
    if (threadIdx.x == 0) add_release(arrivals_, 1);
    expected_ += blocks_;
  }
  __device__ __forceinline__ void wait() const {
    if (threadIdx.x == 0)
      while (load_acquire(arrivals_) < expected_) {
      }
    __syncthreads();
  }

 private:
  uint32_t* const arrivals_;
  const uint32_t blocks_;
  uint32_t expected_ = 0;
};

}  // namespace trifuse::cuda
