// A barrier across blocks that are all resident, as in a cooperative launch.

#pragma once

#include "cuda/ptx.cuh"

namespace trifuse::cuda {

// All threads of all blocks call arrive(), then wait(), any number of times. After wait() every
// thread can read data that was written to global memory before arrive(), but not through __ldg.
// Work between the two calls overlaps with the wait.
//
// The wait cannot be interrupted if a block fails, and need not be. Device code does not throw, and
// a trap or a fault in one block ends the whole grid with an error. A grid whose blocks are not all
// resident is refused at launch; in such a grid, a block would wait for one that has not started.
//
// `arrivals` must be 0 at launch and is never reset; 2^32 arrivals are enough for any call. Blocks
// must be one-dimensional.
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
