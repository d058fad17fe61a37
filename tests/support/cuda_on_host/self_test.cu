// Kernels that test the model of CUDA, with correct and with faulty code.
//
// A C function launches each kernel, and returns the message of a thrown exception, or null.

#include <exception>
#include <string>

#include "cuda/grid_barrier.cuh"
#include "cuda/launch.h"
#include "cuda/ptx_sm90a.cuh"
#include "cuda/tensor_map.h"
#include "cuda/warp.cuh"

namespace {

using namespace trifuse::cuda;

LaunchPlan plan(const char* kernel, unsigned blocks, unsigned threads, size_t shared) {
  return {.kernel = kernel, .sizes = {}, .grid = blocks, .block = threads, .shared = shared};
}

// Reverses a row of `blockDim.x` numbers through shared memory.
template <bool kBarrier>
__global__ void reverse(const float* from, float* to) {
  float* row = reinterpret_cast<float*>(shared_memory());
  row[threadIdx.x] = from[blockIdx.x * blockDim.x + threadIdx.x];
  if (kBarrier) __syncthreads();
  to[blockIdx.x * blockDim.x + threadIdx.x] = row[blockDim.x - 1 - threadIdx.x];
}

// Rotates a row by two numbers, one at a time, through shared memory that each thread uses twice.
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
  for (int i = 0; i < 4; ++i) to[128 + 4 * threadIdx.x + i] = row[128 + 4 * threadIdx.x + i];
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

// Every block adds its index to a sum, and reads the sum after all blocks have added theirs.
template <bool kBarrier>
__global__ void sum_of_blocks(uint32_t* arrivals, float* sum, float* to) {
  GridBarrier others(arrivals, gridDim.x);
  const auto meet = [&] {
    if (!kBarrier) return;
    others.arrive();
    others.wait();
  };
  for (int round = 0; round < 3; ++round) {
    if (threadIdx.x == 0) atomicAdd(sum, static_cast<float>(blockIdx.x));
    meet();
    to[round * gridDim.x + blockIdx.x] = *sum;
    meet();
  }
}

// Warps 0 and 1 pass numbers to warps 2 and 3; only warps 2 and 3 wait.
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

// For each lane: sum, maximum, value of lane 5 and of both neighbours, votes, sum over 8 lanes.
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

// Multiplies (16, 16) by (16, 8) in 16 bits; b is stored as (16, 8) if kTransposed, else (8, 16).
template <class Scalar, bool kTransposed>
__global__ void multiply(const uint16_t* a, const uint16_t* b, float* d) {
  auto* shared = reinterpret_cast<uint16_t*>(shared_memory());  // a, then b; rows of 16 or 8
  for (int i = threadIdx.x; i < 256; i += 32) shared[i] = a[i];
  for (int i = threadIdx.x; i < 128; i += 32) shared[256 + i] = b[i];
  __syncwarp();
  const int lane = threadIdx.x;
  uint32_t of_a[4], of_b[4];
  ldmatrix(of_a, shared + lane % 16 * 16 + lane / 16 * 8);
  // The last two of the four matrices repeat the first two.
  if (kTransposed) ldmatrix_transposed(of_b, shared + 256 + lane % 16 * 8);
  else ldmatrix(of_b, shared + 256 + lane % 8 * 16 + lane / 8 % 2 * 8);
  float sum[4] = {};
  mma<Scalar>(sum, of_a, {of_b[0], of_b[1]});
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

// Multiplies (16, 8) by (8, 8) in float32, truncated to tf32.
__global__ void multiply_tf32(const float* a, const float* b, float* d) {
  const int group = threadIdx.x / 4, within = threadIdx.x % 4;
  uint32_t of_a[4], of_b[2];
  for (int i = 0; i < 4; ++i)
    of_a[i] = __float_as_uint(a[(group + i % 2 * 8) * 8 + within + i / 2 * 4]);
  for (int i = 0; i < 2; ++i) of_b[i] = __float_as_uint(b[(within + 4 * i) * 8 + group]);
  float sum[4] = {};
  mma_tf32(sum, of_a, of_b);
  for (int i = 0; i < 4; ++i) d[(group + i / 2 * 8) * 8 + within * 2 + i % 2] = sum[i];
}

// x in bfloat16 and float16, and the special function unit's exp2, tanh, rsqrt, exp, log and 1/x.
__global__ void convert(const float* x, float* to, int n) {
  for (int i = threadIdx.x; i < n; i += 32) {
    const float results[] = {
        __bfloat162float(__float2bfloat16_rn(x[i])),
        __half2float(__float2half_rn(x[i])),
        exp2_approximate(x[i]),
        tanh_approximate(x[i]),
        rsqrtf(x[i]),
        __expf(x[i]),
        __logf(x[i]),
        __fdividef(1.0f, x[i])};
    for (int j = 0; j < 8; ++j) to[8 * i + j] = results[j];
  }
}

// Stores whether any thread of its pair of warps, and any of the block, has a positive number.
__global__ void votes(const float* from, float* to) {
  const bool positive = from[threadIdx.x] > 0;
  const bool of_pair = named_barrier_or(1 + threadIdx.x / 64, 64, positive);
  to[threadIdx.x] = of_pair + 2 * __syncthreads_or(positive);
}

__global__ void arrive_for_nobody() { named_barrier_arrive(3, 64); }

// Copies eight boxes (16, 64), one after the other, through one tile in shared memory: warp 0
// starts the copies, warp 1 writes the boxes to `to`, row by row.
template <bool kWaitUntilFull, bool kWaitUntilEmpty>
__global__ void copy_boxes(const __grid_constant__ CUtensorMap map, uint16_t* to, int column) {
  auto* tile = reinterpret_cast<uint16_t*>(shared_memory());
  auto* full = reinterpret_cast<SharedBarrier*>(shared_memory() + 2048);
  SharedBarrier* empty = full + 1;
  if (threadIdx.x == 0) {
    init_barrier(full, 1);
    init_barrier(empty, 32);
    fence_for_async();
  }
  __syncthreads();
  for (int i = 0; i < 8; ++i) {
    const uint32_t parity = i % 2;
    if (threadIdx.x == 0) {
      if (kWaitUntilEmpty) wait(empty, parity ^ 1);
      arrive_and_expect(full, 2048);
      copy_box(tile, &map, full, column, 16 * (i % 2), i / 2 % 2, i / 4);
    } else if (threadIdx.x >= 32) {
      if (kWaitUntilFull) wait(full, parity);
      for (int at = threadIdx.x - 32; at < 1024; at += 32) {
        const int row = at / 64, chunk = at % 64 / 8 ^ row % 8;
        to[1024 * i + at] = tile[64 * row + 8 * chunk + at % 8];
      }
      arrive(empty);
    }
  }
}

__global__ void copy_for_nobody(const __grid_constant__ CUtensorMap map) {
  auto* full = reinterpret_cast<SharedBarrier*>(shared_memory() + 2048);
  if (threadIdx.x == 0) {
    init_barrier(full, 1);
    arrive_and_expect(full, 2048);
    copy_box(shared_memory(), &map, full, 0, 0, 0, 0);
  }
}

// Address of an element of a swizzled tile with rows of 64 numbers.
__device__ uint16_t* at(uint16_t* tile, int row, int column) {
  return tile + 64 * row + ((column / 8 ^ row % 8) * 8 + column % 8);
}

enum Fault { kNone, kNoBegin, kNoWait, kSum, kFactor, kStride, kLeading, kOneWarp };

// Multiplies (64, 64) by (64, 128) in 16 bits. If kByRows, a is in shared memory and b is stored as
// its transpose, (128, 64); else a is in registers. b lies in panels of 64 columns.
template <class Scalar, bool kByRows>
__global__ void multiply_of_warpgroup(const uint16_t* a, const uint16_t* b, float* d, int fault) {
  auto* of_a = reinterpret_cast<uint16_t*>(shared_memory());
  uint16_t* of_b = of_a + 4096;
  for (int i = threadIdx.x; i < 4096; i += 128) *at(of_a, i / 64, i % 64) = a[i];
  for (int i = threadIdx.x; i < 8192; i += 128) {
    if (kByRows) *at(of_b, i / 64, i % 64) = b[i];
    else *at(of_b + i / 64 % 2 * 4096, i / 128, i % 64) = b[i];
  }
  fence_for_async();
  __syncthreads();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  uint32_t fragments[4][4];
  for (int k = 0; k < 4; ++k)
    for (int i = 0; i < 4; ++i)
      memcpy(&fragments[k][i], a + (row + i % 2 * 8) * 64 + 16 * k + i / 2 * 8 + lane % 4 * 2, 4);
  float sum[16][4] = {};
  const uint32_t stride = fault == kStride ? 512 : 1024, leading = fault == kLeading ? 4096 : 8192;
  if (fault != kNoBegin) wgmma_begin(sum, fragments);
  for (int k = 0; k < (fault == kOneWarp && threadIdx.x < 32 ? 3 : 4); ++k) {
    const uint64_t of = describe_matrix(of_b, leading, stride);
    if (kByRows) wgmma_ss<Scalar>(sum, describe_matrix(of_a, 0, 1024) + 2 * k, of + 2 * k, k > 0);
    else wgmma_rs<Scalar>(sum, fragments[k], of + 128 * k);
  }
  wgmma_commit();
  const float early = sum[0][0];
  if (fault == kSum) sum[0][0] = 1;
  if (fault == kFactor) fragments[3][3] = 0;
  wgmma_wait<0>(sum, fragments);
  if (fault == kNoWait) sum[0][0] = early;
  for (int n = 0; n < 16; ++n)
    for (int e = 0; e < 4; ++e)
      d[(row + e / 2 * 8) * 128 + 8 * n + lane % 4 * 2 + e % 2] = sum[n][e];
}

// Three warpgroups start with 168 registers per thread. One gives some back; the others take more.
template <int taken>
__global__ void hand_registers_over() {
  if (threadIdx.x < 128) give_registers_back<40>();
  else take_registers<taken>();
}

MappedTensor mapped(void* data, int64_t rows, int64_t columns, int64_t row_stride) {
  return {
      trifuse::DType::Float16,
      data,
      {2, 2, rows, columns},
      {2 * rows * row_stride, rows * row_stride, row_stride, 1}};
}

// Runs a test; returns the message of the exception that it throws, or null.
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

#define TEST(name, parameters, ...)                                                      \
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
TEST(diverge, (), { launch(plan("diverge", 1, 32, 0), nullptr, diverge); })
TEST(diverge_by_place, (), {
  launch(plan("diverge_by_place", 1, 32, 0), nullptr, diverge_by_place);
})
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
  const auto kernel = bfloat16
      ? transposed ? multiply<__nv_bfloat16, true> : multiply<__nv_bfloat16, false>
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
TEST(too_much_shared_memory, (), { launch(plan("diverge", 1, 32, 1 << 20), nullptr, diverge); })
TEST(votes, (const float* from, float* to), {
  launch(plan("votes", 1, 128, 0), nullptr, votes, from, to);
})
TEST(arrive_for_nobody, (), {
  launch(plan("arrive_for_nobody", 1, 32, 0), nullptr, arrive_for_nobody);
})
TEST(
    copy_boxes,
    (uint16_t* from, uint16_t* to, int rows, int columns, int stride, int column, bool full,
     bool empty),
    {
      const auto kernel = !full ? copy_boxes<false, true>
          : empty               ? copy_boxes<true, true>
                                : copy_boxes<true, false>;
      const CUtensorMap map = make_tensor_map(mapped(from, rows, columns, stride), 16);
      launch(plan("copy_boxes", 1, 64, 2064), nullptr, kernel, map, to, column);
    })
TEST(copy_for_nobody, (uint16_t* from), {
  const CUtensorMap map = make_tensor_map(mapped(from, 16, 64, 64), 16);
  launch(plan("copy_for_nobody", 1, 32, 2064), nullptr, copy_for_nobody, map);
})
TEST(has_tensor_map, (uint16_t* from, int rows, int columns, int stride, bool* answer), {
  *answer = has_tensor_map(mapped(from, rows, columns, stride));
  if (!*answer) make_tensor_map(mapped(from, rows, columns, stride), 16);
})
TEST(
    multiply_of_warpgroup,
    (const uint16_t* a, const uint16_t* b, float* d, bool bfloat16, bool by_rows, int fault), {
      const auto kernel = bfloat16 ? by_rows ? multiply_of_warpgroup<__nv_bfloat16, true>
                                             : multiply_of_warpgroup<__nv_bfloat16, false>
          : by_rows                ? multiply_of_warpgroup<__half, true>
                                   : multiply_of_warpgroup<__half, false>;
      launch(plan("multiply_of_warpgroup", 1, 128, 24576), nullptr, kernel, a, b, d, fault);
    })
TEST(hand_registers_over, (bool too_many), {
  const auto kernel = too_many ? hand_registers_over<240> : hand_registers_over<232>;
  launch(plan("hand_registers_over", 1, 384, 0), nullptr, kernel);
})
