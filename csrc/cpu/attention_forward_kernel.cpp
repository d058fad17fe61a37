// Attention forward on a CPU. Calls of few queries take attention_few_queries.h.
//
// A task owns 64 queries of one head of one sequence. It reads their keys and values tile by tile,
// 64 at a time, and keeps for each query its running softmax and the output so far: 64 x Ev values.
// It writes its rows of out and logsumexp.
//
// Floor: 2 · 64 · 64 · (E + Ev) operations a tile, on the machine's multiply-add pipes. The softmax
// adds one exp2 a pair, about 13 vector instructions for 16 pairs, and a pass for the maximum. The
// tile, the transposed queries and the output stay in the L1 and L2 caches; keys and values are
// read from there or L3 once for every 64 queries, 1/64 of a byte an operation.

#include "cpu/attention_few_queries.h"
#include "cpu/attention_output.h"
#include "cpu/attention_tile.h"
#include "cpu/kernels.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

int64_t query_blocks(const AttentionProblem& p) { return (p.Lq + kTile - 1) / kTile; }

template <class Scalar>
void run(const AttentionProblem& p, int64_t task) {
  using E = typename Compute<Scalar>::Element;
  using T = AccumulatorOf<E>;
  using Vec = Vectorized<T>;

  const int64_t blocks = query_blocks(p);
  const int64_t h = task / blocks % p.heads;
  // Under a causal mask late queries see most keys: longest first leaves no long tail.
  const int64_t i = (blocks - 1 - task % blocks) * kTile;
  const Sequence s(p, task / blocks / p.heads);
  if (i >= s.Lq) return;
  const int64_t rows = std::min(kTile, s.Lq - i), lanes = round_up(rows, Vec::size());
  const int64_t kv_head = h / (p.heads / p.kv_heads);
  const int64_t out_ld = padded<E>(p.Ev);
  const Scale<T> scale(p);

  thread_local Scratch scratch;
  scratch.reset(
      Scratch::bytes<TileMask<T>>(1) + Scratch::bytes<E>(right_transposed_size<E>(p.E)) +
          Scratch::bytes<E>(left_rows_size<E>(kTile, p.E)) +
          Scratch::bytes<E>(right_rows_size<E>(kTile, p.Ev)) + Scratch::bytes<E>(kTile * kTile) +
          Scratch::bytes<T>(kTile * kTile) + Scratch::bytes<T>(kTile * out_ld),
      "a thread of attention");
  TileMask<T>& mask = *scratch.take<TileMask<T>>(1);
  E* query_t = scratch.take<E>(right_transposed_size<E>(p.E));         // [E][64]
  E* row_buffer = scratch.take<E>(left_rows_size<E>(kTile, p.E));      // [64][E]
  E* value_buffer = scratch.take<E>(right_rows_size<E>(kTile, p.Ev));  // [64][Ev]
  E* weight_buffer = scratch.take<E>(kTile * kTile);                   // [64 / pack][64]
  T* scores = scratch.take<T>(kTile * kTile);                          // [keys][queries]
  T* out = scratch.take<T>(kTile * out_ld);                            // [queries][Ev]

  Softmax<T> softmax(scale.exponent);
  std::fill_n(out, kTile * out_ld, T(0));
  right_transposed(s.query_rows<Scalar>(p.query, h, i), rows, p.E, scale.sign, row_buffer, query_t);

  uint64_t seen = 0;  // bit i: query i has a key
  const auto visible = s.visible(i, rows);
  for (int64_t j = visible.first / kTile * kTile; j < visible.last; j += kTile) {
    const Cover cover =
        mask.template read<Scalar>(p, s, h, i, rows, j, std::min(kTile, s.keys - j));
    if (cover == Cover::Empty) continue;
    const int64_t keys = mask.keys;
    seen |= cover == Cover::Full ? low_bits(rows) : mask.queries();

    const auto values = s.key_rows<Scalar>(p.value, kv_head, j);
    const auto key = left_rows<E>(s.key_rows<Scalar>(p.key, kv_head, j), keys, p.E, row_buffer);
    tile_scores(p, mask, scale, key, query_t, keys, lanes, scores);
    tile_softmax(softmax, mask, cover, keys, lanes, scores);

    if (p.dropout.threshold) {
      uint64_t kept[kTile];
      dropout_tile(p, s, h, i, rows, j, kept);
      for (int64_t c = 0; c < keys; ++c)
        for (int64_t l = 0; l < lanes; l += Vec::size()) {
          T* weights = scores + c * kTile + l;
          select(kept[c] >> l, Vec::loadu(weights), Vec(T(0))).store(weights);
        }
    }

    // 0 · NaN is NaN: a value that takes no part matters only if the tile leaves out a pair.
    const bool finite = cover == Cover::Full || all_finite(values, keys, p.Ev);
    const auto value = right_rows(values, keys, p.Ev, value_buffer, !finite);
    const auto weight = pair_rows(scores, keys, lanes, weight_buffer);
    add_product(
        mask.by_query(), rows, p.Ev, elements<E>(keys), weight, true, value, out, out_ld,
        softmax.rescale);
    if (!finite)
      spread_nan(values, keys, p.Ev, out, out_ld, [&](int64_t j) { return mask.bits[j]; });
  }

  write_rows<Scalar>(p, s, softmax, scale, seen, rows, out, out_ld, [&](int64_t r) {
    return HeadAndQuery{h, i + r};
  });
}

AttentionTasks tasks(const AttentionProblem& p) {
  return for_type(p.dtype, [&]<class Scalar>() -> AttentionTasks {
    using E = typename Compute<Scalar>::Element;
    if constexpr (kHasFewQueries<E>)
      if (has_few_queries<E>(p)) {
        const int64_t related = Group(p).tasks;
        return {p.batch * p.kv_heads * related, related, true};
      }
    return {p.batch * p.heads * query_blocks(p), query_blocks(p), false};
  });
}

void run_any(const AttentionProblem& p, int64_t task) {
  [[maybe_unused]] const MatrixUnit unit;
  for_type(p.dtype, [&]<class Scalar>() {
    using E = typename Compute<Scalar>::Element;
    if constexpr (kHasFewQueries<E>)
      if (has_few_queries<E>(p)) return run_few_queries<Scalar>(p, task);
    run<Scalar>(p, task);
  });
}

}  // namespace

AttentionForward attention_forward() { return {tasks, run_any}; }

}  // namespace trifuse::TRIFUSE_CAPABILITY
