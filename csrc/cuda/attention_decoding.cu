// Attention forward of few queries over many keys on a GPU, such as one query over a cache in a
// decoding step.
//
// A block owns one key head of one sequence and a split, kSplitKeys of its keys. Its rows are the
// queries of all query heads that share the key head, at most 16, so that every key is read once.
// Each of its warps streams its own tiles of the split, without a barrier, and keeps its own
// running softmax; the warps' sums are then added up in order. If the keys are one split, the block
// writes its rows of out and logsumexp. Otherwise it writes partial sums, Partials, and a second
// kernel, with a block for each row, adds up the splits in which the row's sequence has visible
// keys. Blocks of the other splits end at once.
//
// Packed sequences may differ much in length, and the host does not read their lengths. So the
// splits of all sequences lie side by side: total_k / kSplitKeys places and one more per sequence
// hold the splits of any lengths, and a block searches for its sequence in cu_seqlens_k. All sums
// are partial. The second kernel also fills the tokens past the last sequence.
//
// Where a split begins depends only on the key's place in its sequence, so neither the batch around
// a sequence nor the padding after its keys changes a bit of its results. A packed sequence has the
// bits of a padded one.
//
// Floor: the bytes of the keys and values that some row attends to, at the copy rate of the memory.
// Partial sums are written and read again: 4 (D + 2) bytes per row and split, for kSplitKeys keys
// of 2 (E + Ev) bytes. With packed sequences, the search comes before them: one load of a warp for
// up to 32 sequences, two for up to 1024.

#include <algorithm>

#include "cuda/attention_configurations.cuh"
#include "cuda/attention_forward.cuh"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_launch.cuh"
#include "cuda/attention_pairs.cuh"
#include "cuda/attention_passes.cuh"
#include "cuda/attention_softmax.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/warp.cuh"

namespace trifuse::cuda {
namespace {

// 4096 keys of 8 key heads make 128 blocks, about one for each multiprocessor of a large GPU. The
// partial sums of 16 rows of 128 columns are then only 6% of the bytes of their keys and values.
constexpr int kSplitKeys = 256;

constexpr int64_t kMostGridRows = 65535;  // the most of a grid's second and third dimensions

// The general kernel holds this many keys in its two stages, so it reads them all at once.
constexpr int64_t kKeysForOthers = 128;

// The query and the head of a block's row. Most calls have one query, and no divisions.
__device__ __forceinline__ int query_of(int row, int Lq) { return Lq == 1 ? 0 : row % Lq; }
__device__ __forceinline__ int head_of(int row, int Lq) { return Lq == 1 ? row : row / Lq; }

// Rows of (B, H, Lq, splits); packed: (1, H, Lq, places), with the splits of all sequences side by
// side. Rows of splits without visible keys of a sequence are not written.
struct Partials {
  float* sums;        // D columns: the sum of values by weight
  float2* softmax;    // the maximum to which the weights are relative, and the sum of the weights
  int splits, group;  // group: query heads for each key head

  // The row for a row of a block with Lq queries, and a split or its place.
  template <bool kPacked>
  __device__ __forceinline__ int64_t
  at(const Attention& p, const Head& head, int row, int Lq, int place) const {
    const int64_t of_row =
        kPacked ? (head.h + head_of(row, Lq)) * p.Lq + query_of(row, Lq) : head.first_row + row;
    return of_row * splits + place;
  }
};

// The place of a sequence's first split: 0; packed: behind the splits of earlier sequences. From
// one packed sequence to the next, places advance by at least the splits that it needs.
template <bool kPacked>
__device__ __forceinline__ int first_place(const Attention& p, int b) {
  return kPacked ? static_cast<int>(p.cu_seqlens_k[b] / kSplitKeys) + b : 0;
}

// Returns the packed sequence whose splits may lie at a place: the last that begins by there. A
// warp tests 32 sequences at a time.
__device__ __forceinline__ int sequence_of(const Attention& p, int place) {
  int b = 0, end = static_cast<int>(p.batch);
  while (end - b > 1) {
    const int step = (end - b + 31) / 32, tested = b + step * lane();
    const bool begun = tested < end && first_place<true>(p, tested) <= place;
    b += step * (__popc(__ballot_sync(kAllLanes, begun)) - 1);  // that of lane 0 has begun
    end = min(b + step, end);
  }
  return b;
}

// The number of a sequence's queries.
template <bool kPacked>
__device__ __forceinline__ int queries_of(const Attention& p, const Head& head) {
  return kPacked ? head.queries : static_cast<int>(p.Lq);
}

// For a sum of parts that are relative to different maxima of a row's scores: the factor that makes
// a part relative to the largest maximum.
__device__ __forceinline__ float share_of(float row_max, float largest, const Scale& scale) {
  // This includes the case that both are infinite.
  return row_max == largest ? 1.0f : power_of_2<float>((row_max - largest) * scale.exponent);
}

// A row's logsumexp, and its columns [column, column + columns) of out.
template <bool kPacked, class Scalar, int columns>
__device__ __forceinline__ void store_row(
    const Attention& p, const Head& head, int h, int query, const Scale& scale, float row_max,
    float row_sum, int column, const float (&sums)[columns]) {
  const FinishedRow finished(p, scale, row_max, finished_sum(row_max, row_sum));
  const int64_t batch = kPacked ? 0 : head.b, token = kPacked ? head.first_query + query : query;
  if (column == 0) finished.store_logsumexp(p, batch, h, token);
  const HeadRows<Scalar> to(p.out, batch, h, token, p.Ev);
#pragma unroll
  for (int i = 0; i < columns; ++i) {
    float x = sums[i] * finished.factor;
    if (fabsf(x) == kInfinity) x = kNan;
    if (column + i < to.columns) to.data[(column + i) * to.column_stride] = narrow<Scalar>(x);
  }
}

// The splits [first, last) with keys that, by position, some row of a sequence attends to.
struct VisibleSplits {
  int first, last;

  __device__ __forceinline__ VisibleSplits(const Attention& p, const Head& head) {
    const Range range = visible_to_block<kSplitKeys, false>(head, 0, static_cast<int>(p.Lq));
    first = range.first / kSplitKeys;
    last = range.first < range.last ? (range.last - 1) / kSplitKeys + 1 : first;
  }
};

// The queries of the block's rows: row r is query r % Lq of head h + r / Lq. Rows past the last are
// zeros.
template <bool kPacked, int D, class Scalar>
__device__ __forceinline__ void load_queries(
    const Tile<Scalar>& to, const Attention& p, const Head& head, int Lq, int rows) {
  constexpr int kChunk = Tile<Scalar>::kChunk, kChunks = D / kChunk;
  const int used = static_cast<int>(round_up(p.E, 16));
  for (int i = threadIdx.x; i < DecodingShape<D>::kRows * kChunks; i += blockDim.x) {
    const int row = i / kChunks, column = i % kChunks * kChunk;
    if (column >= used) continue;
    const bool inside = row < rows;
    const int query = inside ? query_of(row, Lq) : 0;
    const HeadRows<const Scalar> from(
        p.query, kPacked ? 0 : head.b, inside ? head.h + head_of(row, Lq) : 0,
        kPacked ? head.first_query + query : query, p.E);
    const int count = inside ? min(max(from.columns - column, 0), kChunk) : 0;
    copy_chunk(to.chunk(row, column), from, 0, column, count);
  }
}

// A warp's tile of keys that is being loaded.
template <int N>
struct PendingTile {
  Pairs<N> pairs;
  int column;
  uint32_t seen;  // a bit for each key: whether some row attends to it; 0: there is no tile
};

// Returns the next tile from `column` on, every `step` keys up to `end`, that has pairs.
template <int N, Masks kMasks>
__device__ __forceinline__ PendingTile<N> find_tile(
    const Attention& p, const Head& head, const ThreadRanges<false>& ranges, int& column, int step,
    int end) {
  PendingTile<N> tile;
  tile.seen = 0;
  for (; column < end && !tile.seen; column += step) {
    tile.column = column;
    tile.pairs = find_pairs<N, false, kMasks, 64 / N>(p, head, ranges, 0, column);
    if (!tile.pairs.any) continue;
    tile.pairs.full = false;  // not kept: it saves almost nothing, as few tiles have 16 rows
    // The bits of the first of the four lanes that share a row are not shifted.
    uint32_t seen = tile.pairs.row[0] | tile.pairs.row[1];
#pragma unroll
    for (int bits = 4; bits < 32; bits *= 2) seen |= __shfl_xor_sync(kAllLanes, seen, bits);
    tile.seen = __shfl_sync(kAllLanes, seen, 0);
  }
  return tile;
}

// Starts a warp's load of a tile's rows. Keys that no row attends to are not read, and become
// zeros.
template <int N, int D, class Scalar>
__device__ __forceinline__ void load_rows(
    const Tile<Scalar>& to, const HeadRows<const Scalar>& from, const PendingTile<N>& tile) {
  constexpr int kChunk = Tile<Scalar>::kChunk, kChunks = D / kChunk, kAtOnce = 32 / kChunks;
  const int column = lane() % kChunks * kChunk, first = lane() / kChunks;
  if (!tile.seen || column >= round_up(from.columns, 16)) return;
  const int bytes = min(max(from.columns - column, 0), kChunk) * int(sizeof(Scalar));
  const Scalar* source = from.data + (tile.column + first) * from.stride + column;
  if (tile.seen == static_cast<uint32_t>(low_bits<N>(N)) && from.columns % 16 == 0) {
    // The usual case, in half the instructions: every chunk is whole.
#pragma unroll
    for (int i = 0; i < N; i += kAtOnce) {
      cp_async(to.chunk(i + first, column), source);
      source += kAtOnce * from.stride;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i += kAtOnce) {
      const bool wanted = tile.seen >> (i + first) & 1;
      cp_async(to.chunk(i + first, column), wanted ? source : from.data, wanted ? bytes : 0);
      source += kAtOnce * from.stride;
    }
  }
}

// A warp's sums in shared memory, in place of its stages. The pitch spreads rows over the banks.
template <int D>
struct WarpSums {
  static constexpr int kPitch = D + 8;
  static_assert((DecodingShape<D>::kRows * (kPitch + 2)) * 4 <= 4 * DecodingShape<D>::N * D * 2);
  float* data;

  __device__ __forceinline__ float* row(int row) const { return data + row * kPitch; }
  __device__ __forceinline__ float2& softmax(int row) const {
    return reinterpret_cast<float2*>(data + DecodingShape<D>::kRows * kPitch)[row];
  }
};

// Adds up the warps' sums in order, and writes the block's rows.
template <bool kPacked, int D, class Scalar>
__device__ __forceinline__ void store_block(
    const Attention& p, const Partials& partials, const Head& head, const Scale& scale, int place,
    int Lq, int rows, const Tile<Scalar>& stages) {
  using Shape = DecodingShape<D>;
  const auto of_warp = [&](int w) {
    return WarpSums<D>{reinterpret_cast<float*>(stages.from(4 * Shape::N * w).data)};
  };
  for (int i = threadIdx.x; i < rows * (D / 4); i += 32 * Shape::kWarps) {
    const int row = i / (D / 4), column = i % (D / 4) * 4;
    float2 softmax[Shape::kWarps];
    float row_max = -kInfinity, row_sum = 0, sums[4] = {};
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      softmax[w] = of_warp(w).softmax(row);
      row_max = fmaxf(row_max, softmax[w].x);
    }
#pragma unroll
    for (int w = 0; w < Shape::kWarps; ++w) {
      const float share = share_of(softmax[w].x, row_max, scale);
      const float4 part = *reinterpret_cast<const float4*>(of_warp(w).row(row) + column);
      row_sum = fmaf(share, softmax[w].y, row_sum);
      sums[0] = fmaf(share, part.x, sums[0]);
      sums[1] = fmaf(share, part.y, sums[1]);
      sums[2] = fmaf(share, part.z, sums[2]);
      sums[3] = fmaf(share, part.w, sums[3]);
    }
    if (!kPacked && partials.splits == 1) {
      store_row<kPacked, Scalar>(
          p, head, head.h + head_of(row, Lq), query_of(row, Lq), scale, row_max, row_sum, column,
          sums);
    } else {
      const int64_t at = partials.at<kPacked>(p, head, row, Lq, place);
      *reinterpret_cast<float4*>(partials.sums + at * D + column) =
          make_float4(sums[0], sums[1], sums[2], sums[3]);
      if (column == 0) partials.softmax[at] = make_float2(row_max, row_sum);
    }
  }
}

// kPlain: without a mask, and with scores that are not in nats. That code has 2,800 instructions
// instead of 4,100 at D = 128. A warp runs most of them only a few times, so the time to load them
// matters. kPacked: sequences are packed.
template <class Scalar, int D, bool kPlain, bool kPacked>
__global__ __launch_bounds__(32 * DecodingShape<D>::kWarps, 3) void attention_decoding_kernel(
    const __grid_constant__ Attention p, const __grid_constant__ Partials partials) {
  using Shape = DecodingShape<D>;
  constexpr int N = Shape::N;
  constexpr Masks kMasks = kPlain ? Masks::None : Masks::TwoForHeads;
  const int place = blockIdx.x, kv_head = blockIdx.y;
  const int b = kPacked ? sequence_of(p, place) : blockIdx.z;
  const int split = place - first_place<kPacked>(p, b);
  Head head(p, b, kv_head * partials.group, kv_head);
  const int Lq = queries_of<kPacked>(p, head), rows = partials.group * Lq;
  const VisibleSplits visible(p, head);
  const bool sees = split >= visible.first && split < visible.last;
  if (!sees && (kPacked || partials.splits > 1)) return;
  let_next_kernel_begin();

  const Tile<Scalar> query{reinterpret_cast<Scalar*>(shared_memory()), D};
  const auto stages = query.from(Shape::kRows);
  const auto keys = head.streamed_keys<N>(p, stages.from(4 * N * warp()));
  const PaddedDims dims(p);
  Scale scale(p);
  if (kPlain) scale.scores_in_nats = false;
  ThreadRanges<false> ranges(head, 0);
#pragma unroll
  for (int r = 0; r < 2; ++r) ranges.of[r] = visible_keys(head, query_of(fragment_row(2 * r), Lq));
  const int begin = split * kSplitKeys, end = sees ? min(begin + kSplitKeys, head.keys) : begin;
  head.queries = rows;  // from here on, rows take the role of queries

  // If all rows attend to the same keys, the other keys are zeros, and pass on no NaN.
  const bool may_differ = p.Lq > 1 || p.mask.stride[2] != 0 || p.relative_bias.stride[2] != 0;
  Mode mode = Mode::Fast;
  float acc[D / 8][4];
  Softmax<Scalar> softmax;
  ReachedSums<D> reached;
  do {
    set_to_zero<D>(acc);
    softmax = {};
    int column = begin + N * warp();
    PendingTile<N> tile, next;
    tile.seen = next.seen = 0;
    // The first two rounds only load. Each round makes two groups of copies, of keys and of values,
    // so the latest three are not yet needed when a tile's keys or values are.
    for (int round = 0; round < 2 || tile.seen; ++round) {
      const int stage = round % 2;
      const auto later = find_tile<N, kMasks>(p, head, ranges, column, Shape::kWarps * N, end);
      float weights[N / 8][4] = {};
      if (tile.seen) {
        cp_async_wait<3>();
        __syncwarp();
        if (mode != Mode::Locate) multiply_rows<N>(weights, query, keys.of_scores(stage), dims.E);
        __syncwarp();
      }
      load_rows<N, D>(keys.of_scores(stage), keys.score_rows, later);
      if (mode == Mode::Fast && round == 0) load_queries<kPacked, D>(query, p, head, Lq, rows);
      cp_async_commit();
      if (tile.seen) {
        if (mode != Mode::Locate) {
          if (!kPlain && scale.scores_in_nats)
            scale_and_add_mask<N, false, Scalar, kMasks, true>(
                weights, p, scale, head, tile.pairs, 0, tile.column);
          float rescale[2];
          softmax.template take<N>(weights, tile.pairs, scale, rescale);
          if (__any_sync(kAllLanes, rescale[0] != 1 || rescale[1] != 1))
            multiply_by<D>(acc, rescale);
        } else {
          set_to_pairs<N>(weights, tile.pairs);
        }
        cp_async_wait<3>();
        __syncwarp();
        if (mode != Mode::Fast) {
          prepare_numbers(keys.of_outputs(stage).data, N * D, lane(), 32, mode);
          __syncwarp();
        }
        multiply_weights<N, D>(acc, weights, keys.of_outputs(stage), 0, dims.Ev);
        __syncwarp();
      }
      load_rows<N, D>(keys.of_outputs(stage), keys.output_rows, later);
      cp_async_commit();
      if (mode == Mode::Fast && round == 1) {
        cp_async_wait<3>();
        __syncthreads();  // the queries have arrived
      }
      tile = next;
      next = later;
    }
    if (mode == Mode::Locate) reached = ReachedSums<D>(acc);
  } while (may_differ &&
           next_pass(p, mode, [&] { return __any_sync(kAllLanes, any_non_finite<D>(acc)); }));

  const WarpSums<D> mine{reinterpret_cast<float*>(keys.stages.data)};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = fragment_row(2 * r);
    const float row_sum = warp_sum<4>(softmax.row_sum[r]);
    if (row >= rows) continue;
    if (lane() % 4 == 0) mine.softmax(row) = make_float2(softmax.row_max[r], row_sum);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float low = reached.test(n, 2 * r) ? kNan : acc[n][2 * r];
      const float high = reached.test(n, 2 * r + 1) ? kNan : acc[n][2 * r + 1];
      *reinterpret_cast<float2*>(mine.row(row) + fragment_column(n, 0)) = make_float2(low, high);
    }
  }
  __syncthreads();
  store_block<kPacked, D>(p, partials, head, scale, place, Lq, rows, stages);
}

constexpr int kSumWarps = 8;
constexpr int kUnusedRows = 32;  // a block fills this many tokens past the last sequence at once

// A block owns a row. Each warp adds up every eighth split with visible keys of the row's sequence,
// relative to the largest maximum so far. Then the warps' sums are added up in order. Blocks begin
// while the last splits are still being computed, so that their launch is hidden. With packed
// sequences, blocks of one more sequence fill the tokens past the last.
template <class Scalar, int D, bool kPacked>
__global__ __launch_bounds__(32 * kSumWarps) void attention_decoding_sum_kernel(
    const __grid_constant__ Attention p, const __grid_constant__ Partials partials) {
  // A lane has two of every 64 columns, and keeps loads for kAhead splits in flight.
  constexpr int kColumns = D / 32, kAhead = 8;
  const int query = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
  if constexpr (kPacked) {
    if (b == p.batch) {
      // This kernel must not end before the other, even if all other blocks of it end at once.
      wait_for_previous_kernel();
      BlockIndex index(p.Lq, 1, p.heads);
      index.h = h;
      index.b = b;
      return store_unused_tokens<Scalar>(p, index, kUnusedRows);
    }
  }
  const Head head(p, b, h, 0);  // keys are not read
  const int Lq = queries_of<kPacked>(p, head);
  if (kPacked && query >= Lq) return;
  const VisibleSplits visible(p, head);
  const Scale scale(p);
  const int64_t first = partials.at<kPacked>(p, head, query, Lq, first_place<kPacked>(p, b));
  const float2* softmax = partials.softmax + first;
  const float* parts = partials.sums + first * D + 2 * lane();
  wait_for_previous_kernel();

  float row_max = -kInfinity, row_sum = 0, sums[kColumns] = {};
  for (int i = visible.first + warp(); i < visible.last; i += kAhead * kSumWarps) {
    float part[kAhead][kColumns];
    float2 of_part[kAhead];
    float largest = row_max;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int split = i + j * kSumWarps;
      const bool inside = split < visible.last;
      of_part[j] = inside ? softmax[split] : make_float2(-kInfinity, 0);
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) {
        const float* two_columns = parts + int64_t(split) * D + 32 * c;
        const float2 two =
            inside ? *reinterpret_cast<const float2*>(two_columns) : make_float2(0, 0);
        part[j][c] = two.x;
        part[j][c + 1] = two.y;
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) largest = fmaxf(largest, of_part[j].x);
    const float rescale = share_of(row_max, largest, scale);
    row_max = largest;
    row_sum *= rescale;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[c] *= rescale;
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const float share = share_of(of_part[j].x, row_max, scale);
      row_sum = fmaf(share, of_part[j].y, row_sum);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums[c] = fmaf(share, part[j][c], sums[c]);
    }
  }

  float* const of_warps = reinterpret_cast<float*>(shared_memory());  // (kSumWarps, D)
  float2* const of_softmax = reinterpret_cast<float2*>(of_warps + kSumWarps * D);
#pragma unroll
  for (int c = 0; c < kColumns; ++c)
    of_warps[warp() * D + c / 2 * 64 + 2 * lane() + c % 2] = sums[c];
  if (lane() == 0) of_softmax[warp()] = make_float2(row_max, row_sum);
  __syncthreads();
  for (int w = 0; w < kSumWarps; ++w) row_max = fmaxf(row_max, of_softmax[w].x);
  for (int column = threadIdx.x; column < D; column += 32 * kSumWarps) {
    float total[1] = {}, total_weight = 0;
#pragma unroll
    for (int w = 0; w < kSumWarps; ++w) {
      const float share = share_of(of_softmax[w].x, row_max, scale);
      total[0] = fmaf(share, of_warps[w * D + column], total[0]);
      total_weight = fmaf(share, of_softmax[w].y, total_weight);
    }
    store_row<kPacked, Scalar>(p, head, h, query, scale, row_max, total_weight, column, total);
  }
}

// The splits of a sequence or, packed, the places of all.
int64_t splits_of(const Attention& p) {
  if (p.cu_seqlens_q) return std::min(p.total_k, p.batch * p.Lk) / kSplitKeys + p.batch;
  return (p.Lk + kSplitKeys - 1) / kSplitKeys;
}

// The rows of Partials; 0 if nothing is partial.
int64_t partial_rows(const Attention& p) {
  if (p.cu_seqlens_q) return p.heads * p.Lq * splits_of(p);
  return splits_of(p) == 1 ? 0 : p.batch * p.heads * p.Lq * splits_of(p);
}

// Whether every row can be moved 16 bytes at a time.
bool is_aligned(const Tensor4& t, int64_t columns) {
  constexpr int64_t kChunk = 8;
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride[0] % kChunk == 0 &&
      t.stride[1] % kChunk == 0 && t.stride[2] % kChunk == 0 && (t.stride[3] == 1 || columns == 1);
}

}  // namespace

bool is_for_decoding(const Attention& p) {
  if (p.dtype != DType::BFloat16 && p.dtype != DType::Float16) return false;
  if (p.batch * p.heads * p.Lq == 0 || p.Lk <= kKeysForOthers || p.dropout.threshold ||
      p.relative_index)
    return false;
  const int64_t grid_rows = p.batch + (p.cu_seqlens_q != nullptr);
  if (grid_rows > kMostGridRows || p.heads > kMostGridRows) return false;
  const int64_t group = p.heads / p.kv_heads;
  const bool mask_has_rows = p.mask.stride[1] != 0 || p.mask.stride[2] != 0 || p.relative_bias.data;
  return p.Lq * group <= 16 && std::max(p.E, p.Ev) <= 256 &&
      (p.Lq == 1 || group == 1 || p.mask_kind == MaskKind::None || !mask_has_rows) &&
      is_aligned(p.key, p.E) && is_aligned(p.value, p.Ev);
}

int64_t attention_decoding_workspace(const Attention& p) {
  int64_t bytes = 0;
  for_head_dim(p, [&]<int D>() { bytes = partial_rows(p) * (D + 2) * int64_t(sizeof(float)); });
  return bytes;
}

void attention_decoding(const Attention& given, void* workspace, void* stream) {
  Attention p = given;
  // A row of one query is a head.
  if (p.Lq == 1)
    for (Tensor4* mask : {&p.mask, &p.relative_bias}) mask->stride[2] = mask->stride[1];
  const int64_t splits = splits_of(p), group = p.heads / p.kv_heads;
  const bool plain = p.mask_kind == MaskKind::None && !has_scores_in_nats(p);
  const auto extent = [](int64_t n) { return static_cast<unsigned>(n); };
  for_head_dim(p, [&]<int D>() {
    using Shape = DecodingShape<D>;
    float* const sums = static_cast<float*>(workspace);
    const Partials partials{
        sums, reinterpret_cast<float2*>(sums + partial_rows(p) * D), static_cast<int>(splits),
        static_cast<int>(group)};
    const auto run = [&]<class Scalar, bool kPacked>() {
      const auto on = static_cast<cudaStream_t>(stream);
      LaunchPlan plan = attention_plan("attention_decoding", p, 0, Shape::kWarps, Shape::kShared);
      plan.grid = {extent(splits), extent(p.kv_heads), kPacked ? 1 : extent(p.batch)};
      if (plain) launch(plan, on, attention_decoding_kernel<Scalar, D, true, kPacked>, p, partials);
      else launch(plan, on, attention_decoding_kernel<Scalar, D, false, kPacked>, p, partials);
      if (!kPacked && splits == 1) return;
      plan = attention_plan(
          "attention_decoding_sum", p, 0, kSumWarps, kSumWarps * (D + 2) * sizeof(float));
      plan.grid = {extent(p.Lq), extent(p.heads), extent(p.batch + kPacked)};
      plan.overlaps_previous = true;
      launch(plan, on, attention_decoding_sum_kernel<Scalar, D, kPacked>, p, partials);
    };
    const auto run_with_type = [&]<bool kPacked>() {
      if (p.dtype == DType::BFloat16) run.template operator()<__nv_bfloat16, kPacked>();
      else run.template operator()<__half, kPacked>();
    };
    if (p.cu_seqlens_q) run_with_type.template operator()<true>();
    else run_with_type.template operator()<false>();
  });
}

}  // namespace trifuse::cuda
