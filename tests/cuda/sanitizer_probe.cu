// This program has two correct patterns that compute-sanitizer reports as errors. To see it, on a
// GPU of compute capability 9.0:
//
//   nvcc -std=c++20 -gencode=arch=compute_90a,code=sm_90a -Icsrc tests/cuda/sanitizer_probe.cu
//   compute-sanitizer --tool racecheck ./a.out handover
//   compute-sanitizer --tool synccheck ./a.out two-places
//
// With CUDA 13.0 both report errors. So `benchmarks/gpu.sh` keeps racecheck off the attention
// kernels that hand tiles over by barriers in shared memory, and these kernels have no named
// barrier of a whole block that they reach in two places.

#include <cstdio>
#include <cstring>

#include "cuda/ptx_sm90a.cuh"

namespace {

using namespace trifuse::cuda;

// Four warps write 128 numbers, three times; a fifth warp reads them each time before they are
// overwritten. `full` and `empty` order the writes and the reads.
__global__ void hand_over(int* out) {
  __shared__ int numbers[128];
  __shared__ SharedBarrier full, empty;
  if (threadIdx.x == 0) {
    init_barrier(&full, 1);
    init_barrier(&empty, 32);
    fence_for_async();
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  int sum = 0;
  for (int i = 0; i < 3; ++i) {
    if (threadIdx.x < 128) {
      wait(&empty, i % 2 ^ 1);
      numbers[threadIdx.x] = i;
      named_barrier(1, 128);
      if (threadIdx.x == 0) arrive(&full);
    } else {
      wait(&full, i % 2);
      for (int j = 0; j < 4; ++j) sum += numbers[4 * lane + j];
      arrive(&empty);
    }
  }
  if (threadIdx.x >= 128) out[lane] = sum;
}

// All 384 threads of a block wait at one barrier, in two places of the code. Four warps have waited
// for one another before.
__global__ void meet(int* out) {
  if (threadIdx.x < 128) {
    named_barrier(2, 128);
    named_barrier(2, 128);
    named_barrier(1, 384);
    out[threadIdx.x] = 0;
  } else {
    named_barrier(1, 384);
    out[threadIdx.x] = 1;
  }
}

}  // namespace

int main(int count, char** arguments) {
  int* out;
  cudaMalloc(&out, 384 * sizeof(int));
  if (count > 1 && !std::strcmp(arguments[1], "handover")) hand_over<<<1, 160>>>(out);
  else meet<<<8, 384>>>(out);
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("%s\n", cudaGetErrorString(error));
  return error != cudaSuccess;
}
