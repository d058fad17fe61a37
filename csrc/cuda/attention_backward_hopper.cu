// Attention backward on Hopper GPUs (sm_90a), in 16-bit types: gradients of keys, values and
// queries.
//
// Replaces the kernels key_value and query of attention_backward.cu, which launches its other
// kernels first and serves all other calls. Sums are neither split between blocks nor added up in a
// varying order, so results are reproducible bit for bit.
//
// - key_value: a block owns 128 keys of one key head, and loops over the queries that attend to
//   them, in all query heads that share the key head.
// - query: a block owns 128 queries of one head, and loops over the keys that they attend to.
//
// Both are one program, with the roles of attention_hopper.cuh. A consumer owns 64 rows of two
// tensors, k and v or q and dO; the other two tensors stream past, 64 columns at a time. Rows own
// their sums, so weights and dS stay in registers between two products. The tiles that they
// multiply are read by columns, and nothing is transposed or written to shared memory. A tile's
// products of dO and v run while its scores become weights; its sums then run together with the
// scores of the next tile.
//
// Kernels of Masks::All serve calls with softcap, with tables, and with a relative bias beside a
// mask. There the products are computed first and multiplied by the slopes of the cap; then the
// scores become weights. Kernels of Masks::One serve the rest.
//
// Floor: 2 · pairs · (4 E + 3 Ev) operations of the tensor cores, of which 2 · pairs · (E + Ev) are
// done twice. A product with both factors in shared memory takes all of the 128 bytes per cycle
// that shared memory delivers, and a sum, with one factor in registers, takes half. The average is
// 96 bytes by key and 107 by query.

#include "cuda/attention_backward.cuh"
#include "cuda/attention_hopper.cuh"

namespace trifuse::cuda {
namespace {

constexpr int N = HopperBackwardShape::N, kStages = HopperBackwardShape::kStages;
constexpr int kConsumers = HopperBackwardShape::kConsumers, kBlockRows = kConsumers * kGroupRows;

// A kernel's parameters.
struct KernelArguments {
  Attention attention;
  QueryVectors vectors;
  Source query, key, value, grad_out;
};

// Rows of q or k, from which scores are computed, and the same rows of dO or v.
template <class Scalar, int D, int rows>
struct Tiles {
  Scalar of_scores[rows * D], of_outputs[rows * D];
};

// A tile's header: also its query head and, if its columns are queries, QueryVectors.
struct BackwardHeader : DropoutHeader<N, kBlockRows> {
  int h;
  alignas(8) float shift[N], rest[N], delta[N];
};

// A block's shared memory.
template <class Scalar, int D>
struct Shared {
  Tiles<Scalar, D, kGroupRows> own[kConsumers];
  Tiles<Scalar, D, N> other[kStages];
  BackwardHeader headers[kStages];
  SharedBarrier own_full[kConsumers], full[kStages], empty[kStages];
  SharedBarrier loaded;    // a tile that must still be prepared has arrived
  SharedBarrier searched;  // all consumers have searched their sums for non-finite numbers
  bool non_finite;
};

// As TileVectors, for a tile's columns: reads the header, two neighbours at a time.
class HeaderVectors {
 public:
  __device__ __forceinline__ explicit HeaderVectors(const BackwardHeader& header)
      : header_(header) {}
  __device__ __forceinline__ float shift(int n, int e) const { return at(header_.shift, n, e); }
  __device__ __forceinline__ float rest(int n, int e) const { return at(header_.rest, n, e); }
  __device__ __forceinline__ float delta(int n, int e) const { return at(header_.delta, n, e); }

 private:
  __device__ static __forceinline__ float at(const float (&numbers)[N], int n, int e) {
    const float2 two = *reinterpret_cast<const float2*>(numbers + fragment_column(n, 0));
    return e % 2 ? two.y : two.x;
  }
  const BackwardHeader& header_;
};

// Producers ---------------------------------------------------------------------------------------

// A query's numbers for a header, in one of the producer's first N threads.
struct HeaderNumbers {
  float shift = 0, rest = 0, delta = 0;

  __device__ __forceinline__ HeaderNumbers(const QueryVectors& vectors, int64_t at, bool inside) {
    if (!inside) return;
    shift = vectors.shift[at];
    rest = vectors.rest[at];
    delta = vectors.delta[at];
  }
  __device__ __forceinline__ void write(BackwardHeader& header) const {
    if (threadIdx.x >= N) return;
    header.shift[threadIdx.x] = shift;
    header.rest[threadIdx.x] = rest;
    header.delta[threadIdx.x] = delta;
  }
};

// Starts to load rows of keys and values, or of queries and dO. Called by one thread.
template <bool keys, int rows, class Scalar, int D>
__device__ __forceinline__ void load_both(
    Tiles<Scalar, D, rows>& to, const KernelArguments& call, SharedBarrier* barrier, int batch,
    int h, int token) {
  load<Scalar, D>(to.of_scores, keys ? call.key : call.query, barrier, batch, h, token, rows);
  load<Scalar, D>(to.of_outputs, keys ? call.value : call.grad_out, barrier, batch, h, token, rows);
}

// kByKey: a block owns keys.
template <bool kByKey, Masks kMasks, class Scalar, int D>
__device__ __forceinline__ void produce(
    const KernelArguments& call, const BlockIndex& index, int groups, Shared<Scalar, D>& shared) {
  const Attention& p = call.attention;
  const bool leader = threadIdx.x == 0;
  const int first = index.block * kBlockRows;
  const int members = kByKey ? static_cast<int>(p.heads / p.kv_heads) : 1;
  Range range{0, 0, 0, 0}, all = range;
  OtherRows<kByKey> rows;
  {
    const Head head(p, index.b, index.h * members);
    if (leader)
      for (int group = 0; group < groups; ++group) {
        arrive_and_expect(&shared.own_full[group], sizeof shared.own[group]);
        load_both<kByKey>(
            shared.own[group], call, &shared.own_full[group], static_cast<int>(head.batch), index.h,
            static_cast<int>(kByKey ? head.first_key : head.first_query) + first +
                group * kGroupRows);
      }
    range = visible_to_block<N, kByKey>(head, first, kBlockRows);
    all = visible_to_all<kByKey, kMasks>(p, head, first, kBlockRows);
    rows = OtherRows<kByKey>(p, head);
  }
  Ring<kStages> tiles;
  uint32_t loaded = 0;  // parity of shared.loaded
  Mode mode = Mode::Fast;
  do {
    for (int h = index.h * members; h < (index.h + 1) * members; ++h) {
      for (int column = range.first; column < range.last; column += N) {
        BackwardHeader& header = shared.headers[tiles.stage];
        if (!write_header<kByKey, kMasks>(
                header, &shared.empty[tiles.stage], tiles.parity, p, index.b, h, first, column,
                all))
          continue;
        const int end = rows.end - column;
        const bool as_it_is = mode == Mode::Fast && end >= N;
        auto& tile = shared.other[tiles.stage];
        SharedBarrier* const full = &shared.full[tiles.stage];
        if (leader) {
          header.h = h;
          header.column = column;
          SharedBarrier* const barrier = as_it_is ? full : &shared.loaded;
          if (kByKey && as_it_is) expect(barrier, sizeof tile);
          else arrive_and_expect(barrier, sizeof tile);
          load_both<!kByKey>(
              tile, call, barrier, rows.batch, kByKey ? h : rows.head, rows.first + column);
        }
        if constexpr (kByKey) {
          // Read while the tile loads, and written after the leader has found the stage empty.
          const int query = column + static_cast<int>(threadIdx.x);
          const HeaderNumbers numbers(
              call.vectors, (rows.batch * p.heads + h) * p.total_q + rows.first + query,
              threadIdx.x < N && query < rows.count);
          named_barrier(kProducing, kWarpgroup);
          numbers.write(header);
        }
        if (!as_it_is) {
          wait(&shared.loaded, loaded);
          loaded ^= 1;
          prepare_panels<N, D>(tile.of_scores, end, mode);
          if constexpr (kByKey) prepare_panels<N, D>(tile.of_outputs, end, mode);
          fence_for_async();
        }
        if (kByKey || !as_it_is) {
          named_barrier(kProducing, kWarpgroup);
          if (leader) arrive(full);
        }
        tiles.advance();
      }
    }
    write_end(shared.headers, shared.full, shared.empty, tiles);
  } while (next_pass<kMasks>(p, mode, [&] { return any_found(shared); }));
}

// Consumers ---------------------------------------------------------------------------------------

// Stores a warp's gradients of 16 keys and values, or queries. The consumer's own tiles serve as
// staging memory.
template <bool kByKey, class Scalar, int D>
__device__ __forceinline__ void store_gradients(
    const Attention& p, const BlockIndex& index, int strip, Tiles<Scalar, D, kGroupRows>& own,
    float (&sums)[D / 8][4], const ReachedSums<D>& reached, float (&value_sums)[D / 8][4],
    const ReachedSums<D>& value_reached) {
  const int row = index.block * kBlockRows + 16 * strip;
  const Head head(p, index.b, kByKey ? index.h * static_cast<int>(p.heads / p.kv_heads) : index.h);
  const auto store = [&](const auto& gradient, double factor, const auto& where, Scalar* staging,
                         auto to) {
    const float factors[2] = {static_cast<float>(factor), static_cast<float>(factor)};
    store_rows<D>(
        gradient, factors, where, Tile<Scalar>{staging + 16 * (strip % 4) * D, D}, to, row,
        kByKey ? head.stored : head.queries, 0);
  };
  if constexpr (kByKey) {
    clear_rows<D>(sums, head.keys - row);
    clear_rows<D>(value_sums, head.keys - row);
    store(sums, p.scale, reached, own.of_scores, head.key_rows<Scalar>(p.grad_key, p.E));
    store(
        value_sums, p.dropout.scale, value_reached, own.of_outputs,
        head.key_rows<Scalar>(p.grad_value, p.Ev));
  } else {
    store(sums, p.scale, reached, own.of_scores, head.query_rows<Scalar>(p.grad_query, p.E));
  }
}

template <bool kByKey, Masks kMasks, class Scalar, int D>
__device__ __forceinline__ void consume(
    const KernelArguments& call, const BlockIndex& index, int group, Shared<Scalar, D>& shared) {
  const Attention& p = call.attention;
  const int strip = 4 * group + warp() % 4, row = index.block * kBlockRows + 16 * strip;
  constexpr bool kAll = kMasks == Masks::All;
  auto scale = Scale::of<kMasks>(p);
  // Otherwise it would be recomputed for every tile.
  scale.scores_in_nats = kAll || uniform(scale.scores_in_nats);
  auto& own = shared.own[group];
  Ring<kStages> tiles;
  int last_stage;  // stage of the previous tile

  // Per tile: scores, which become weights, and products of dO and v, which become dS. Over all
  // tiles: sums of dS times q or k and, by key, value_sums of weights times dO.
  float scores[N / 8][4], products[N / 8][4], sums[D / 8][4], value_sums[D / 8][4];
  uint32_t gradients[N / 16][4], weights[N / 16][4];
  ReachedSums<D> reached, value_reached;
  Mode mode = Mode::Fast;

  // Waits for the next tile; returns whether there is one.
  const auto another = [&] {
    tiles.stage = uniform(tiles.stage);
    wait(&shared.full[tiles.stage], tiles.parity);
    return shared.headers[tiles.stage].column >= 0;
  };
  const auto go_on = [&] {
    last_stage = tiles.stage;
    tiles.advance();
  };
  const auto start_scores = [&] {
    start_products<Scalar, D, N>(scores, own.of_scores, shared.other[tiles.stage].of_scores);
  };
  // Adds the previous tile to the sums and, with `more`, computes the scores of this one.
  const auto finish_tile = [&]<bool more>() {
    const auto& used = shared.other[last_stage];
    if constexpr (kByKey) wgmma_begin(scores, sums, gradients, value_sums, weights);
    else wgmma_begin(scores, sums, gradients);
    if constexpr (more) start_scores();
    if constexpr (kByKey) start_sums<Scalar, D, N>(value_sums, weights, used.of_outputs);
    start_sums<Scalar, D, N>(sums, gradients, used.of_scores);
    wgmma_commit();
    if constexpr (kByKey) wgmma_wait<0>(scores, sums, gradients, value_sums, weights);
    else wgmma_wait<0>(scores, sums, gradients);
    release(&shared.empty[last_stage]);
  };
  // Turns a tile's scores into the factors of its sums.
  const auto weigh = [&](const auto& per_query) {
    const BackwardHeader& header = shared.headers[tiles.stage];
    Pairs<N> pairs = read_bits<N>(header.pairs, strip, header.full[strip]);
    if (!kAll && scale.scores_in_nats) {
      scale_and_add_mask<N, kByKey, Scalar>(
          scores, p, scale, Head(p, index.b, header.h), pairs, row, header.column);
      subtract_shifts<N>(scores, per_query);
    }
    wgmma_begin(products);
    start_products<Scalar, D, N>(products, own.of_outputs, shared.other[tiles.stage].of_outputs);
    wgmma_commit();
    if (!kAll) make_weights<N, Scalar>(scores, scale, per_query, pairs);
    wgmma_wait<0>(products);
    if constexpr (kAll) {
      make_capped<N, kByKey, Scalar, kMasks>(
          scores, products, p, scale, Head(p, index.b, header.h), per_query, pairs, row,
          header.column, [&](float (&numbers)[N / 8][4], float factor) {
            apply_dropout<N>(numbers, read_bits<N>(header.kept, strip, false), factor);
          });
    } else if (p.dropout.threshold) {
      const Pairs<N> kept = read_bits<N>(header.kept, strip, false);
      apply_dropout<N>(products, kept, static_cast<float>(p.dropout.scale));
      make_gradients<N>(products, scores, per_query, pairs);
      apply_dropout<N>(scores, kept, 1);
    } else {
      make_gradients<N>(products, scores, per_query, pairs);
    }
    pack_weights<Scalar, N>(gradients, [&](int n, int e) { return products[n][e]; });
    if constexpr (kByKey)
      pack_weights<Scalar, N>(weights, [&](int n, int e) { return scores[n][e]; });
  };

  wait(&shared.own_full[group], 0);
  do {
    set_to_zero<D>(sums);
    if constexpr (kByKey) set_to_zero<D>(value_sums);
    if (mode == Mode::Locate) {
      while (another()) {
        const auto& header = shared.headers[tiles.stage];
        Pairs<N> pairs = read_bits<N>(header.pairs, strip, header.full[strip]);
        if constexpr (kAll)
          if (p.relative_index)
            remove_own_pairs_that_tables_leave_out<N, kByKey>(
                pairs, p, Head(p, index.b, header.h), row, header.column);
        const auto part = [&](int n, int e) { return pairs.test(n, e); };
        pack_weights<Scalar, N>(gradients, part);
        if constexpr (kByKey) pack_weights<Scalar, N>(weights, part);
        go_on();
        finish_tile.template operator()<false>();
      }
      reached = ReachedSums<D>(sums);
      if constexpr (kByKey) value_reached = ReachedSums<D>(value_sums);
    } else if (another()) {
      const TileVectors<N, false> of_rows(call.vectors, Head(p, index.b, index.h), row, 0);
      wgmma_begin(scores);
      start_scores();
      wgmma_commit();
      wgmma_wait<0>(scores);
      for (;;) {
        if constexpr (kByKey) weigh(HeaderVectors(shared.headers[tiles.stage]));
        else weigh(of_rows);
        go_on();
        if (!another()) break;
        finish_tile.template operator()<true>();
      }
      finish_tile.template operator()<false>();
    }
    release(&shared.empty[tiles.stage]);
    tiles.advance();
  } while (next_pass<kMasks>(p, mode, [&] {
    bool found = any_non_finite<D>(sums);
    if constexpr (kByKey) found |= any_non_finite<D>(value_sums);
    record_found(shared, found);
    return any_found(shared);
  }));

  named_barrier(kStoring + group, kWarpgroup);  // all warps are done with the consumer's own tiles
  store_gradients<kByKey>(p, index, strip, own, sums, reached, value_sums, value_reached);
}

// Kernels -----------------------------------------------------------------------------------------

template <bool kByKey, Masks kMasks, class Scalar, int D>
__device__ __forceinline__ void backward(
    const KernelArguments& call, const BlockIndex& index, int rows) {
  const int left = rows - index.block * kBlockRows;
  if (left <= 0) return;
  const int groups = consumers<kConsumers>(left);
  auto& shared = *reinterpret_cast<Shared<Scalar, D>*>(shared_memory());
  if (threadIdx.x == 0) {
    prefetch_map(&call.query.map);
    prefetch_map(&call.key.map);
    prefetch_map(&call.value.map);
    prefetch_map(&call.grad_out.map);
    for (int group = 0; group < groups; ++group) init_barrier(&shared.own_full[group], 1);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&shared.full[stage], 1);
      init_barrier(&shared.empty[stage], 4 * groups);
    }
    init_barrier(&shared.loaded, 1);
    init_barrier(&shared.searched, 4 * groups);
    shared.non_finite = false;
    fence_for_async();
  }
  __syncthreads();

  const int group = uniform(threadIdx.x / kWarpgroup) - 1;
  if (group < 0) {
    give_registers_back<HopperBackwardShape::kProducerRegisters<kByKey, D>>();
    produce<kByKey, kMasks>(call, index, groups, shared);
  } else {
    take_registers<consumer_registers(
        kConsumers, HopperBackwardShape::kProducerRegisters<kByKey, D>)>();
    if (group < groups) consume<kByKey, kMasks>(call, index, group, shared);
  }
}

template <class Scalar, int D, Masks kMasks>
__global__
__launch_bounds__(threads(kConsumers), 1) void attention_backward_key_value_hopper_kernel(
    const __grid_constant__ KernelArguments call) {
  const Attention& p = call.attention;
  const BlockIndex index(p.Lk, kBlockRows, p.kv_heads);
  if (index.b == p.batch) return store_unused_keys<Scalar>(p, index, kBlockRows);
  backward<true, kMasks, Scalar, D>(call, index, Head(p, index.b, 0).stored);
}

template <class Scalar, int D, Masks kMasks>
__global__ __launch_bounds__(threads(kConsumers), 1) void attention_backward_query_hopper_kernel(
    const __grid_constant__ KernelArguments call) {
  const Attention& p = call.attention;
  const auto index = BlockIndex::of_queries(p, kBlockRows);
  if (index.b == p.batch) return store_unused_queries<Scalar>(p, index, kBlockRows);
  backward<false, kMasks, Scalar, D>(call, index, Head(p, index.b, 0).queries);
}

}  // namespace

void attention_backward_hopper(const Attention& p, const QueryVectors& vectors, void* stream) {
  const KernelArguments call{
      p,
      vectors,
      source(mapped_query(p), N),
      source(mapped_key(p), N),
      source(mapped_value(p), N),
      source(mapped_grad_out(p), N)};
  static_assert(N == kGroupRows);  // each map is `own` in one kernel and `other` in the other
  const auto run = [&]<class Scalar, int D, Masks kMasks>() {
    static_assert(sizeof(Shared<Scalar, D>) <= kMostSharedHopper);
    const auto launch_one = [&](const char* name, auto kernel, int64_t length, int64_t heads) {
      const int64_t blocks = blocks_for(p, length, kBlockRows, heads, true);
      if (blocks == 0) return;
      launch(
          attention_plan(name, p, blocks, threads(kConsumers) / 32, sizeof(Shared<Scalar, D>)),
          static_cast<cudaStream_t>(stream), kernel, call);
    };
    launch_one(
        "attention_backward_key_value_hopper",
        attention_backward_key_value_hopper_kernel<Scalar, D, kMasks>, p.Lk, p.kv_heads);
    launch_one(
        "attention_backward_query_hopper",
        attention_backward_query_hopper_kernel<Scalar, D, kMasks>, p.Lq, p.heads);
  };
  const auto run_with_masks = [&]<class Scalar, int D>() {
    if (masks_for(p) == Masks::All) run.template operator()<Scalar, D, Masks::All>();
    else run.template operator()<Scalar, D, Masks::One>();
  };
  const auto run_for = [&]<class Scalar>() {
    if (std::max(p.E, p.Ev) <= 64) run_with_masks.template operator()<Scalar, 64>();
    else run_with_masks.template operator()<Scalar, 128>();
  };
  if (p.dtype == DType::BFloat16) run_for.template operator()<__nv_bfloat16>();
  else run_for.template operator()<__half>();
}

}  // namespace trifuse::cuda
