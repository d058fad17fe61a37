// What the kernels of attention for Hopper GPUs share: how a block's warpgroups work together, how tiles
// come, and their products.
//
// A block has three warpgroups of four warps. One produces: it finds the tiles in which some pair of a
// query and a key takes part, has the copy engine load them, as far ahead as there is room, and leaves
// beside them which pairs take part and which weights dropout keeps. Two consume, 64 of the block's rows
// each: products by the tensor cores, which run behind the threads' backs.

#pragma once

#include "cuda/attention_tile.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "cuda/tensor_map.h"

namespace trifuse::cuda {

constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kGroupRows = 64, kRows = kConsumers * kGroupRows;
// Of the registers that each thread has at launch a producer keeps some, and consumers get the others.
constexpr int kRegisters = 168;
constexpr int consumer_registers(int producer) { return (3 * kRegisters - producer) / kConsumers; }

constexpr int kPanelRow = 128;  // bytes of a row of a panel

// A number that is the same for all lanes of a warp. Told so the compiler keeps what follows from it, descriptors
// of matrices above all, where products take it from: in uniform registers.
__device__ __forceinline__ int uniform(int number) { return __shfl_sync(kAllLanes, number, 0); }

// Numbers of named barriers; 0 is __syncthreads.
enum Named {
  kTurns = 1,      // of consumers 0 and 1
  kProducing = 3,  // among producers
  kPassing = 4,    // among all, between passes
  kStoring = 5,    // among consumer 0 and among consumer 1
};

// Tensors as the copy engine sees them -------------------------------------------------------------------

// A tensor that the copy engine loads from, and whether heads and sequences are dimensions of it: where
// it is broadcast over them they aren't.
struct Source {
  CUtensorMap map;
  int heads, sequences;
};

inline Source source(const MappedTensor& t, int rows) {
  return {make_tensor_map(t, rows), t.size[1] > 1, t.size[0] > 1};
}

// (sequences, heads, length, columns), for boxes of 64 columns.
inline MappedTensor mapped(
    const Attention& p, const Tensor4& t, int64_t heads, int64_t length, int64_t columns) {
  MappedTensor result{
      p.dtype, t.data, {p.cu_seqlens_q ? 1 : p.batch, heads, length, columns},
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

// Starts to load `rows` rows of a head, from token `first` on, zeros past the tensor's ends; by one thread.
// Tiles lie in panels of 64 columns.
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

// Makes a tile of N rows one to be summed up over its rows, by all producers: in the first pass by zeros
// from row `end` on, which aren't this sequence's.
template <int N, int D, class Scalar>
__device__ __forceinline__ void clean_panels(Scalar* tile, int end, Mode mode) {
  if (mode != Mode::Hope) return clean_numbers(tile, N * D, kWarpgroup, mode);
  for (int i = threadIdx.x; i < (N - end) * 64; i += kWarpgroup)
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel)
      tile[(panel * N + end) * 64 + i] = narrow<Scalar>(0);
}

// The stage that is used next, and the parity of its barriers' phases.
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

// A warp lets go of a stage.
__device__ __forceinline__ void release(SharedBarrier* empty) {
  __syncwarp();
  if (lane() == 0) arrive(empty);
}

// How many consumers have rows, of `left` that are the block's or a later one's.
__device__ __forceinline__ int consumers(int left) { return left > kGroupRows ? 2 : 1; }

// After a pass, by all threads of the block: whether there is another one, and then its mode. `found` says
// whether a sum isn't finite. See attention_forward.cu for the three passes.
template <class Shared>
__device__ __forceinline__ bool pass_again(
    const Attention& p, Shared& shared, Mode& mode, int threads, bool found) {
  if (!is_selective(p) || mode == Mode::Clean) return false;
  if (mode == Mode::Count) {
    mode = Mode::Clean;
    return true;
  }
  if (found) shared.non_finite = true;
  named_barrier(kPassing, threads);
  mode = Mode::Count;
  return shared.non_finite;
}

// Notes on tiles -----------------------------------------------------------------------------------------

// What the producers say of a tile of N columns. -1 for its first column says that there are no more.
template <int N>
struct Notes {
  using Bits = typename Pairs<N>::Bits;
  Bits pairs[kRows], kept[kRows];
  bool full[kRows / 16];
  int column;
};

// Notes which pairs of the block's rows, from `first` on, and a tile's columns take part; whether some of
// the warp's do. Heads are made anew wherever they are needed, for they take more registers than there are
// to keep.
template <int N, bool kByKey>
__device__ __forceinline__ bool note_pairs(
    Notes<N>& notes, const Attention& p, int b, int h, int first, int column) {
  constexpr int kAhead = kByKey || N == 64 ? 8 : 4;  // as registers allow
  const Head head(p, b, h);
  bool any = false;
#pragma unroll 1
  for (int strip = 2 * warp(); strip < 2 * warp() + 2; ++strip) {
    const int row = first + 16 * strip;
    const Span spans[2] = {
        span_of<kByKey>(p, head, row + row_of(0)), span_of<kByKey>(p, head, row + row_of(2))};
    bool full = true;
#pragma unroll 1
    for (int part = 0; part < N / 64; ++part) {
      const Pairs<64> pairs = look<64, kByKey, kAhead>(p, head, spans, row, column + 64 * part);
      if (lane() % 4 == 0)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          reinterpret_cast<uint64_t*>(notes.pairs + 16 * strip + row_of(2 * r))[part] = pairs.row[r];
      any |= pairs.any;
      full &= pairs.full;
    }
    if (lane() == 0) notes.full[strip] = full;
  }
  return any;
}

// Notes which weights dropout keeps. A lane draws for a query and eight keys.
template <int N, bool kByKey>
__device__ __forceinline__ void note_kept(
    Notes<N>& notes, const Attention& p, int b, int h, int first, int column) {
  const uint32_t plane = static_cast<uint32_t>(b * p.heads + h);
  const uint64_t seed = *p.seed;
  if constexpr (kByKey) {
#pragma unroll 1
    for (int i = warp(); i < kRows / 8 * (N / 32); i += kWarpgroup / 32) {
      const int eight = i / (N / 32), part = i % (N / 32);
      const uint32_t drawn = dropout_keep(
          seed, plane, column + 32 * part + lane(), first / 8 + eight, p.dropout.threshold);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t queries = __ballot_sync(kAllLanes, drawn >> j & 1);
        if (lane() == j) reinterpret_cast<uint32_t*>(notes.kept + 8 * eight + j)[part] = queries;
      }
    }
  } else {
    auto* bytes = reinterpret_cast<unsigned char*>(notes.kept);
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * N / 8; i += kWarpgroup)
      bytes[i] = dropout_keep(
          seed, plane, first + i / (N / 8), column / 8 + i % (N / 8), p.dropout.threshold);
  }
}

// The columns that all of the block's rows see, from `first` on.
template <bool kByKey>
__device__ __forceinline__ Span seen_by_all(const Attention& p, const Head& head, int first) {
  const int count = kByKey ? head.keys : head.queries;
  Span result = span_of<kByKey>(p, head, min(first + kRows, count) - 1);
  result.last = p.mask_kind == MaskKind::None ? span_of<kByKey>(p, head, first).last : 0;
  return result;
}

// Notes all of a tile. False: no pair takes part, and the tile is left out. `all`: what seen_by_all says.
template <int N, bool kByKey>
__device__ __forceinline__ bool note_tile(
    Notes<N>& notes, const Attention& p, int b, int h, int first, int column, const Span& all) {
  bool any = true;
  if (all.first <= column && column + N <= all.last) {
    notes.full[threadIdx.x % (kRows / 16)] = true;  // without a branch, which takes registers
  } else {
    any = note_pairs<N, kByKey>(notes, p, b, h, first, column);
  }
  if (!named_barrier_or(kProducing, kWarpgroup, any)) return false;
  if (p.dropout.threshold) {
    note_kept<N, kByKey>(notes, p, b, h, first, column);
    named_barrier(kProducing, kWarpgroup);
  }
  return true;
}

// Says, in the place of a tile's notes, that a pass has no more of them.
template <class TileNotes, int kStages>
__device__ __forceinline__ void note_end(
    TileNotes (&notes)[kStages], SharedBarrier (&full)[kStages], SharedBarrier (&empty)[kStages],
    Ring<kStages>& tiles) {
  wait(&empty[tiles.stage], tiles.parity ^ 1);
  // The leader goes on only when no thread can come so late to a wait that the next phase is over too.
  named_barrier(kProducing, kWarpgroup);
  if (threadIdx.x == 0) {
    notes[tiles.stage].column = -1;
    arrive(&full[tiles.stage]);
  }
  tiles.advance();
}

// Of the thread's two rows of a strip of 16, as it was noted.
template <int N>
__device__ __forceinline__ Pairs<N> noted(
    const typename Pairs<N>::Bits (&bits)[kRows], int strip, bool full) {
  using Bits = typename Pairs<N>::Bits;
  if (full) return {{~Bits(0), ~Bits(0)}, true, true};
  const int shift = lane() % 4 * 2, at = 16 * strip;
  return {{bits[at + row_of(0)] >> shift, bits[at + row_of(2)] >> shift}, true, full};
}

// Products -----------------------------------------------------------------------------------------------

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
    wgmma_rows<Scalar>(
        products, further(a, panel * kGroupRows + within), further(b, panel * N + within), k > 0);
  }
}

// Starts sums (64, D) += weights (64, N) times a tile (N, D).
template <class Scalar, int D, int N>
__device__ __forceinline__ void start_sums(
    float (&sums)[D / 8][4], const uint32_t (&weights)[N / 16][4], const Scalar* tile) {
  const uint64_t b = describe_matrix(tile, N * kPanelRow, 8 * kPanelRow);
#pragma unroll
  for (int k = 0; k < N / 16; ++k)
    wgmma_columns<Scalar>(sums, weights[k], further(b, 16 * k * kPanelRow));
}

}  // namespace trifuse::cuda
