// PTX instructions that CUDA C++ does not expose, one function each. sm_80 and up.
//
// Tests that compile the kernels for the host replace this file with models of the instructions.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace trifuse::cuda {

constexpr unsigned kAllLanes = 0xFFFFFFFF;

// Returns a block's shared memory, all of it dynamic, aligned to 1024 bytes.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char trifuse_shared_memory[];
  return trifuse_shared_memory;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Fills each half of a word with the top bit of that half's byte `from`. __byte_perm does not
// support this mode of prmt.
template <int from>
__device__ __forceinline__ uint32_t spread_bits(uint32_t x) {
  static_assert(from == 0 || from == 1);
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(x), "n"(from ? 0xBB99 : 0xAA88));
  return result;
}

// Asynchronous copies to shared memory (cp.async) -------------------------------------------------

// Copies the first `valid` bytes, 0 to 16, and sets the others to 0.
__device__ __forceinline__ void cp_async(void* to, const void* from, int valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid)
               : "memory");
}

// Makes a group of the copies since the last commit.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the thread's latest `groups` groups have arrived. Other threads see the data
// after a barrier.
template <int groups>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Prefetches a line of global memory into the L2 cache.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Matrix fragments and products (ldmatrix, mma) ---------------------------------------------------

// Loads four matrices. Lanes 8 i to 8 i + 7 point to the rows of matrix i, 16 bytes each. Lane l
// gets elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of each matrix.
__device__ __forceinline__ void ldmatrix(uint32_t (&matrix)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(shared_address(row))
               : "memory");
}

// As ldmatrix, for the transposed matrices.
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&matrix)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(shared_address(row))
               : "memory");
}

// d += a b, (16, 16) by (16, 8), accumulated in float32. Fragments as in PTX (mma.m16n8k16).
template <class Scalar>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<Scalar, __nv_bfloat16> || std::is_same_v<Scalar, __half>);
  if constexpr (std::is_same_v<Scalar, __nv_bfloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b, (16, 8) by (8, 8) in tf32: float32 with the last 13 bits taken as 0 (mma.m16n8k8).
__device__ __forceinline__ void mma_tf32(
    float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Special functions -------------------------------------------------------------------------------

// 2^x, to 2 units in the last place; denormals are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(x), to a relative error of 2^-11.
__device__ __forceinline__ float tanh_approximate(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Between blocks and warps ------------------------------------------------------------------------

// Adds with release semantics: a load_acquire of the sum makes this thread's prior writes visible.
__device__ __forceinline__ void add_release(uint32_t* p, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// Allows the stream's next kernel to begin, if it was launched to overlap with this one, once every
// block of this kernel has called this function or ended. Its blocks use the resources that the
// blocks of this kernel leave free.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the stream's previous kernel has ended and its writes can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Waits at barrier `number`, 1 to 15, until `threads` threads of the block, in whole warps, have
// arrived. Threads that only arrive continue at once.
__device__ __forceinline__ void named_barrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// As named_barrier; returns whether `predicate` holds for any of the threads.
__device__ __forceinline__ bool named_barrier_or(int number, int threads, bool predicate) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, any;\n"
      "setp.ne.s32 mine, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, mine;\n"
      "selp.s32 %0, 1, 0, any;\n"
      "}"
      : "=r"(any)
      : "r"(number), "r"(threads), "r"(int(predicate))
      : "memory");
  return any;
}

}  // namespace trifuse::cuda
