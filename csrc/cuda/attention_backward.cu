// Attention backward on a GPU: the formulas at the head of pytorch_ext/reference/attention.py.
//
// No kernel uses atomics. The order of every sum depends only on the sizes, so results are
// reproducible bit for bit.
//
// - rows: computes the numbers from which a query's weights are recomputed, and ∑ dO O - dlse.
// - key_value: a block owns 64 keys of one key head (32 in float32 beyond a head_dim of 128), and
//   loops over the queries that attend to them, in all query heads that share the key head. It
//   reads its keys and values once, and q, dO and three numbers for each query; it writes its rows
//   of dK and dV. Beyond a head_dim of 128 two blocks share the keys, and each writes half of the
//   columns.
// - query: a block owns 64 queries of one head (32 as above), and loops over the keys that they
//   attend to. It reads q and dO once, and the keys and values; it writes its rows of dQ.
// - mask: a block owns a tile of the float mask's gradient, and a share of the sum over the
//   dimensions in which the mask is broadcast. It recomputes dS for one sequence, head and block of
//   queries after another. Another kernel adds up the shares. A mask that all keys share has its
//   own kernel.
// - band: does the same for the relative bias, whose gradient is a sum along each diagonal. A block
//   owns a band, which is all tiles with the same offset of the first key from the first query. It
//   adds up these tiles and stores the sum. Another kernel sums the bands' tiles along their
//   diagonals.
// - Tables that an index reads have their own kernels, in attention_backward_tables.cu.
//
// Floor: 2 · pairs · (4 E + 3 Ev) operations of the tensor cores (float32: of the FMA pipes), of
// which 2 · pairs · (E + Ev) are done twice, so that dK, dV and dQ need not be split between
// blocks. The mask's gradient does them a third time.

#include "cuda/attention.h"
#include "cuda/attention_backward.cuh"
#include "cuda/attention_configurations.cuh"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_grad_scores.cuh"
#include "cuda/attention_launch.cuh"
#include "cuda/attention_pairs.cuh"
#include "cuda/attention_passes.cuh"
#include "cuda/attention_softmax.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/long_sum.cuh"
#include "cuda/warp.cuh"

namespace trifuse::cuda {
namespace {

// How the gradient of a float mask is divided among blocks.
struct MaskShares {
  bool full[4];  // dimensions that the gradient has; it is summed over the others
  int64_t row_blocks, column_blocks;
  int64_t tiles, terms, chunk, shares;  // a share is up to `chunk` of the sum's terms
  int64_t size;                         // elements of the gradient
};

int padded_head_dim(const Attention& p) {
  int result = 0;
  for_head_dim(p, [&]<int D>() { result = D; });
  return result;
}

// Rows --------------------------------------------------------------------------------------------

// Above this magnitude a float32 logsumexp is too coarse to normalise large scores. Near the lowest
// finite number, a common mask value, rounding loses log ∑ exp completely.
constexpr float kCoarseLogsumexp = 1024;

// Writes the three numbers of a warp's 16 queries, from number `row` on. Returns whether one of
// their logsumexps is coarse.
template <class Scalar>
__device__ __forceinline__ bool write_query_vectors(
    const Attention& p, const QueryVectors& vectors, const Head& head, const Scale& scale,
    int row) {
  const auto grad_out = head.query_rows<const Scalar>(p.grad_out, p.Ev);
  const auto out = head.query_rows<const Scalar>(p.out, p.Ev);
  const auto float_at = [&](const Tensor4& t, int query) {
    return static_cast<const float*>(t.data)
        [head.batch * t.stride[0] + head.h * t.stride[1] +
         (head.first_query + query) * t.stride[2]];
  };
  bool coarse = false;
  // Eight lanes share a row.
  constexpr int kChunk = Tile<Scalar>::kChunk;
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const int query = row + i + lane() / 8;
    const bool inside = query < head.queries;
    float delta = 0;
    for (int c = lane() % 8 * kChunk; inside && c < out.columns; c += 8 * kChunk) {
      float g[kChunk], o[kChunk];
      load_chunk(g, grad_out, query, c);
      load_chunk(o, out, query, c);
      // An Inf in dO makes its row's delta NaN, for any output.
#pragma unroll
      for (int j = 0; j < kChunk; ++j) delta = fmaf(fmaf(g[j], 0.0f, g[j]), o[j], delta);
    }
    delta = warp_sum<8>(delta);
    if (!inside || lane() % 8 != 0) continue;
    if (p.grad_logsumexp.data) delta -= float_at(p.grad_logsumexp, query);
    delta = fmaf(delta, 0.0f, delta);
    const float lse = float_at(p.logsumexp, query);
    const bool empty = lse == -kInfinity;
    coarse |= !empty && fabsf(lse) > kCoarseLogsumexp;
    // rest holds the part of the logsumexp that shift loses by rounding. A row without a pair takes
    // part in no tile; 0 keeps -inf out of its exponents.
    const double in_scores = empty ? 0.0 : lse / scale.unit;
    const float shift =
        scale.scores_in_nats || !kTensorCore<Scalar> ? static_cast<float>(in_scores) : 0.0f;
    vectors.delta[head.first_row + query] = delta;
    vectors.shift[head.first_row + query] = shift;
    vectors.rest[head.first_row + query] = static_cast<float>((in_scores - shift) * scale.exponent);
  }
  return coarse;
}

// Replaces the logsumexps of a block's queries, from number `first` on, with the maximum and the
// sum as separate numbers.
template <Masks kMasks, class Scalar>
__device__ __forceinline__ void write_maximum_and_sum(
    const Attention& p, const QueryVectors& vectors, const Head& head, const Scale& scale,
    int first, int pitch) {
  using Shape = WideShape<Scalar>;
  constexpr int N = Shape::N;
  const int row = first + 16 * warp();
  const Tile<Scalar> query{reinterpret_cast<Scalar*>(shared_memory()), pitch};
  const auto key_tile = [&](int stage) { return query.from(Shape::kRows + stage * N); };
  const auto keys = head.key_rows<const Scalar>(p.key, p.E);
  const ThreadRanges<false> ranges(head, row);
  load_tile(query, head.query_rows<const Scalar>(p.query, p.E), first, Shape::kRows, head.queries);
  cp_async_commit();
  Softmax<Scalar> softmax;
  for_tiles<N>(
      visible_to_block<N, false>(head, first, Shape::kRows),
      [&](int column) { return find_pairs<N, false, kMasks>(p, head, ranges, row, column); },
      [&](int column, int stage) { load_tile(key_tile(stage), keys, column, N, head.keys); },
      [](int) {},
      [&](int column, int stage, const Pairs<N>& pairs) {
        float scores[N / 8][4] = {}, rescale[2];
        multiply_rows<N>(scores, query.from(16 * warp()), key_tile(stage), PaddedDims(p).E);
        scale_and_add_mask<N, false, Scalar, kMasks, true>(
            scores, p, scale, head, pairs, row, column);
        softmax.template take<N>(scores, pairs, scale, rescale);
      });
  softmax.finish();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int own = row + fragment_row(2 * r);
    if (lane() % 4 != 0 || own >= head.queries) continue;
    const bool empty = softmax.row_max[r] == -kInfinity;
    vectors.shift[head.first_row + own] = empty ? 0.0f : softmax.row_max[r];
    vectors.rest[head.first_row + own] = log2f(softmax.row_sum[r]);
  }
}

// A block owns some queries of one head of one sequence; it reads their rows of dO and O and writes
// three numbers for each. With large scores, and only if one of its logsumexps is coarse, it also
// loops over the keys.
template <class Scalar, Masks kMasks>
__global__ __launch_bounds__(32 * WideShape<Scalar>::kWarps) void attention_backward_rows_kernel(
    const __grid_constant__ Attention p, const QueryVectors vectors, int pitch) {
  using Shape = WideShape<Scalar>;
  const BlockIndex index(p.Lq, Shape::kRows, p.heads);
  const Head head(p, index.b, index.h);
  const int first = index.block * Shape::kRows;
  if (first >= head.queries) return;
  const auto scale = Scale::of<kMasks>(p);
  const bool coarse = write_query_vectors<Scalar>(p, vectors, head, scale, first + 16 * warp());
  if (may_have_large_scores<kMasks>(p) && __syncthreads_or(coarse))
    write_maximum_and_sum<kMasks, Scalar>(p, vectors, head, scale, first, pitch);
}

// Keys and values ---------------------------------------------------------------------------------

template <class Scalar, int D, Masks kMasks>
__global__
__launch_bounds__(32 * BackwardShape<Scalar, D>::kWarps) void attention_backward_key_value_kernel(
    const __grid_constant__ Attention p, const QueryVectors vectors) {
  using Shape = BackwardShape<Scalar, D>;
  constexpr int N = Shape::N, C = Shape::kColumns;
  // With a causal bound, the most queries attend to the first keys, and their blocks already start
  // first.
  const BlockIndex index(p.Lk, Shape::kRows, p.kv_heads);
  const int first_column = blockIdx.y * C;
  if (index.b == p.batch) {
    if (first_column == 0) store_unused_keys<Scalar>(p, index, Shape::kRows);
    return;
  }
  const int group = static_cast<int>(p.heads / p.kv_heads);
  const Head any_head(p, index.b, index.h * group);
  const int first = index.block * Shape::kRows, row = first + 16 * warp();
  if (first >= any_head.stored) return;

  const Tile<Scalar> key{reinterpret_cast<Scalar*>(shared_memory()), D};
  const Tile<Scalar> value = key.from(Shape::kRows), stages = value.from(Shape::kRows);
  const PaddedDims dims(p);
  const auto scale = Scale::of<kMasks>(p);
  const uint64_t seed = dropout_seed(p);

  const auto keys = any_head.key_rows<const Scalar>(p.key, p.E);
  const auto values = any_head.key_rows<const Scalar>(p.value, p.Ev);
  load_tile(key, keys, first, Shape::kRows, any_head.keys);
  load_tile(value, values, first, Shape::kRows, any_head.keys);
  cp_async_commit();

  Mode mode = Mode::Fast;
  float dk[C / 8][4], dv[C / 8][4];
  ReachedSums<C> dk_reached, dv_reached;
  do {
    set_to_zero<C>(dk);
    set_to_zero<C>(dv);
    for (int member = 0; member < group; ++member) {
      const Head head(p, index.b, index.h * group + member);
      const auto queries = head.streamed_queries<N>(p, stages);
      const ThreadRanges<true> ranges(head, row);
      for_tiles<N>(
          visible_to_block<N, true>(head, first, Shape::kRows),
          [&](int column) { return find_pairs<N, true, kMasks>(p, head, ranges, row, column); },
          [&](int column, int stage) { queries.load(column, stage); },
          [&](int stage) {
            if (mode == Mode::Fast) return;
            prepare_tile(queries.of_scores(stage), N, mode);
            prepare_tile(queries.of_outputs(stage), N, mode);
            __syncthreads();
          },
          [&](int column, int stage, const Pairs<N>& pairs) {
            float weights[N / 8][4] = {}, grad_scores[N / 8][4] = {};
            if (mode == Mode::Locate) {
              set_to_pairs<N>(weights, pairs);
              set_to_pairs<N>(grad_scores, pairs);
            } else {
              // Constructed first, so that its loads overlap with the products.
              const TileVectors<N, true> per_query(vectors, head, row, column);
              multiply_rows<N>(weights, key.from(16 * warp()), queries.of_scores(stage), dims.E);
              multiply_rows<N>(
                  grad_scores, value.from(16 * warp()), queries.of_outputs(stage), dims.Ev);
              weights_and_gradients<N, true, Scalar, kMasks>(
                  weights, grad_scores, p, scale, head, per_query, pairs, seed, row, column);
            }
            multiply_weights<N, C>(dv, weights, queries.of_outputs(stage), first_column, dims.Ev);
            multiply_weights<N, C>(dk, grad_scores, queries.of_scores(stage), first_column, dims.E);
          });
    }
    if (mode == Mode::Locate) {
      dk_reached = ReachedSums<C>(dk);
      dv_reached = ReachedSums<C>(dv);
    }
  } while (next_pass<kMasks>(
      p, mode, [&] { return __syncthreads_or(any_non_finite<C>(dk) || any_non_finite<C>(dv)); }));
  clear_rows<C>(dk, any_head.keys - row);
  clear_rows<C>(dv, any_head.keys - row);
  const float scale_factor[2] = {static_cast<float>(p.scale), static_cast<float>(p.scale)};
  store_rows<C>(
      dk, scale_factor, dk_reached, key.from(16 * warp()),
      any_head.key_rows<Scalar>(p.grad_key, p.E), row, any_head.stored, first_column);
  const float keep_scale = static_cast<float>(p.dropout.scale);
  const float keep_factor[2] = {keep_scale, keep_scale};
  store_rows<C>(
      dv, keep_factor, dv_reached, value.from(16 * warp()),
      any_head.key_rows<Scalar>(p.grad_value, p.Ev), row, any_head.stored, first_column);
}

// Queries -----------------------------------------------------------------------------------------

template <class Scalar, int D, Masks kMasks>
__global__
__launch_bounds__(32 * BackwardShape<Scalar, D>::kWarps) void attention_backward_query_kernel(
    const __grid_constant__ Attention p, const QueryVectors vectors) {
  using Shape = BackwardShape<Scalar, D>;
  constexpr int N = Shape::N;
  const auto index = BlockIndex::of_queries(p, Shape::kRows);
  if (index.b == p.batch) return store_unused_queries<Scalar>(p, index, Shape::kRows);
  const Head head(p, index.b, index.h);
  const int first = index.block * Shape::kRows, row = first + 16 * warp();
  if (first >= head.queries) return;

  const Tile<Scalar> query{reinterpret_cast<Scalar*>(shared_memory()), D};
  const Tile<Scalar> grad_out = query.from(Shape::kRows);
  const auto keys = head.streamed_keys<N>(p, grad_out.from(Shape::kRows));
  const PaddedDims dims(p);
  const auto scale = Scale::of<kMasks>(p);
  const uint64_t seed = dropout_seed(p);
  const ThreadRanges<false> ranges(head, row);
  const Range range = visible_to_block<N, false>(head, first, Shape::kRows);

  load_tile(query, head.query_rows<const Scalar>(p.query, p.E), first, Shape::kRows, head.queries);
  load_tile(
      grad_out, head.query_rows<const Scalar>(p.grad_out, p.Ev), first, Shape::kRows, head.queries);
  cp_async_commit();

  const TileVectors<N, false> per_query(vectors, head, row, 0);
  Mode mode = Mode::Fast;
  float dq[D / 8][4];
  ReachedSums<D> reached;
  do {
    set_to_zero<D>(dq);
    for_tiles<N>(
        range,
        [&](int column) { return find_pairs<N, false, kMasks>(p, head, ranges, row, column); },
        [&](int column, int stage) { keys.load(column, stage); },
        [&](int stage) {
          if (mode == Mode::Fast) return;
          prepare_tile(keys.of_scores(stage), N, mode);
          __syncthreads();
        },
        [&](int column, int stage, const Pairs<N>& pairs) {
          float weights[N / 8][4] = {}, grad_scores[N / 8][4] = {};
          if (mode == Mode::Locate) {
            set_to_pairs<N>(grad_scores, pairs);
          } else {
            multiply_rows<N>(weights, query.from(16 * warp()), keys.of_scores(stage), dims.E);
            multiply_rows<N>(
                grad_scores, grad_out.from(16 * warp()), keys.of_outputs(stage), dims.Ev);
            weights_and_gradients<N, false, Scalar, kMasks>(
                weights, grad_scores, p, scale, head, per_query, pairs, seed, row, column);
          }
          multiply_weights<N, D>(dq, grad_scores, keys.of_scores(stage), 0, dims.E);
        });
    if (mode == Mode::Locate) reached = ReachedSums<D>(dq);
  } while (next_pass<kMasks>(p, mode, [&] { return __syncthreads_or(any_non_finite<D>(dq)); }));
  const float factor[2] = {static_cast<float>(p.scale), static_cast<float>(p.scale)};
  store_rows<D>(
      dq, factor, reached, query.from(16 * warp()), head.query_rows<Scalar>(p.grad_query, p.E), row,
      head.queries, 0);
}

// The float mask ----------------------------------------------------------------------------------

__device__ __forceinline__ void store_mask_gradient(
    const Attention& p, const MaskShares& how, float* parts, int64_t share, int64_t at,
    float value) {
  if (how.shares > 1) {
    parts[share * how.size + at] = value;
  } else if (p.mask_kind == MaskKind::Float32 || p.dtype == DType::Float32) {
    static_cast<float*>(p.grad_mask.data)[at] = value;
  } else if (p.dtype == DType::BFloat16) {
    static_cast<__nv_bfloat16*>(p.grad_mask.data)[at] = narrow<__nv_bfloat16>(value);
  } else {
    static_cast<__half*>(p.grad_mask.data)[at] = narrow<__half>(value);
  }
}

// Stores a block's share of a tile of the gradient, the `plane`th (Lq, Lk) of it.
template <class Scalar>
__device__ __forceinline__ void store_mask_tile(
    const Attention& p, const MaskShares& how, float* parts, int64_t share, int64_t plane,
    int first, int column, const float (&sums)[WideShape<Scalar>::N / 8][4]) {
#pragma unroll
  for (int n = 0; n < WideShape<Scalar>::N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t i = first + 16 * warp() + fragment_row(e);
      const int64_t j = column + fragment_column(n, e);
      if (i < p.Lq && j < p.Lk)
        store_mask_gradient(p, how, parts, share, (plane * p.Lq + i) * p.Lk + j, sums[n][e]);
    }
}

// As store_mask_tile, if all queries share the mask: adds up the rows of a thread, of a warp and of
// the block, in this order, and stores one row.
template <class Scalar>
__device__ __forceinline__ void store_mask_row(
    const Attention& p, const MaskShares& how, float* parts, int64_t share, int64_t plane,
    int column, const float (&sums)[WideShape<Scalar>::N / 8][4]) {
  using Shape = WideShape<Scalar>;
  constexpr int N = Shape::N;
  float* const warp_sums = reinterpret_cast<float*>(shared_memory());  // (kWarps, N)
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = sums[n][i] + sums[n][2 + i];
#pragma unroll
      for (int bits = 4; bits < 32; bits *= 2) sum += __shfl_xor_sync(kAllLanes, sum, bits);
      if (lane() < 4) warp_sums[warp() * N + fragment_column(n, i)] = sum;
    }
  __syncthreads();
  if (threadIdx.x >= N || column + int(threadIdx.x) >= p.Lk) return;
  float sum = 0;
  for (int w = 0; w < Shape::kWarps; ++w) sum += warp_sums[w * N + threadIdx.x];
  store_mask_gradient(p, how, parts, share, plane * p.Lk + column + threadIdx.x, sum);
}

// A block owns a tile (of one row if all queries share the mask) and a share of the sum.
template <class Scalar, Masks kMasks>
__global__ __launch_bounds__(32 * WideShape<Scalar>::kWarps) void attention_backward_mask_kernel(
    const __grid_constant__ Attention p, const QueryVectors vectors,
    const __grid_constant__ MaskShares how, float* parts, int pitch) {
  using Shape = WideShape<Scalar>;
  constexpr int N = Shape::N;
  // The block's index: columns fastest, then rows, heads, sequences, and the share last.
  int64_t index = blockIdx.x;
  const int column = static_cast<int>(take_digit(index, how.column_blocks)) * N;
  const int tile_row = how.full[2] ? static_cast<int>(take_digit(index, how.row_blocks)) : 0;
  const int tile_head = how.full[1] ? static_cast<int>(take_digit(index, p.heads)) : 0;
  const int tile_batch = how.full[0] ? static_cast<int>(take_digit(index, p.batch)) : 0;
  const int64_t share = index;

  const GradientTiles<Scalar> tiles(pitch);
  const auto scale = Scale::of<kMasks>(p);
  const uint64_t seed = dropout_seed(p);
  float sums[N / 8][4] = {};
  RunTotals<Scalar> totals(tiles.end());
  for (int64_t term = share * how.chunk; term < min((share + 1) * how.chunk, how.terms); ++term) {
    if (term % kTermsOfRun == 0) totals.end_runs(sums);
    // The term's index: blocks of queries fastest, then heads, then sequences.
    int64_t rest = term;
    const int block = how.full[2] ? tile_row : static_cast<int>(take_digit(rest, how.row_blocks));
    const int h = how.full[1] ? tile_head : static_cast<int>(take_digit(rest, p.heads));
    const int b = how.full[0] ? tile_batch : static_cast<int>(rest);
    const Head head(p, b, h);
    add_grad_scores<Scalar, kMasks>(
        sums, tiles, p, vectors, scale, head, seed, block * Shape::kRows, column);
  }
  totals.add_to(sums);

  const int64_t plane = (how.full[0] ? tile_batch : 0) * (how.full[1] ? p.heads : 1) + tile_head;
  if (how.full[2])
    store_mask_tile<Scalar>(p, how, parts, share, plane, tile_row * Shape::kRows, column, sums);
  else store_mask_row<Scalar>(p, how, parts, share, plane, column, sums);
}

// A mask that all keys share shifts whole rows, which changes their logsumexp and nothing else. So
// its gradient is dlse. A block owns one element of it.
constexpr int kRowMaskThreads = 128;
__global__ __launch_bounds__(kRowMaskThreads) void attention_backward_row_mask_kernel(
    const __grid_constant__ Attention p, const QueryVectors vectors,
    const __grid_constant__ MaskShares how) {
  int64_t index = blockIdx.x;
  const int64_t own_row = how.full[2] ? take_digit(index, p.Lq) : 0;
  const int own_head = how.full[1] ? static_cast<int>(take_digit(index, p.heads)) : 0;
  const int own_batch = static_cast<int>(index);
  float sum[1] = {0}, total = 0;
  for (int64_t term = threadIdx.x; term < how.terms; term += kRowMaskThreads) {
    if (term / kRowMaskThreads % kTermsOfRun == 0) end_run(sum[0], total);
    int64_t rest = term;
    const int query = static_cast<int>(how.full[2] ? own_row : take_digit(rest, p.Lq));
    const int h = how.full[1] ? own_head : static_cast<int>(take_digit(rest, p.heads));
    const Head head(p, how.full[0] ? own_batch : static_cast<int>(rest), h);
    if (query >= head.queries) continue;
    const auto at = [&](const Tensor4& t) {
      return static_cast<const float*>(t.data)
          [head.batch * t.stride[0] + h * t.stride[1] + (head.first_query + query) * t.stride[2]];
    };
    if (at(p.logsumexp) == -kInfinity) continue;
    // shift and delta are multiplied by 0, so that they add only a NaN that has reached the row.
    sum[0] += fmaf(
        vectors.shift[head.first_row + query] + vectors.delta[head.first_row + query], 0.0f,
        p.grad_logsumexp.data ? at(p.grad_logsumexp) : 0.0f);
  }
  sum[0] += total;
  block_sum<kRowMaskThreads>(sum, reinterpret_cast<float*>(shared_memory()));
  if (threadIdx.x == 0) store_mask_gradient(p, how, nullptr, 0, blockIdx.x, sum[0]);
}

// A thread adds up the shares of one element, in runs of kTermsOfRun.
__global__ __launch_bounds__(kSumThreads) void attention_backward_mask_sum_kernel(
    const __grid_constant__ Attention p, MaskShares how, const float* parts) {
  const int64_t at = int64_t(blockIdx.x) * kSumThreads + threadIdx.x;
  if (at >= how.size) return;
  float sum = 0, total = 0;
  for (int64_t share = 0; share < how.shares; ++share) {
    sum += parts[share * how.size + at];
    if (share % kTermsOfRun == kTermsOfRun - 1) end_run(sum, total);
  }
  sum += total;
  how.shares = 1;
  store_mask_gradient(p, how, nullptr, 0, at, sum);
}

// The relative bias -------------------------------------------------------------------------------

// How the gradient of the relative bias is divided among blocks. Bands are numbered by the offset
// of their first key from their first query, from that of the last row of tiles on.
struct BandShares {
  bool batch, heads;  // whether each sequence, and each head, has its own bands
  int64_t row_blocks, bands;
  int64_t planes, terms, chunk, shares;  // a share is up to `chunk` of a band's terms
  int64_t tile;                          // elements of a tile
};

// A block owns a band and a share of the sum.
template <class Scalar>
__global__ __launch_bounds__(32 * WideShape<Scalar>::kWarps) void attention_backward_band_kernel(
    const __grid_constant__ Attention p, const QueryVectors vectors,
    const __grid_constant__ BandShares how, float* parts, int pitch) {
  using Shape = WideShape<Scalar>;
  constexpr int N = Shape::N, kSteps = Shape::kRows / N;
  // The block's index: bands fastest, then heads, sequences, and the share last.
  int64_t index = blockIdx.x;
  const int band = static_cast<int>(take_digit(index, how.bands));
  const int own_head = how.heads ? static_cast<int>(take_digit(index, p.heads)) : 0;
  const int own_batch = how.batch ? static_cast<int>(take_digit(index, p.batch)) : 0;
  const int64_t share = index;
  const int offset = (band - static_cast<int>(how.row_blocks - 1) * kSteps) * N;

  const GradientTiles<Scalar> tiles(pitch);
  const Scale scale(p);
  const uint64_t seed = dropout_seed(p);
  float sums[N / 8][4] = {};
  RunTotals<Scalar> totals(tiles.end());
  for (int64_t term = share * how.chunk; term < min((share + 1) * how.chunk, how.terms); ++term) {
    if (term % kTermsOfRun == 0) totals.end_runs(sums);
    // The term's index: blocks of queries fastest, then heads, then sequences.
    int64_t rest = term;
    const int first = static_cast<int>(take_digit(rest, how.row_blocks)) * Shape::kRows;
    const int h = how.heads ? own_head : static_cast<int>(take_digit(rest, p.heads));
    const Head head(p, how.batch ? own_batch : static_cast<int>(rest), h);
    add_grad_scores<Scalar, Masks::Two>(
        sums, tiles, p, vectors, scale, head, seed, first, first + offset);
  }
  totals.add_to(sums);
  float* const part = parts + blockIdx.x * how.tile;
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      part[(16 * warp() + fragment_row(e)) * N + fragment_column(n, e)] = sums[n][e];
}

// A thread adds up the diagonals of one distance, in runs of one diagonal of a tile.
template <class Scalar>
__global__ __launch_bounds__(kSumThreads) void attention_backward_band_sum_kernel(
    const __grid_constant__ Attention p, const __grid_constant__ BandShares how, const float* parts,
    int64_t size) {
  using Shape = WideShape<Scalar>;
  constexpr int N = Shape::N, kRows = Shape::kRows;
  const RelativeBiasGradient& grad = p.grad_relative_bias;
  const int64_t at = int64_t(blockIdx.x) * kSumThreads + threadIdx.x;
  if (at >= size) return;
  int64_t rest = at;
  const int64_t distance = take_digit(rest, grad.columns) - grad.zero;
  const int64_t h = grad.heads ? take_digit(rest, p.heads) : 0;
  // Sequences with separate diagonals have separate bands, even if they share the bias.
  const int64_t first_batch = grad.batch ? rest : 0;
  const int64_t last_batch = how.batch && !grad.batch ? p.batch : first_batch + 1;
  float sum = 0, total = 0;
  for (int64_t b = first_batch; b < last_batch; ++b) {
    // All heads of a sequence have the same corner, and so do sequences that share their bands.
    const int64_t corner = Head(p, static_cast<int>(b), 0).corner;
    // The place among the diagonals of all bands, from the first one's last row on.
    const int64_t place = distance + corner + how.row_blocks * kRows - 1;
    if (place < 0) continue;
    for (int64_t share = 0; share < how.shares; ++share)
      for (int step = 0; step <= kRows / N; ++step) {
        const int64_t band = place / N - step;
        if (band < 0 || band >= how.bands) continue;
        const int64_t heads = how.heads ? p.heads : 1, sequences = how.batch ? p.batch : 1;
        const int64_t plane = (share * sequences + (how.batch ? b : 0)) * heads + h;
        const float* part = parts + (plane * how.bands + band) * how.tile;
        // Element (r, c) of a tile lies on its diagonal c - r + kRows - 1.
        const int diagonal_in_tile = static_cast<int>(place % N) + step * N;
        for (int r = 0; r < kRows; ++r)
          if (const int c = diagonal_in_tile + r - (kRows - 1); 0 <= c && c < N)
            sum += part[r * N + c];
        end_run(sum, total);
      }
  }
  grad.data[at] = sum + total;
}

// Launchers ---------------------------------------------------------------------------------------

MaskShares mask_shares(const Attention& p) {
  MaskShares how{};
  const bool tensor_core = p.dtype != DType::Float32;
  const int64_t rows = tensor_core ? WideShape<__half>::kRows : WideShape<float>::kRows;
  const int64_t N = tensor_core ? WideShape<__half>::N : WideShape<float>::N;
  for (int d = 0; d < 4; ++d) how.full[d] = p.grad_mask.stride[d] != 0;
  how.row_blocks = how.full[3] ? (p.Lq + rows - 1) / rows : p.Lq;
  how.column_blocks = how.full[3] ? (p.Lk + N - 1) / N : 1;
  how.tiles = how.column_blocks;
  how.terms = 1;
  how.size = how.full[3] ? p.Lk : 1;
  const int64_t blocks[3] = {p.batch, p.heads, how.row_blocks}, sizes[3] = {p.batch, p.heads, p.Lq};
  for (int d = 0; d < 3; ++d) {
    (how.full[d] ? how.tiles : how.terms) *= blocks[d];
    if (how.full[d]) how.size *= sizes[d];
  }
  const int64_t most_shares = std::max<int64_t>(kBlocksOfSum / std::max<int64_t>(how.tiles, 1), 1);
  how.chunk =
      how.full[3] ? std::max<int64_t>((how.terms + most_shares - 1) / most_shares, 1) : how.terms;
  how.shares = how.full[3] ? std::max<int64_t>((how.terms + how.chunk - 1) / how.chunk, 1) : 1;
  return how;
}

BandShares band_shares(const Attention& p) {
  BandShares how{};
  const bool tensor_core = p.dtype != DType::Float32;
  const int64_t rows = tensor_core ? WideShape<__half>::kRows : WideShape<float>::kRows;
  const int64_t N = tensor_core ? WideShape<__half>::N : WideShape<float>::N;
  how.batch = p.grad_relative_bias.batch || (p.cu_seqlens_q && p.lower_right);
  how.heads = p.grad_relative_bias.heads;
  how.row_blocks = (p.Lq + rows - 1) / rows;
  how.bands = (how.row_blocks - 1) * (rows / N) + (p.Lk + N - 1) / N;
  how.planes = (how.batch ? p.batch : 1) * (how.heads ? p.heads : 1);
  how.terms = how.row_blocks * p.batch * p.heads / how.planes;
  const int64_t most_shares = std::max<int64_t>(kBlocksOfSum / (how.bands * how.planes), 1);
  how.chunk = (how.terms + most_shares - 1) / most_shares;
  how.shares = (how.terms + how.chunk - 1) / how.chunk;
  how.tile = rows * N;
  return how;
}

template <class Scalar>
void launch_bands(
    const Attention& p, const QueryVectors& vectors, float* parts, int pitch, cudaStream_t stream) {
  using Shape = WideShape<Scalar>;
  const BandShares how = band_shares(p);
  const size_t shared =
      (2 * Shape::kRows + 2 * Shape::N) * pitch * sizeof(Scalar) + kSharedRunTotals<Scalar>;
  const LaunchPlan plan = attention_plan(
      "attention_backward_band", p, how.bands * how.planes * how.shares, Shape::kWarps, shared);
  launch(plan, stream, attention_backward_band_kernel<Scalar>, p, vectors, how, parts, pitch);
  const RelativeBiasGradient& grad = p.grad_relative_bias;
  const int64_t size = (grad.batch ? p.batch : 1) * (grad.heads ? p.heads : 1) * grad.columns;
  const LaunchPlan sum = attention_plan(
      "attention_backward_band_sum", p, (size + kSumThreads - 1) / kSumThreads, kSumThreads / 32,
      0);
  launch(sum, stream, attention_backward_band_sum_kernel<Scalar>, p, how, parts, size);
}

int64_t mask_floats(const Attention& p) {
  if (!p.grad_mask.data) return 0;
  const MaskShares how = mask_shares(p);
  return how.shares > 1 ? how.shares * how.size : 0;
}

template <class Scalar, Masks kMasks>
void launch_mask(
    const Attention& p, const QueryVectors& vectors, float* parts, int pitch, cudaStream_t stream) {
  using Shape = WideShape<Scalar>;
  const MaskShares how = mask_shares(p);
  if (how.size == 0) return;
  if (!how.full[3]) {
    const LaunchPlan plan = attention_plan(
        "attention_backward_row_mask", p, how.size, kRowMaskThreads / 32, 4 * sizeof(float));
    return launch(plan, stream, attention_backward_row_mask_kernel, p, vectors, how);
  }
  const size_t shared =
      (2 * Shape::kRows + 2 * Shape::N) * pitch * sizeof(Scalar) + kSharedRunTotals<Scalar>;
  const LaunchPlan plan =
      attention_plan("attention_backward_mask", p, how.tiles * how.shares, Shape::kWarps, shared);
  launch(
      plan, stream, attention_backward_mask_kernel<Scalar, kMasks>, p, vectors, how, parts, pitch);
  if (how.shares == 1) return;
  const LaunchPlan sum = attention_plan(
      "attention_backward_mask_sum", p, (how.size + kSumThreads - 1) / kSumThreads,
      kSumThreads / 32, 0);
  launch(sum, stream, attention_backward_mask_sum_kernel, p, how, parts);
}

int64_t row_count(const Attention& p) {
  return p.cu_seqlens_q ? p.heads * p.total_q : p.batch * p.heads * p.Lq;
}

}  // namespace

int64_t attention_backward_workspace(const Attention& p) {
  int64_t floats = 3 * row_count(p) + mask_floats(p);
  if (!p.relative_index && p.grad_relative_bias.data) {
    const BandShares how = band_shares(p);
    floats += how.bands * how.planes * how.shares * how.tile;
  }
  return attention_backward_table_doubles(p) * static_cast<int64_t>(sizeof(double)) +
      floats * static_cast<int64_t>(sizeof(float));
}

void attention_backward(const Attention& p, void* workspace, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  double* const doubles = static_cast<double*>(workspace);
  float* const floats = reinterpret_cast<float*>(doubles + attention_backward_table_doubles(p));
  const int64_t rows = row_count(p);
  const QueryVectors vectors{floats, floats + rows, floats + 2 * rows};
  const int pitch = padded_head_dim(p);
  for_kernel(p, [&]<class Scalar, int D, Masks kMasks>() {
    using Shape = BackwardShape<Scalar, D>;
    using Wide = WideShape<Scalar>;
    if (const int64_t blocks = blocks_for(p, p.Lq, Wide::kRows, p.heads, false)) {
      const size_t shared = may_have_large_scores<kMasks>(p)
          ? (Wide::kRows + 2 * Wide::N) * pitch * sizeof(Scalar)
          : 0;
      launch(
          attention_plan("attention_backward_rows", p, blocks, Wide::kWarps, shared), on,
          attention_backward_rows_kernel<Scalar, kMasks>, p, vectors, pitch);
    }
    float* const parts = floats + 3 * rows;
    if (p.grad_mask.data) {
      constexpr Masks kRead = reads_tables(kMasks) ? kMasks : Masks::Two;
      launch_mask<Scalar, kRead>(p, vectors, parts, pitch, on);
    }
    if constexpr (reads_tables(kMasks))
      attention_backward_tables(p, vectors, doubles, pitch, stream);
    else if (p.grad_relative_bias.data)
      launch_bands<Scalar>(p, vectors, parts + mask_floats(p), pitch, on);
    if (is_for_hopper(p)) return attention_backward_hopper(p, vectors, stream);
    if (const int64_t blocks = blocks_for(p, p.Lk, Shape::kRows, p.kv_heads, true)) {
      LaunchPlan plan =
          attention_plan("attention_backward_key_value", p, blocks, Shape::kWarps, Shape::kShared);
      plan.grid.y = std::max(p.E, p.Ev) > Shape::kColumns ? D / Shape::kColumns : 1;
      launch(plan, on, attention_backward_key_value_kernel<Scalar, D, kMasks>, p, vectors);
    }
    if (const int64_t blocks = blocks_for(p, p.Lq, Shape::kRows, p.heads, true))
      launch(
          attention_plan("attention_backward_query", p, blocks, Shape::kWarps, Shape::kShared), on,
          attention_backward_query_kernel<Scalar, D, kMasks>, p, vectors);
  });
}

}  // namespace trifuse::cuda
