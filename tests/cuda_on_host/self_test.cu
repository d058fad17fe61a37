// Kernels that show what the model of CUDA makes of right code, and of wrong.
//
// Each is launched by a function in C, which returns what was thrown, or null.

#include <exception>
#include <string>

#include "cuda/grid_barrier.cuh"
#include "cuda/launch.h"
#include "cuda/warp.cuh"

namespace {

using namespace trifuse::cuda;

LaunchPlan plan(const char* kernel, unsigned blocks, unsigned threads, size_t shared) {
  return {.kernel = kernel, .sizes = {}, .grid = blocks, .block = threads, .shared = shared};
}

// Turns a row of `blockDim.x` numbers around, through shared memory.
template <bool kBarrier>
__global__ void reverse(const float* from, float* to) {
  float* row = reinterpret_cast<float*>(shared_memory());
  row[threadIdx.x] = from[blockIdx.x * blockDim.x + threadIdx.x];
  if (kBarrier) __syncthreads();
  to[blockIdx.x * blockDim.x + threadIdx.x] = row[blockDim.x - 1 - threadIdx.x];
}

// Twice a number, through shared memory that each thread uses twice.
template <bool kBarrier>
__global__ void rotate_twice(const float* from, float* to) {
  float* row = reinterpret_cast<float*>(shared_memory());
  row[threadIdx.x] = from[threadIdx.x];
  __syncthreads();
  const float next = row[(threadIdx.x + 1) % blockDim.x];
  if (kBarrier) __syncthreads();
  row[threadIdx.x] = next;
  __syncthreads();
  to[threadIdx.x] = row[(threadIdx.x + 1) % blockDim.x];
}

template <bool kWait>
__global__ void copy_asynchronously(const float* from, float* to) {
  float* row = reinterpret_cast<float*>(shared_memory());
  cp_async(row + 4 * threadIdx.x, from + 4 * threadIdx.x);
  cp_async_commit();
  cp_async(row + 4 * (threadIdx.x + 32), from + 4 * (threadIdx.x + 32), 8);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) to[4 * threadIdx.x + i] = row[127 - 4 * threadIdx.x - i];
  if (kWait) cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i)
    to[128 + 4 * threadIdx.x + i] = row[128 + 4 * threadIdx.x + i];
}

__global__ void diverge() {
  if (threadIdx.x % 2) __syncthreads();
}

__global__ void diverge_by_place() {
  if (threadIdx.x % 2) __syncthreads();
  else __syncthreads();
}

__global__ void diverge_in_a_warp(float* to) {
  if (threadIdx.x < 16) to[0] = __shfl_xor_sync(kAllLanes, 1.0f, 1);
}

__global__ void write_past_shared_memory(int at) { shared_memory()[at] = 1; }

__global__ void read_misaligned(const float* from, float* to) {
  const float4 four = __ldg(reinterpret_cast<const float4*>(from + 1));
  to[0] = four.x;
}

__global__ void wait_for_nobody(uint32_t* flag) {
  while (load_acquire(flag) == 0) {
  }
}

// Every block adds its number to a sum and reads it after all have.
template <bool kBarrier>
__global__ void sum_of_blocks(uint32_t* arrivals, float* sum, float* to) {
  for (uint32_t phase = 1; phase <= 3; ++phase) {
    if (threadIdx.x == 0) atomicAdd(sum, static_cast<float>(blockIdx.x));
    if (kBarrier) grid_barrier(arrivals, gridDim.x, 2 * phase - 1);
    to[(phase - 1) * gridDim.x + blockIdx.x] = *sum;
    if (kBarrier) grid_barrier(arrivals, gridDim.x, 2 * phase);
  }
}

// Warps 0 and 1 hand numbers to warps 2 and 3, which alone wait.
__global__ void producers_and_consumers(float* to) {
  float* row = reinterpret_cast<float*>(shared_memory());
  if (threadIdx.x < 64) {
    row[threadIdx.x] = threadIdx.x;
    named_barrier_arrive(1, 128);
  } else {
    named_barrier(1, 128);
    to[threadIdx.x - 64] = row[127 - threadIdx.x];
  }
}

// Rows of 32: sum, maximum, value of lane 5, of the lane above and below, votes, sums of segments of 8.
__global__ void warp_operations(const float* from, float* to) {
  const float x = from[threadIdx.x];
  float* row = to + threadIdx.x * 8;
  row[0] = warp_sum(x);
  row[1] = warp_max(x);
  row[2] = __shfl_sync(kAllLanes, x, 5);
  row[3] = __shfl_up_sync(kAllLanes, x, 1);
  row[4] = __shfl_down_sync(kAllLanes, x, 1, 8);
  row[5] = static_cast<float>(__popc(__ballot_sync(kAllLanes, x > 0)));
  row[6] = static_cast<float>(__any_sync(kAllLanes, x > 2) + 2 * __all_sync(kAllLanes, x > -9));
  row[7] = warp_sum<8>(x);
}

__global__ void sum_over_block(const float* from, float* to) {
  float sums[2] = {from[threadIdx.x], 2 * from[threadIdx.x]};
  block_sum<128>(sums, reinterpret_cast<float*>(shared_memory()));
  to[2 * threadIdx.x] = sums[0];
  to[2 * threadIdx.x + 1] = sums[1];
}

// (16, 16) by (16, 8), both in 16 bits; b is (8, 16), its transpose, or (16, 8).
template <class Scalar, bool kTransposed>
__global__ void multiply(const uint16_t* a, const uint16_t* b, float* d) {
  auto* shared = reinterpret_cast<uint16_t*>(shared_memory());  // a, then b; rows of 16 or 8
  for (int i = threadIdx.x; i < 256; i += 32) shared[i] = a[i];
  for (int i = threadIdx.x; i < 128; i += 32) shared[256 + i] = b[i];
  __syncwarp();
  const int lane = threadIdx.x;
  uint32_t of_a[4], of_b[4];
  ldmatrix(of_a, shared + lane % 16 * 16 + lane / 16 * 8);
  // The last two of the four matrices are the first two once more.
  if (kTransposed) ldmatrix_transposed(of_b, shared + 256 + lane % 16 * 8);
  else ldmatrix(of_b, shared + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
  float sum[4] = {};
  mma<Scalar>(sum, of_a, {of_b[0], of_b[1]});
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

// (16, 8) by (8, 8) in float32 cut to tf32.
__global__ void multiply_tf32(const float* a, const float* b, float* d) {
  const int group = threadIdx.x / 4, within = threadIdx.x % 4;
  uint32_t of_a[4], of_b[2];
  for (int i = 0; i < 4; ++i)
    of_a[i] = __float_as_uint(a[(group + i % 2 * 8) * 8 + within + i / 2 * 4]);
  for (int i = 0; i < 2; ++i) of_b[i] = __float_as_uint(b[(within + 4 * i) * 8 + group]);
  float sum[4] = {};
  mma_tf32(sum, of_a, of_b);
  for (int i = 0; i < 4; ++i)
    d[(group + i / 2 * 8) * 8 + within * 2 + i % 2] = sum[i];
}

// x as bfloat16, as float16, and exp2, tanh, rsqrt, exp, log and 1/x as the special function unit has them.
__global__ void convert(const float* x, float* to, int n) {
  for (int i = threadIdx.x; i < n; i += 32) {
    const float results[] = {
        __bfloat162float(__float2bfloat16_rn(x[i])), __half2float(__float2half_rn(x[i])),
        exp2_approximate(x[i]), tanh_approximate(x[i]), rsqrtf(x[i]), __expf(x[i]), __logf(x[i]),
        __fdividef(1.0f, x[i])};
    for (int j = 0; j < 8; ++j) to[8 * i + j] = results[j];
  }
}

// Runs a test; what it throws, or null.
template <class Run>
const char* thrown_by(const Run& run) {
  static std::string message;
  try {
    run();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

#define TEST(name, parameters, ...)                                                        \
  extern "C" __attribute__((visibility("default"))) const char* test_##name parameters { \
    return thrown_by([&] { __VA_ARGS__ });                                               \
  }

TEST(reverse, (const float* from, float* to, bool barrier), {
  launch(plan("reverse", 3, 64, 256), nullptr, barrier ? reverse<true> : reverse<false>, from, to);
})
TEST(rotate_twice, (const float* from, float* to, bool barrier), {
  const auto kernel = barrier ? rotate_twice<true> : rotate_twice<false>;
  launch(plan("rotate_twice", 1, 64, 256), nullptr, kernel, from, to);
})
TEST(copy_asynchronously, (const float* from, float* to, bool wait), {
  const auto kernel = wait ? copy_asynchronously<true> : copy_asynchronously<false>;
  launch(plan("copy_asynchronously", 1, 32, 1024), nullptr, kernel, from, to);
})
TEST(diverge, (), { launch(plan("diverge", 1, 32, 0), nullptr, diverge);})
TEST(diverge_by_place, (), { launch(plan("diverge_by_place", 1, 32, 0), nullptr, diverge_by_place);})
TEST(diverge_in_a_warp, (float* to), {
  launch(plan("diverge_in_a_warp", 1, 32, 0), nullptr, diverge_in_a_warp, to);
})
TEST(write_past_shared_memory, (int at), {
  launch(plan("write_past_shared_memory", 1, 32, 64), nullptr, write_past_shared_memory, at);
})
TEST(read_misaligned, (const float* from, float* to), {
  launch(plan("read_misaligned", 1, 32, 0), nullptr, read_misaligned, from, to);
})
TEST(wait_for_nobody, (uint32_t* flag), {
  launch(plan("wait_for_nobody", 1, 32, 0), nullptr, wait_for_nobody, flag);
})
TEST(sum_of_blocks, (uint32_t* arrivals, float* sum, float* to, int blocks, bool barrier), {
  LaunchPlan together = plan("sum_of_blocks", blocks, 64, 0);
  together.cooperative = true;
  const auto kernel = barrier ? sum_of_blocks<true> : sum_of_blocks<false>;
  launch(together, nullptr, kernel, arrivals, sum, to);
})
TEST(producers_and_consumers, (float* to), {
  const LaunchPlan of = plan("producers_and_consumers", 1, 128, 256);
  launch(of, nullptr, producers_and_consumers, to);
})
TEST(warp_operations, (const float* from, float* to), {
  launch(plan("warp_operations", 1, 32, 0), nullptr, warp_operations, from, to);
})
TEST(sum_over_block, (const float* from, float* to), {
  launch(plan("sum_over_block", 1, 128, 32), nullptr, sum_over_block, from, to);
})
TEST(multiply, (const uint16_t* a, const uint16_t* b, float* d, bool bfloat16, bool transposed), {
  const auto kernel = bfloat16 ? transposed ? multiply<__nv_bfloat16, true>
                                            : multiply<__nv_bfloat16, false>
                      : transposed ? multiply<__half, true>
                                   : multiply<__half, false>;
  launch(plan("multiply", 1, 32, 768), nullptr, kernel, a, b, d);
})
TEST(multiply_tf32, (const float* a, const float* b, float* d), {
  launch(plan("multiply_tf32", 1, 32, 0), nullptr, multiply_tf32, a, b, d);
})
TEST(convert, (const float* x, float* to, int n), {
  launch(plan("convert", 1, 32, 0), nullptr, convert, x, to, n);
})
TEST(too_much_shared_memory, (), { launch(plan("diverge", 1, 32, 1 << 20), nullptr, diverge);})
