// Tile sizes of the attention kernels, and the limits that bound them.
//
// D is the padded head dimension. KiB is the size of a block's shared memory.

#pragma once

#include <cstddef>

#include "cuda/attention.h"
#include "cuda/attention_fragments.cuh"

namespace trifuse::cuda {

// The masks of a call that a kernel reads.
enum class Masks {
  None,
  One,           // a mask, or a relative bias in its place
  OneAndTables,  // also tables that an index reads
  Two,           // also a relative bias beside a mask
  TwoForHeads,   // as Two, in a kernel whose rows may be heads, each with its own bias
  All,           // as Two, or tables beside a mask, in Hopper's kernels; these also cap scores
};

// Whether a kernel serves calls with tables. Code that depends on tables tests the kernel, not the
// call, because testing the call would take registers from the other kernels.
constexpr bool reads_tables(Masks masks) {
  return masks == Masks::OneAndTables || masks == Masks::All;
}

// Whether a call has tables, in a kernel that reads kMasks. Only with Masks::All does the call
// decide.
template <Masks kMasks>
constexpr bool has_tables(const AttentionProblem& p) {
  return kMasks == Masks::OneAndTables || (kMasks == Masks::All && p.relative_index);
}

// The general kernels for the widest heads serve the calls with a relative bias beside a mask,
// whatever their head_dim. In the other kernels the bias would take registers from calls without
// one. The kernels for the widest heads also serve all calls with tables, with separate code, which
// is compiled for one width to keep the library small.
constexpr int kWidest = 256;
template <int D>
constexpr Masks kMasksOf = D == kWidest ? Masks::Two : Masks::One;

// Kernels for any GPU -----------------------------------------------------------------------------
//
// A block has 16 · kWarps rows of its own; tiles of N rows of the other side stream through two
// stages. Compute capabilities 8.6, 8.9 and 12.0 give a block the least shared memory: 99 KiB.
constexpr size_t kMostShared = 99 << 10;

// A block's own rows are queries; a stage holds keys and values.
//
//             16 bits         float32
//   D       rows  N  KiB    rows  N  KiB
//   64       64  64   40     64  32   48
//   128      64  64   80     64  32   96
//   256      64  32   96     32  16   96
//
// From 80 KiB on, twice the keys would not fit. The other tiles are smaller than the memory allows.
template <class Scalar, int D>
struct ForwardShape {
  static constexpr int kWarps = !kTensorCore<Scalar> && D == 256 ? 2 : 4;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int N = kTensorCore<Scalar> ? (D == 256 ? 32 : 64) : (D == 256 ? 16 : 32);
  static constexpr size_t kShared = (kRows + 4 * N) * D * sizeof(Scalar);
  static_assert(kShared <= kMostShared);
};

// A block's own rows are the rows of one key head, at most kRows; each warp streams its own tiles
// of N keys and their values through two stages. N fills a block's stages with 64 KiB. So a single
// block uses a multiprocessor's whole share of memory bandwidth, and a multiprocessor of a Hopper
// GPU holds three blocks.
//
//   D       warps  N  KiB
//   64        4   32   66
//   128       4   16   68
//   256       2   16   72
template <int D>
struct DecodingShape {
  static constexpr int kWarps = D == 256 ? 2 : 4;
  static constexpr int kRows = 16;
  static constexpr int N = D == 64 ? 32 : 16;
  static constexpr size_t kShared = (kRows + kWarps * 4 * N) * D * 2;
  static_assert(kShared <= kMostShared);
};

// A block's own rows are rows of two tensors, k and v or q and dO, and so are the rows of a stage.
//
//             16 bits         float32
//   D       rows  N  KiB    rows  N  KiB
//   64       64  32   32     64  32   64
//   128      64  32   64     64  16   96
//   256      64  16   96     32   8   96
//
// At 96 KiB, twice the N would not fit; in float32 at D = 256, 64 rows of two tensors alone would
// take 128 KiB. The other tiles are smaller than the memory allows.
template <class Scalar, int D>
struct BackwardShape {
  static constexpr int kWarps = !kTensorCore<Scalar> && D == 256 ? 2 : 4;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int N = kTensorCore<Scalar> ? (D == 256 ? 16 : 32)
                                               : (D == 64        ? 32
                                                      : D == 128 ? 16
                                                                 : 8);
  static constexpr size_t kShared = (2 * kRows + 4 * N) * D * sizeof(Scalar);
  static_assert(kShared <= kMostShared);
  // Columns of dK and dV per block. A thread's sums of 128 columns of both take 128 registers; of
  // 256 columns they would take 256, and a thread has 255.
  static constexpr int kColumns = D < 128 ? D : 128;
};

// The shape of kernels in which only the tiles' pitch depends on the head dimension. It is the same
// for all. At D = 256 the rows kernel takes (kRows + 2 N) · D elements, 64 KiB; the mask kernel
// takes (2 kRows + 2 N) · D, 96 KiB, and in float32 2 KiB more for its totals.
template <class Scalar>
struct WideShape {
  static constexpr int kWarps = kTensorCore<Scalar> ? 4 : 2;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int N = kTensorCore<Scalar> ? 32 : 16;
};

// Kernels for Hopper GPUs -------------------------------------------------------------------------
//
// attention_hopper.cuh describes the blocks. Compute capability 9.0 gives a block 227 KiB.
constexpr size_t kMostSharedHopper = 227 << 10;

// N is the number of keys per tile. Consumers hide one another's softmax, so there are as many as
// the registers allow. With four consumers, each thread has 112 registers, and at D = 64 its sums
// and a tile's scores and weights take 80. Code that reads masks would not fit beside them, so only
// plain kernels have four consumers. With three, each thread has 152, and at D = 128 these arrays
// take 112. At D = 256 they take 176. With Masks::All there are two consumers at any D, because the
// numbers of tables, and tanh, need registers. A block takes 105, 183 and 195 KiB, and at D = 64
// with a mask 95.
template <int D, Masks kMasks>
struct HopperForwardShape {
  static constexpr int kConsumers = D == 256 || kMasks == Masks::All ? 2
      : D == 64 && kMasks == Masks::None                             ? 4
                                                                     : 3;
  static constexpr int N = 64;
  static constexpr int kStages = D == 256 ? 2 : 4;
  static constexpr int kProducerRegisters = kConsumers == 4 ? 32 : 56;
};

// N is the number of columns per tile. A block takes 108 KiB at D = 64 and 204 at 128. By key at
// D = 128 a consumer's arrays are largest, 224 numbers a thread: both sums, a tile's scores and
// products, and their packed factors. There the producer keeps the fewest registers. ptxas
// spills 120 bytes of a thread, and 208 with Masks::All.
struct HopperBackwardShape {
  static constexpr int kConsumers = 2, N = 64, kStages = 4;
  template <bool kByKey, int D>
  static constexpr int kProducerRegisters = kByKey && D == 128 ? 56 : 72;
};

}  // namespace trifuse::cuda
