// As ptx.cuh, for instructions that only sm_90a has: barriers in shared memory, copies of tiles by the
// copy engine (TMA), and products by four warps at a time.

#pragma once

#include <cuda.h>

#include "cuda/ptx.cuh"

namespace trifuse::cuda {

// Barriers in shared memory (mbarrier) -----------------------------------------------------------------

// A phase of a barrier is over when as many threads as it was made for have arrived, and as many bytes
// as they expect have come. Phases have parity 0 and 1 in turns, the first 0.
using SharedBarrier = uint64_t;

__device__ __forceinline__ void init_barrier(SharedBarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void arrive(SharedBarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void arrive_and_expect(SharedBarrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Until the phase of this parity is over; before the first, that of parity 1 is.
__device__ __forceinline__ void wait(SharedBarrier* barrier, uint32_t parity) {
  uint32_t over;
  do {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n"
        "}"
        : "=r"(over)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!over);
}

// What the thread wrote to shared memory, barriers it made included, can from here on be seen by the copy
// engine and by the products below; by others' after a barrier.
__device__ __forceinline__ void fence_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies of tiles (TMA) ---------------------------------------------------------------------------------

// A box of a tensor from these coordinates on, the first of them that of neighbours in memory; zeros past
// the ends. One thread asks for it, and its bytes come to a barrier's phase.
__device__ __forceinline__ void copy_box(
    void* to, const CUtensorMap* from, SharedBarrier* barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
      "l"(from), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Products of a warpgroup (wgmma) -----------------------------------------------------------------------

// They run behind the threads' backs: from wgmma_begin to wgmma_wait nobody may touch the registers, nor
// write the shared memory, that they work on. Warp w of the four has rows 16 w to 16 w + 15 of a product,
// laid out in its registers as mma's are.

// A matrix in shared memory for a product: eight rows of 128 bytes after another, chunks of 16 bytes
// swizzled as copy_box with CU_TENSOR_MAP_SWIZZLE_128B does, at a multiple of 1024 bytes. Counted in bytes:
// `stride` from eight rows to the next; `leading` from 64 columns to the next where a product sums over
// rows, and else of no meaning.
__device__ __forceinline__ uint64_t describe_matrix(const void* p, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1;
  return uint64_t(shared_address(p) >> 4 & 0x3FFF) | uint64_t(leading >> 4 & 0x3FFF) << 16 |
      uint64_t(stride >> 4 & 0x3FFF) << 32 | kSwizzle128 << 62;
}

// What begins some bytes further on: columns of the first eight rows, or rows by the eight. Addresses carry
// nothing into the upper half, which stays a constant to the compiler.
__device__ __forceinline__ uint64_t further(uint64_t matrix, uint32_t bytes) {
  return matrix >> 32 << 32 | (static_cast<uint32_t>(matrix) + bytes / 16);
}

// Makes the compiler take these registers for read and written here.
template <class T, int rows, int columns>
__device__ __forceinline__ void touch(T (&registers)[rows][columns]) {
#pragma unroll
  for (int i = 0; i < rows; ++i)
#pragma unroll
    for (int j = 0; j < columns; ++j) {
      if constexpr (std::is_same_v<T, float>) asm volatile("" : "+f"(registers[i][j])::"memory");
      else asm volatile("" : "+r"(registers[i][j])::"memory");
    }
}

// Before products that work on these registers.
template <class... Registers>
__device__ __forceinline__ void wgmma_begin(Registers&... registers) {
  (touch(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Those since the last commit become a group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until all but the latest groups are done, which worked on these registers.
template <int groups, class... Registers>
__device__ __forceinline__ void wgmma_wait(Registers&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
  (touch(registers), ...);
}

// The registers of a product, 4 or 32 of them in a piece, as operands and by their numbers.
#define TRIFUSE_D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define TRIFUSE_D32(i)                                                                   \
  TRIFUSE_D4(i), TRIFUSE_D4(i + 1), TRIFUSE_D4(i + 2), TRIFUSE_D4(i + 3), TRIFUSE_D4(i + 4), \
      TRIFUSE_D4(i + 5), TRIFUSE_D4(i + 6), TRIFUSE_D4(i + 7)
#define TRIFUSE_D64(i) TRIFUSE_D32(i), TRIFUSE_D32(i + 8)
#define TRIFUSE_D128(i) TRIFUSE_D64(i), TRIFUSE_D64(i + 16)
#define TRIFUSE_TEN(tens)                                                                    \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" \
      #tens "7, %" #tens "8, %" #tens "9, "
#define TRIFUSE_R32 TRIFUSE_TEN() TRIFUSE_TEN(1) TRIFUSE_TEN(2) "%30, %31"
#define TRIFUSE_R64                                                             \
  TRIFUSE_TEN() TRIFUSE_TEN(1) TRIFUSE_TEN(2) TRIFUSE_TEN(3) TRIFUSE_TEN(4) TRIFUSE_TEN(5) \
  "%60, %61, %62, %63"
#define TRIFUSE_R128                                                                            \
  TRIFUSE_TEN() TRIFUSE_TEN(1) TRIFUSE_TEN(2) TRIFUSE_TEN(3) TRIFUSE_TEN(4) TRIFUSE_TEN(5)      \
  TRIFUSE_TEN(6) TRIFUSE_TEN(7) TRIFUSE_TEN(8) TRIFUSE_TEN(9) TRIFUSE_TEN(10) TRIFUSE_TEN(11)   \
  "%120, %121, %122, %123, %124, %125, %126, %127"

// a from shared memory and b by its rows; then a from registers and b by its columns. What ends in an
// underscore are the numbers of the operands after d's.
#define TRIFUSE_WGMMA_SS(n, type, registers, numbers, a_, b_, add_)                                  \
  asm volatile(                                                                                      \
      "{\n.reg .pred add;\nsetp.ne.b32 add, " add_ ", 0;\n"                                          \
      "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" numbers "}, " a_ ", " b_ \
      ", add, 1, 1, 0, 0;\n}"                                                                        \
      : registers(0)                                                                                 \
      : "l"(a), "l"(b), "r"(int(add)))
#define TRIFUSE_WGMMA_RS(n, type, registers, numbers, a_, b_)                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" numbers "}, {" a_ \
               "}, " b_ ", 1, 1, 1, 1;"                                                              \
               : registers(0)                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d (64, N) = a bᵀ, plus d if `add`: a (64, 16) and b (N, 16) in shared memory, rows along their rows.
template <class Scalar, int rows>
__device__ __forceinline__ void wgmma_rows(float (&d)[rows][4], uint64_t a, uint64_t b, bool add) {
  constexpr int N = 8 * rows;
  static_assert(N == 64 || N == 128);
  if constexpr (std::is_same_v<Scalar, __half>) {
    if constexpr (N == 64)
      TRIFUSE_WGMMA_SS(64, "f16", TRIFUSE_D32, TRIFUSE_R32, "%32", "%33", "%34");
    else TRIFUSE_WGMMA_SS(128, "f16", TRIFUSE_D64, TRIFUSE_R64, "%64", "%65", "%66");
  } else {
    if constexpr (N == 64)
      TRIFUSE_WGMMA_SS(64, "bf16", TRIFUSE_D32, TRIFUSE_R32, "%32", "%33", "%34");
    else TRIFUSE_WGMMA_SS(128, "bf16", TRIFUSE_D64, TRIFUSE_R64, "%64", "%65", "%66");
  }
}

// d (64, N) += a b: a (64, 16) in registers, laid out as mma's a, and b (16, N) in shared memory.
template <class Scalar, int rows>
__device__ __forceinline__ void wgmma_columns(
    float (&d)[rows][4], const uint32_t (&a)[4], uint64_t b) {
  constexpr int N = 8 * rows;
  static_assert(N == 64 || N == 128 || N == 256);
  if constexpr (std::is_same_v<Scalar, __half>) {
    if constexpr (N == 64)
      TRIFUSE_WGMMA_RS(64, "f16", TRIFUSE_D32, TRIFUSE_R32, "%32, %33, %34, %35", "%36");
    else if constexpr (N == 128)
      TRIFUSE_WGMMA_RS(128, "f16", TRIFUSE_D64, TRIFUSE_R64, "%64, %65, %66, %67", "%68");
    else TRIFUSE_WGMMA_RS(256, "f16", TRIFUSE_D128, TRIFUSE_R128, "%128, %129, %130, %131", "%132");
  } else {
    if constexpr (N == 64)
      TRIFUSE_WGMMA_RS(64, "bf16", TRIFUSE_D32, TRIFUSE_R32, "%32, %33, %34, %35", "%36");
    else if constexpr (N == 128)
      TRIFUSE_WGMMA_RS(128, "bf16", TRIFUSE_D64, TRIFUSE_R64, "%64, %65, %66, %67", "%68");
    else TRIFUSE_WGMMA_RS(256, "bf16", TRIFUSE_D128, TRIFUSE_R128, "%128, %129, %130, %131", "%132");
  }
}

// Registers between warpgroups --------------------------------------------------------------------------

// Leaves a thread so many registers, a multiple of 8, fewer or more than it has; all threads of a
// warpgroup do it. More can be had once others have given theirs back.
template <int registers>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace trifuse::cuda
