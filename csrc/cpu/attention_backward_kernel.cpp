// Attention backward on a CPU.
//
// A task owns a chunk of the keys of one key head (or of all heads and sequences that share one
// gradient of a broadcast float mask). It sums their rows of grad_key and grad_value over all
// queries and writes them once. It loops over blocks of 64 queries. For each block it recomputes
// the weights of its keys from the saved logsumexp, tile by tile, and adds its part of grad_query.
//
// Several chunks add to the same rows of grad_query. They do so in the order of the chunks: each
// waits for the previous one at that block (`progress`). So the sum has the same bits for any
// number of threads, and no copies of grad_query are needed. The chunks of a head are started in
// order. So a task that another one waits for is always running already, unless it has thrown
// (failure.h). Chunk 0 visits every block and initialises it.
//
// Floor: 2 · 64 · 64 · (3 E + 2 Ev) operations per tile, which is five products against the
// forward's two, and about 15 vector instructions for 16 pairs. Queries, outputs and their
// gradients are read once per chunk. So a chunk is as long as its keys, values and their two sums
// fit a 1 MB L2 cache.

#include <atomic>

#include "cpu/attention_tile.h"
#include "cpu/kernels.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

// Returns the number of keys in a chunk. It depends only on the head dimensions, because a result
// must not change with the batch or the number of threads.
int64_t chunk_keys(const AttentionProblem& p) {
  return p.E + p.Ev <= 128 ? 8 * kTile : p.E + p.Ev <= 256 ? 4 * kTile : 2 * kTile;
}

int64_t key_chunks(const AttentionProblem& p) {
  return std::max<int64_t>(1, (p.Lk + chunk_keys(p) - 1) / chunk_keys(p));
}

// Key heads that share one mask gradient belong to one task, and so do sequences that share one.
// Sequences that share a table are grouped into about kEnoughTasks tasks, because each task has
// sums of the table's gradient of its own: one for each sequence would take many times the table's
// memory.
int64_t head_groups(const AttentionProblem& p) {
  return p.grad_mask.data && p.grad_mask.stride[1] == 0 ? std::min<int64_t>(p.kv_heads, 1)
                                                        : p.kv_heads;
}

int64_t batch_groups(const AttentionProblem& p) {
  constexpr int64_t kEnoughTasks = 128;
  if (p.grad_mask.data && p.grad_mask.stride[0] == 0) return std::min<int64_t>(p.batch, 1);
  if (!p.one_table) return p.batch;
  const int64_t tasks = std::max<int64_t>(key_chunks(p) * head_groups(p), 1);  // of a group
  const int64_t sequences = std::max<int64_t>(p.batch * tasks / kEnoughTasks, 1);
  return (p.batch + sequences - 1) / sequences;
}

int64_t table_groups(const AttentionProblem& p) { return p.one_table ? batch_groups(p) : p.batch; }

int64_t tasks(const AttentionProblem& p) {
  return key_chunks(p) * batch_groups(p) * head_groups(p);
}

// Computes a tile's weights and score gradients in place, from its scores and its products of value
// and grad_out: scores becomes D P, products becomes dS (reference/attention.py), where P =
// 2^((score - shift) · factor - rest).
template <bool Partial, bool Dropout, class E, class T = AccumulatorOf<E>>
inline void gradient_tile(
    T* scores, T* products, const uint64_t* bits, const uint64_t* kept, int64_t keys, int64_t lanes,
    T factor, T dropout_scale, const T* shift, const T* rest, const T* delta) {
  using Vec = Vectorized<T>;
  constexpr int L = Vec::size();
  const Vec zero(T(0));
  for (int64_t j = 0; j < keys; ++j) {
#pragma GCC unroll 4
    for (int64_t l = 0; l < lanes; l += L) {
      T *score = scores + j * kTile + l, *product = products + j * kTile + l;
      const Vec x = Vec::loadu(score) - Vec::loadu(shift + l);
      Vec p = Softmax<E>::power_of_2(at::vec::fmsub(x, Vec(factor), Vec::loadu(rest + l)));
      Vec dp = Vec::loadu(product);
      if constexpr (Partial) p = select(bits[j] >> l, p, zero);
      Vec dropped = p;
      if constexpr (Dropout) {
        dropped = select(kept[j] >> l, p * Vec(dropout_scale), zero);
        dp = select(kept[j] >> l, dp * Vec(dropout_scale), zero);
      }
      Vec ds = p * (dp - Vec::loadu(delta + l));
      if constexpr (Partial) ds = select(bits[j] >> l, ds, zero);
      dropped.store(score);
      ds.store(product);
    }
  }
}

// Adds a tile's score gradients to the gradient of a mask with a value per key: transposed, or
// summed over queries if the mask is broadcast over them.
template <class Sum, class T>
void add_mask_gradient(
    const AttentionProblem& p, const Sequence& s, int64_t h, int64_t i, int64_t rows, int64_t j,
    int64_t keys, const T* ds, T* buffer) {
  const auto* stride = p.grad_mask.stride;
  Sum* grad = static_cast<Sum*>(p.grad_mask.data) + s.index * stride[0] + h * stride[1] +
      i * stride[2] + j * stride[3];
  if (stride[2] == 0) {
    for (int64_t c = 0; c < keys; ++c) {
      T sum = 0;
      for (int64_t r = 0; r < rows; ++r) sum += ds[c * kTile + r];
      grad[c * stride[3]] += sum;
    }
  } else {
    transpose_tile(ds, kTile, keys, rows, buffer);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < keys; ++c) grad[r * stride[2] + c] += buffer[r * kTile + c];
  }
}

// Adds a tile's score gradients to the sums of the relative bias's gradient. A tile's 127 diagonals
// are summed first, in `buffer`: each key's line of queries starts one element before that of the
// previous key.
template <class T>
void add_relative_bias_gradient(const T* ds, int64_t rows, int64_t keys, T* buffer, double* sums) {
  using Vec = Vectorized<T>;
  std::fill_n(buffer, 2 * kTile, T(0));
  const int64_t whole = rows / Vec::size() * Vec::size();
  for (int64_t c = 0; c < keys; ++c) {
    T* diagonal = buffer + keys - 1 - c;
    const T* line = ds + c * kTile;
    for (int64_t r = 0; r < whole; r += Vec::size())
      (Vec::loadu(diagonal + r) + Vec::loadu(line + r)).store(diagonal + r);
    for (int64_t r = whole; r < rows; ++r) diagonal[r] += line[r];
  }
  // buffer[r - c + keys - 1]; the sums are in the order of the distance c - r.
  const int64_t count = rows + keys - 1;
  for (int64_t x = 0; x < count; ++x) sums[count - 1 - x] += static_cast<double>(buffer[x]);
}

// Adds a tile's score gradients to those of the tables that its pairs read: to `sums` (n) of the
// relative bias, unless that is null, and to the rows of its queries and keys.
template <class T>
void add_table_gradients(
    const AttentionProblem& p, const Sequence& s, int64_t h, int64_t i, int64_t rows, int64_t j,
    int64_t keys, const T* ds, double* sums) {
  for (int64_t c = 0; c < keys; ++c) {
    const int32_t* column = s.columns(p, i, j + c);
    const T* line = ds + c * kTile;
    if (sums)
      for (int64_t r = 0; r < rows; ++r) sums[column[r]] += static_cast<double>(line[r]);
    if (p.grad_query_bias.data) {
      T* grad = s.query_row<T>(p.grad_query_bias, h, i);
      for (int64_t r = 0; r < rows; ++r)
        grad[r * p.grad_query_bias.stride[2] + column[r]] += line[r];
    }
    if (p.grad_key_bias.data) {
      T* grad = s.key_row<T>(p.grad_key_bias, h, j + c);
      for (int64_t r = 0; r < rows; ++r) grad[column[r]] += line[r];
    }
  }
}

// Adds the gradient of a mask that is broadcast over keys. Such a mask shifts whole rows, which
// changes their logsumexp and nothing else. So the sum of dS over a row is exactly dlse, or NaN if
// any pair of the row is NaN.
template <class Sum, class Scalar, class T>
void add_row_mask_gradient(
    const AttentionProblem& p, const Sequence& s, int64_t h, int64_t i, int64_t rows) {
  const auto* stride = p.grad_mask.stride;
  Sum* grad =
      static_cast<Sum*>(p.grad_mask.data) + s.index * stride[0] + h * stride[1] + i * stride[2];
  const T* lse = s.query_row<T>(p.logsumexp, h, i);
  const auto grad_out = s.query_rows<Scalar>(p.grad_out, h, i);
  for (int64_t r = 0; r < rows; ++r) {
    const T row_lse = lse[r * p.logsumexp.stride[2]];
    if (row_lse == -std::numeric_limits<T>::infinity()) continue;  // a row without keys
    const Scalar* o = s.query_row<Scalar>(p.out, h, i + r);
    const Scalar* g = grad_out.row(r);
    T delta = row_lse;
    for (int64_t c = 0; c < p.Ev; ++c)
      delta += static_cast<T>(o[c]) * static_cast<T>(g[c * grad_out.column_stride]);
    T sum = 0;
    if (p.grad_logsumexp.data)
      sum = s.query_row<T>(p.grad_logsumexp, h, i)[r * p.grad_logsumexp.stride[2]];
    if (!std::isfinite(delta)) sum = std::numeric_limits<T>::quiet_NaN();
    grad[r * stride[2]] += sum;
  }
}

// All data of a task, laid out in its thread's scratch memory.
template <class Scalar>
class Task {
  using E = typename Compute<Scalar>::Element;
  using T = AccumulatorOf<E>;
  using Vec = Vectorized<T>;

 public:
  Task(
      const AttentionProblem& problem, int64_t chunk_index, int64_t batch_group, int32_t* progress,
      const Failure& failure)
      : p(problem), scale(problem), chunk(chunk_keys(problem)), index(chunk_index),
        batch_group(batch_group), progress(progress), failure(failure), e_ld(padded<E>(problem.E)),
        ev_ld(padded<E>(problem.Ev)) {
    // Two passes: the first counts the bytes, and the second assigns the pieces.
    layout([](auto*& piece, int64_t n) {
      scratch.need += Scratch::bytes<std::remove_reference_t<decltype(*piece)>>(n);
    });
    scratch.memory.reset(std::exchange(scratch.need, 0), "a thread of attention's backward");
    layout([](auto*& piece, int64_t n) {
      piece = scratch.memory.template take<std::remove_reference_t<decltype(*piece)>>(n);
    });
  }

  // Processes all query heads that share one key head of one sequence.
  void run(int64_t b, int64_t kv_head) {
    const Sequence s(p, b);
    const int64_t first = index * chunk, stored = std::min(chunk, s.Lk - first);
    if (stored <= 0 && index > 0) return;
    const int64_t keys = std::clamp<int64_t>(s.keys - first, 0, chunk);
    if (stored > 0) {
      std::fill_n(grad_key, stored * e_ld, T(0));
      std::fill_n(grad_value, stored * ev_ld, T(0));
    }
    if (keys > 0) {
      key = left_rows<E>(s.key_rows<Scalar>(p.key, kv_head, first), keys, p.E, key_buffer);
      value = left_rows<E>(s.key_rows<Scalar>(p.value, kv_head, first), keys, p.Ev, value_buffer);
      // B with k along the keys. A tile has an even number of keys, so no pair straddles two tiles.
      key_by_row = right_rows(s.key_rows<Scalar>(p.key, kv_head, first), keys, p.E, key_row_buffer);
    }
    const int64_t group = p.heads / p.kv_heads;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
      for (int64_t i = 0; i < s.Lq; i += kTile) query_block(s, h, kv_head, i, first, keys);
    for (int64_t r = 0; r < stored; ++r) {
      T* row = grad_key + r * e_ld;
      for (int64_t c = 0; c < p.E; ++c) row[c] = infinite_to_nan(row[c] * static_cast<T>(p.scale));
      narrow(row, p.E, s.key_row<Scalar>(p.grad_key, kv_head, first + r), 1);
      T* value_row = grad_value + r * ev_ld;
      for (int64_t c = 0; c < p.Ev; ++c) value_row[c] = infinite_to_nan(value_row[c]);
      narrow(value_row, p.Ev, s.key_row<Scalar>(p.grad_value, kv_head, first + r), 1);
    }
  }

 private:
  void query_block(
      const Sequence& s, int64_t h, int64_t kv_head, int64_t i, int64_t first, int64_t keys) {
    const int64_t rows = std::min(kTile, s.Lq - i), lanes = round_up(rows, Vec::size());
    const auto visible = s.visible(i, rows);
    const int64_t from = std::max(visible.first, first) / kTile * kTile;
    const int64_t to = std::min(visible.last, first + keys);
    if (from >= to && index > 0) return;

    if (index == 0 && p.grad_mask.data && p.grad_mask.stride[3] == 0)
      p.grad_mask_in_double ? add_row_mask_gradient<double, Scalar, T>(p, s, h, i, rows)
                            : add_row_mask_gradient<T, Scalar, T>(p, s, h, i, rows);
    std::fill_n(grad_query, kTile * e_ld, T(0));
    if (from < to) load_queries(s, h, kv_head, i, rows);
    if (p.grad_query_bias.data) wait_for_turn(s, h, i, rows);  // tiles add to its rows
    for (int64_t j = from; j < to; j += kTile)
      tile(s, h, kv_head, i, rows, lanes, j, first, std::min(kTile, first + keys - j));

    for (int64_t r = 0; r < rows; ++r) {
      T* row = grad_query + r * e_ld;
      for (int64_t c = 0; c < p.E; ++c) row[c] = infinite_to_nan(row[c] * static_cast<T>(p.scale));
    }
    add_grad_query(s, h, i, rows);
  }

  void load_queries(const Sequence& s, int64_t h, int64_t kv_head, int64_t i, int64_t rows) {
    const auto q = s.query_rows<Scalar>(p.query, h, i);
    const auto go = s.query_rows<Scalar>(p.grad_out, h, i);
    right_transposed(q, rows, p.E, scale.sign, row_buffer, query_t);
    right_transposed(go, rows, p.Ev, 1.0f, row_buffer, grad_out_t);
    query = right_rows(q, rows, p.E, query_buffer);
    grad_out = right_rows(go, rows, p.Ev, grad_out_buffer);

    std::fill_n(shift, kTile, T(0));
    std::fill_n(rest, kTile, T(0));
    std::fill_n(delta, kTile, T(0));
    bool lost = false;
    const T* lse = s.query_row<T>(p.logsumexp, h, i);
    for (int64_t r = 0; r < rows; ++r) {
      const T x = lse[r * p.logsumexp.stride[2]];
      // A row without keys takes no part in any tile; 0 keeps -inf out of its exponents.
      if (x != -std::numeric_limits<T>::infinity()) {
        const double in_scores = x / scale.unit;
        shift[r] = static_cast<T>(in_scores);
        rest[r] = static_cast<T>((in_scores - shift[r]) * scale.exponent);
        lost |= std::abs(x) > 8192;
      }
      const Scalar* o = s.query_row<Scalar>(p.out, h, i + r);
      const Scalar* g = go.row(r);
      if (go.column_stride != 1) {
        // Copied, so that the sum has the same order in every layout.
        auto* copy = reinterpret_cast<Scalar*>(row_buffer);
        for (int64_t c = 0; c < p.Ev; ++c) copy[c] = g[c * go.column_stride];
        g = copy;
      }
      delta[r] = dot<T>(o, g, p.Ev);
      if (p.grad_logsumexp.data)
        delta[r] -= s.query_row<T>(p.grad_logsumexp, h, i)[r * p.grad_logsumexp.stride[2]];
      delta[r] = infinite_to_nan(delta[r]);
    }
    if (lost) recover_logsumexp(s, h, kv_head, i, rows);
  }

  // Recomputes the maximum and the logarithm of the sum as two separate numbers. If the maximum is
  // in the thousands or beyond, as with a mask of the lowest finite number, the saved logsumexp has
  // no digits left for the logarithm.
  void recover_logsumexp(const Sequence& s, int64_t h, int64_t kv_head, int64_t i, int64_t rows) {
    Softmax<E> softmax(scale.exponent);
    const int64_t lanes = round_up(rows, Vec::size());
    const auto visible = s.visible(i, rows);
    for (int64_t j = visible.first / kTile * kTile; j < visible.last; j += kTile) {
      const int64_t columns = std::min(kTile, s.keys - j);
      if (mask->template read<Scalar>(p, s, h, i, rows, j, columns) == Cover::Empty) continue;
      const int64_t keys = mask->keys;
      const auto k = left_rows<E>(s.key_rows<Scalar>(p.key, kv_head, j), keys, p.E, row_buffer);
      tile_scores(p, *mask, scale, k, query_t, keys, lanes, scores);
      tile_softmax(softmax, *mask, Cover::Partial, keys, lanes, scores);
    }
    double log2_sum[kTile];
    softmax.log2_sum(log2_sum);
    for (int64_t r = 0; r < rows; ++r) {
      if (std::isnan(shift[r])) continue;  // the row stays NaN, even if all its weights were 0
      const bool empty = softmax.row_sum[r] == 0;
      shift[r] = empty ? T(0) : softmax.row_max[r];
      rest[r] = empty ? T(0) : static_cast<T>(log2_sum[r]);
    }
  }

  void tile(
      const Sequence& s, int64_t h, int64_t kv_head, int64_t i, int64_t rows, int64_t lanes,
      int64_t j, int64_t first, int64_t columns) {
    const Cover cover = mask->template read<Scalar>(p, s, h, i, rows, j, columns);
    if (cover == Cover::Empty) return;
    const int64_t keys = mask->keys;
    const int64_t at = j - first;  // within the chunk

    const Operand<E> key_tile{key.data + at * key.ld, key.ld};
    tile_scores(p, *mask, scale, key_tile, query_t, keys, lanes, scores, slope);
    const Operand<E> value_tile{value.data + at * value.ld, value.ld};
    product_by_keys(*mask, value_tile, grad_out_t, elements<E>(p.Ev), keys, lanes, products);
    if (p.dropout.threshold) dropout_tile(p, s, h, i, rows, j, kept);
    const auto gradients = [&]<bool Partial, bool Dropout>() {
      gradient_tile<Partial, Dropout, E>(
          scores, products, mask->bits, kept, keys, lanes, scale.exponent,
          static_cast<T>(p.dropout.scale), shift, rest, delta);
    };
    const bool partial = cover == Cover::Partial;
    if (partial && p.dropout.threshold) gradients.template operator()<true, true>();
    if (partial && !p.dropout.threshold) gradients.template operator()<true, false>();
    if (!partial && p.dropout.threshold) gradients.template operator()<false, true>();
    if (!partial && !p.dropout.threshold) gradients.template operator()<false, false>();

    if (p.grad_mask.data && p.grad_mask.stride[3] != 0)
      p.grad_mask_in_double
          ? add_mask_gradient<double>(p, s, h, i, rows, j, keys, products, mask_buffer)
          : add_mask_gradient<T>(p, s, h, i, rows, j, keys, products, mask_buffer);

    const int64_t group = p.one_table ? batch_group : s.index;
    if (p.relative_index) {
      double* sums = p.relative_bias_sums;
      if (sums) sums += ((group * p.heads + h) * key_chunks(p) + index) * p.columns;
      add_table_gradients(p, s, h, i, rows, j, keys, products, sums);
    } else if (p.relative_bias_sums) {
      const int64_t length = p.Lq + chunk;
      double* sums =
          p.relative_bias_sums + ((group * p.heads + h) * key_chunks(p) + index) * length;
      add_relative_bias_gradient(products, rows, keys, mask_buffer, sums + at + p.Lq - i - rows);
    }

    if (p.softcap > 0)  // the gradient of the scores before the cap
      for (int64_t c = 0; c < keys; ++c)
        for (int64_t l = 0; l < lanes; l += Vec::size()) {
          T* ds = products + c * kTile + l;
          const Vec uncapped = Vec::loadu(ds) * Vec::loadu(slope + c * kTile + l);
          select(mask->bits[c] >> l, uncapped, Vec(T(0))).store(ds);  // 0 · NaN is NaN
        }

    T* dk = grad_key + at * e_ld;
    T* dv = grad_value + at * ev_ld;
    const auto q = s.query_rows<Scalar>(p.query, h, i);
    const auto go = s.query_rows<Scalar>(p.grad_out, h, i);
    const auto k = s.key_rows<Scalar>(p.key, kv_head, j);
    // As in the forward, masked pairs must not add 0 · NaN to any of the three products.
    const bool finite = !partial ||
        (all_finite(q, rows, p.E) && all_finite(go, rows, p.Ev) && all_finite(k, keys, p.E));
    Operand<E> q_rows = query, go_rows = grad_out;
    Operand<E> k_rows{key_by_row.data + elements<E>(at) * key_by_row.ld, key_by_row.ld};
    if (!finite) {
      q_rows = right_rows(q, rows, p.E, finite_buffer[0], true);
      go_rows = right_rows(go, rows, p.Ev, finite_buffer[1], true);
      k_rows = right_rows(k, keys, p.E, finite_buffer[2], true);
    }
    const int64_t K = elements<E>(rows);
    // Pairs overwrite data that is no longer used: those of the weights overwrite the weights, and
    // those of the gradients first overwrite the other half of the weights.
    const auto weight = pair_columns(scores, keys, rows, reinterpret_cast<E*>(scores));
    add_product(mask->by_key(), keys, p.Ev, K, weight, false, go_rows, dv, ev_ld);
    const auto ds =
        pair_columns(products, keys, rows, reinterpret_cast<E*>(scores + kTile * kTile / 2));
    add_product(mask->by_key(), keys, p.E, K, ds, false, q_rows, dk, e_ld);
    const auto ds_t = operand_by_query<E>(products, keys, lanes);
    add_product(
        mask->by_query(), rows, p.E, elements<E>(keys), ds_t, !kUsesMatrixUnit<E>, k_rows,
        grad_query, e_ld);
    if (!finite) {
      uint64_t keys_of[kTile];  // bit j of word i: query i attends to key j
      std::copy_n(mask->bits, keys, keys_of);
      std::fill(keys_of + keys, keys_of + kTile, 0);
      transpose_bits(keys_of);
      spread_nan(q, rows, p.E, dk, e_ld, [&](int64_t r) { return keys_of[r]; });
      spread_nan(go, rows, p.Ev, dv, ev_ld, [&](int64_t r) { return keys_of[r]; });
      spread_nan(k, keys, p.E, grad_query, e_ld, [&](int64_t c) { return mask->bits[c]; });
    }
  }

  // The last chunk that has finished a block.
  std::atomic_ref<int32_t> last_chunk(const Sequence& s, int64_t h, int64_t i) {
    return std::atomic_ref(progress[(s.index * p.heads + h) * query_blocks(p) + i / kTile]);
  }

  // Waits until the last of the earlier chunks that visit a block has finished it.
  void wait_for_turn(const Sequence& s, int64_t h, int64_t i, int64_t rows) {
    if (index == 0) return;
    const auto last = last_chunk(s, h, i);
    const auto visible = s.visible(i, rows);
    const int64_t before = std::max(visible.first / chunk, int64_t(0)) < index ? index - 1 : 0;
    failure.wait_until([&] { return last.load(std::memory_order_acquire) >= before; });
  }

  // Adds a block's part of grad_query when it is this chunk's turn. The last chunk that visits the
  // block rounds the sum.
  void add_grad_query(const Sequence& s, int64_t h, int64_t i, int64_t rows) {
    wait_for_turn(s, h, i, rows);
    const auto visible = s.visible(i, rows);
    const bool any = visible.first / kTile * kTile < visible.last;  // as query_block looks at it
    const int64_t last = any ? (visible.last - 1) / chunk : 0;
    for (int64_t r = 0; r < rows; ++r) {
      T* row = grad_query + r * e_ld;
      if (index > 0) {
        const T* sum = s.query_row<T>(p.grad_query_sum, h, i + r);
        for (int64_t c = 0; c < p.E; ++c) row[c] += sum[c];
      }
      if (index == last) narrow(row, p.E, s.query_row<Scalar>(p.grad_query, h, i + r), 1);
      else std::copy_n(row, p.E, s.query_row<T>(p.grad_query_sum, h, i + r));
    }
    last_chunk(s, h, i).store(static_cast<int32_t>(index), std::memory_order_release);
  }

  template <class Piece>
  void layout(Piece piece) {
    piece(mask, 1);
    piece(kept, kTile);
    piece(key_buffer, left_rows_size<E>(chunk, p.E));
    piece(value_buffer, left_rows_size<E>(chunk, p.Ev));
    piece(key_row_buffer, right_rows_size<E>(chunk, p.E));
    piece(row_buffer, left_rows_size<E>(kTile, std::max(p.E, p.Ev)));
    piece(query_t, right_transposed_size<E>(p.E));
    piece(grad_out_t, right_transposed_size<E>(p.Ev));
    piece(query_buffer, right_rows_size<E>(kTile, p.E));
    piece(grad_out_buffer, right_rows_size<E>(kTile, p.Ev));
    for (auto& buffer : finite_buffer)
      piece(buffer, right_rows_size<E>(kTile, std::max(p.E, p.Ev)));
    piece(scores, kTile * kTile);
    piece(products, kTile * kTile);
    piece(mask_buffer, kTile * kTile);
    piece(slope, p.softcap > 0 ? kTile * kTile : 0);
    piece(grad_query, kTile * e_ld);
    piece(grad_key, chunk * e_ld);
    piece(grad_value, chunk * ev_ld);
    piece(shift, kTile);
    piece(rest, kTile);
    piece(delta, kTile);
  }

  const AttentionProblem& p;
  const Scale<T> scale;
  const int64_t chunk, index, batch_group;
  int32_t* const progress;
  const Failure& failure;
  const int64_t e_ld, ev_ld;

  TileMask<T>* mask;
  uint64_t* kept;  // [64], for each key: bits of the queries that dropout keeps
  E *key_buffer, *value_buffer, *key_row_buffer;  // [chunk][E], [chunk][Ev], [chunk][E]
  E* row_buffer;                                  // [64][max(E, Ev)]
  E *query_t, *grad_out_t;                        // [E][64], [Ev][64]
  E *query_buffer, *grad_out_buffer;              // [64][E], [64][Ev]
  E* finite_buffer[3];                            // [64][max(E, Ev)]
  T *scores, *products, *mask_buffer;             // [keys][queries]; mask_buffer is transposed
  T* slope;                                       // [keys][queries], of capped scores
  T* grad_query;                                  // [64][E]
  T *grad_key, *grad_value;                       // [chunk][E], [chunk][Ev]
  T *shift, *rest, *delta;  // [64]: logsumexp as a score; its remainder, in log2
  Operand<E> key, value, key_by_row, query, grad_out;

  struct ThreadScratch {
    Scratch memory;
    int64_t need = 0;
  };
  static thread_local ThreadScratch scratch;
};

template <class Scalar>
thread_local typename Task<Scalar>::ThreadScratch Task<Scalar>::scratch;

template <class Scalar>
void run(const AttentionProblem& p, int64_t task, int32_t* progress, const Failure& failure) {
  const int64_t batches = batch_groups(p), heads = head_groups(p);
  const int64_t chunks = key_chunks(p), group = task / chunks;
  Task<Scalar> work(p, task % chunks, group / heads, progress, failure);
  const int64_t sequences = (p.batch + batches - 1) / batches;  // of a group
  const int64_t b = group / heads * sequences, h = group % heads;
  const int64_t last_b = std::min(b + sequences, p.batch);
  const int64_t last_h = heads == p.kv_heads ? h + 1 : p.kv_heads;
  for (int64_t x = b; x < last_b; ++x)
    for (int64_t y = h; y < last_h; ++y) work.run(x, y);
}

void run_any(const AttentionProblem& p, int64_t task, int32_t* progress, const Failure& failure) {
  [[maybe_unused]] const MatrixUnit unit;
  for_type(p.dtype, [&]<class Scalar>() { run<Scalar>(p, task, progress, failure); });
}

}  // namespace

AttentionBackward attention_backward() {
  return {tasks, chunk_keys, key_chunks, query_blocks, table_groups, run_any};
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
