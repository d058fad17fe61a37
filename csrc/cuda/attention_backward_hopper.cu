// Attention backward on Hopper GPUs (sm_90a), in 16-bit types: gradients of keys, values and queries.
//
// Two of the four kernels of attention_backward.cu, which runs the other two before them and takes all
// other calls. Sums are never split between blocks, nor added up in an order that could vary: results
// repeat bit for bit.
//
// - key_value: a block owns 128 keys of one key head, and runs through the queries that see them, of all
//   query heads that share the key head.
// - query: a block owns 128 queries of one head, and runs through the keys that they see.
//
// Both are one program, as attention_hopper.cuh says: 64 rows of a consumer's own tiles, k and v or q and
// dO, by 64 columns of the other two, which come by. Rows own their sums, so weights and dS go from one
// product to the next in registers; the tiles that they are multiplied by are read by their columns, and
// nothing is transposed or written to shared memory. While a consumer makes weights of a tile's scores, its
// products of dO and v run; the tile's sums then run together with the scores of the next one.
//
// Floor: 2 · pairs · (5 E + 2 Ev) operations of the tensor cores, of which 2 · pairs · (E + Ev) are made
// twice. Products of two factors in shared memory take all of the 128 bytes that it yields in a cycle,
// sums, with one in registers, half of that: in the mean 96 bytes by key, and 107 by query.

#include "cuda/attention_backward.cuh"
#include "cuda/attention_hopper.cuh"

namespace trifuse::cuda {
namespace {

// Columns of a tile, and how many tiles there is room for.
constexpr int N = 64, kStages = 4;
template <bool kByKey, int D>
constexpr int kProducerRegisters = kByKey && D == 128 ? 56 : 72;

struct Call {
  Attention attention;
  RowVectors vectors;
  Source query, key, value, grad_out;
};

// Rows of q or k, which scores are made of, and the same ones of dO or v.
template <class Scalar, int D, int rows>
struct Tiles {
  Scalar of_scores[rows * D], of_outputs[rows * D];
};

// What the producers say of a tile: also of which query head it is, and, where queries are its columns,
// their numbers.
struct TileNotes : Notes<N> {
  int h;
  alignas(8) float shift[N], rest[N], delta[N];
};

// A block's shared memory.
template <class Scalar, int D>
struct Shared {
  Tiles<Scalar, D, kGroupRows> own[kConsumers];
  Tiles<Scalar, D, N> other[kStages];
  TileNotes notes[kStages];
  SharedBarrier own_full[kConsumers], full[kStages], empty[kStages];
  SharedBarrier loaded;  // before it is cleaned
  bool non_finite;
};

// As TileVectors, of a tile's columns: two neighbours' at a time.
class NotedVectors {
 public:
  __device__ __forceinline__ explicit NotedVectors(const TileNotes& notes) : notes_(notes) {}
  __device__ __forceinline__ float shift(int n, int e) const { return at(notes_.shift, n, e); }
  __device__ __forceinline__ float rest(int n, int e) const { return at(notes_.rest, n, e); }
  __device__ __forceinline__ float delta(int n, int e) const { return at(notes_.delta, n, e); }

 private:
  __device__ static __forceinline__ float at(const float (&numbers)[N], int n, int e) {
    const float2 two = *reinterpret_cast<const float2*>(numbers + column_of(n, 0));
    return e % 2 ? two.y : two.x;
  }
  const TileNotes& notes_;
};

// Producers ----------------------------------------------------------------------------------------------

__device__ __forceinline__ void note_vectors(
    TileNotes& notes, const RowVectors& vectors, const Head& head, int column) {
  for (int i = threadIdx.x; i < N; i += kWarpgroup) {
    const bool inside = column + i < head.queries;
    const int64_t at = head.row + column + i;
    notes.shift[i] = inside ? vectors.shift[at] : 0.0f;
    notes.rest[i] = inside ? vectors.rest[at] : 0.0f;
    notes.delta[i] = inside ? vectors.delta[at] : 0.0f;
  }
}

// Starts to load rows of keys and values, or of queries and dO; by one thread.
template <bool keys, int rows, class Scalar, int D>
__device__ __forceinline__ void load_both(
    Tiles<Scalar, D, rows>& to, const Call& call, SharedBarrier* barrier, const Head& head, int first) {
  const int64_t token = (keys ? head.first_key : head.first_query) + first;
  const int h = keys ? head.kv_head : head.h;
  arrive_and_expect(barrier, sizeof to);
  load<Scalar, D>(to.of_scores, keys ? call.key : call.query, barrier, head.batch, h, token, rows);
  load<Scalar, D>(to.of_outputs, keys ? call.value : call.grad_out, barrier, head.batch, h, token, rows);
}

// kByKey: a block owns keys.
template <bool kByKey, class Scalar, int D>
__device__ __forceinline__ void produce(
    const Call& call, const Place& place, int groups, Shared<Scalar, D>& shared) {
  const Attention& p = call.attention;
  const bool leader = threadIdx.x == 0;
  const int first = place.block * kRows;
  const int members = kByKey ? static_cast<int>(p.heads / p.kv_heads) : 1;
  if (leader)
    for (int group = 0; group < groups; ++group)
      load_both<kByKey>(
          shared.own[group], call, &shared.own_full[group], Head(p, place.b, place.h * members),
          first + group * kGroupRows);
  const Span all = seen_by_all<kByKey>(p, Head(p, place.b, place.h * members), first);
  Ring<kStages> tiles;
  uint32_t loaded = 0;  // parity
  Mode mode = Mode::Hope;
  do {
    for (int h = place.h * members; h < (place.h + 1) * members; ++h) {
      const auto head = [&] { return Head(p, place.b, h); };
      const Span span = visible<N, kByKey>(p, head(), first, kRows);
      for (int column = span.first; column < span.last; column += N) {
        TileNotes& notes = shared.notes[tiles.stage];
        wait(&shared.empty[tiles.stage], tiles.parity ^ 1);
        if constexpr (kByKey) note_vectors(notes, call.vectors, head(), column);
        if (!note_tile<N, kByKey>(notes, p, place.b, h, first, column, all)) continue;
        // Rows from here on are in memory, but none of this sequence.
        const Head of = head();
        const int end = kByKey ? of.first_query + of.queries < p.total_q ? of.queries - column : N
            : of.first_key + of.keys < p.total_k ? of.keys - column : N;
        const bool as_it_is = mode == Mode::Hope && end >= N;
        auto& tile = shared.other[tiles.stage];
        SharedBarrier* const full = &shared.full[tiles.stage];
        if (leader) {
          notes.h = h;
          notes.column = column;
          load_both<!kByKey>(tile, call, as_it_is ? full : &shared.loaded, of, column);
        }
        if (!as_it_is) {
          wait(&shared.loaded, loaded);
          loaded ^= 1;
          clean_panels<N, D>(tile.of_scores, end, mode);
          if constexpr (kByKey) clean_panels<N, D>(tile.of_outputs, end, mode);
          fence_for_async();
          named_barrier(kProducing, kWarpgroup);
          if (leader) arrive(full);
        }
        tiles.advance();
      }
    }
    note_end(shared.notes, shared.full, shared.empty, tiles);
  } while (pass_again(p, shared, mode, (1 + groups) * kWarpgroup, false));
}

// Consumers ----------------------------------------------------------------------------------------------

template <bool kByKey, class Scalar, int D>
__device__ __forceinline__ void consume(
    const Call& call, const Place& place, int groups, int group, Shared<Scalar, D>& shared) {
  const Attention& p = call.attention;
  const int strip = 4 * group + warp() % 4, row = place.block * kRows + 16 * strip;
  const Scale scale(p);
  auto& own = shared.own[group];
  Ring<kStages> tiles;
  int last_stage;  // of the tile before

  // Of a tile: scores, then weights; products of dO and v, then dS. Sums of dS times q or k, and by key
  // also of weights times dO.
  float scores[N / 8][4], products[N / 8][4], sums[D / 8][4], value_sums[D / 8][4];
  uint32_t gradients[N / 16][4], weights[N / 16][4];
  Reached<D> reached, value_reached;
  Mode mode = Mode::Hope;

  // Whether there is another tile, once it has come.
  const auto another = [&] {
    tiles.stage = uniform(tiles.stage);
    wait(&shared.full[tiles.stage], tiles.parity);
    return shared.notes[tiles.stage].column >= 0;
  };
  const auto go_on = [&] {
    last_stage = tiles.stage;
    tiles.advance();
  };
  const auto start_scores = [&] {
    start_products<Scalar, D, N>(scores, own.of_scores, shared.other[tiles.stage].of_scores);
  };
  // Sums of the last tile, and the scores of this one, if there are more.
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
  // From a tile's scores to what its sums are made of.
  const auto weigh = [&](const auto& of) {
    const TileNotes& notes = shared.notes[tiles.stage];
    const Pairs<N> pairs = noted<N>(notes.pairs, strip, notes.full[strip]);
    if (scale.natural) {
      scale_and_add_mask<N, kByKey, Scalar>(
          scores, p, scale, Head(p, place.b, notes.h), pairs, row, notes.column);
      subtract_shifts<N>(scores, of);
    }
    wgmma_begin(products);
    start_products<Scalar, D, N>(products, own.of_outputs, shared.other[tiles.stage].of_outputs);
    wgmma_commit();
    make_weights<N, Scalar>(scores, scale, of, pairs);
    wgmma_wait<0>(products);
    if (p.dropout.threshold) {
      const Pairs<N> noted_kept = noted<N>(notes.kept, strip, false);
      const auto kept = [&](int n, int e) { return noted_kept.test(n, e); };
      keep<N>(products, kept, static_cast<float>(p.dropout.scale));
      make_gradients<N>(products, scores, of, pairs);
      keep<N>(scores, kept, 1);
    } else {
      make_gradients<N>(products, scores, of, pairs);
    }
    pack_weights<Scalar, N>(gradients, [&](int n, int e) { return products[n][e]; });
    if constexpr (kByKey)
      pack_weights<Scalar, N>(weights, [&](int n, int e) { return scores[n][e]; });
  };

  wait(&shared.own_full[group], 0);
  for (;;) {
    set_to_zero<D>(sums);
    if constexpr (kByKey) set_to_zero<D>(value_sums);
    if (mode == Mode::Count) {
      while (another()) {
        const Pairs<N> pairs = noted<N>(shared.notes[tiles.stage].pairs, strip, false);
        const auto part = [&](int n, int e) { return pairs.test(n, e); };
        pack_weights<Scalar, N>(gradients, part);
        if constexpr (kByKey) pack_weights<Scalar, N>(weights, part);
        go_on();
        finish_tile.template operator()<false>();
      }
      reached = Reached<D>(sums);
      if constexpr (kByKey) value_reached = Reached<D>(value_sums);
    } else if (another()) {
      const TileVectors<N, false> of_rows(call.vectors, Head(p, place.b, place.h), row, 0);
      wgmma_begin(scores);
      start_scores();
      wgmma_commit();
      wgmma_wait<0>(scores);
      for (;;) {
        if constexpr (kByKey) weigh(NotedVectors(shared.notes[tiles.stage]));
        else weigh(of_rows);
        go_on();
        if (!another()) break;
        finish_tile.template operator()<true>();
      }
      finish_tile.template operator()<false>();
    }
    release(&shared.empty[tiles.stage]);
    tiles.advance();
    bool found = any_non_finite<D>(sums);
    if constexpr (kByKey) found |= any_non_finite<D>(value_sums);
    if (!pass_again(p, shared, mode, (1 + groups) * kWarpgroup, found)) break;
  }

  named_barrier(kStoring + group, kWarpgroup);  // all warps are done with their own tiles
  const Head head(p, place.b, kByKey ? place.h * static_cast<int>(p.heads / p.kv_heads) : place.h);
  const auto store = [&](const auto& gradient, double factor, const auto& where, Scalar* room, auto to) {
    const float factors[2] = {static_cast<float>(factor), static_cast<float>(factor)};
    store_rows<D>(
        gradient, factors, where, Tile<Scalar>{room + 16 * (strip % 4) * D, D}, to, row,
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

// Kernels ------------------------------------------------------------------------------------------------

template <bool kByKey, class Scalar, int D>
__device__ __forceinline__ void backward(const Call& call, const Place& place, int rows) {
  const int left = rows - place.block * kRows;
  if (left <= 0) return;
  const int groups = consumers(left);
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
    shared.non_finite = false;
    fence_for_async();
  }
  __syncthreads();

  const int group = uniform(threadIdx.x / kWarpgroup) - 1;
  if (group < 0) {
    give_registers_back<kProducerRegisters<kByKey, D>>();
    produce<kByKey>(call, place, groups, shared);
  } else {
    take_registers<consumer_registers(kProducerRegisters<kByKey, D>)>();
    if (group < groups) consume<kByKey>(call, place, groups, group, shared);
  }
}

template <class Scalar, int D>
__global__ __launch_bounds__(kThreads, 1) void attention_backward_key_value_hopper_kernel(
    const __grid_constant__ Call call) {
  const Attention& p = call.attention;
  const Place place(p.Lk, kRows, p.kv_heads);
  if (place.b == p.batch) return store_unused_keys<Scalar>(p, place, kRows);
  backward<true, Scalar, D>(call, place, Head(p, place.b, 0).stored);
}

template <class Scalar, int D>
__global__ __launch_bounds__(kThreads, 1) void attention_backward_query_hopper_kernel(
    const __grid_constant__ Call call) {
  const Attention& p = call.attention;
  Place place(p.Lq, kRows, p.heads);
  if (p.window_right >= 0) place.block = place.blocks - 1 - place.block;  // those that see most first
  if (place.b == p.batch) return store_unused_queries<Scalar>(p, place, kRows);
  backward<false, Scalar, D>(call, place, Head(p, place.b, 0).queries);
}

}  // namespace

void attention_backward_hopper(const Attention& p, const RowVectors& vectors, void* stream) {
  const Call call{
      p, vectors, source(mapped_query(p), N), source(mapped_key(p), N), source(mapped_value(p), N),
      source(mapped_grad_out(p), N)};
  static_assert(N == kGroupRows);  // for a tensor is its own in one kernel and the other's in the other
  const auto run = [&]<class Scalar, int D>() {
    const auto launch_one = [&](const char* name, auto kernel, int64_t length, int64_t heads) {
      const int64_t blocks = blocks_for(p, length, kRows, heads, true);
      if (blocks == 0) return;
      launch(
          attention_plan(name, p, blocks, kThreads / 32, sizeof(Shared<Scalar, D>)),
          static_cast<cudaStream_t>(stream), kernel, call);
    };
    launch_one(
        "attention_backward_key_value_hopper", attention_backward_key_value_hopper_kernel<Scalar, D>,
        p.Lk, p.kv_heads);
    launch_one(
        "attention_backward_query_hopper", attention_backward_query_hopper_kernel<Scalar, D>, p.Lq,
        p.heads);
  };
  const auto run_for = [&]<class Scalar>() {
    if (std::max(p.E, p.Ev) <= 64) run.template operator()<Scalar, 64>();
    else run.template operator()<Scalar, 128>();
  };
  if (p.dtype == DType::BFloat16) run_for.template operator()<__nv_bfloat16>();
  else run_for.template operator()<__half>();
}

}  // namespace trifuse::cuda
