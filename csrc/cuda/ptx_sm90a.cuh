// As ptx.cuh, for instructions of sm_90a: barriers in shared memory, copies of tiles by the copy
// engine (TMA), and products by four warps at a time.

#pragma once

#include <cuda.h>

#include "cuda/ptx.cuh"

namespace trifuse::cuda {

// Barriers in shared memory (mbarrier) ------------------------------------------------------------

// A phase of a barrier is over when all arrivals for which it was initialised have happened, and
// all bytes that they expect have arrived. Phases alternate between parity 0 and 1; the first has
// parity 0.
using SharedBarrier = uint64_t;

__device__ __forceinline__ void init_barrier(SharedBarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void arrive(SharedBarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void arrive_and_expect(SharedBarrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Makes the current phase expect bytes, without an arrival.
__device__ __forceinline__ void expect(SharedBarrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Waits until the phase of this parity is over. On a new barrier, parity 1 counts as over.
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

// Makes the thread's writes to shared memory, initialised barriers included, visible to the copy
// engine and to the products below. Products that other threads start need a barrier as well.
__device__ __forceinline__ void fence_for_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Copies of tiles (TMA) ---------------------------------------------------------------------------

// Starts to copy the box of a tensor at coordinates (c0, c1, c2, c3), innermost first; zeros past
// the ends. Called by one thread. The bytes count towards the barrier's current phase.
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

// Products of a warpgroup (wgmma) -----------------------------------------------------------------

// Products are asynchronous: from wgmma_begin to wgmma_wait no thread may touch the registers, or
// write the shared memory, that they work on. Warp w of the four holds rows 16 w to 16 w + 15 of a
// product, in mma's register layout.

// Returns the descriptor of a matrix in shared memory: groups of eight rows of 128 bytes, at a
// multiple of 1024 bytes, with chunks of 16 bytes swizzled as by copy_box with
// CU_TENSOR_MAP_SWIZZLE_128B. `stride` is the distance in bytes from eight rows to the next eight
// rows. `leading` is the distance in bytes from 64 columns to the next 64 if a product sums over
// rows, and is ignored otherwise.
__device__ __forceinline__ uint64_t
describe_matrix(const void* p, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1;
  return uint64_t(shared_address(p) >> 4 & 0x3FFF) | uint64_t(leading >> 4 & 0x3FFF) << 16 |
      uint64_t(stride >> 4 & 0x3FFF) << 32 | kSwizzle128 << 62;
}

// Returns the descriptor of a matrix `bytes` further on: other columns of the first eight rows, or
// other groups of eight rows. Addresses never carry into the upper half, which stays a
// compile-time constant.
__device__ __forceinline__ uint64_t advance_descriptor(uint64_t matrix, uint32_t bytes) {
  return matrix >> 32 << 32 | (static_cast<uint32_t>(matrix) + bytes / 16);
}

// Makes the compiler assume that these registers are read and written here.
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

// Called before products that work on these registers.
template <class... Registers>
__device__ __forceinline__ void wgmma_begin(Registers&... registers) {
  (touch(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Makes a group of the products since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until all but the latest `groups` groups are done; these worked on `registers`.
template <int groups, class... Registers>
__device__ __forceinline__ void wgmma_wait(Registers&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
  (touch(registers), ...);
}

// clang-format off
// A product's registers as asm operands (D) and as their numbers in the asm text (R).
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
// clang-format on

// SS: a in shared memory, b read by rows. RS: a in registers, b read by columns. Parameters that
// end in an underscore are the numbers of the operands after d's.
#define TRIFUSE_WGMMA_SS(n, type, registers, numbers, a_, b_, add_)                         \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add_                                 \
               ", 0;\n"                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" numbers \
               "}, " a_ ", " b_ ", add, 1, 1, 0, 0;\n}"                                     \
               : registers(0)                                                               \
               : "l"(a), "l"(b), "r"(int(add)))
#define TRIFUSE_WGMMA_RS(n, type, registers, numbers, a_, b_)                               \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" numbers \
               "}, {" a_ "}, " b_ ", 1, 1, 1, 1;"                                           \
               : registers(0)                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d (64, N) = a bᵀ, plus d if `add`: a (64, 16) and b (N, 16) in shared memory, row-major.
template <class Scalar, int rows>
__device__ __forceinline__ void wgmma_ss(float (&d)[rows][4], uint64_t a, uint64_t b, bool add) {
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

// d (64, N) += a b: a (64, 16) in registers as mma's a, b (16, N) in shared memory, row-major.
template <class Scalar, int rows>
__device__ __forceinline__ void wgmma_rs(float (&d)[rows][4], const uint32_t (&a)[4], uint64_t b) {
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
    else
      TRIFUSE_WGMMA_RS(256, "bf16", TRIFUSE_D128, TRIFUSE_R128, "%128, %129, %130, %131", "%132");
  }
}

// Registers between warpgroups --------------------------------------------------------------------

// Set a thread's number of registers, a multiple of 8, to fewer or more than it has. Called by all
// threads of a warpgroup. take_registers waits until other warpgroups have released enough.
template <int registers>
__device__ __forceinline__ void give_registers_back() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace trifuse::cuda
