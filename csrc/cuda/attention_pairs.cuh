// The pairs of the attention kernels: heads and sequences, which query-key pairs take part, which
// weights dropout keeps, and the loop over the tiles that have pairs.

#pragma once

#include <type_traits>

#include "cuda/attention.h"
#include "cuda/attention_configurations.cuh"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/philox.cuh"
#include "cuda/ptx.cuh"

namespace trifuse::cuda {

// Heads and sequences -----------------------------------------------------------------------------

// One query head of one sequence.
struct Head {
  int b, h, kv_head;
  int64_t batch;                   // index into the tensors: 0 if sequences are packed
  int64_t first_query, first_key;  // tokens at which the sequence begins
  int queries, keys;               // lengths; keys end at key_lengths
  int stored;                      // length of the keys in memory
  int corner;                      // relative biases count distances from key i + corner
  int left, right;                 // in the window, query i attends to keys [i - left, i + right]
  int64_t first_row;               // index of its first query in (B, H, Lq); packed: (H, total)
  int64_t mask_offset;             // offset of its mask

  __device__ Head(const Attention& p, int b, int h)
      : Head(p, b, h, h / (static_cast<int>(p.heads) / static_cast<int>(p.kv_heads))) {}
  __device__ Head(const Attention& p, int b, int h, int kv_head) : b(b), h(h), kv_head(kv_head) {
    const bool packed = p.cu_seqlens_q != nullptr;
    batch = packed ? 0 : b;
    first_query = packed ? p.cu_seqlens_q[b] : 0;
    first_key = packed ? p.cu_seqlens_k[b] : 0;
    queries = static_cast<int>(packed ? p.cu_seqlens_q[b + 1] - first_query : p.Lq);
    keys = stored = static_cast<int>(packed ? p.cu_seqlens_k[b + 1] - first_key : p.Lk);
    corner = p.lower_right ? stored - queries : 0;
    const int64_t diagonal = corner + p.offset(b);
    left = bound(p.window_left - diagonal, stored, queries);
    right = bound(p.window_right + diagonal, queries, stored);
    if (p.key_lengths) keys = min(static_cast<int>(p.key_lengths[b]), stored);
    first_row = (batch * p.heads + h) * p.total_q + first_query;
    mask_offset = b * p.mask.stride[0] + h * p.mask.stride[1] + (p.mask_by_distance ? corner : 0);
  }

  // Clamps a bound to [-before, after - 1]. Below that range it would leave out every pair, and
  // above it none. After the clamp, a position can be added in 32 bits.
  __device__ static int bound(int64_t side, int before, int after) {
    return static_cast<int>(min(max(side, -int64_t(before)), int64_t(after) - 1));
  }

  template <class Scalar>
  __device__ HeadRows<Scalar> query_rows(const Tensor4& t, int64_t columns) const {
    return {t, batch, h, first_query, columns};
  }
  template <class Scalar>
  __device__ HeadRows<Scalar> key_rows(const Tensor4& t, int64_t columns) const {
    return {t, batch, kv_head, first_key, columns};
  }
  template <int N, class Scalar>
  __device__ StreamedRows<Scalar, N> streamed_queries(
      const Attention& p, const Tile<Scalar>& stages) const {
    return {
        query_rows<const Scalar>(p.query, p.E), query_rows<const Scalar>(p.grad_out, p.Ev), queries,
        stages};
  }
  template <int N, class Scalar>
  __device__ StreamedRows<Scalar, N> streamed_keys(
      const Attention& p, const Tile<Scalar>& stages) const {
    return {
        key_rows<const Scalar>(p.key, p.E), key_rows<const Scalar>(p.value, p.Ev), keys, stages};
  }
};

// A thread block owns block `block` of the `blocks` blocks of rows of head h of sequence b. With
// packed sequences, b is p.batch in the blocks for tokens past the last sequence.
struct BlockIndex {
  int block, blocks, h, b;

  __device__ BlockIndex(int64_t length, int rows, int64_t heads) {
    blocks = static_cast<int>((length + rows - 1) / rows);
    // Divisions of 64 bits would take several times as long.
    const unsigned plane = blockIdx.x / blocks, all = static_cast<unsigned>(heads);
    block = blockIdx.x % blocks;
    h = static_cast<int>(plane % all);
    b = static_cast<int>(plane / all);
  }
  // Blocks of queries. Under a causal bound the last queries attend to the most keys, and start
  // first.
  __device__ static BlockIndex of_queries(const Attention& p, int rows) {
    BlockIndex index(p.Lq, rows, p.heads);
    if (p.window_right != kNoBound) index.block = index.blocks - 1 - index.block;
    return index;
  }
};

// A block's share of the packed tokens past the last sequence: the first `rows` of every `step`
// tokens among [first, total).
struct UnusedTokens {
  int64_t first, total, step;
  int rows;

  __device__ __forceinline__
  UnusedTokens(const int64_t* cu_seqlens, int64_t total, const BlockIndex& index, int rows)
      : first(cu_seqlens[index.b] + index.block * rows), total(total),
        step(int64_t(index.blocks) * rows), rows(rows) {}
};

template <class Scalar>
__device__ __forceinline__ void store_zeros(
    const HeadRows<Scalar>& to, const UnusedTokens& unused) {
  for (int64_t first = unused.first; first < unused.total; first += unused.step)
    for (int i = threadIdx.x; i < unused.rows * to.columns; i += blockDim.x)
      if (const int64_t row = first + i / to.columns; row < unused.total)
        to.data[row * to.stride + i % to.columns * to.column_stride] = narrow<Scalar>(0);
}

// Pairs -------------------------------------------------------------------------------------------

// The columns [first, last) to which a row attends by its position.
struct Range {
  int first, last;

  // A row attends to `before` columns before the column with its own number, and `behind` after it.
  __device__ Range(int row, int before, int behind, int count) {
    first = min(max(row - before, 0), count);
    last = min(max(row + behind + 1, 0), count);
  }
};
__device__ __forceinline__ Range visible_keys(const Head& head, int query) {
  return {query, head.left, head.right, head.keys};
}
__device__ __forceinline__ Range visible_queries(const Head& head, int key) {
  return {key, head.right, head.left, head.queries};
}

// kByKey: rows are keys and columns are queries.
template <bool kByKey>
__device__ __forceinline__ Range visible_to_row(const Head& head, int row) {
  if constexpr (kByKey) return visible_queries(head, row);
  else return visible_keys(head, row);
}

// The columns to which the thread's two rows attend, in the tiles of a warp whose rows begin at
// `row`.
template <bool kByKey>
struct ThreadRanges {
  Range of[2];

  __device__ __forceinline__ ThreadRanges(const Head& head, int row)
      : of{visible_to_row<kByKey>(head, row + fragment_row(0)),
           visible_to_row<kByKey>(head, row + fragment_row(2))} {}
};

// Returns the columns to which some row of a block attends by position, from a multiple of N on.
template <int N, bool kByKey>
__device__ __forceinline__ Range visible_to_block(const Head& head, int first, int rows) {
  const int count = kByKey ? head.keys : head.queries;
  Range result = visible_to_row<kByKey>(head, first);
  result.last = first < count ? visible_to_row<kByKey>(head, min(first + rows, count) - 1).last : 0;
  result.first = result.first / N * N;
  return result;
}

// The pairs of a warp's 16 x N tile that take part.
template <int N>
struct Pairs {
  using Bits = std::conditional_t<
      N == 128, unsigned __int128, std::conditional_t<N == 64, uint64_t, uint32_t>>;
  Bits row[2];     // the thread's two rows, shifted so that its own columns are at constant bits
  bool any, full;  // whether any pair, or every pair, of the whole tile takes part

  __device__ __forceinline__ bool test(int n, int e) const {
    return row[e / 2] >> (8 * n + e % 2) & 1;
  }
  // Called before remove: keeps the bits of the thread's own columns alone.
  __device__ __forceinline__ void keep_own() {
#pragma unroll
    for (Bits& bits : row) bits &= ~Bits(0) / 255 * 3;
    full = false;
  }
  __device__ __forceinline__ void remove(int n, int e) {
    row[e / 2] &= ~(Bits(1) << (8 * n + e % 2));
  }
};

template <int N>
constexpr typename Pairs<N>::Bits low_bits(int count) {
  using Bits = typename Pairs<N>::Bits;
  constexpr int kBits = 8 * sizeof(Bits);
  return count <= 0 ? 0 : count >= kBits ? ~Bits(0) : (Bits(1) << count) - 1;
}

// A mask of one head, or with `bias` the relative bias beside it: (queries, keys) by strides, from
// element `offset` on.
template <Masks kMasks>
struct HeadMask {
  const void* data;
  MaskKind kind;
  int64_t offset, query_stride, key_stride;

  __device__ __forceinline__ HeadMask(const Attention& p, const Head& head, bool bias)
      : data(bias ? p.relative_bias.data : p.mask.data),
        kind(bias ? MaskKind::Float32 : p.mask_kind),
        // With two masks, the offset is computed here: keeping both would take more registers.
        offset(
            kMasks < Masks::Two ? head.mask_offset
                                : head.b * (bias ? p.relative_bias : p.mask).stride[0] +
                    head.h * (bias ? p.relative_bias : p.mask).stride[1] +
                    (bias || p.mask_by_distance ? head.corner : 0)),
        query_stride(bias ? p.relative_bias.stride[2] : p.mask.stride[2]),
        key_stride(bias ? p.relative_bias.stride[3] : p.mask.stride[3]) {}
};

// Returns whether the mask lets a pair take part. `out` is the bit pattern that leaves a pair out.
template <class Raw>
__device__ __forceinline__ bool mask_keeps(const Raw* pair, Raw out) {
  return __ldg(pair) != out;
}

// Reads the mask of rows [row, row + 16) and columns [column, column + N) into bits of the thread's
// two rows. A lane keeps loads for `kAhead` queries in flight.
template <int N, bool kByKey, int kAhead, class Mask, class Raw>
__device__ __forceinline__ void read_mask(
    typename Pairs<N>::Bits (&bits)[2], const Mask& of, const Head& head, int row, int column,
    Raw out) {
  using Bits = typename Pairs<N>::Bits;
  const Raw* mask = static_cast<const Raw*>(of.data) + of.offset;
  const int64_t query_stride = of.query_stride, key_stride = of.key_stride;
  if constexpr (kByKey) {
    // A lane reads one key's mask for every second query; the lane 16 away reads the other queries.
    const int key = row + lane() % 16, half = lane() / 16;
    Bits mine = 0;
    if (query_stride == 0) {
      mine = key < head.keys && mask_keeps(mask + key * key_stride, out) ? ~Bits(0) : 0;
    } else {
#pragma unroll kAhead
      for (int i = 0; i < N / 2; ++i) {
        const int query = column + 2 * i + half;
        const bool kept = query < head.queries && key < head.keys &&
            mask_keeps(mask + query * query_stride + key * key_stride, out);
        mine |= Bits(kept) << (2 * i + half);
      }
      mine |= __shfl_xor_sync(kAllLanes, mine, 16);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) bits[r] = __shfl_sync(kAllLanes, mine, fragment_row(2 * r));
  } else {
    // A lane reads the mask of one or two keys, query by query.
    const int rows = query_stride == 0 ? 1 : 16;
    bits[0] = bits[1] = 0;
#pragma unroll kAhead
    for (int r = 0; r < rows; ++r) {
      const int query = row + r;
      Bits word = 0;
#pragma unroll
      for (int part = 0; part < N; part += 32) {
        const int key = column + part + lane();
        const bool kept = lane() < N && (rows == 1 || query < head.queries) && key < head.keys &&
            mask_keeps(mask + query * query_stride + key * key_stride, out);
        word |= Bits(__ballot_sync(kAllLanes, kept)) << part;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (rows == 1 || r == fragment_row(2 * i)) bits[i] = word;
    }
  }
}

constexpr uint32_t kMinusInfinity = 0xFF800000;  // the bit pattern in float32

// As read_mask, for a relative bias beside a mask. A tile has few distances, and a lane reads every
// 32nd of them.
template <int N, bool kByKey, class Mask>
__device__ __forceinline__ void read_bias(
    typename Pairs<N>::Bits (&bits)[2], const Mask& bias, const Head& head, int row, int column) {
  constexpr int kWords = N == 64 ? 3 : 2;
  static_assert(N + 15 <= 32 * kWords);
  const uint32_t* at_0 = static_cast<const uint32_t*>(bias.data) + bias.offset;
  uint32_t kept[kWords];  // a bit for each distance of a column from a row, from the smallest on
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const int apart = column - (row + 15) + 32 * i + lane(), distance = kByKey ? -apart : apart;
    kept[i] = __ballot_sync(
        kAllLanes,
        -head.queries < distance && distance < head.stored &&
            mask_keeps(at_0 - distance, kMinusInfinity));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int shift = 15 - fragment_row(2 * r);
    bits[r] = __funnelshift_r(kept[0], kept[1], shift);
    if constexpr (N == 64) bits[r] |= uint64_t(__funnelshift_r(kept[1], kept[2], shift)) << 32;
  }
}

// The column of the tables that each pair of one head reads.
struct PairColumns {
  const int32_t* index;  // of query 0 and key 0

  __device__ __forceinline__ PairColumns(const Attention& p, const Head& head)
      : index(p.relative_index + (p.index_by_distance ? head.corner : 0)) {}
  __device__ __forceinline__ int of(const Attention& p, int query, int key) const {
    return __ldg(index + query * p.index_stride[0] + key * p.index_stride[1]);
  }
};

// The tables of one head that an index reads.
struct HeadTables {
  PairColumns columns;
  const float *shared, *of_queries, *of_keys;  // the row of all pairs, of query 0 and of key 0

  __device__ __forceinline__ HeadTables(const Attention& p, const Head& head)
      : columns(p, head), shared(first_row(p.relative_bias, head.b, head.h, 0)),
        of_queries(first_row(p.query_bias, head.batch, head.h, head.first_query)),
        of_keys(first_row(p.key_bias, head.batch, head.h, head.first_key)) {}

  // Calls take(number) with the number that a pair reads from each table of the call.
  template <class Take>
  __device__ __forceinline__ void read(
      const Attention& p, int query, int key, const Take& take) const {
    const int column = columns.of(p, query, key);
    if (p.relative_bias.data) take(__ldg(shared + column));
    if (p.query_bias.data) take(__ldg(of_queries + query * p.query_bias.stride[2] + column));
    if (p.key_bias.data) take(__ldg(of_keys + key * p.key_bias.stride[2] + column));
  }

 private:
  __device__ __forceinline__ static const float* first_row(
      const Tensor4& t, int64_t batch, int h, int64_t row) {
    return static_cast<const float*>(t.data) + batch * t.stride[0] + h * t.stride[1] +
        row * t.stride[2];
  }
};

// Removes the thread's own pairs that read -inf from a table.
template <int N, bool kByKey>
__device__ __forceinline__ void remove_own_pairs_that_tables_leave_out(
    Pairs<N>& pairs, const Attention& p, const Head& head, int row, int column) {
  const HeadTables tables(p, head);
  pairs.keep_own();
#pragma unroll 1
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!pairs.test(n, e)) continue;
      const int own_row = row + fragment_row(e), own_column = column + fragment_column(n, e);
      bool keeps = true;
      tables.read(
          p, kByKey ? own_column : own_row, kByKey ? own_row : own_column,
          [&](float number) { keeps &= __float_as_uint(number) != kMinusInfinity; });
      if (!keeps) pairs.remove(n, e);
    }
}

// Clears the bits of pairs that read -inf from a table, in the thread's two rows. Only pairs whose
// bit is set are looked up, because other pairs may be outside the index.
template <int N, bool kByKey>
__device__ __forceinline__ void clear_pairs_that_tables_leave_out(
    typename Pairs<N>::Bits (&bits)[2], const Attention& p, const Head& head, int row, int column) {
  using Bits = typename Pairs<N>::Bits;
  const HeadTables tables(p, head);
  Bits kept[2] = {0, 0};
  // Not unrolled, so that neither the bits nor the addresses stay in registers for all columns.
#pragma unroll 1
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int own_row = row + fragment_row(e), own_column = fragment_column(n, e);
      if (!(bits[e / 2] >> own_column & 1)) continue;
      bool keeps = true;
      tables.read(
          p, kByKey ? column + own_column : own_row, kByKey ? own_row : column + own_column,
          [&](float number) { keeps &= __float_as_uint(number) != kMinusInfinity; });
      kept[e / 2] |= Bits(keeps) << own_column;
    }
  // Each of the four lanes that share a row has looked up a quarter of its pairs.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    kept[r] |= __shfl_xor_sync(kAllLanes, kept[r], 1);
    bits[r] = kept[r] | __shfl_xor_sync(kAllLanes, kept[r], 2);
  }
}

// Returns which pairs of rows [row, row + 16) and columns [column, column + N) take part. With
// Masks::All these include pairs that tables leave out, which the consumers remove.
template <int N, bool kByKey, Masks kMasks = Masks::One, int kAhead = 4>
__device__ __forceinline__ Pairs<N> find_pairs(
    const Attention& p, const Head& head, const ThreadRanges<kByKey>& ranges, int row, int column) {
  using Bits = typename Pairs<N>::Bits;
  Pairs<N> pairs;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool inside = row + fragment_row(2 * r) < (kByKey ? head.keys : head.queries);
    pairs.row[r] = inside ? low_bits<N>(min(ranges.of[r].last - column, N)) &
            ~low_bits<N>(ranges.of[r].first - column)
                          : 0;
  }
  if (kMasks != Masks::None && p.mask_kind != MaskKind::None &&
      __any_sync(kAllLanes, (pairs.row[0] | pairs.row[1]) != 0)) {
    const HeadMask<kMasks> mask(p, head, false);
    Bits kept[2];
    const bool bfloat16 = p.dtype == DType::BFloat16;
    if (p.mask_kind == MaskKind::Bool)
      read_mask<N, kByKey, kAhead>(kept, mask, head, row, column, uint8_t(0));
    else if (p.mask_kind == MaskKind::Float32 || p.dtype == DType::Float32)
      read_mask<N, kByKey, kAhead>(kept, mask, head, row, column, kMinusInfinity);
    else
      read_mask<N, kByKey, kAhead>(
          kept, mask, head, row, column, uint16_t(bfloat16 ? 0xFF80 : 0xFC00));
    pairs.row[0] &= kept[0];
    pairs.row[1] &= kept[1];
    if (kMasks >= Masks::Two && p.relative_bias.data && !has_tables<kMasks>(p)) {
      const HeadMask<kMasks> bias(p, head, true);
      if constexpr (kMasks == Masks::TwoForHeads)
        read_mask<N, kByKey, kAhead>(kept, bias, head, row, column, kMinusInfinity);
      else if constexpr (kMasks >= Masks::Two) read_bias<N, kByKey>(kept, bias, head, row, column);
      pairs.row[0] &= kept[0];
      pairs.row[1] &= kept[1];
    }
  }
  if constexpr (kMasks == Masks::OneAndTables)
    if (__any_sync(kAllLanes, (pairs.row[0] | pairs.row[1]) != 0))
      clear_pairs_that_tables_leave_out<N, kByKey>(pairs.row, p, head, row, column);
  const Bits all = low_bits<N>(N);
  pairs.any = __any_sync(kAllLanes, (pairs.row[0] | pairs.row[1]) != 0);
  pairs.full = __all_sync(kAllLanes, pairs.row[0] == all && pairs.row[1] == all);
#pragma unroll
  for (int r = 0; r < 2; ++r) pairs.row[r] >>= lane() % 4 * 2;
  return pairs;
}

// Sets weights to 1 for pairs that take part, and to 0 for others.
template <int N>
__device__ __forceinline__ void set_to_pairs(float (&weights)[N / 8][4], const Pairs<N>& pairs) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) weights[n][e] = pairs.test(n, e);
}

__device__ __forceinline__ uint64_t dropout_seed(const Attention& p) {
  return p.dropout.threshold ? *p.seed : 0;
}

// Where the random numbers of a head's tile begin.
struct DrawnTile {
  uint32_t plane;
  int query, key;
  __device__ __forceinline__ DrawnTile(const Attention& p, int b, int h, int query, int key)
      : plane(drawn_unit(p.seed, p.placed, static_cast<uint32_t>(b * p.heads + h))), query(query),
        key(key) {
    if (!p.placed) return;
    const Place place = Place::read(p.seed);
    this->query += static_cast<int>(place.row);
    this->key += static_cast<int>(place.column);
  }
};

// The weights of a warp's tile that dropout keeps.
template <int N, bool kByKey>
class Kept {
 public:
  // The tile begins at a multiple of 8 keys. A lane draws one byte for a query and eight keys, and
  // packs its bytes into a word; shuffles then bring each thread the bits of its own pairs.
  __device__ __forceinline__
  Kept(const Attention& p, const Head& head, uint64_t seed, int row, int column) {
    constexpr int kDraws = 16 * N / 8;
    constexpr int kQueries = kByKey ? N : 16;
    const DrawnTile tile(p, head.b, head.h, kByKey ? column : row, kByKey ? row : column);
    uint32_t drawn = 0;
#pragma unroll
    for (int i = 0; i < kDraws; i += 32) {
      const int draw = i + lane();
      const int query = tile.query + draw % kQueries, group = tile.key / 8 + draw / kQueries;
      drawn |= dropout_keep(seed, tile.plane, query, group, p.dropout.threshold) << i / 4;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int from =
          kByKey ? i / 2 * 8 + lane() % 4 * 2 + i % 2 : i / 2 * 16 + fragment_row(i % 2 * 2);
      word_[i] = __shfl_sync(kAllLanes, drawn, from) >> (kByKey ? lane() / 4 : lane() % 4 * 2);
    }
  }
  __device__ __forceinline__ bool test(int n, int e) const {
    if constexpr (kByKey) {
      const int draw = e / 2 * N + 8 * n;
      return word_[draw % 32 / 8 * 2 + e % 2] >> draw / 32 * 8 & 1;
    } else {
      return word_[n % 2 * 2 + e / 2] >> (n / 2 * 8 + e % 2) & 1;
    }
  }

 private:
  static constexpr int kWords = kByKey ? 8 : 4;
  uint32_t word_[kWords];
};

// Tiles -------------------------------------------------------------------------------------------

// Calls compute(column, stage, pairs) in each warp for the tiles of `range`, N columns each, in
// which the warp has pairs; find_pairs(column) returns them. start_load(column, stage) starts the
// block's load of a tile; it is called one tile ahead, and only for tiles in which some warp has a
// pair. All threads call prepare(stage) once a tile has arrived. One barrier per tile. On return no
// thread uses the stages.
template <int N, class FindPairs, class StartLoad, class Prepare, class Compute>
__device__ __forceinline__ void for_tiles(
    const Range& range, const FindPairs& find_pairs, const StartLoad& start_load,
    const Prepare& prepare, const Compute& compute) {
  Pairs<N> pairs, next_pairs;
  int column = range.first - N, stage = 0;
  for (bool loaded = false;; loaded = true) {
    if (loaded) cp_async_wait<0>();
    int next = column;
    bool some;
    do {
      next += N;
      some = false;
      if (next < range.last) {
        next_pairs = find_pairs(next);
        some = next_pairs.any;
      }
      some = __syncthreads_or(some);
    } while (!some && next < range.last);
    if (some) {
      start_load(next, stage ^ 1);
      cp_async_commit();
    }
    if (loaded) {
      prepare(stage);
      if (pairs.any) compute(column, stage, pairs);
    }
    if (!some) break;
    column = next;
    pairs = next_pairs;
    stage ^= 1;
  }
  cp_async_wait<0>();
  __syncthreads();
}

}  // namespace trifuse::cuda
