// Shared by the attention kernels for Hopper GPUs: how a block's warpgroups cooperate, loads of
// tiles, and their products.
//
// A block has three to five warpgroups of four warps. One is the producer. It finds the tiles in
// which some query-key pair takes part and starts their TMA loads as far ahead as there are stages.
// For each tile it writes a header, which holds the pairs that take part and, in the backward, the
// weights that dropout keeps. The others are consumers, with 64 of the block's rows each. They run
// the products, which the tensor cores execute asynchronously. In the forward the consumers draw
// the random numbers for dropout themselves. They also find the pairs that only tables leave out,
// because they look up the tables' numbers anyway.

#pragma once

#include <climits>

#include "cuda/attention.h"
#include "cuda/attention_configurations.cuh"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_launch.cuh"
#include "cuda/attention_pairs.cuh"
#include "cuda/attention_passes.cuh"
#include "cuda/attention_softmax.cuh"
#include "cuda/philox.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "cuda/tensor_map.h"

namespace trifuse::cuda {

constexpr int kWarpgroup = 128, kGroupRows = 64;  // threads and rows

constexpr int threads(int consumers) { return (1 + consumers) * kWarpgroup; }
// Registers per thread at launch: the largest multiple of 8 so that a multiprocessor's 65536
// registers suffice for all threads. The producer keeps some of its registers; the consumers take
// the rest.
constexpr int launch_registers(int consumers) { return 65536 / threads(consumers) / 8 * 8; }
constexpr int consumer_registers(int consumers, int producer) {
  return ((1 + consumers) * launch_registers(consumers) - producer) / consumers / 8 * 8;
}

constexpr int kPanelRow = 128;  // bytes of a row of a panel

// Marks a number as the same for all lanes of a warp. The compiler then keeps values computed from
// it, in particular matrix descriptors, in uniform registers, from which products read them.
__device__ __forceinline__ int uniform(int number) { return __shfl_sync(kAllLanes, number, 0); }

// Numbers of named barriers; 0 is __syncthreads.
enum NamedBarrier {
  kTurns = 1,      // + consumer: its turn to start products
  kProducing = 5,  // among the producer's threads
  kStoring = 6,    // + consumer: among its threads
};

// The copy engine's coordinates of the rows that stream past a block's own rows: keys and values,
// or with kByKey queries and dO. Computed once per block, because a Head's divisions and loads take
// longer than a tile's products.
template <bool kByKey>
struct OtherRows {
  int batch, head, first, count;
  int end;  // rows from `end` on are in memory but past the lengths, so they take no part

  OtherRows() = default;
  __device__ __forceinline__ OtherRows(const Attention& p, const Head& of)
      : batch(static_cast<int>(of.batch)), head(kByKey ? of.h : of.kv_head),
        first(static_cast<int>(kByKey ? of.first_query : of.first_key)),
        count(kByKey ? of.queries : of.keys),
        end(kByKey ? (of.first_query + of.queries < p.total_q ? of.queries : INT_MAX)
                   : (of.first_key + of.keys < p.total_k ? of.keys : INT_MAX)) {}
};

// Tensor maps of the copy engine (TMA) ------------------------------------------------------------

// A tensor from which the copy engine loads. `heads` and `sequences` are factors of its
// coordinates: 0 if it is broadcast over that dimension, else 1.
struct Source {
  CUtensorMap map;
  int heads, sequences;
};

inline Source source(const MappedTensor& t, int rows) {
  return {make_tensor_map(t, rows), t.size[1] > 1, t.size[0] > 1};
}

// Returns a tensor as (sequences, heads, length, columns); broadcast dimensions have size 1.
inline MappedTensor mapped(
    const Attention& p, const Tensor4& t, int64_t heads, int64_t length, int64_t columns) {
  MappedTensor result{
      p.dtype,
      t.data,
      {p.cu_seqlens_q ? 1 : p.batch, heads, length, columns},
      {t.stride[0], t.stride[1], t.stride[2], t.stride[3]}};
  for (int d = 0; d < 2; ++d)
    if (t.stride[d] == 0) result.size[d] = 1;
  return result;
}
inline MappedTensor mapped_query(const Attention& p) {
  return mapped(p, p.query, p.heads, p.total_q, p.E);
}
inline MappedTensor mapped_key(const Attention& p) {
  return mapped(p, p.key, p.kv_heads, p.total_k, p.E);
}
inline MappedTensor mapped_value(const Attention& p) {
  return mapped(p, p.value, p.kv_heads, p.total_k, p.Ev);
}
inline MappedTensor mapped_grad_out(const Attention& p) {
  return mapped(p, p.grad_out, p.heads, p.total_q, p.Ev);
}

// Starts to load `rows` rows of a head from token `first` on, with zeros past the tensor's ends.
// Called by one thread. The tile is stored in panels of 64 columns.
template <class Scalar, int D>
__device__ __forceinline__ void load(
    Scalar* to, const Source& from, SharedBarrier* barrier, int64_t batch, int h, int64_t first,
    int rows) {
#pragma unroll
  for (int column = 0; column < D; column += 64)
    copy_box(
        to + column * rows, &from.map, barrier, column, static_cast<int>(first), h * from.heads,
        static_cast<int>(batch) * from.sequences);
}

// Prepares a tile of N rows for a sum over its rows. Called by all threads of the producer. The
// first pass zeros the rows from `end` on, which take no part.
template <int N, int D, class Scalar>
__device__ __forceinline__ void prepare_panels(Scalar* tile, int end, Mode mode) {
  if (mode != Mode::Fast) return prepare_numbers(tile, N * D, threadIdx.x, kWarpgroup, mode);
  for (int i = threadIdx.x; i < (N - end) * 64; i += kWarpgroup)
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
      tile[(panel * N + end) * 64 + i] = narrow<Scalar>(0);
}

// The next stage, and the parity of its barriers' phases.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Releases a stage on behalf of a warp.
__device__ __forceinline__ void release(SharedBarrier* empty) {
  __syncwarp();
  if (lane() == 0) arrive(empty);
}

// Returns how many of a block's consumers have rows if `left` remain from the block's first on.
template <int most>
__device__ __forceinline__ int consumers(int left) {
  return min((left + kGroupRows - 1) / kGroupRows, most);
}

// The kind of kernel that serves a call. One kind serves all calls with softcap, with tables or
// with a relative bias beside a mask, because each kind makes the library larger.
constexpr Masks masks_for(const AttentionProblem& p) {
  if (p.relative_index || p.relative_bias.data || p.softcap > 0) return Masks::All;
  return p.mask_kind != MaskKind::None || has_scores_in_nats(p) ? Masks::One : Masks::None;
}

// Records whether a consumer's thread has found a sum that is not finite. All consumers' threads
// call it once. `searched` is a barrier in shared memory, not a named one, because synccheck
// reports a named barrier of a whole block as an error if producer and consumers reach it in
// different places of the code.
template <class Shared>
__device__ __forceinline__ void record_found(Shared& shared, bool found) {
  if (found) shared.non_finite = true;
  release(&shared.searched);
}

// Returns, to all threads, whether any thread has found one.
template <class Shared>
__device__ __forceinline__ bool any_found(Shared& shared) {
  wait(&shared.searched, 0);
  return shared.non_finite;
}

// Headers of tiles --------------------------------------------------------------------------------

// A header of a block's tile of N columns: written by the producer, read by the consumers. `column`
// is the tile's first, or -1 at the end of a pass.
template <int N, int rows>
struct TileHeader {
  static constexpr int kColumns = N;
  using Bits = typename Pairs<N>::Bits;
  Bits pairs[rows];
  bool full[rows / 16];
  int column;
};

// A header that also holds which weights dropout keeps.
template <int N, int rows>
struct DropoutHeader : TileHeader<N, rows> {
  typename Pairs<N>::Bits kept[rows];
};

// Writes which pairs of the block's rows, from `first` on, and a tile's columns take part. Returns
// whether any pair of the warp's rows does.
template <bool kByKey, Masks kMasks, int N, int rows>
__device__ __forceinline__ bool write_pairs(
    TileHeader<N, rows>& header, const Attention& p, int b, int h, int first, int column) {
  constexpr int kAhead = kByKey || N == 64 ? 8 : 4;  // limited by registers
  const Head head(p, b, h);
  bool any = false;
#pragma unroll 1
  for (int strip = warp(); strip < rows / 16; strip += kWarpgroup / 32) {
    const int row = first + 16 * strip;
    const ThreadRanges<kByKey> ranges(head, row);
    bool full = true;
#pragma unroll 1
    for (int part = 0; part < N / 64; ++part) {
      const Pairs<64> pairs =
          find_pairs<64, kByKey, kMasks, kAhead>(p, head, ranges, row, column + 64 * part);
      if (lane() % 4 == 0)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          reinterpret_cast<uint64_t*>(header.pairs + 16 * strip + fragment_row(2 * r))[part] =
              pairs.row[r];
      any |= pairs.any;
      full &= pairs.full;
    }
    if (lane() == 0) header.full[strip] = full;
  }
  return any;
}

// Writes which weights dropout keeps. A lane draws for one query and eight keys at a time.
template <bool kByKey, int N, int rows>
__device__ __forceinline__ void write_kept(
    DropoutHeader<N, rows>& header, const Attention& p, int b, int h, int first, int column) {
  const DrawnTile tile(p, b, h, kByKey ? column : first, kByKey ? first : column);
  const uint64_t seed = *p.seed;
  if constexpr (kByKey) {
#pragma unroll 2
    for (int i = warp(); i < rows / 8 * (N / 32); i += kWarpgroup / 32) {
      const int eight = i / (N / 32), part = i % (N / 32);
      const uint32_t drawn = dropout_keep(
          seed, tile.plane, tile.query + 32 * part + lane(), tile.key / 8 + eight,
          p.dropout.threshold);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t queries = __ballot_sync(kAllLanes, drawn >> j & 1);
        if (lane() == j) reinterpret_cast<uint32_t*>(header.kept + 8 * eight + j)[part] = queries;
      }
    }
  } else {
    auto* bytes = reinterpret_cast<unsigned char*>(header.kept);
    // Four draws at a time, because a single one waits for each of its products.
    const int row = threadIdx.x / (N / 8), group = threadIdx.x % (N / 8);
#pragma unroll 4
    for (int i = 0; i < rows * N / 8 / kWarpgroup; ++i)
      bytes[threadIdx.x + i * kWarpgroup] = dropout_keep(
          seed, tile.plane, tile.query + row + i * (kWarpgroup / (N / 8)), tile.key / 8 + group,
          p.dropout.threshold);
  }
}

// The weights of a consumer warp's tile (16, 64) that dropout keeps. One call of Philox draws for a
// query and eight keys, and the four lanes that share the query hold two of these keys each. So
// each of the four lanes draws for two of the tile's eight groups of keys, for both of their
// queries, and later passes the bits of their keys to the other lanes.
class KeptWeights {
 public:
  __device__ __forceinline__ KeptWeights(const Attention& p, int b, int h, int row)
      : tile_(p, b, h, row + fragment_row(0), 0), seed_(dropout_seed(p)),
        last_dropped_((p.dropout.threshold - 1) * 0x10001),
        first_kept_(min(p.dropout.threshold, 0xFFFFu) * 0x10001) {}

  // Draws for the tile from key `column` on.
  __device__ __forceinline__ void draw(int column) {
    const uint32_t group = (tile_.key + column) / 8 + 2 * (lane() % 4);
    uint32_t sum = 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint4 words =
          philox(make_uint4(group + c / 2, tile_.query + c % 2 * 8, tile_.plane, 0), seed_);
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
      // Each half of a word becomes the last number that is dropped, or that number plus one if it
      // is kept. The words have one bit of a half each, so the sum is 0xFFFF times that number,
      // plus the bits of kept elements.
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum += __vminu2(__vmaxu2(word[i], last_dropped_), first_kept_) << bit(c, i);
    }
    drawn_ = sum - last_dropped_ * 0xFFFF;
  }

  // Sets packed weights (pack_weights) to 0 unless they are kept.
  __device__ __forceinline__ void apply(uint32_t (&weights)[4][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t bits = __shfl_sync(kAllLanes, drawn_, k, 4) << (6 - 2 * (lane() % 4));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[k][i] &= i % 2 ? spread_bits<1>(bits << i / 2) : spread_bits<0>(bits << i / 2);
    }
  }

 private:
  // The bit in both halves of drawn_ for word i of call c. For the lane that holds the word's keys,
  // apply shifts it to the top of a byte, and the bit of the other group to the position below.
  __device__ static constexpr int bit(int c, int i) { return 8 * (c % 2) + 2 * i + 1 - c / 2; }

  DrawnTile tile_;
  uint64_t seed_;
  // The last number that is dropped and the first that is kept, in both halves. If all are dropped,
  // both are the last number.
  uint32_t last_dropped_, first_kept_;
  uint32_t drawn_;
};

// Returns the columns to which all rows [first, first + rows) attend; none if there is a mask, or
// if there are tables, in which no row past the end may be looked up.
template <bool kByKey, Masks kMasks>
__device__ __forceinline__ Range
visible_to_all(const Attention& p, const Head& head, int first, int rows) {
  const int count = kByKey ? head.keys : head.queries;
  Range result = visible_to_row<kByKey>(head, min(first + rows, count) - 1);
  const bool bounded = p.mask_kind == MaskKind::None && !has_tables<kMasks>(p);
  result.last = bounded ? visible_to_row<kByKey>(head, first).last : 0;
  return result;
}

// Waits until a stage is empty, and writes a tile's pairs, and kept weights, to its header. Returns
// false if no pair takes part, in which case the tile is skipped. `all` comes from visible_to_all.
// If there is nothing to find, only the leader does the work. The other threads run ahead, so they
// must not wait for a stage themselves, because they could mistake an earlier phase for theirs.
template <bool kByKey, Masks kMasks, class Header>
__device__ __forceinline__ bool write_header(
    Header& header, SharedBarrier* empty, uint32_t parity, const Attention& p, int b, int h,
    int first, int column, const Range& all) {
  const bool full = all.first <= column && column + Header::kColumns <= all.last;
  if (threadIdx.x == 0) {
    wait(empty, parity ^ 1);
    if (full)
#pragma unroll
      for (bool& strip : header.full) strip = true;
  }
  constexpr bool kWithKept = requires { header.kept; };
  const bool draws = kWithKept && p.dropout.threshold;
  if (full && !draws) return true;
  named_barrier(kProducing, kWarpgroup);
  if (!full) {
    const bool any = write_pairs<kByKey, kMasks>(header, p, b, h, first, column);
    if (!named_barrier_or(kProducing, kWarpgroup, any)) return false;
  }
  if constexpr (kWithKept)
    if (draws) {
      write_kept<kByKey>(header, p, b, h, first, column);
      named_barrier(kProducing, kWarpgroup);
    }
  return true;
}

// Marks the end of a pass in the header of the next stage.
template <class Header, int kStages>
__device__ __forceinline__ void write_end(
    Header (&headers)[kStages], SharedBarrier (&full)[kStages], SharedBarrier (&empty)[kStages],
    Ring<kStages>& tiles) {
  if (threadIdx.x == 0) {
    wait(&empty[tiles.stage], tiles.parity ^ 1);
    headers[tiles.stage].column = -1;
    arrive(&full[tiles.stage]);
  }
  tiles.advance();
}

// Returns a header's bits for the thread's two rows of a strip of 16 rows.
template <int N>
__device__ __forceinline__ Pairs<N> read_bits(
    const typename Pairs<N>::Bits* bits, int strip, bool full) {
  using Bits = typename Pairs<N>::Bits;
  if (full) return {{~Bits(0), ~Bits(0)}, true, true};
  const int shift = lane() % 4 * 2, at = 16 * strip;
  return {{bits[at + fragment_row(0)] >> shift, bits[at + fragment_row(2)] >> shift}, true, full};
}

// Products ----------------------------------------------------------------------------------------

// Packs a warp's weights (16, N), made by weight(n, e), for start_sums.
template <class Scalar, int N, class Weight>
__device__ __forceinline__ void pack_weights(uint32_t (&packed)[N / 16][4], const Weight& weight) {
#pragma unroll
  for (int k = 0; k < N / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int n = 2 * k + i / 2, e = i % 2 * 2;
      packed[k][i] = pack<Scalar>(weight(n, e), weight(n, e + 1));
    }
}

// Starts products (64, N) = rows columnsᵀ of tiles (64, D) and (N, D).
template <class Scalar, int D, int N>
__device__ __forceinline__ void start_products(
    float (&products)[N / 8][4], const Scalar* rows, const Scalar* columns) {
  const uint64_t a = describe_matrix(rows, 0, 8 * kPanelRow);
  const uint64_t b = describe_matrix(columns, 0, 8 * kPanelRow);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const int panel = k / 4 * kPanelRow, within = k % 4 * 32;
    wgmma_ss<Scalar>(
        products, advance_descriptor(a, panel * kGroupRows + within),
        advance_descriptor(b, panel * N + within), k > 0);
  }
}

// Starts sums (64, D) += weights (64, N) times a tile (N, D).
template <class Scalar, int D, int N>
__device__ __forceinline__ void start_sums(
    float (&sums)[D / 8][4], const uint32_t (&weights)[N / 16][4], const Scalar* tile) {
  const uint64_t b = describe_matrix(tile, N * kPanelRow, 8 * kPanelRow);
#pragma unroll
  for (int k = 0; k < N / 16; ++k)
    wgmma_rs<Scalar>(sums, weights[k], advance_descriptor(b, 16 * k * kPanelRow));
}

}  // namespace trifuse::cuda
