// The LSTM, the GRU and the RNN over a whole sequence in one launch, if the multiprocessors can
// hold the recurrent weights.
//
// A block owns some units of one chain, with all G gates of each, and with a projection some
// columns of h. Its part of the weights stays on the chip from the first step to the last: up to 64
// KiB of a 16-bit W_hh in registers, and the rest in shared memory. c stays with the block that
// owns the unit. All blocks need h (or m, or the gradients of the gates) of all rows, which is
// exchanged through global memory, in effect through the L2 cache. Then the blocks of a chain meet
// at a barrier, once per step or, with a projection, twice or three times. Each chain has its own
// barriers. The grid is cooperative. A call whose blocks can't all be resident gets no plan, and is
// never launched.
//
// Chains that are layers of a stack run as a wavefront. A launch is a chunk of steps, in which each
// layer is one chunk behind the layer that it reads. Between launches the caller multiplies a
// layer's output by W_ih of the next layer. L layers then take as long as T steps and L - 1 chunks
// of one layer. To run without launches in between, each layer except the first would also have to
// hold its W_ih, which doubles the weights.
//
// Products are computed for 16 rows at a time. The warps split the contraction, and write partial
// sums to shared memory that are added up in order, so results are reproducible bit for bit. 16-bit
// types use mma.sync with float32 accumulators; float32 uses fused multiply-adds, because no matrix
// unit multiplies it exactly.
//
// In the backward, every block reads the gradients of all gates and computes the gradient of its
// own columns of h. If a projection makes h small, these gradients are much larger than h. Then the
// blocks of a chain form groups. A block reads only the gradients of its group's gates, and
// multiplies them by its share, within the group, of the columns of h. Blocks with the same number
// in each group, called peers, have the same columns, and each of them adds up the groups' sums for
// its own part of these.
//
// Floor, per step: for every 16 rows, one read of the weights that are not in registers from shared
// memory, at 128 bytes a clock; h, B · R numbers, or in the backward without a projection up to
// four times as many, read by every block from the L2 cache; with a projection also m, or the
// gradients of a group's gates; one to three barriers of about 1.2 µs each.

#include <algorithm>

#include "cuda/grid_barrier.cuh"
#include "cuda/launch.h"
#include "cuda/lstm_units.cuh"

namespace trifuse::cuda {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kProductRows = 16;
constexpr int kTiles = 8;  // the most tiles of 8 columns that a warp has
constexpr int64_t kMaxColumns = kWarps * kTiles * 8;
// The number of 16-byte pieces of W_hh that a lane can hold in registers, as operands of the matrix
// unit.
template <class Scalar>
constexpr int kHeldPieces = sizeof(Scalar) == 2 ? 16 : 0;
// Distance between the counters of two barriers: a cache line.
constexpr int kCounterStride = LstmSequence::kArrivals / LstmSequence::kBarriers;

// One block's columns of a weight matrix, K deep, in pieces of 16 bytes: (chunks, columns, 4). The
// groups of warps split the columns; the warps of a group split the chunks. The first chunks of a
// warp may stay in its registers; the others lie in shared memory.
template <class Scalar>
struct Slice {
  static constexpr int kPiece = 16 / sizeof(Scalar);  // numbers in 16 bytes
  static constexpr int kChunk = 4 * kPiece;
  int64_t K;
  int columns;
  int groups, splits;    // groups of warps, and warps per group
  int chunks;            // in all
  int chunks_per_split;  // the last splits may have fewer
  int held_chunks;       // per split, in registers
  uint4* pieces;         // the pieces in shared memory

  // A lane may hold up to `held_pieces` in registers.
  __host__ __device__ Slice(int64_t columns, int64_t K, int held_pieces)
      : K(K), columns(static_cast<int>(columns)), groups(1),
        chunks(static_cast<int>((K + kChunk - 1) / kChunk)) {
    while (groups * kTiles * 8 < columns) groups *= 2;
    splits = max(kWarps / groups, 1);
    chunks_per_split = (chunks + splits - 1) / splits;
    held_chunks = min(held_pieces / tiles(), chunks_per_split);
  }

  // Returns a warp's number of tiles of 8 columns, rounded up to a number for which code is
  // compiled.
  __host__ __device__ int tiles() const { return columns <= 16 ? 2 : columns <= 32 ? 4 : kTiles; }
  // Return the index of a split's chunk in shared memory, and the number of such indices.
  __host__ __device__ int place(int chunk, int split) const {
    return chunk - held_chunks * (split + 1);
  }
  __host__ __device__ int places() const {
    const int full = chunks_per_split ? chunks / chunks_per_split : 0;  // full splits
    return full * (chunks_per_split - held_chunks) +
        max(chunks - full * chunks_per_split - held_chunks, 0);
  }
  __host__ __device__ int64_t bytes() const { return int64_t(places()) * columns * 4 * 16; }

  __device__ Slice(unsigned char*& memory, int64_t columns, int64_t K, int held_pieces)
      : Slice(columns, K, held_pieces) {
    pieces = reinterpret_cast<uint4*>(memory);
    memory += bytes();
  }

  __device__ const uint4& piece(int place, int column, int quarter) const {
    return pieces[(place * columns + column) * 4 + quarter];
  }

  // Copies the slice to shared memory, with zeros for columns from `existing` on. An element is at
  // `weight(column, k)`. With kAcross, elements with the same k are neighbours in memory; otherwise
  // elements of one column are. A thread issues several loads together, so that their latencies
  // overlap.
  template <bool kAcross, class Weight>
  __device__ void fill(int existing, const Weight& weight) const {
    constexpr int kTogether = 4;
    const int shared = chunks_per_split - held_chunks;  // chunks per split in shared memory
    const int all = places() * columns * 4;
    for (int first = threadIdx.x; first < all; first += kTogether * kThreads) {
      uint4 loaded[kTogether];
      int to[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int index = first + i * kThreads;
        if (index >= all) break;
        const int column = kAcross ? index % columns : index / 4 % columns;
        const int quarter = kAcross ? index / columns % 4 : index % 4;
        const int place = index / (4 * columns), chunk = place + held_chunks * (place / shared + 1);
        to[i] = (place * columns + column) * 4 + quarter;
        loaded[i] = gather<kAcross>(chunk, column, quarter, existing, weight);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (first + i * kThreads < all) pieces[to[i]] = loaded[i];
    }
  }
  template <bool kAcross, class Weight>
  __device__ __forceinline__ uint4
  gather(int chunk, int column, int quarter, int existing, const Weight& weight) const {
    uint4 piece = make_uint4(0, 0, 0, 0);
    const int64_t k = int64_t(chunk) * kChunk + quarter * kPiece;
    if (column >= existing || k >= K) return piece;
    const Scalar* const first = weight(column, k);
    if (!kAcross && k + kPiece <= K && reinterpret_cast<uintptr_t>(first) % 16 == 0)
      return __ldg(reinterpret_cast<const uint4*>(first));
    Scalar numbers[kPiece];
#pragma unroll
    for (int n = 0; n < kPiece; ++n)
      numbers[n] = k + n < K ? *weight(column, k + n) : narrow<Scalar>(0);
    memcpy(&piece, numbers, sizeof(piece));
    return piece;
  }
};

// Returns the stride of rows of N numbers that blocks exchange. The rows begin at multiples of 16
// bytes and are padded with zeros.
__host__ __device__ inline int64_t padded(int64_t N) { return (N + 7) / 8 * 8; }

// Loads 16 bytes of a row that another block wrote; zeros if there is no row, or from `limit` on.
__device__ __forceinline__ uint4
load_piece(const void* row, int64_t first, int64_t limit, int size) {
  if (!row || first >= limit) return make_uint4(0, 0, 0, 0);
  return __ldcg(reinterpret_cast<const uint4*>(static_cast<const char*>(row) + first * size));
}

__device__ __forceinline__ void add_products(float& sum, const uint4& a, const uint4& b) {
  sum = fmaf(__uint_as_float(a.x), __uint_as_float(b.x), sum);
  sum = fmaf(__uint_as_float(a.y), __uint_as_float(b.y), sum);
  sum = fmaf(__uint_as_float(a.z), __uint_as_float(b.z), sum);
  sum = fmaf(__uint_as_float(a.w), __uint_as_float(b.w), sum);
}

// Partial sums of a slice's splits in shared memory: (splits, 16, stride). Groups of 8 columns are
// swizzled by the row, so that half a warp, which writes sums of four rows, writes to all banks.
__host__ __device__ inline int parts_stride(int columns) { return (columns + 31) / 32 * 32; }
__device__ __forceinline__ int part_place(int row, int column) { return column ^ row % 4 * 8; }
template <class Scalar>
int64_t parts_bytes(const Slice<Scalar>& slice) {
  return int64_t(slice.splits) * kProductRows * parts_stride(slice.columns) * sizeof(float);
}

// The products of 16 rows with all columns of a slice. A lane holds up to kHeld pieces of it.
//
// Warp w owns tiles of 8 columns of group w % groups, and chunks of K of split w / groups. Lane l's
// sums are laid out as mma's accumulators. In the forward of an LSTM a tile's columns are the gates
// of two units:
//
//                   unit u                    unit u + 1
//              i      f      g      o      i      f      g      o
//   row 0    | lane 0      | lane 1      | lane 2      | lane 3      |
//   row 1    | lane 4      | lane 5      | lane 6      | lane 7      |
//    ...
//   row 7    | lane 28     | lane 29     | lane 30     | lane 31     |
//   row 8    | lane 0      | lane 1      | lane 2      | lane 3      |
//    ...
//
// As mma's operands, in 16-bit types, lane l has quarter l % 4 of a chunk of rows l / 4 and
// l / 4 + 8, and of a tile's column l / 4. The warps write their sums to shared memory. Then each
// thread owns elements of (16, units), the same ones at every step (for_elements), and adds up the
// splits' sums of the unit's four gates in order.
template <class Scalar, int kHeld>
class Products {
 public:
  __device__ Products(unsigned char* memory, const Slice<Scalar>& slice)
      : slice_(slice), parts_(reinterpret_cast<float*>(memory)),
        stride_(parts_stride(slice.columns)) {}

  // Loads the slice into shared memory and registers; see Slice::fill.
  template <bool kAcross, class Weight>
  __device__ __forceinline__ void fill(int existing, const Weight& weight) {
    slice_.template fill<kAcross>(existing, weight);
    const int lane = threadIdx.x % 32, tiles = slice_.tiles();
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      held_[i] = i / tiles < slice_.held_chunks
          ? slice_.template gather<kAcross>(
                first_chunk() + i / tiles, first_column() + i % tiles * 8 + lane / 4, lane % 4,
                existing, weight)
          : make_uint4(0, 0, 0, 0);
  }

  // Called by all threads. `row(r)` points to row r of the 16 rows, or is null for zeros.
  // `meanwhile` is called while the first loads of the rows are in flight.
  template <class Row, class Meanwhile>
  __device__ __forceinline__ void compute(const Row& row, const Meanwhile& meanwhile) const {
    const int lane = threadIdx.x % 32, split = threadIdx.x / 32 / slice_.groups;
    const int tile_count = min((slice_.columns - first_column() + 7) / 8, kTiles);
    const int places = slice_.place(0, split);
    int chunk = first_chunk();
    const int end = min(chunk + slice_.chunks_per_split, slice_.chunks);
    const int64_t limit = min(slice_.K, int64_t(end) * kChunk);
    const void* const rows[2] = {row(lane / 4), row(lane / 4 + 8)};
    float sums[kTiles][4] = {};
    // Several chunks of the rows are loaded together, so that the latencies of the L2 cache
    // overlap.
    uint4 a[kAhead][kTurns][2];
    load(a, rows, chunk, limit);
    meanwhile();
    if constexpr (kHeld > 0)
      with_tiles([&]<int tiles>() {
        constexpr int kMost = kHeld / tiles;
#pragma unroll
        for (int i = 0; i < kMost; i += kAhead) {
#pragma unroll
          for (int n = 0; n < kAhead; ++n) {
            if (chunk + n >= end) break;
            if (i + n >= kMost) {
              add_from_memory(sums, a[n], places + chunk + n, tile_count);
              continue;
            }
#pragma unroll
            for (int j = 0; j < tiles; ++j) add(sums[j], a[n], held_[(i + n) * tiles + j]);
          }
          chunk += kAhead;
          if (chunk < end) load(a, rows, chunk, limit);
        }
      });
    while (chunk < end) {
#pragma unroll
      for (int n = 0; n < kAhead; ++n) {
        if (chunk + n >= end) break;
        add_from_memory(sums, a[n], places + chunk + n, tile_count);
      }
      chunk += kAhead;
      if (chunk < end) load(a, rows, chunk, limit);
    }
    __syncthreads();  // the previous parts have been read
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= tile_count) break;
      const int column = first_column() + 8 * j + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(part(split, lane / 4 + 8 * i, column)) =
            make_float2(sums[j][2 * i], sums[j][2 * i + 1]);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ float operator()(int row, int column) const {
    float sum = 0;
    for (int split = 0; split < slice_.splits; ++split) sum += *part(split, row, column);
    return sum;
  }
  // Returns the sums of a unit's gates.
  template <int count>
  __device__ __forceinline__ auto gates(int row, int unit) const {
    if constexpr (count == 4) {
      Gates<float> sum = {};
      for (int split = 0; split < slice_.splits; ++split)
        sum = sum + load_gates<float>(part(split, row, 4 * unit), 0);
      return sum;
    } else {
      Numbers<float, count> sum = {};
      for (int split = 0; split < slice_.splits; ++split)
#pragma unroll
        for (int i = 0; i < count; ++i) sum.of[i] += *part(split, row, count * unit + i);
      return sum;
    }
  }

 private:
  static constexpr int kPiece = Slice<Scalar>::kPiece, kChunk = Slice<Scalar>::kChunk;
  static constexpr bool kMatrixUnit = sizeof(Scalar) == 2;
  // Quarters of a chunk that a lane reads of its two rows: one for the matrix unit, otherwise all
  // four in turn.
  static constexpr int kTurns = kMatrixUnit ? 1 : 4;
  static constexpr int kAhead = kMatrixUnit ? 4 : 2;  // chunks loaded together
  static_assert(kMatrixUnit || kHeld == 0);

  __device__ __forceinline__ float* part(int split, int row, int column) const {
    return parts_ + (split * kProductRows + row) * stride_ + part_place(row, column);
  }
  // First column and first chunk of the warp.
  __device__ __forceinline__ int first_column() const {
    return threadIdx.x / 32 % slice_.groups * kTiles * 8;
  }
  __device__ __forceinline__ int first_chunk() const {
    return threadIdx.x / 32 / slice_.groups * slice_.chunks_per_split;
  }

  // Calls run<tiles>() with the slice's number of tiles, so that register indices are constants.
  template <class Run>
  __device__ __forceinline__ void with_tiles(const Run& run) const {
    switch (slice_.tiles()) {
      case 2: return run.template operator()<2>();
      case 4: return run.template operator()<4>();
      default: return run.template operator()<kTiles>();
    }
  }

  // Lanes start with different quarters, so that they read different banks.
  static __device__ __forceinline__ int quarter_of(int turn) { return (turn + threadIdx.x) % 4; }

  // Loads kAhead chunks of the lane's two rows.
  static __device__ __forceinline__ void load(
      uint4 (&a)[kAhead][kTurns][2], const void* const (&rows)[2], int chunk, int64_t limit) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n)
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          a[n][turn][half] = load_piece(
              rows[half], int64_t(chunk + n) * kChunk + quarter_of(turn) * kPiece, limit,
              sizeof(Scalar));
  }

  // Adds the products of a chunk of the rows with the chunk at `place` in shared memory, for
  // `tile_count` tiles. Lane l's sums are those of rows l / 4 and l / 4 + 8, and columns 2 (l % 4)
  // and the next.
  __device__ __forceinline__ void add_from_memory(
      float (&sums)[kTiles][4], const uint4 (&a)[kTurns][2], int place, int tile_count) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j >= tile_count) break;
      const int first = first_column() + 8 * j;
      if constexpr (kMatrixUnit) {
        const int column = first + lane / 4;
        add(sums[j], a,
            column < slice_.columns ? slice_.piece(place, column, lane % 4)
                                    : make_uint4(0, 0, 0, 0));
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = first + lane % 4 * 2 + i;
          if (column >= slice_.columns) break;
#pragma unroll
          for (int turn = 0; turn < kTurns; ++turn) {
            const uint4 b = slice_.piece(place, column, quarter_of(turn));
            add_products(sums[j][i], a[turn][0], b);
            add_products(sums[j][2 + i], a[turn][1], b);
          }
        }
      }
    }
  }
  // `b` is 8 numbers of column l / 4. They are operands of two mma steps of 16. The order of k
  // differs from mma's, but is the same for a and b.
  static __device__ __forceinline__ void add(
      float (&sums)[4], const uint4 (&a)[kTurns][2], const uint4& b) {
    const auto& [upper, lower] = a[0];
    mma<Scalar>(sums, {upper.x, lower.x, upper.y, lower.y}, {b.x, b.y});
    mma<Scalar>(sums, {upper.z, lower.z, upper.w, lower.w}, {b.z, b.w});
  }

  const Slice<Scalar> slice_;
  float* const parts_;
  const int stride_;
  uint4 held_[kHeld > 0 ? kHeld : 1];
};

// How a call is split among blocks.
struct Layout {
  int64_t blocks;   // per chain
  int64_t units;    // per block; the last one may own fewer
  int64_t columns;  // of h per block, with a projection; the last ones may own fewer
  // Backward only; more than one group only with a projection. The number of groups of consecutive
  // blocks, the number of their members, and the number of columns of h by which a member
  // multiplies its group's gates. It owns `columns` of these columns.
  int groups, members, member_columns;
  size_t shared;

  __host__ __device__ int64_t group_units() const { return members * units; }
};

// The part of a call that a block owns.
struct BlockPart {
  int d;
  int64_t first_unit, first_column;
  int units, columns;  // that exist

  __device__ BlockPart(const Lstm& p, const Layout& layout) {
    d = blockIdx.y;
    first_unit = blockIdx.x * layout.units;
    first_column = blockIdx.x * layout.columns;
    units = static_cast<int>(max(int64_t(0), min(layout.units, p.H - first_unit)));
    columns = static_cast<int>(max(int64_t(0), min(layout.columns, p.R - first_column)));
  }
};

// Returns whether a projection follows. A variable for this would take registers.
template <class Unit>
__device__ __forceinline__ bool projected(const Lstm& p) {
  return Unit::kProjects && p.projected;
}

// The part of a call that a block owns in the backward.
template <class Unit>
struct BackwardPart : BlockPart {
  static constexpr int G = Unit::kGates;
  int group, member;
  // The part of W_hh by which it multiplies gradients of gates: the gates of its group, for the
  // member's columns of h, or without a projection all gates, for its own columns.
  int first_gate, gates, first_product, product_columns;
  // Its columns of h: its units or, with a projection, its share of the member's columns.
  int first_h, h_columns;

  __device__ __forceinline__ BackwardPart(const Lstm& p, const Layout& layout)
      : BlockPart(p, layout), group(blockIdx.x / layout.members),
        member(blockIdx.x % layout.members) {
    const auto existing = [](int64_t first, int64_t count, int64_t all) {
      return static_cast<int>(max(int64_t(0), min(count, all - first)));
    };
    first_gate = G * static_cast<int>(group * layout.group_units());
    gates = existing(first_gate, G * layout.group_units(), G * p.H);
    first_h = first_product = static_cast<int>(first_unit);
    h_columns = product_columns = units;
    if (!projected<Unit>(p)) return;
    first_product = member * layout.member_columns;
    product_columns = existing(first_product, layout.member_columns, p.R);
    const int first_own = group * static_cast<int>(layout.columns);
    first_h = first_product + first_own;
    h_columns = existing(first_own, layout.columns, product_columns);
  }
};

// The barriers in which a block takes part during the backward: those of its chain, of its group
// and, if there are several groups, of its peers.
struct BackwardBarriers {
  GridBarrier chain, group, peers;

  template <class Unit>
  __device__ BackwardBarriers(
      const LstmSequence& s, const Layout& layout, const BackwardPart<Unit>& own)
      : chain(counter(s, layout, own.d, 0), layout.blocks),
        group(counter(s, layout, own.d, 1 + own.group), layout.members),
        peers(counter(s, layout, own.d, 1 + layout.groups + own.member), layout.groups) {}

  // Returns how many counters a chain has.
  static __host__ __device__ int counters(int groups, int members) {
    return 1 + groups + (groups > 1 ? members : 0);
  }

 private:
  static __device__ uint32_t* counter(
      const LstmSequence& s, const Layout& layout, int d, int number) {
    return s.arrivals + (d * counters(layout.groups, layout.members) + number) * kCounterStride;
  }
};

// The groups' sums of the gradient of h, (groups, B, R), which peers exchange.
struct GroupSums {
  const Lstm& p;
  float* sums;
  int groups;

  __device__ GroupSums(const Lstm& p, const LstmSequence& s, const Layout& layout, int d)
      : p(p), sums(s.parts + int64_t(d * layout.groups) * p.B * p.R), groups(layout.groups) {}
  __device__ __forceinline__ float& at(int group, int64_t row, int64_t column) const {
    return sums[(group * p.B + row) * p.R + column];
  }
  // Returns the sum over all groups.
  __device__ __forceinline__ float total(int64_t row, int64_t column) const {
    float sum = 0;
#pragma unroll 8
    for (int group = 0; group < groups; ++group) sum += __ldcg(&at(group, row, column));
    return sum;
  }
};

// 16 rows of the batch, from number `first` on, sorted with the longest first. Only rows that have
// `step` count.
struct ActiveRows {
  const Lstm& p;
  const LstmSequence& s;
  int64_t first, step;

  // Returns the index of row r, or -1 if there is none.
  __device__ __forceinline__ int64_t operator[](int r) const {
    const int64_t i = first + r;
    if (i >= p.B) return -1;
    if (!s.order) return step < p.T ? i : -1;
    const int64_t row = s.order[i];
    return step < s.lengths[i] ? row : -1;
  }
  __device__ __forceinline__ bool any() const { return (*this)[0] >= 0; }
  // Row r must have the step.
  __device__ __forceinline__ Step at(int r, int d) const {
    return {p, step, (*this)[r], d, s.order ? s.lengths[first + r] : p.T};
  }
  // Returns the rows of a state, (B, stride), as Products::compute takes them.
  template <class Scalar>
  __device__ __forceinline__ auto of(const Scalar* state, int64_t stride) const {
    return [=, *this](int r) {
      const int64_t row = (*this)[r];
      return row < 0 ? nullptr : state + row * stride;
    };
  }
};

// Calls each(row, column) for the rows that have the step and for `columns` columns. At every step,
// a thread has the same elements.
template <class Each>
__device__ __forceinline__ void for_elements(
    const ActiveRows& rows, int columns, const Each& each) {
  for (int item = threadIdx.x; item < kProductRows * columns; item += kThreads)
    if (rows[item / columns] >= 0) each(item / columns, item % columns);
}

// Calls product(meanwhile) in all threads, then each(row, column, loaded) as for_elements does.
// `loaded` is the result of load(row, column), which loads from memory. The loads of a thread's
// first element are in flight during the product, if `load` does not use their values.
template <class Load, class Product, class Each>
__device__ __forceinline__ void for_elements_after(
    const Product& product, const ActiveRows& rows, int columns, const Load& load,
    const Each& each) {
  const int own = threadIdx.x;
  decltype(load(0, 0)) first{};
  product([&] {
    if (own < kProductRows * columns && rows[own / columns] >= 0)
      first = load(own / columns, own % columns);
  });
  for_elements(rows, columns, [&](int r, int column) {
    each(r, column, r * columns + column == own ? first : load(r, column));
  });
}

// Forward -----------------------------------------------------------------------------------------

template <class Unit>
__global__ __launch_bounds__(kThreads, 1) void forward_sequence_kernel(
    const __grid_constant__ Lstm p, const __grid_constant__ LstmSequence s, const Layout layout) {
  using Scalar = Unit::Scalar;
  constexpr int G = Unit::kGates;
  const BlockPart own(p, layout);
  const int d = own.d;
  const LstmSequence::Steps steps = s.steps(p, d);
  if (steps.first == steps.last) return;
  unsigned char* memory = shared_memory();
  const Slice<Scalar> hh_slice(memory, G * layout.units, p.R, kHeldPieces<Scalar>);
  const Slice<Scalar> hr_slice(memory, layout.columns, projected<Unit>(p) ? p.H : 0, 0);
  Products<Scalar, kHeldPieces<Scalar>> hh_product(memory, hh_slice);
  Products<Scalar, 0> hr_product(memory, hr_slice);
  const auto* weight_hh = static_cast<const Scalar*>(s.weight_hh);
  hh_product.template fill<false>(G * own.units, [&](int row, int64_t k) {
    return weight_hh + ((d * p.H + own.first_unit) * G + row) * p.R + k;
  });
  const auto* weight_hr = static_cast<const Scalar*>(s.weight_hr);
  hr_product.template fill<false>(own.columns, [&](int row, int64_t k) {
    return weight_hr + (d * p.R + own.first_column + row) * p.H + k;
  });
  __syncthreads();

  const int64_t h_stride = padded(p.R), m_stride = padded(p.H);
  Scalar* const m = static_cast<Scalar*>(s.operand_hr) + d * p.B * m_stride;
  GridBarrier barrier(s.arrivals + d * kCounterStride, gridDim.x);

  // Prefetches W_ih x into the L2 cache while the blocks wait for one another.
  const auto prefetch_inputs = [&](const ActiveRows& rows) {
    for_elements(rows, own.units, [&](int r, int u) {
      const int64_t token = rows.at(r, d).token_offset(p, p.H);
      prefetch(static_cast<const Numbers<Scalar, G>*>(p.from_input) + token + own.first_unit + u);
    });
  };

  const int64_t last = min(s.order ? s.lengths[0] : p.T, steps.last);
  for (int64_t step = steps.first; step < last; ++step) {
    // Two buffers are used in turns, because some blocks write the next state while others still
    // read the last one.
    const auto h_of = [&](int64_t step) {
      return static_cast<Scalar*>(s.operand_hh) + (step % 2 * p.chains + d) * p.B * h_stride;
    };
    for (int64_t first = 0; first < p.B; first += kProductRows) {
      const ActiveRows rows{p, s, first, step};
      if (!rows.any()) continue;
      const auto load = [&](int r, int u) {
        return Unit::load(p, rows.at(r, d), own.first_unit + u);
      };
      const auto product = [&](const auto& meanwhile) {
        hh_product.compute(rows.of(h_of(step), h_stride), meanwhile);
      };
      for_elements_after(product, rows, own.units, load, [&](int r, int u, const auto& loaded) {
        const Step at = rows.at(r, d);
        const int64_t unit = own.first_unit + u;
        const float m_new = Unit::forward(p, at, unit, loaded, hh_product.template gates<G>(r, u));
        if (projected<Unit>(p)) m[at.row * m_stride + unit] = narrow<Scalar>(m_new);
        else h_of(step + 1)[at.row * h_stride + unit] = finish_h<Scalar>(p, at, unit, m_new);
      });
    }
    barrier.arrive();
    for (int64_t first = 0; first < p.B; first += kProductRows)
      prefetch_inputs(ActiveRows{p, s, first, step + 1});
    barrier.wait();
    if (!projected<Unit>(p)) continue;
    for (int64_t first = 0; first < p.B; first += kProductRows) {
      const ActiveRows rows{p, s, first, step};
      if (!rows.any()) continue;
      hr_product.compute(rows.of(m, m_stride), [] {});
      for_elements(rows, own.columns, [&](int r, int k) {
        const Step at = rows.at(r, d);
        const int64_t column = own.first_column + k;
        const float h_new = clip_projection(p, at, column, hr_product(r, k));
        h_of(step + 1)[at.row * h_stride + column] = finish_h<Scalar>(p, at, column, h_new);
      });
    }
    barrier.arrive();
    barrier.wait();
  }
}

// Backward ----------------------------------------------------------------------------------------

// Adds the gradient through the first step's product to that of h0.
__device__ __forceinline__ void add_to_grad_h0(
    const Lstm& p, const Step& at, int64_t column, float dh_recurrent) {
  const int64_t index = at.state_offset(p, p.R) + column;
  if (p.dropout) dh_recurrent *= static_cast<const float*>(p.dropout)[index];
  static_cast<float*>(p.grad_h)[index] += dh_recurrent;
}

template <class Unit>
__global__ __launch_bounds__(kThreads, 1) void backward_sequence_kernel(
    const __grid_constant__ Lstm p, const __grid_constant__ LstmSequence s, const Layout layout) {
  using Scalar = Unit::Scalar;
  constexpr int G = Unit::kGates;
  const BackwardPart<Unit> own(p, layout);
  const int d = own.d;
  const LstmSequence::Steps steps = s.steps(p, d);
  if (steps.first == steps.last) return;
  unsigned char* memory = shared_memory();
  const Slice<Scalar> hh_slice(
      memory, projected<Unit>(p) ? layout.member_columns : layout.units, own.gates,
      kHeldPieces<Scalar>);
  const Slice<Scalar> hr_slice(memory, projected<Unit>(p) ? layout.units : 0, p.R, 0);
  Products<Scalar, kHeldPieces<Scalar>> hh_product(memory, hh_slice);
  Products<Scalar, 0> hr_product(memory, hr_slice);
  const auto* weight_hh = static_cast<const Scalar*>(s.weight_hh);
  hh_product.template fill<true>(own.product_columns, [&](int column, int64_t k) {
    return weight_hh + (d * p.H * G + own.first_gate + k) * p.R + own.first_product + column;
  });
  const auto* weight_hr = static_cast<const Scalar*>(s.weight_hr);
  hr_product.template fill<true>(own.units, [&](int unit, int64_t k) {
    return weight_hr + (d * p.R + k) * p.H + own.first_unit + unit;
  });
  __syncthreads();

  const int64_t gates_stride = padded(G * p.H), q_stride = padded(p.R);
  Scalar* const dq = static_cast<Scalar*>(s.operand_hr) + d * p.B * q_stride;
  const auto da_of = [&](int64_t step) {
    return static_cast<Scalar*>(s.operand_hh) + (step % 2 * p.chains + d) * p.B * gates_stride;
  };
  const GroupSums sums(p, s, layout, d);
  BackwardBarriers barriers(s, layout, own);

  // Calls each(r, k, loaded, dh_recurrent) for the block's columns of the rows that have a step.
  // `loaded` is the result of load(r, k); `dh_recurrent` is the gradient of h through the product
  // of step `after`, 0 if the row does not have that step.
  const auto for_columns = [&](const ActiveRows& rows, int64_t after, const auto& load,
                               const auto& each) {
    const ActiveRows rows_after{p, s, rows.first, after};
    if (layout.groups == 1) {
      const auto product = [&](const auto& meanwhile) {
        hh_product.compute(rows_after.of(da_of(after), gates_stride), meanwhile);
      };
      return for_elements_after(
          product, rows, own.h_columns, load,
          [&](int r, int k, const auto& loaded) { each(r, k, loaded, hh_product(r, k)); });
    }
    for_elements(rows, own.h_columns, [&](int r, int k) {
      const auto loaded = load(r, k);
      const int64_t row = rows_after[r];
      each(r, k, loaded, row < 0 ? 0 : sums.total(row, own.first_h + k));
    });
  };

  // Prefetches a step's inputs into the L2 cache while the blocks wait for one another.
  const auto prefetch_inputs = [&](const ActiveRows& rows) {
    for_elements(rows, own.units, [&](int r, int u) {
      Unit::prefetch(p, rows.at(r, d), own.first_unit + u);
    });
    for_elements(rows, own.h_columns, [&](int r, int k) {
      const Step at = rows.at(r, d);
      prefetch(
          static_cast<const Scalar*>(p.grad_output) + at.token_offset(p, p.R) + own.first_h + k);
      if (p.clips(p.proj_clip)) prefetch(&clipped_projection(p, at, own.first_h + k));
    });
  };

  const int64_t last = min(s.order ? s.lengths[0] : p.T, steps.last);
  // Step -1 only adds the gradient through the first step's product to that of h0.
  const int64_t first_step = steps.first == 0 ? -1 : steps.first;
  for (int64_t step = last - 1; step >= first_step; --step) {
    for (int64_t first = 0; first < p.B; first += kProductRows) {
      const ActiveRows rows{p, s, first, step};
      if (!rows.any()) continue;
      const auto load = [&](int r, int k) -> Unit::LoadedBackward {
        if (step < 0) return {};
        return Unit::load_backward(p, rows.at(r, d), own.first_h + k);
      };
      for_columns(rows, step + 1, load, [&](int r, int k, const auto& loaded, float dh_recurrent) {
        const Step at = rows.at(r, d);
        const int64_t column = own.first_h + k;
        if (step < 0) return add_to_grad_h0(p, at, column, dh_recurrent);
        const float grad = Unit::gradient(p, at, column, loaded, dh_recurrent);
        if (!projected<Unit>(p))
          return Unit::backward(p, at, column, loaded, grad, da_of(step) + at.row * gates_stride);
        if constexpr (Unit::kProjects) {
          const Scalar grad_q = narrow<Scalar>(loaded.column.clipped ? 0 : grad);
          static_cast<Scalar*>(s.grad_projected)[at.saved_offset(p, p.R) + column] = grad_q;
          dq[at.row * q_stride + column] = grad_q;
        }
      });
    }
    if (step < 0) break;
    barriers.chain.arrive();
    if (step > 0)
      for (int64_t first = 0; first < p.B; first += kProductRows)
        prefetch_inputs(ActiveRows{p, s, first, step - 1});
    barriers.chain.wait();
    if (!projected<Unit>(p)) continue;
    if constexpr (Unit::kProjects) {  // other units lack these parts
      for (int64_t first = 0; first < p.B; first += kProductRows) {
        const ActiveRows rows{p, s, first, step};
        if (!rows.any()) continue;
        const auto load = [&](int r, int u) {
          return Unit::load_cell(p, rows.at(r, d), own.first_unit + u);
        };
        const auto product = [&](const auto& meanwhile) {
          hr_product.compute(rows.of(dq, q_stride), meanwhile);
        };
        for_elements_after(product, rows, own.units, load, [&](int r, int u, const auto& unit) {
          const Step at = rows.at(r, d);
          Unit::backward_cell(
              p, at, own.first_unit + u, unit, hr_product(r, u),
              da_of(step) + at.row * gates_stride);
        });
      }
      barriers.group.arrive();
      barriers.group.wait();
      if (layout.groups == 1) continue;
      for (int64_t first = 0; first < p.B; first += kProductRows) {
        const ActiveRows rows{p, s, first, step};
        if (!rows.any()) continue;
        hh_product.compute(rows.of(da_of(step) + own.first_gate, gates_stride), [] {});
        for_elements(rows, own.product_columns, [&](int r, int k) {
          sums.at(own.group, rows[r], own.first_product + k) = hh_product(r, k);
        });
      }
      barriers.peers.arrive();
      barriers.peers.wait();
    }
  }
}

// Launches ----------------------------------------------------------------------------------------

template <class Scalar>
using Kernel = void (*)(const Lstm, const LstmSequence, const Layout);

const char* name_of(const Lstm& p, bool backward) {
  switch (p.cell) {
    case Cell::Gru: return backward ? "gru_backward_sequence" : "gru_forward_sequence";
    case Cell::Rnn: return backward ? "rnn_backward_sequence" : "rnn_forward_sequence";
    default: return backward ? "lstm_backward_sequence" : "lstm_forward_sequence";
  }
}

LaunchPlan plan_of(const Lstm& p, bool backward, const Layout& layout) {
  return {
      .kernel = name_of(p, backward),
      .sizes = {{"T", p.T}, {"B", p.B}, {"H", p.H}, {"R", p.R}},
      .grid = dim3(static_cast<unsigned>(layout.blocks), static_cast<unsigned>(p.chains)),
      .block = kThreads,
      .shared = layout.shared,
      .cooperative = true,
  };
}

// Returns how many groups the blocks of a chain form in the backward. Several groups pay off if a
// projection makes h smaller than c, because a block then reads only a part of the gates, at the
// cost of one more barrier.
template <class Scalar>
int groups_of(const Lstm& p, const Layout& layout, int64_t most_blocks) {
  constexpr int kMostGroups = 8, kFewestMembers = 2;
  if (!p.projected || p.R >= p.H) return 1;
  const auto fits = [&](int groups) {
    const int members = static_cast<int>((layout.blocks + groups - 1) / groups);
    // A group's gates must begin at multiples of 16 bytes.
    return members >= kFewestMembers && groups * members <= most_blocks &&
        p.gates_per_unit() * members * layout.units * sizeof(Scalar) % 16 == 0 &&
        p.chains * BackwardBarriers::counters(groups, members) <= LstmSequence::kBarriers;
  };
  int groups = kMostGroups;
  while (groups > 1 && !fits(groups)) groups /= 2;
  return groups;
}

// Fills in `layout`. Returns why the call does not fit, or an empty string.
template <class Scalar>
std::string lay_out(const Lstm& p, bool backward, Kernel<Scalar> kernel, Layout& layout) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t most_blocks = multiprocessors() / p.chains;
  if (most_blocks == 0)
    return std::string("the ") + (p.layers ? "layers" : "directions") + " share one multiprocessor";
  layout.units = ceil_div(p.H, most_blocks);
  layout.blocks = ceil_div(p.H, layout.units);
  layout.groups = backward ? groups_of<Scalar>(p, layout, most_blocks) : 1;
  layout.members = static_cast<int>(ceil_div(layout.blocks, layout.groups));
  layout.blocks = layout.groups * layout.members;
  layout.member_columns = p.projected ? static_cast<int>(ceil_div(p.R, layout.members)) : 0;
  layout.columns = ceil_div(layout.member_columns, layout.groups);
  // The numbers of columns and the contraction lengths of the products with W_hh and W_hr.
  const int64_t G = p.gates_per_unit();
  int64_t hh_columns = G * layout.units, hh_K = p.R;
  int64_t hr_columns = layout.columns, hr_K = p.projected ? p.H : 0;
  if (backward) {
    hh_columns = p.projected ? layout.member_columns : layout.units;
    hh_K = G * std::min(layout.group_units(), p.H);
    hr_columns = p.projected ? layout.units : 0;
    hr_K = p.R;
  }
  const Slice<Scalar> hh_slice(hh_columns, hh_K, kHeldPieces<Scalar>);
  const Slice<Scalar> hr_slice(hr_columns, hr_K, 0);
  layout.shared =
      hh_slice.bytes() + hr_slice.bytes() + std::max(parts_bytes(hh_slice), parts_bytes(hr_slice));
  const int64_t blocks = layout.blocks * p.chains;
  if (std::max(hh_columns, hr_columns) > kMaxColumns || layout.shared > shared_memory_limit())
    return "the recurrent weights take " + std::to_string(layout.shared >> 10) +
        " KiB of shared memory of each of " + std::to_string(blocks) +
        " multiprocessors, which have " + std::to_string(shared_memory_limit() >> 10);
  const int64_t resident = resident_blocks(plan_of(p, backward, layout), kernel);
  if (blocks > resident)
    return std::to_string(blocks) + " blocks would have to be resident, and " +
        std::to_string(resident) + " can be";
  return {};
}

template <class Unit>
Kernel<typename Unit::Scalar> kernel_of(bool backward) {
  return backward ? backward_sequence_kernel<Unit> : forward_sequence_kernel<Unit>;
}

// Calls run<Scalar>(kernel) for the type and the cell of a call; float64 has no kernel.
template <class Run>
void with_kernel(const Lstm& p, bool backward, const Run& run) {
  for_type(p.dtype, [&]<class Scalar>() {
    if constexpr (!std::is_same_v<Scalar, double>)
      run.template operator()<Scalar>(
          p.cell == Cell::Gru       ? kernel_of<GruUnit<Scalar>>(backward)
              : p.cell == Cell::Rnn ? kernel_of<RnnUnit<Scalar>>(backward)
                                    : kernel_of<LstmUnit<Scalar>>(backward));
  });
}

void launch_sequence(const Lstm& p, const LstmSequence& s, bool backward, void* stream) {
  with_kernel(p, backward, [&]<class Scalar>(Kernel<Scalar> kernel) {
    Layout layout;
    const std::string why_not = lay_out<Scalar>(p, backward, kernel, layout);
    if (!why_not.empty())
      throw std::runtime_error(std::string(name_of(p, backward)) + ": " + why_not);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const LaunchPlan plan = plan_of(p, backward, layout);
    fill_with_zeros(plan, cuda_stream, s.arrivals, LstmSequence::kArrivals * sizeof(uint32_t));
    launch(plan, cuda_stream, kernel, p, s, layout);
  });
}

}  // namespace

bool lstm_fits_sequence(const Lstm& p, bool backward, std::string* why_not) {
  std::string reason;
  if (p.norm_hh) {
    reason = "layer norm needs whole rows";
    if (lstm_workspace(p)) reason += ", too long for shared memory";
  } else if (p.reset_first) {
    reason = "a step has two products if the reset gate comes first";
  } else if (p.dtype == DType::Float64) {
    reason = "float64 has no kernel of its own";
  } else {
    with_kernel(p, backward, [&]<class Scalar>(Kernel<Scalar> kernel) {
      Layout layout;
      reason = lay_out<Scalar>(p, backward, kernel, layout);
    });
  }
  if (why_not) *why_not = reason;
  return reason.empty();
}

int64_t lstm_backward_parts(const Lstm& p) {
  int64_t count = 0;
  with_kernel(p, true, [&]<class Scalar>(Kernel<Scalar> kernel) {
    Layout layout;
    if (lay_out<Scalar>(p, true, kernel, layout).empty() && layout.groups > 1)
      count = p.chains * layout.groups * p.B * p.R;
  });
  return count;
}

void lstm_forward_sequence(const Lstm& p, const LstmSequence& s, void* stream) {
  launch_sequence(p, s, false, stream);
}

void lstm_backward_sequence(const Lstm& p, const LstmSequence& s, void* stream) {
  launch_sequence(p, s, true, stream);
}

}  // namespace trifuse::cuda
