// Attention forward on a CPU. attention_few_queries.h serves calls of few queries.
//
// A task owns 64 queries of one head of one sequence. It reads their keys and values tile by tile,
// 64 at a time, and keeps for each query its running softmax and the output so far: 64 x Ev values,
// and as many for the chunks of keys before (attention_chunks.h). It writes its rows of out and
// logsumexp.
//
// In a window, a task also prefetches the data that the next task reads (Ahead).
//
// Floor: 2 · 64 · 64 · (E + Ev) operations a tile, on the machine's multiply-add pipes. The softmax
// adds one exp2 per pair, about 13 vector instructions for 16 pairs, and a pass for the maximum.
// The tile, the transposed queries and the output stay in the L1 and L2 caches. Keys and values are
// read from there or from L3 once for every 64 queries, which is 1/64 of a byte per operation.

#include "cpu/attention_chunks.h"
#include "cpu/attention_few_queries.h"
#include "cpu/attention_output.h"
#include "cpu/attention_tile.h"
#include "cpu/kernels.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

// A task owns a block: queries [i, i + rows) of head h of a sequence. It reads their keys
// [first_key, last_key), in tiles that start at first_key.
struct Block {
  Sequence s;
  int64_t h, kv_head;
  int64_t i, rows;  // rows <= 0: the sequence has no such queries
  int64_t first_key, last_key;

  Block(const AttentionProblem& p, int64_t task) : s(p, task / query_blocks(p) / p.heads) {
    const int64_t blocks = query_blocks(p);
    h = task / blocks % p.heads;
    kv_head = h / (p.heads / p.kv_heads);
    // Under a causal mask, late queries attend to the most keys. Starting with the longest tasks
    // avoids a long tail.
    i = (blocks - 1 - task % blocks) * kTile;
    rows = std::min(kTile, s.Lq - i);
    const auto visible = s.visible(i, rows);
    first_key = visible.first / kTile * kTile;
    last_key = visible.last;
  }

  bool same_keys(const Block& other) const {
    return s.index == other.s.index && kv_head == other.kv_head;
  }
};

// Prefetches memory into the L2 cache while a task computes, a few rows at a time between parts of
// its products: the rows of out that the task writes, the queries of the next task, and the keys
// and values that only the next task reads. This pays off if these are in memory and a task has few
// keys, as in a window. If a task has many keys, its neighbours in the head share most of them.
template <class Scalar>
class Ahead {
 public:
  Ahead(const AttentionProblem& p, const Block& now, int64_t next_task) {
    constexpr int64_t kFewKeys = 4 * kTile;
    if (now.last_key - now.first_key > kFewKeys || !reads_memory<Scalar>(p)) return;
    out_ = {now.s.template query_rows<Scalar>(p.out, now.h, now.i), 0, now.rows, p.Ev};
    if (next_task >= p.batch * p.heads * query_blocks(p)) return;
    const Block next(p, next_task);
    query_ = {next.s.template query_rows<Scalar>(p.query, next.h, next.i), 0, next.rows, p.E};
    const int64_t first = next.first_key;
    const int64_t last =
        now.same_keys(next) ? std::min(next.last_key, now.first_key) : next.last_key;
    key_ = {next.s.template key_rows<Scalar>(p.key, next.kv_head, 0), first, last, p.E};
    value_ = {next.s.template key_rows<Scalar>(p.value, next.kv_head, 0), first, last, p.Ev};
  }

  bool done() const { return out_.done() && query_.done() && key_.done() && value_.done(); }
  void some() {
    out_.template some<true>();
    query_.some();
    key_.some();
    value_.some();
  }

 private:
  // Rows [row, end) have not been fetched yet.
  struct Stretch {
    Rows<Scalar> rows{};
    int64_t row = 0, end = 0, columns = 0;

    bool done() const { return row >= end; }
    template <bool write = false>
    void some() {
      constexpr int64_t kLine = 64 / sizeof(Scalar), kRows = 3;
      for (const int64_t last = std::min(row + kRows, end); row < last; ++row)
        for (int64_t c = 0; c < columns; c += kLine)
          __builtin_prefetch(rows.row(row) + c * rows.column_stride, write, 2);
    }
  };
  Stretch out_, query_, key_, value_;
};

// A key head's values as the product reads them, tile by tile. If the product needs a copy in
// pairs, a run of tasks makes it once for all blocks of queries, as long as the copies fit the L2
// cache.
template <class Scalar>
class Values {
  using E = typename Compute<Scalar>::Element;
  static constexpr int64_t kMostBytes = int64_t{256} << 10;

 public:
  Values(const AttentionProblem& p, int64_t tasks) : p(p) {
    const int64_t tiles = (p.Lk + kTile - 1) / kTile;
    const bool shared = query_blocks(p) > 1 || p.heads > p.kv_heads;
    keeps = kPack<E> == 2 && shared && tasks > 1 && tiles <= 64 && tiles * bytes() <= kMostBytes;
    scratch.reset((keeps ? tiles : 1) * bytes(), "a thread of attention");
    buffer = scratch.template take<E>((keeps ? tiles : 1) * size());
  }

  // Returns keys [j, j + keys), which must be read before the next call.
  Operand<E> tile(
      const Sequence& s, int64_t kv_head, int64_t j, int64_t keys, bool zero_nonfinite) {
    const auto rows = s.key_rows<Scalar>(p.value, kv_head, j);
    if constexpr (kPack<E> == 2) {
      if (keeps && !zero_nonfinite) return kept_tile(s, kv_head, j, rows);
    }
    packed = 0;
    return right_rows(rows, keys, p.Ev, buffer, zero_nonfinite);
  }

 private:
  Operand<E> kept_tile(const Sequence& s, int64_t kv_head, int64_t j, const Rows<Scalar>& rows) {
    if (const int64_t head = s.index * p.kv_heads + kv_head; head != owner) {
      owner = head;
      packed = 0;
    }
    E* copy = buffer + j / kTile * size();
    if (!(packed >> j / kTile & 1)) {
      copy_right_rows(rows, std::min(kTile, s.keys - j), p.Ev, padded<E>(p.Ev), copy);
      packed |= uint64_t{1} << j / kTile;
    }
    return {copy, padded<E>(p.Ev)};
  }

  int64_t size() const { return right_rows_size<E>(kTile, p.Ev); }
  int64_t bytes() const { return Scratch::bytes<E>(size()); }

  static inline thread_local Scratch scratch;
  const AttentionProblem& p;
  bool keeps;
  E* buffer;            // [tiles][64 / pack][Ev]
  int64_t owner = -1;   // the key head, of a sequence, whose tiles are kept
  uint64_t packed = 0;  // bit t: tile t is there
};

// Computes a block. A pair that is left out has the weight 0, but 0 · NaN is NaN, so such values
// must not enter the product. Searching for them reads all values once more, so only a `careful`
// call does so. Any other call writes nothing and returns false if a tile leaves out pairs and a
// sum is not finite.
template <class Scalar>
bool attend(
    const AttentionProblem& p, const Block& block, Values<Scalar>& kept_values,
    Ahead<Scalar>& ahead, bool careful) {
  using E = typename Compute<Scalar>::Element;
  using T = AccumulatorOf<E>;
  using Vec = Vectorized<T>;

  const auto& [s, h, kv_head, i, rows, first_key, last_key] = block;
  const int64_t lanes = round_up(rows, Vec::size());
  const int64_t out_ld = padded<E>(p.Ev);
  const Scale<T> scale(p);
  const bool several_chunks = chunk_of(first_key) < chunk_of(last_key - 1);

  thread_local Scratch scratch;
  scratch.reset(
      Scratch::bytes<TileMask<T>>(1) + Scratch::bytes<E>(right_transposed_size<E>(p.E)) +
          Scratch::bytes<E>(left_rows_size<E>(kTile, p.E)) + Scratch::bytes<T>(kTile * kTile) +
          (several_chunks ? 2 : 1) * Scratch::bytes<T>(kTile * out_ld),
      "a thread of attention");
  TileMask<T>& mask = *scratch.take<TileMask<T>>(1);
  E* query_t = scratch.take<E>(right_transposed_size<E>(p.E));     // [E][64]
  E* row_buffer = scratch.take<E>(left_rows_size<E>(kTile, p.E));  // [64][E]
  T* scores = scratch.take<T>(kTile * kTile);                      // [keys][queries]
  T* out = scratch.take<T>(kTile * out_ld);                        // [queries][Ev]

  Softmax<E> softmax(scale.exponent);
  JoinedChunks<E> joined(
      scale.exponent, several_chunks ? scratch.take<T>(kTile * out_ld) : nullptr);
  bool adds = false;  // whether the product is added to `out`, which then has sums of this chunk
  const auto end_chunk = [&] {
    if (adds) joined.add(softmax.row_max, softmax.row_sum, out, rows, p.Ev, out_ld);
    softmax.restart();
    adds = false;
  };
  right_transposed(s.query_rows<Scalar>(p.query, h, i), rows, p.E, scale.sign, row_buffer, query_t);

  uint64_t seen = 0;  // bit i: query i has a key
  bool left_out = false;
  for (int64_t j = first_key; j < last_key; j += kTile) {
    if (j % kChunkKeys == 0) end_chunk();
    const Cover cover =
        mask.template read<Scalar>(p, s, h, i, rows, j, std::min(kTile, s.keys - j));
    if (cover == Cover::Empty) continue;
    const int64_t keys = mask.keys;
    seen |= cover == Cover::Full ? low_bits(rows) : mask.queries();

    const auto values = s.key_rows<Scalar>(p.value, kv_head, j);
    const auto key = left_rows<E>(s.key_rows<Scalar>(p.key, kv_head, j), keys, p.E, row_buffer);
    tile_scores<E, T>(p, mask, scale, key, query_t, keys, lanes, scores, nullptr, ahead);
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

    left_out |= cover != Cover::Full;
    const bool finite = !careful || cover == Cover::Full || all_finite(values, keys, p.Ev);
    const auto value = kept_values.tile(s, kv_head, j, keys, !finite);
    const auto weight = operand_by_query<E>(scores, keys, lanes);
    if (!adds && mask.stepped) {  // a step without a pair does not write its rows of `out`
      std::fill_n(out, kTile * out_ld, T(0));
      adds = true;
    }
    add_product(
        mask.by_query(), rows, p.Ev, elements<E>(keys), weight, !kUsesMatrixUnit<E>, value, out,
        out_ld, {adds, adds && softmax.rescales ? softmax.rescale : nullptr}, ahead);
    adds = true;
    if (!finite)
      spread_nan(values, keys, p.Ev, out, out_ld, [&](int64_t j) { return mask.bits[j]; });
  }

  if (!joined.empty()) end_chunk();
  T* const sums = joined.empty() ? out : joined.out;
  if (left_out && !careful && !all_finite(Rows<T>{sums, out_ld, 1}, rows, p.Ev)) return false;
  write_rows<Scalar>(
      p, s, joined.empty() ? softmax : joined.softmax, scale, seen, rows, sums, out_ld,
      [&](int64_t r) { return HeadAndQuery{h, i + r}; });
  return true;
}

template <class Scalar>
void run(const AttentionProblem& p, Values<Scalar>& values, int64_t task) {
  const Block block(p, task);
  if (block.rows <= 0) return;
  Ahead<Scalar> ahead(p, block, task + 1);
  if (!attend<Scalar>(p, block, values, ahead, false))
    attend<Scalar>(p, block, values, ahead, true);
}

AttentionTasks tasks(const AttentionProblem& p) {
  return for_type(p.dtype, [&]<class Scalar>() -> AttentionTasks {
    using E = typename Compute<Scalar>::Element;
    if constexpr (kHasFewQueries<E>)
      if (has_few_queries<E>(p)) {
        // Tasks that share a key head, or some more, because acquiring the matrix unit is expensive
        // for a short task.
        const int64_t sharing = Group<E>(p).tasks;
        return {
            p.batch * p.kv_heads * sharing, round_up(kFewTasks, sharing), chunks_of_task(p),
            ChunkSums<E>::bytes(p)};
      }
    return {p.batch * p.heads * query_blocks(p), query_blocks(p)};
  });
}

void run_any(const AttentionProblem& p, int64_t first, int64_t last) {
  [[maybe_unused]] const MatrixUnit unit;
  for_type(p.dtype, [&]<class Scalar>() {
    using E = typename Compute<Scalar>::Element;
    if constexpr (kHasFewQueries<E>)
      if (has_few_queries<E>(p)) {
        for (int64_t task = first; task < last; ++task) run_few_queries<Scalar>(p, task);
        return;
      }
    Values<Scalar> values(p, last - first);
    for (int64_t task = first; task < last; ++task) run<Scalar>(p, values, task);
  });
}

}  // namespace

AttentionForward attention_forward() { return {tasks, run_any}; }

}  // namespace trifuse::TRIFUSE_CAPABILITY
