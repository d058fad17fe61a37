// Attention forward on Hopper GPUs (sm_90a), in 16-bit types.
//
// A block owns 128 queries of one head of one sequence, and has three warpgroups of four warps. One
// produces: it finds the tiles of keys in which some pair takes part, has the copy engine load their keys
// and values, as far ahead as there is room, and leaves beside them which pairs take part and which
// weights dropout keeps. Two consume, 64 queries each: products by the tensor cores, which run behind the
// threads' backs, and the softmax between them in registers. A consumer starts its products for one tile of
// keys and for the values of the tile before, both at once, and works on the scores while the latter still
// run. The two take turns at starting them, so that the tensor cores are busy with one's while the other
// computes exponentials (Shah et al., "FlashAttention-3", 2024).
//
// Floor: as in attention_forward.cu, which takes all other calls.

#include "cuda/attention_forward.cuh"
#include "cuda/ptx_sm90a.cuh"
#include "cuda/tensor_map.h"

namespace trifuse::cuda {
namespace {

constexpr int kWarpgroup = 128, kConsumers = 2, kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kGroupRows = 64, kRows = kConsumers * kGroupRows;
// For a thread, of the 168 that each has at launch: 56 + 2 · 224 = 3 · 168.
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;

// A row of a panel, in bytes; and how far on so many bytes are in a matrix's descriptor.
constexpr int kPanelRow = 128;
constexpr int steps(int bytes) { return bytes / 16; }

// Numbers of named barriers; 0 is __syncthreads.
enum Named {
  kTurns = 1,      // of consumers 0 and 1
  kProducing = 3,  // among producers
  kPassing = 4,    // among all, between passes
  kStoring = 5,    // among consumer 0 and among consumer 1
};

// A tensor that the copy engine loads from, and whether heads and sequences are dimensions of it: where
// it is broadcast over them they aren't.
struct Source {
  CUtensorMap map;
  int heads, sequences;
};

struct Call {
  Attention attention;
  Source query, key, value;
};

// Keys of a tile, and how many tiles there is room for.
template <int D>
constexpr int kKeys = D == 256 ? 64 : 128;
template <int D>
constexpr int kStages = D == 64 ? 4 : 2;

// What the producers say of a tile. -1 for its first column says that there are no more.
template <int N>
struct Notes {
  using Bits = typename Pairs<N>::Bits;
  Bits pairs[kRows], kept[kRows];
  bool full[kRows / 16];
  int column;
};

// A block's shared memory. Tiles lie in panels of 64 columns.
template <class Scalar, int D>
struct Shared {
  static constexpr int N = kKeys<D>, S = kStages<D>;
  Scalar query[kConsumers][kGroupRows * D];
  Scalar key[S][N * D], value[S][N * D];
  Notes<N> notes[S];  // full and empty with the keys
  SharedBarrier query_full[kConsumers];
  SharedBarrier key_full[S], key_empty[S], value_full[S], value_empty[S];
  SharedBarrier value_loaded;  // before it is cleaned
  bool non_finite;
};

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

// How many consumers have queries.
__device__ __forceinline__ int consumers(const Head& head, int first) {
  return head.queries - first > kGroupRows ? 2 : 1;
}

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

// Producers ----------------------------------------------------------------------------------------------

// Loads `rows` rows of a head, from token `first` on, zeros past the tensor's ends; by one thread.
template <class Scalar, int D>
__device__ __forceinline__ void load(
    Scalar* to, const Source& from, SharedBarrier* barrier, int64_t batch, int h, int64_t first,
    int rows) {
  arrive_and_expect(barrier, rows * D * int(sizeof(Scalar)));
#pragma unroll
  for (int column = 0; column < D; column += 64)
    copy_box(
        to + column * rows, &from.map, barrier, column, static_cast<int>(first), h * from.heads,
        static_cast<int>(batch) * from.sequences);
}

// Notes which pairs of a tile take part; whether some of the warp's do.
template <int N>
__device__ __forceinline__ bool note_pairs(
    Notes<N>& notes, const Attention& p, const Place& place, int column) {
  const Head head(p, place.b, place.h);
  bool any = false;
#pragma unroll 1
  for (int strip = 2 * warp(); strip < 2 * warp() + 2; ++strip) {
    const int row = place.block * kRows + 16 * strip;
    const Span spans[2] = {keys_of(p, head, row + row_of(0)), keys_of(p, head, row + row_of(2))};
    bool full = true;
#pragma unroll 1
    for (int part = 0; part < N / 64; ++part) {
      const Pairs<64> pairs = look<64, false>(p, head, spans, row, column + 64 * part);
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

// Notes which weights dropout keeps, eight a byte.
template <int N>
__device__ __forceinline__ void note_kept(
    Notes<N>& notes, const Attention& p, const Place& place, int column) {
  auto* bytes = reinterpret_cast<unsigned char*>(notes.kept);
  const uint32_t plane = static_cast<uint32_t>(place.b * p.heads + place.h);
  const uint64_t seed = *p.seed;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * N / 8; i += kWarpgroup)
    bytes[i] = dropout_keep(
        seed, plane, place.block * kRows + i / (N / 8), column / 8 + i % (N / 8), p.dropout.threshold);
}

template <class Scalar, int D>
__device__ __forceinline__ void produce(
    const Call& call, const Place& place, int groups, Shared<Scalar, D>& shared) {
  constexpr int N = kKeys<D>;
  const Attention& p = call.attention;
  const bool leader = threadIdx.x == 0;
  const int first = place.block * kRows;
  // Made anew wherever it is needed, for it takes more registers than there are to keep.
  const auto head = [&] { return Head(p, place.b, place.h); };
  const Span span = visible<N, false>(p, head(), first, kRows);
  if (leader) {
    for (int group = 0; group < groups; ++group)
      load<Scalar, D>(
          shared.query[group], call.query, &shared.query_full[group], head().batch, place.h,
          head().first_query + first + group * kGroupRows, kGroupRows);
  }
  Ring<kStages<D>> keys, values;
  uint32_t loaded = 0;  // parity
  Mode mode = Mode::Hope;
  do {
    for (int column = span.first; column < span.last; column += N) {
      Notes<N>& notes = shared.notes[keys.stage];
      wait(&shared.key_empty[keys.stage], keys.parity ^ 1);
      const bool any = note_pairs(notes, p, place, column);
      if (!named_barrier_or(kProducing, kWarpgroup, any)) continue;
      if (p.dropout.threshold) {
        note_kept(notes, p, place, column);
        named_barrier(kProducing, kWarpgroup);
      }
      if (leader) {
        notes.column = column;
        load<Scalar, D>(
            shared.key[keys.stage], call.key, &shared.key_full[keys.stage], head().batch,
            head().kv_head, head().first_key + column, N);
      }
      keys.advance();

      wait(&shared.value_empty[values.stage], values.parity ^ 1);
      Scalar* value = shared.value[values.stage];
      SharedBarrier* full = &shared.value_full[values.stage];
      // Rows from here on are in memory, but no keys of this sequence.
      const int end = head().first_key + head().keys < p.total_k ? head().keys - column : N;
      const bool as_it_is = mode == Mode::Hope && end >= N;
      if (leader)
        load<Scalar, D>(
            value, call.value, as_it_is ? full : &shared.value_loaded, head().batch, head().kv_head,
            head().first_key + column, N);
      if (!as_it_is) {
        wait(&shared.value_loaded, loaded);
        loaded ^= 1;
        if (mode == Mode::Hope) {
          for (int i = threadIdx.x; i < (N - end) * 64; i += kWarpgroup)
#pragma unroll
            for (int panel = 0; panel < D / 64; ++panel)
              value[(panel * N + end) * 64 + i] = narrow<Scalar>(0);
        } else {
          clean_numbers(value, N * D, kWarpgroup, mode);
        }
        fence_for_async();
        named_barrier(kProducing, kWarpgroup);
        if (leader) arrive(full);
      }
      values.advance();
    }
    wait(&shared.key_empty[keys.stage], keys.parity ^ 1);
    // The leader goes on only when no thread can come so late to a wait that the next phase is over too.
    named_barrier(kProducing, kWarpgroup);
    if (leader) {
      shared.notes[keys.stage].column = -1;
      arrive(&shared.key_full[keys.stage]);
    }
    keys.advance();
  } while (pass_again(p, shared, mode, (1 + groups) * kWarpgroup, false));
}

// Consumers ----------------------------------------------------------------------------------------------

// Starts scores (64, N) = query keyᵀ.
template <class Scalar, int D, int N>
__device__ __forceinline__ void start_scores(
    float (&scores)[N / 8][4], const Scalar* query, const Scalar* key) {
  const uint64_t a = describe_matrix(query, 0, 8 * kPanelRow), b = describe_matrix(key, 0, 8 * kPanelRow);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const int panel = k / 4 * kPanelRow, within = k % 4 * 32;
    wgmma_rows<Scalar>(
        scores, a + steps(panel * kGroupRows + within), b + steps(panel * N + within), k > 0);
  }
}

// Starts acc (64, D) += weights (64, N) value.
template <class Scalar, int D, int N>
__device__ __forceinline__ void start_sums(
    float (&acc)[D / 8][4], const uint32_t (&weights)[N / 16][4], const Scalar* value) {
  const uint64_t b = describe_matrix(value, N * kPanelRow, 8 * kPanelRow);
#pragma unroll
  for (int k = 0; k < N / 16; ++k)
    wgmma_columns<Scalar>(acc, weights[k], b + steps(16 * k * kPanelRow));
}

template <class Scalar, int D>
__device__ __forceinline__ void consume(
    const Attention& p, const Place& place, int groups, int group, Shared<Scalar, D>& shared) {
  constexpr int N = kKeys<D>;
  const int strip = 4 * group + warp() % 4, row = place.block * kRows + 16 * strip;
  const Scale scale(p);
  Scalar* const query = shared.query[group];
  Ring<kStages<D>> keys, values;
  const auto take_turn = [&] {
    if (groups == 2) named_barrier(kTurns + group, 2 * kWarpgroup);
  };
  const auto give_turn = [&] {
    if (groups == 2) named_barrier_arrive(kTurns + (group ^ 1), 2 * kWarpgroup);
  };
  const auto release = [&](SharedBarrier* empty) {
    __syncwarp();
    if (lane() == 0) arrive(empty);
  };
  // Of the thread's two rows.
  const auto noted = [&](const typename Pairs<N>::Bits* bits, bool full) {
    const int shift = lane() % 4 * 2, at = 16 * strip;
    return Pairs<N>{{bits[at + row_of(0)] >> shift, bits[at + row_of(2)] >> shift}, true, full};
  };

  float acc[D / 8][4], scores[N / 8][4];
  uint32_t weights[N / 16][4];  // of the tile before
  Softmax<Scalar> softmax;
  Reached<D> reached;
  Mode mode = Mode::Hope;

  const auto pack_weights = [&] {
#pragma unroll
    for (int k = 0; k < N / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weights[k][i] =
            pack<Scalar>(scores[2 * k + i / 2][i % 2 * 2], scores[2 * k + i / 2][i % 2 * 2 + 1]);
  };
  // Makes weights of a tile's scores, and lets go of its keys.
  const auto weigh = [&](float (&shrink)[2]) {
    const Notes<N>& notes = shared.notes[keys.stage];
    const Pairs<N> pairs = noted(notes.pairs, notes.full[strip]);
    make_infinite_scores_nan<N>(scores);
    if (scale.natural)
      scale_and_add_mask<N, false, Scalar>(
          scores, p, scale, Head(p, place.b, place.h), pairs, row, notes.column);
    softmax.template take<N>(scores, pairs, scale.exponent, shrink);
    if (p.dropout.threshold) {
      const Pairs<N> kept = noted(notes.kept, false);
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!kept.test(n, e)) scores[n][e] = 0;
    }
    release(&shared.key_empty[keys.stage]);
    keys.advance();
  };
  // Whether there is another tile, once its keys have come.
  const auto another = [&] {
    wait(&shared.key_full[keys.stage], keys.parity);
    return shared.notes[keys.stage].column >= 0;
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
  if (group == 1) give_turn();
  do {
    set_to_zero<D>(acc);
    if (mode == Mode::Count) {
      while (another()) {
        const Pairs<N> pairs = noted(shared.notes[keys.stage].pairs, false);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) scores[n][e] = pairs.test(n, e);
        pack_weights();
        release(&shared.key_empty[keys.stage]);
        keys.advance();
        finish_sums();
      }
      reached = Reached<D>(acc);
    } else {
      softmax = {};
      float shrink[2];
      if (another()) {
        take_turn();
        wgmma_begin(scores);
        start_scores<Scalar, D, N>(scores, query, shared.key[keys.stage]);
        wgmma_commit();
        give_turn();
        wgmma_wait<0>(scores);
        for (bool summing = false;; summing = true) {
          weigh(shrink);
          wgmma_wait<0>(acc, weights);
          if (summing) {
            release(&shared.value_empty[values.stage]);
            values.advance();
          }
          multiply_by<D>(acc, shrink);
          pack_weights();
          if (!another()) break;
          wait(&shared.value_full[values.stage], values.parity);
          take_turn();
          wgmma_begin(scores, acc, weights);
          start_scores<Scalar, D, N>(scores, query, shared.key[keys.stage]);
          wgmma_commit();
          start_sums<Scalar, D, N>(acc, weights, shared.value[values.stage]);
          wgmma_commit();
          give_turn();
          wgmma_wait<1>(scores);
        }
        finish_sums();
      }
    }
    release(&shared.key_empty[keys.stage]);
    keys.advance();
  } while (pass_again(p, shared, mode, (1 + groups) * kWarpgroup, any_non_finite<D>(acc)));

  named_barrier(kStoring + group, kWarpgroup);  // all warps are done with the queries
  const Tile<Scalar> room{query + 16 * (strip % 4) * D, D};
  store_results<D>(
      p, Head(p, place.b, place.h), Scale(p), row, acc, softmax, reached, room);
  if (group == 0) take_turn();  // consumer 1 has given one more than were taken
}

template <class Scalar, int D>
__global__ __launch_bounds__(kThreads, 1) void attention_forward_hopper_kernel(
    const __grid_constant__ Call call) {
  const Attention& p = call.attention;
  Place place(p.Lq, kRows, p.heads);
  if (p.window_right >= 0) place.block = place.blocks - 1 - place.block;  // those that see most first
  if (place.b == p.batch) {
    store_unused_tokens<Scalar>(p, place, kRows);
    return;
  }
  const Head head(p, place.b, place.h);
  const int first = place.block * kRows, groups = consumers(head, first);
  if (first >= head.queries) return;

  auto& shared = *reinterpret_cast<Shared<Scalar, D>*>(shared_memory());
  if (threadIdx.x == 0) {
    prefetch_map(&call.query.map);
    prefetch_map(&call.key.map);
    prefetch_map(&call.value.map);
    for (int group = 0; group < groups; ++group) init_barrier(&shared.query_full[group], 1);
    for (int stage = 0; stage < kStages<D>; ++stage) {
      init_barrier(&shared.key_full[stage], 1);
      init_barrier(&shared.value_full[stage], 1);
      init_barrier(&shared.key_empty[stage], 4 * groups);
      init_barrier(&shared.value_empty[stage], 4 * groups);
    }
    init_barrier(&shared.value_loaded, 1);
    shared.non_finite = false;
    fence_for_async();
  }
  __syncthreads();

  const int group = threadIdx.x / kWarpgroup - 1;
  if (group < 0) {
    give_registers_back<kProducerRegisters>();
    produce(call, place, groups, shared);
  } else {
    take_registers<kConsumerRegisters>();
    if (group < groups) consume(p, place, groups, group, shared);
  }
}

// (sequences, heads, length, columns), for boxes of 64 columns.
MappedTensor mapped(
    const Attention& p, const Tensor4& t, int64_t heads, int64_t length, int64_t columns) {
  MappedTensor result{
      p.dtype, t.data, {p.cu_seqlens_q ? 1 : p.batch, heads, length, columns},
      {t.stride[0], t.stride[1], t.stride[2], t.stride[3]}};
  for (int d = 0; d < 2; ++d)
    if (t.stride[d] == 0) result.size[d] = 1;
  return result;
}
MappedTensor mapped_query(const Attention& p) {
  return mapped(p, p.query, p.heads, p.total_q, p.E);
}
MappedTensor mapped_key(const Attention& p) {
  return mapped(p, p.key, p.kv_heads, p.total_k, p.E);
}
MappedTensor mapped_value(const Attention& p) {
  return mapped(p, p.value, p.kv_heads, p.total_k, p.Ev);
}

Source source(const MappedTensor& t, int rows) {
  return {make_tensor_map(t, rows), t.size[1] > 1, t.size[0] > 1};
}

}  // namespace

bool is_for_hopper(const Attention& p) {
  return (p.dtype == DType::BFloat16 || p.dtype == DType::Float16) && std::max(p.E, p.Ev) <= 256 &&
      has_tensor_map(mapped_query(p)) && has_tensor_map(mapped_key(p)) &&
      has_tensor_map(mapped_value(p)) && compute_capability() == 90;
}

void attention_forward_hopper(const Attention& p, void* stream) {
  const int64_t blocks = blocks_for(p, p.Lq, kRows, p.heads, true);
  if (blocks == 0) return;
  for_head_dim(p, [&]<int D>() {
    const Call call{
        p, source(mapped_query(p), kGroupRows), source(mapped_key(p), kKeys<D>),
        source(mapped_value(p), kKeys<D>)};
    const auto run = [&]<class Scalar>() {
      launch(
          attention_plan(
              "attention_forward_hopper", p, blocks, kThreads / 32, sizeof(Shared<Scalar, D>)),
          static_cast<cudaStream_t>(stream), attention_forward_hopper_kernel<Scalar, D>, call);
    };
    if (p.dtype == DType::BFloat16) run.template operator()<__nv_bfloat16>();
    else run.template operator()<__half>();
  });
}

}  // namespace trifuse::cuda
