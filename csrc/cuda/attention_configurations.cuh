// Tile sizes of the attention kernels, and the limits that bound them.
//
// D is the padded head dimension. KiB are those of a block's shared memory.

#pragma once

#include <cstddef>

#include "cuda/attention_fragments.cuh"

namespace trifuse::cuda {

// The masks of a call that a kernel reads.
enum class Masks {
  None,
  One,           // a mask, or a relative bias in its place
  OneAndTables,  // also tables that an index reads
  Two,           // also a relative bias beside a mask
  TwoForHeads,   // as Two, in a kernel whose rows may be heads, each with a bias of its own
};

// Whether a kernel serves calls with tables. What depends on them asks its kernel, not the call:
// the test would take registers from the others.
constexpr bool reads_tables(Masks masks) { return masks == Masks::OneAndTables; }

// The kernels for the widest heads serve all calls with a relative bias beside a mask. In the other
// kernels for any width it would take registers from calls without one. They also serve all calls
// with tables, from code of their own, which is made for one width to keep the library small.
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
// From 80 KiB on, twice the keys would not fit. The other tiles are smaller than memory allows.
template <class Scalar, int D>
struct ForwardShape {
  static constexpr int kWarps = !kTensorCore<Scalar> && D == 256 ? 2 : 4;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int N = kTensorCore<Scalar> ? (D == 256 ? 32 : 64) : (D == 256 ? 16 : 32);
  static constexpr size_t kShared = (kRows + 4 * N) * D * sizeof(Scalar);
  static_assert(kShared <= kMostShared);
};

// A block's own rows are the rows of one key head, at most kRows; each warp streams its own tiles
// of N keys and their values through two stages. N fills a block's stages with 64 KiB, so that one
// block alone keeps a multiprocessor's share of memory busy, and a Hopper GPU holds three.
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

// A block's own rows are those of two tensors, k and v or q and dO, and so are a stage's.
//
//             16 bits         float32
//   D       rows  N  KiB    rows  N  KiB
//   64       64  32   32     64  32   64
//   128      64  32   64     64  16   96
//   256      64  16   96     32   8   96
//
// At 96 KiB, twice the N would not fit; in float32 at D = 256, 64 rows of two tensors alone would
// take 128 KiB. The other tiles are smaller than memory allows.
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

// The shape of kernels in which only the tiles' pitch depends on the head dimension: one for all.
// At D = 256 the rows kernel takes (kRows + 2 N) · D elements, 64 KiB; the mask kernel takes
// (2 kRows + 2 N) · D, 96 KiB, and in float32 2 KiB more for its totals.
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

// N is the number of keys per tile. Consumers hide one another's softmax: there are as many as
// registers allow. Of four, each has 112 registers, and at D = 64 its sums and a tile's scores and
// weights take 80; code that reads masks would not fit beside them, so only plain kernels have
// four. Of three, each has 152, and at D = 128 those take 112. At D = 256 they take 176. A block
// takes 105, 183 and 195 KiB, and at D = 64 with a mask 95.
template <int D, bool kPlain>
struct HopperForwardShape {
  static constexpr int kConsumers = D == 256 ? 2 : D == 64 && kPlain ? 4 : 3;
  static constexpr int N = 64;
  static constexpr int kStages = D == 256 ? 2 : 4;
  static constexpr int kProducerRegisters = kConsumers == 4 ? 32 : 56;
};

// N is the number of columns per tile. A block takes 108 KiB at D = 64 and 204 at 128. By key at
// D = 128 a consumer's arrays are largest, 224 numbers a thread: both sums, a tile's scores and
// products, and their packed factors. There the producer keeps fewest registers.
struct HopperBackwardShape {
  static constexpr int kConsumers = 2, N = 64, kStages = 4;
  template <bool kByKey, int D>
  static constexpr int kProducerRegisters = kByKey && D == 128 ? 56 : 72;
};

}  // namespace trifuse::cuda
