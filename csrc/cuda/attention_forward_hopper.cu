// Attention forward on Hopper GPUs (sm_90a), in 16-bit types.
//
// A block owns 64 queries of one head of one sequence for each of its consumers. Its warpgroups
// cooperate as attention_hopper.cuh describes; the softmax stays in the consumers' registers. A
// consumer starts the products for one tile's keys and for the previous tile's values together, and
// works on the scores while the values' products still run. The consumers take turns in starting
// products, so that the tensor cores work for one consumer while others compute exponentials (Shah
// et al., "FlashAttention-3", 2024). With dropout each consumer draws for its own weights, while it
// waits for their scores.
//
// There are three kinds of kernels. Those of Masks::None serve calls without a mask whose scores
// are not in nats (Scale). They have no code that reads masks, so they spill almost nothing. Those
// of Masks::All serve calls with softcap, with tables, and with a relative bias beside a mask.
// Kernels of Masks::One serve the rest.
//
// Floor: as in attention_forward.cu, which serves all calls that is_for_hopper leaves out.

#include "cuda/attention_forward.cuh"
#include "cuda/attention_hopper.cuh"

namespace trifuse::cuda {
namespace {

// A kernel's parameters.
struct KernelArguments {
  Attention attention;
  Source query, key, value;
};

// A block's shared memory.
template <class Scalar, int D, Masks kMasks>
struct Shared {
  using Shape = HopperForwardShape<D, kMasks>;
  static constexpr int N = Shape::N, S = Shape::kStages, kConsumers = Shape::kConsumers;
  Scalar query[kConsumers][kGroupRows * D];
  Scalar key[S][N * D], value[S][N * D];
  TileHeader<N, kConsumers * kGroupRows> headers[S];  // guarded by the keys' barriers
  SharedBarrier query_full[kConsumers];
  SharedBarrier key_full[S], key_empty[S], value_full[S], value_empty[S];
  SharedBarrier value_loaded;  // values that must still be prepared have arrived
  SharedBarrier searched;      // all consumers have searched their sums for non-finite numbers
  bool non_finite;
};

// Producers ---------------------------------------------------------------------------------------

// Loads of keys run one tile ahead of those of values, because consumers need the next tile's keys
// first.
template <class Scalar, int D, Masks kMasks>
__device__ __forceinline__ void produce(
    const KernelArguments& call, const BlockIndex& index, int groups,
    Shared<Scalar, D, kMasks>& shared) {
  using Shape = HopperForwardShape<D, kMasks>;
  constexpr int N = Shape::N, kRows = Shape::kConsumers * kGroupRows;
  const Attention& p = call.attention;
  const bool leader = threadIdx.x == 0;
  const int first = index.block * kRows;
  Range range{0, 0, 0, 0}, all = range;
  OtherRows<false> rows;
  {
    const Head head(p, index.b, index.h);
    if (leader) {
      for (int group = 0; group < groups; ++group) {
        arrive_and_expect(&shared.query_full[group], sizeof shared.query[group]);
        load<Scalar, D>(
            shared.query[group], call.query, &shared.query_full[group], head.batch, index.h,
            head.first_query + first + group * kGroupRows, kGroupRows);
      }
    }
    range = visible_to_block<N, false>(head, first, kRows);
    all = visible_to_all<false, kMasks>(p, head, first, kRows);
    rows = OtherRows<false>(p, head);
  }
  Ring<Shape::kStages> keys, values;
  uint32_t loaded = 0;  // parity of value_loaded
  Mode mode = Mode::Fast;
  do {
    int column = range.first;
    int waiting = -1;  // first column of the tile whose keys are loading and whose values are not
    for (bool more = true; more; column += N) {
      more = column < range.last;
      if (more) {
        auto& header = shared.headers[keys.stage];
        if (!write_header<false, kMasks>(
                header, &shared.key_empty[keys.stage], keys.parity, p, index.b, index.h, first,
                column, all))
          continue;
        if (leader) {
          header.column = column;
          arrive_and_expect(&shared.key_full[keys.stage], sizeof shared.key[keys.stage]);
          load<Scalar, D>(
              shared.key[keys.stage], call.key, &shared.key_full[keys.stage], rows.batch, rows.head,
              rows.first + column, N);
        }
        keys.advance();
      }
      const int values_of = waiting;
      waiting = column;
      if (values_of < 0) continue;

      Scalar* value = shared.value[values.stage];
      SharedBarrier* full = &shared.value_full[values.stage];
      const int end = rows.end - values_of;
      const bool as_it_is = mode == Mode::Fast && end >= N;
      if (leader) {
        SharedBarrier* const barrier = as_it_is ? full : &shared.value_loaded;
        wait(&shared.value_empty[values.stage], values.parity ^ 1);
        arrive_and_expect(barrier, sizeof shared.value[values.stage]);
        load<Scalar, D>(
            value, call.value, barrier, rows.batch, rows.head, rows.first + values_of, N);
      }
      if (!as_it_is) {
        wait(&shared.value_loaded, loaded);
        loaded ^= 1;
        prepare_panels<N, D>(value, end, mode);
        fence_for_async();
        named_barrier(kProducing, kWarpgroup);
        if (leader) arrive(full);
      }
      values.advance();
    }
    write_end(shared.headers, shared.key_full, shared.key_empty, keys);
  } while (next_pass<kMasks>(p, mode, [&] { return any_found(shared); }));
}

// Consumers ---------------------------------------------------------------------------------------

template <class Scalar, int D, Masks kMasks>
__device__ __forceinline__ void consume(
    const Attention& p, const BlockIndex& index, int groups, int group,
    Shared<Scalar, D, kMasks>& shared) {
  using Shape = HopperForwardShape<D, kMasks>;
  constexpr int N = Shape::N;
  const int strip = 4 * group + warp() % 4;
  const int row = index.block * Shape::kConsumers * kGroupRows + 16 * strip;
  auto scale = Scale::of<kMasks>(p);
  // Otherwise it would be recomputed for every tile.
  scale.scores_in_nats =
      kMasks == Masks::All || (kMasks == Masks::One && uniform(scale.scores_in_nats));
  Scalar* const query = shared.query[group];
  Ring<Shape::kStages> keys, values;
  const auto take_turn = [&] {
    if (groups > 1) named_barrier(kTurns + group, 2 * kWarpgroup);
  };
  const auto give_turn = [&] {
    const int next = group + 1 == groups ? 0 : group + 1;
    if (groups > 1) named_barrier_arrive(kTurns + next, 2 * kWarpgroup);
  };
  float acc[D / 8][4], scores[N / 8][4];
  uint32_t weights[N / 16][4];  // of the previous tile
  Softmax<Scalar> softmax;
  ReachedSums<D> reached;
  Mode mode = Mode::Fast;

  KeptWeights kept(p, index.b, index.h, row);
  int summed = -1;  // stage of the values whose products are in flight, -1: none
  // Waits for the scores, releases the keys from which they were computed, and turns them into
  // weights. By then the sums that use the previous weights are done, and the new weights replace
  // these.
  const auto weigh = [&] {
    const auto& header = shared.headers[keys.stage];
    const bool full = header.full[strip];
    if (p.dropout.threshold) kept.draw(header.column);
    wgmma_wait<1>(scores);
    float lowest[2] = {kLowest, kLowest};
    if (!full || scale.scores_in_nats) {
      Pairs<N> pairs = read_bits<N>(header.pairs, strip, full);
      if (scale.scores_in_nats)
        scale_and_add_mask<N, false, Scalar, kMasks, kMasks == Masks::All>(
            scores, p, scale, Head(p, index.b, index.h), pairs, row, header.column);
      leave_out<N>(scores, pairs, lowest);
    }
    release(&shared.key_empty[keys.stage]);
    keys.advance();
    float rescale[2];
    const bool rescales = softmax.template take<N>(scores, lowest, scale, rescale);
    wgmma_wait<0>(acc, weights);
    if (summed >= 0) release(&shared.value_empty[summed]);
    if (rescales) multiply_by<D>(acc, rescale);
    pack_weights<Scalar, N>(weights, [&](int n, int e) { return scores[n][e]; });
    if (p.dropout.threshold) kept.apply(weights);
  };
  // Waits for the next tile's keys; returns whether there is another tile.
  const auto another = [&] {
    wait(&shared.key_full[keys.stage], keys.parity);
    return shared.headers[keys.stage].column >= 0;
  };
  const auto finish_sums = [&] {
    wait(&shared.value_full[values.stage], values.parity);
    wgmma_begin(acc, weights);
    start_sums<Scalar, D, N>(acc, weights, shared.value[values.stage]);
    wgmma_commit();
    wgmma_wait<0>(acc, weights);
    release(&shared.value_empty[values.stage]);
    values.advance();
  };

  wait(&shared.query_full[group], 0);
  if (group == groups - 1) give_turn();
  do {
    set_to_zero<D>(acc);
    if (mode == Mode::Locate) {
      while (another()) {
        const auto& header = shared.headers[keys.stage];
        Pairs<N> pairs = read_bits<N>(header.pairs, strip, header.full[strip]);
        if constexpr (kMasks == Masks::All)
          if (p.relative_index)
            remove_own_pairs_that_tables_leave_out<N, false>(
                pairs, p, Head(p, index.b, index.h), row, header.column);
        pack_weights<Scalar, N>(weights, [&](int n, int e) { return pairs.test(n, e); });
        release(&shared.key_empty[keys.stage]);
        keys.advance();
        finish_sums();
      }
      reached = ReachedSums<D>(acc);
    } else {
      softmax = {};
      if (another()) {
        take_turn();
        wgmma_begin(scores, acc, weights);
        start_products<Scalar, D, N>(scores, query, shared.key[keys.stage]);
        wgmma_commit();
        wgmma_commit();  // an empty group, in place of a previous tile's sums
        give_turn();
        summed = -1;
        for (;;) {
          weigh();
          if (!another()) break;
          wait(&shared.value_full[values.stage], values.parity);
          take_turn();
          wgmma_begin(scores, acc, weights);
          start_products<Scalar, D, N>(scores, query, shared.key[keys.stage]);
          wgmma_commit();
          start_sums<Scalar, D, N>(acc, weights, shared.value[values.stage]);
          wgmma_commit();
          summed = values.stage;
          values.advance();
          give_turn();
        }
        finish_sums();
      }
    }
    release(&shared.key_empty[keys.stage]);
    keys.advance();
  } while (next_pass<kMasks>(p, mode, [&] {
    record_found(shared, any_non_finite<D>(acc));
    return any_found(shared);
  }));

  named_barrier(kStoring + group, kWarpgroup);  // all warps are done with the queries
  const Tile<Scalar> staging{query + 16 * (strip % 4) * D, D};
  store_results<D>(
      p, Head(p, index.b, index.h), Scale::of<kMasks>(p), row, acc, softmax, reached, staging);
  if (group == 0) take_turn();  // the last consumer has given one more turn than consumer 0 took
}

template <class Scalar, int D, Masks kMasks>
__global__ __launch_bounds__(
    threads(HopperForwardShape<D, kMasks>::kConsumers),
    1) void attention_forward_hopper_kernel(const __grid_constant__ KernelArguments call) {
  using Shape = HopperForwardShape<D, kMasks>;
  constexpr int kRows = Shape::kConsumers * kGroupRows;
  const Attention& p = call.attention;
  const auto index = BlockIndex::of_queries(p, kRows);
  if (index.b == p.batch) return store_unused_tokens<Scalar>(p, index, kRows);
  const Head head(p, index.b, index.h);
  const int left = head.queries - index.block * kRows;
  if (left <= 0) return;
  const int groups = consumers<Shape::kConsumers>(left);

  auto& shared = *reinterpret_cast<Shared<Scalar, D, kMasks>*>(shared_memory());
  if (threadIdx.x == 0) {
    prefetch_map(&call.query.map);
    prefetch_map(&call.key.map);
    prefetch_map(&call.value.map);
    for (int group = 0; group < groups; ++group) init_barrier(&shared.query_full[group], 1);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      init_barrier(&shared.key_full[stage], 1);
      init_barrier(&shared.value_full[stage], 1);
      init_barrier(&shared.key_empty[stage], 4 * groups);
      init_barrier(&shared.value_empty[stage], 4 * groups);
    }
    init_barrier(&shared.value_loaded, 1);
    init_barrier(&shared.searched, 4 * groups);
    shared.non_finite = false;
    fence_for_async();
  }
  __syncthreads();

  const int group = uniform(threadIdx.x / kWarpgroup) - 1;
  if (group < 0) {
    give_registers_back<Shape::kProducerRegisters>();
    produce(call, index, groups, shared);
  } else {
    take_registers<consumer_registers(Shape::kConsumers, Shape::kProducerRegisters)>();
    if (group < groups) consume(p, index, groups, group, shared);
  }
}

}  // namespace

bool is_for_hopper(const Attention& p) {
  const bool backward = p.grad_out.data != nullptr;
  return (p.dtype == DType::BFloat16 || p.dtype == DType::Float16) &&
      std::max(p.E, p.Ev) <= (backward ? 128 : 256) && has_tensor_map(mapped_query(p)) &&
      has_tensor_map(mapped_key(p)) && has_tensor_map(mapped_value(p)) &&
      (!backward || has_tensor_map(mapped_grad_out(p))) && compute_capability() == 90;
}

void attention_forward_hopper(const Attention& p, void* stream) {
  const auto run = [&]<class Scalar, int D, Masks kMasks>() {
    using Shape = HopperForwardShape<D, kMasks>;
    using Memory = Shared<Scalar, D, kMasks>;
    static_assert(sizeof(Memory) <= kMostSharedHopper);
    const int64_t blocks = blocks_for(p, p.Lq, Shape::kConsumers * kGroupRows, p.heads, true);
    if (blocks == 0) return;
    const KernelArguments call{
        p, source(mapped_query(p), kGroupRows), source(mapped_key(p), Shape::N),
        source(mapped_value(p), Shape::N)};
    launch(
        attention_plan(
            "attention_forward_hopper", p, blocks, threads(Shape::kConsumers) / 32, sizeof(Memory)),
        static_cast<cudaStream_t>(stream), attention_forward_hopper_kernel<Scalar, D, kMasks>,
        call);
  };
  const auto run_for = [&]<class Scalar, int D>() {
    switch (masks_for(p)) {
      case Masks::None: return run.template operator()<Scalar, D, Masks::None>();
      case Masks::One: return run.template operator()<Scalar, D, Masks::One>();
      default: return run.template operator()<Scalar, D, Masks::All>();
    }
  };
  for_head_dim(p, [&]<int D>() {
    if (p.dtype == DType::BFloat16) run_for.template operator()<__nv_bfloat16, D>();
    else run_for.template operator()<__half, D>();
  });
}

}  // namespace trifuse::cuda
