// Attention forward on a GPU.
//
// A block owns 64 queries of one head of one sequence (32 in float32 beyond a head_dim of 128), a
// warp 16 of them. It reads its queries once, and the keys and values that they attend to tile by
// tile; it writes the queries' rows of out and logsumexp. Blocks of one head are neighbours in the
// grid, so all except the first find the head's keys and values in the L2 cache. With tables that
// an index reads, a block also reads their numbers twice for each pair: once to find -inf, and once
// to add them.
//
// Floor: 2 · pairs · (E + Ev) operations of the tensor cores (float32: of the FMA pipes) and one
// exponential per pair.

#include "cuda/attention_configurations.cuh"
#include "cuda/attention_forward.cuh"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_launch.cuh"
#include "cuda/attention_pairs.cuh"
#include "cuda/attention_passes.cuh"
#include "cuda/attention_softmax.cuh"
#include "cuda/attention_tile.cuh"

namespace trifuse::cuda {
namespace {

template <class Scalar, int D, Masks kMasks>
__global__ __launch_bounds__(32 * ForwardShape<Scalar, D>::kWarps) void attention_forward_kernel(
    const __grid_constant__ Attention p) {
  using Shape = ForwardShape<Scalar, D>;
  constexpr int N = Shape::N;
  const auto index = BlockIndex::of_queries(p, Shape::kRows);
  if (index.b == p.batch) return store_unused_tokens<Scalar>(p, index, Shape::kRows);
  const Head head(p, index.b, index.h);
  const int first = index.block * Shape::kRows, row = first + 16 * warp();
  if (first >= head.queries) return;

  const Tile<Scalar> query{reinterpret_cast<Scalar*>(shared_memory()), D};
  const auto keys = head.streamed_keys<N>(p, query.from(Shape::kRows));
  const PaddedDims dims(p);
  const auto scale = Scale::of<kMasks>(p);
  const uint64_t seed = dropout_seed(p);
  const ThreadRanges<false> ranges(head, row);
  const Range range = visible_to_block<N, false>(head, first, Shape::kRows);

  load_tile(query, head.query_rows<const Scalar>(p.query, p.E), first, Shape::kRows, head.queries);
  cp_async_commit();

  Mode mode = Mode::Fast;
  float acc[D / 8][4];
  Softmax<Scalar> softmax;
  ReachedSums<D> reached;
  do {
    set_to_zero<D>(acc);
    softmax = {};
    for_tiles<N>(
        range,
        [&](int column) { return find_pairs<N, false, kMasks>(p, head, ranges, row, column); },
        [&](int column, int stage) { keys.load(column, stage); },
        [&](int stage) {
          if (mode == Mode::Fast) return;
          prepare_tile(keys.of_outputs(stage), N, mode);
          __syncthreads();
        },
        [&](int column, int stage, const Pairs<N>& pairs) {
          float weights[N / 8][4] = {};
          float rescale[2] = {1, 1};
          if (mode != Mode::Locate) {
            multiply_rows<N>(weights, query.from(16 * warp()), keys.of_scores(stage), dims.E);
            if (scale.scores_in_nats)
              scale_and_add_mask<N, false, Scalar, kMasks, true>(
                  weights, p, scale, head, pairs, row, column);
            softmax.template take<N>(weights, pairs, scale, rescale);
            if (p.dropout.threshold) {
              const Kept<N, false> kept(p, head, seed, row, column);
#pragma unroll
              for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                  if (!kept.test(n, e)) weights[n][e] = 0;
            }
            multiply_by<D>(acc, rescale);
          } else {
            set_to_pairs<N>(weights, pairs);
          }
          multiply_weights<N, D>(acc, weights, keys.of_outputs(stage), 0, dims.Ev);
        });
    if (mode == Mode::Locate) reached = ReachedSums<D>(acc);
  } while (next_pass<kMasks>(p, mode, [&] { return __syncthreads_or(any_non_finite<D>(acc)); }));

  store_results<D>(p, head, scale, row, acc, softmax, reached, query.from(16 * warp()));
}

}  // namespace

int64_t attention_forward_workspace(const Attention& p) {
  return is_for_decoding(p) ? attention_decoding_workspace(p) : 0;
}

void attention_forward(const Attention& p, void* workspace, void* stream) {
  if (is_for_decoding(p)) return attention_decoding(p, workspace, stream);
  if (is_for_hopper(p)) return attention_forward_hopper(p, stream);
  for_kernel(p, [&]<class Scalar, int D, Masks kMasks>() {
    using Shape = ForwardShape<Scalar, D>;
    const int64_t blocks = blocks_for(p, p.Lq, Shape::kRows, p.heads, true);
    if (blocks == 0) return;
    launch(
        attention_plan("attention_forward", p, blocks, Shape::kWarps, Shape::kShared),
        static_cast<cudaStream_t>(stream), attention_forward_kernel<Scalar, D, kMasks>, p);
  });
}

}  // namespace trifuse::cuda
