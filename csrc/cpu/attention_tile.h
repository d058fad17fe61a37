// Shared by the attention forward and backward: the geometry of a call, a tile's mask and scores.
//
// A tile is 64 queries by 64 keys, stored transposed: row j is a key, and vectors run along the
// queries. The softmax then works down the rows, lane by lane, without horizontal steps, and the
// products need no packed copy of keys and values (tile_gemm.h).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "attention.h"
#include "cpu/operand.h"
#include "cpu/philox.h"
#include "cpu/softmax.h"
#include "cpu/tile_gemm.h"
#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

inline int64_t query_blocks(const AttentionProblem& p) { return (p.Lq + kTile - 1) / kTile; }

// One sequence of the batch.
struct Sequence {
  int64_t index;             // b
  int64_t q_start, k_start;  // first token in a packed tensor
  int64_t q_batch, k_batch;  // batch index in the tensors: 0 if packed
  int64_t Lq, Lk;
  int64_t keys;         // Lk, or key_lengths if that is smaller
  int64_t corner;       // relative biases count distances from key i + corner
  int64_t left, right;  // in the window, query i attends to keys [i - left, i + right]

  Sequence(const AttentionProblem& p, int64_t b) : index(b) {
    const bool packed = p.cu_seqlens_q != nullptr;
    q_start = packed ? p.cu_seqlens_q[b] : 0;
    k_start = packed ? p.cu_seqlens_k[b] : 0;
    q_batch = k_batch = packed ? 0 : b;
    Lq = packed ? p.cu_seqlens_q[b + 1] - q_start : p.Lq;
    Lk = packed ? p.cu_seqlens_k[b + 1] - k_start : p.Lk;
    keys = p.key_lengths ? std::min(p.key_lengths[b], Lk) : Lk;
    corner = p.lower_right ? Lk - Lq : 0;
    const int64_t diagonal = corner + p.offset(b);
    left = p.window_left - diagonal;
    right = p.window_right + diagonal;
  }

  // Returns row i (a query) or row j (a key) of head h.
  template <class T>
  T* query_row(const Tensor4& t, int64_t h, int64_t i) const {
    return static_cast<T*>(t.data) + q_batch * t.stride[0] + h * t.stride[1] +
        (q_start + i) * t.stride[2];
  }
  template <class T>
  T* key_row(const Tensor4& t, int64_t h, int64_t j) const {
    return static_cast<T*>(t.data) + k_batch * t.stride[0] + h * t.stride[1] +
        (k_start + j) * t.stride[2];
  }
  template <class Scalar>
  Rows<Scalar> query_rows(const Tensor4& t, int64_t h, int64_t i) const {
    return {query_row<Scalar>(t, h, i), t.stride[2], t.stride[3]};
  }
  template <class Scalar>
  Rows<Scalar> key_rows(const Tensor4& t, int64_t h, int64_t j) const {
    return {key_row<Scalar>(t, h, j), t.stride[2], t.stride[3]};
  }

  // Returns the columns of the tables that key j reads for queries from i on.
  const int32_t* columns(const AttentionProblem& p, int64_t i, int64_t j) const {
    return p.relative_index + i + (p.index_by_distance ? corner : 0) + j * p.index_stride[1];
  }

  // Returns the keys in the window of any query of [i, i + rows): [first, last).
  struct KeyRange {
    int64_t first, last;
  };
  KeyRange visible(int64_t i, int64_t rows) const {
    return {std::max<int64_t>(i - left, 0), std::min(i + rows - 1 + right + 1, keys)};
  }
};

// Whether there is a mask of numbers, which are added to the scores.
constexpr bool has_float_mask(const AttentionProblem& p) {
  return p.mask_kind == MaskKind::Float32 || p.mask_kind == MaskKind::QueryType;
}

// Whether numbers are added to the scores.
constexpr bool has_bias(const AttentionProblem& p) {
  return has_float_mask(p) || p.relative_bias.data || p.relative_index;
}

// Whether a call's keys and values exceed a core's caches, so that prefetching them may pay off.
// With few queries, prefetching saves a third of the time on Zen 5; if a cache holds them, it adds
// a tenth.
template <class Scalar>
inline bool reads_memory(const AttentionProblem& p) {
  constexpr int64_t kCached = int64_t(8) << 20;  // bytes
  const int64_t columns = p.E + p.Ev, numbers = kCached / static_cast<int64_t>(sizeof(Scalar));
  return p.batch * p.kv_heads > numbers / std::max<int64_t>(1, p.Lk * columns);
}

// The unit of scores. Normally a score is the bare product of query and key, and the exponent
// applies the scale. Scores are in nats, with the scale applied, in three cases: they are capped;
// there is a bias, whose values may be anything; or the scale would make an exponent, or a
// logsumexp in units of a product, overflow. The sign of the scale (0 if it rounds to 0) is applied
// to the query rows, so that the largest score has the largest weight.
template <class T>
struct Scale {
  float sign;
  T product;  // if in nats: score = cap((query · key) · product) + mask
  bool scores_in_nats;
  T exponent;   // exponents of 2 are (score - row_max) · exponent
  double unit;  // one unit of score, in nats

  explicit Scale(const AttentionProblem& p) {
    using Limits = std::numeric_limits<T>;
    const T scale = static_cast<T>(p.scale);
    sign = scale == 0 ? 0.0f : scale < 0 ? -1.0f : 1.0f;  // 1 for NaN
    product = scale == 0 ? T(1) : std::abs(scale);
    scores_in_nats = has_bias(p) || p.softcap > 0 ||
        !(product >= 16 * Limits::min() && product <= Limits::max() / 2);
    exponent = static_cast<T>((scores_in_nats ? 1.0 : product) * kLog2e);
    unit = scores_in_nats ? 1.0 : exponent * kLn2;
  }
};

enum class Cover { Empty, Partial, Full };

// A part of a tile's keys or queries: [first, last).
struct Part {
  int64_t first, last;
};

// The pairs of a tile that lie in a window form a staircase, for example under a causal mask:
//
//            queries
//     keys   # # # #     Its steps are 16 keys or 16 queries wide. Products and the softmax
//            . # # #     compute only the parts of a step that hold a pair: 10 of 16 squares
//            . . # #     here. What they leave out would add exact zeros.
//            . . . #
constexpr int64_t kStep = 16, kSteps = kTile / kStep;

// The pairs of a tile that take part, and their bias.
template <class T>
struct TileMask {
  uint64_t bits[kTile];               // bit i of word j: query i attends to key j
  int64_t keys;                       // number of keys up to the last one in a pair, or one more
  alignas(64) T bias[kTile * kTile];  // [j][i]: float mask plus relative biases, if any
  bool stepped;                       // whether the pairs are a staircase; then:
  Part queries_of[kSteps];            // the queries paired with one of 16 keys, in whole steps
  Part keys_of[kSteps];               // the keys paired with one of 16 queries, in pairs of keys

  // Describes queries [i, i + rows) and keys [j, j + columns) of head h.
  template <class Scalar>
  Cover read(
      const AttentionProblem& p, const Sequence& s, int64_t h, int64_t i, int64_t rows, int64_t j,
      int64_t columns) {
    const uint64_t all = low_bits(rows);
    keys = columns;
    bool full = true;
    // The window: two corners of the tile show whether it cuts off any pair.
    const bool cut_left = j < i + rows - 1 - s.left;
    const bool cut_right = j + columns - 1 > i + s.right;
    std::fill_n(bits, columns, all);
    // On the matrix unit, many small products take longer than computing the squares that they
    // skip.
    stepped = (cut_left || cut_right) && !kUsesMatrixUnit<typename Compute<Scalar>::Element>;
    if (stepped) find_steps(s, j - i, cut_left, cut_right);
    if (cut_left || cut_right) {
      full = false;
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t same = j + c - i;  // the query with the same number as this key
        if (cut_left) bits[c] &= low_bits(std::clamp<int64_t>(same + s.left + 1, 0, rows));
        if (cut_right) bits[c] &= ~low_bits(std::clamp<int64_t>(same - s.right, 0, rows));
      }
    }
    if (p.mask_kind != MaskKind::None || has_bias(p)) {
      const int64_t offset = s.index * p.mask.stride[0] + h * p.mask.stride[1] +
          i * p.mask.stride[2] + j * p.mask.stride[3];
      if (p.mask_kind == MaskKind::Bool) {
        read_bool_mask(static_cast<const uint8_t*>(p.mask.data) + offset, p, rows, columns);
      } else if (p.mask_kind == MaskKind::Float32) {
        read_float_mask(static_cast<const float*>(p.mask.data) + offset, p, rows, columns);
      } else if (p.mask_kind == MaskKind::QueryType) {
        read_float_mask(static_cast<const Scalar*>(p.mask.data) + offset, p, rows, columns);
      }
      if (p.relative_index) add_tables(p, s, h, i, rows, j, columns);
      else if (p.relative_bias.data) add_relative_bias(p, s, h, i, rows, j, columns);
      full = true;
      for (int64_t c = 0; c < columns; ++c) full &= bits[c] == all;
    }
    if (full) return Cover::Full;
    while (keys > 0 && bits[keys - 1] == 0) --keys;
    keys = std::min(round_up(keys, 2), columns);  // whole pairs: a bfloat16 element holds two
    return keys > 0 ? Cover::Partial : Cover::Empty;
  }

  // Return the parts for all steps of keys, and for all steps of queries; null if the tile is not
  // stepped.
  const Part* by_key() const { return stepped ? queries_of : nullptr; }
  const Part* by_query() const { return stepped ? keys_of : nullptr; }

  // Returns the bits of the queries that attend to any of the tile's keys.
  uint64_t queries() const {
    uint64_t result = 0;
    for (int64_t c = 0; c < keys; ++c) result |= bits[c];
    return result;
  }

 private:
  // Sets the parts of all steps. Key c has the same number as query c + `shift` of the tile.
  void find_steps(const Sequence& s, int64_t shift, bool cut_left, bool cut_right) {
    const auto within = [](int64_t x) { return std::clamp<int64_t>(x, 0, kTile); };
    for (int64_t step = 0; step < kSteps; ++step) {
      const int64_t first = step * kStep, last = first + kStep - 1;
      queries_of[step] = {
          cut_right ? within(first + shift - s.right) / kStep * kStep : 0,
          cut_left ? round_up(within(last + shift + s.left + 1), kStep) : kTile};
      keys_of[step] = {
          cut_left ? within(first - shift - s.left) / 2 * 2 : 0,
          cut_right ? round_up(within(last - shift + s.right + 1), 2) : kTile};
    }
  }

  void read_bool_mask(
      const uint8_t* mask, const AttentionProblem& p, int64_t rows, int64_t columns) {
    const int64_t si = p.mask.stride[2], sj = p.mask.stride[3];
    if (si == 0) {
      for (int64_t c = 0; c < columns; ++c) bits[c] &= mask[c * sj] ? ~uint64_t(0) : 0;
      return;
    }
    // Packs 64 bytes into bits, along a contiguous dimension, or gathered if there is none.
    const bool by_query = sj == 1 || si != 1;
    const int64_t lines = by_query ? rows : columns, length = by_query ? columns : rows;
    const int64_t step = by_query ? si : sj, along = by_query ? sj : si;
    uint64_t word[kTile];
    for (int64_t l = 0; l < lines; ++l) {
      const uint8_t* line = mask + l * step;
      uint8_t gathered[kTile] = {};
      if (along != 1 || length < kTile) {
        for (int64_t t = 0; t < length; ++t) gathered[t] = line[t * along];
        line = gathered;
      }
      word[l] = nonzero_bits(line);
    }
    if (by_query) {
      std::fill(word + rows, word + kTile, 0);
      transpose_bits(word);
    }
    for (int64_t c = 0; c < columns; ++c) bits[c] &= word[c];
  }

  template <class M>
  void read_float_mask(const M* mask, const AttentionProblem& p, int64_t rows, int64_t columns) {
    const int64_t si = p.mask.stride[2], sj = p.mask.stride[3];
    if (si == 0) {
      for (int64_t c = 0; c < columns; ++c)
        std::fill_n(bias + c * kTile, kTile, static_cast<T>(mask[c * sj]));
    } else if (si == 1) {
      for (int64_t c = 0; c < columns; ++c) {
        widen(mask + c * sj, 1, rows, bias + c * kTile);
        std::fill_n(bias + c * kTile + rows, kTile - rows, T(0));
      }
    } else {
      alignas(64) T line[kTile * kTile];
      for (int64_t r = 0; r < rows; ++r) widen(mask + r * si, sj, columns, line + r * kTile);
      transpose_tile(line, kTile, rows, columns, bias);
    }
    for (int64_t c = 0; c < columns; ++c) leave_out_minus_infinity(c, bias + c * kTile);
  }

  // Adds the relative bias to the float mask, if there is one: a line of 64 distances for each key.
  void add_relative_bias(
      const AttentionProblem& p, const Sequence& s, int64_t h, int64_t i, int64_t rows, int64_t j,
      int64_t columns) {
    const auto* stride = p.relative_bias.stride;
    const T* line = static_cast<const T*>(p.relative_bias.data) + s.index * stride[0] +
        h * stride[1] + i + s.corner - j;
    // A tile has so few distances that checking each is cheaper than checking each pair.
    const T* lowest = line - (columns - 1);
    bool leaves_out = false;
    for (int64_t x = 0; x < rows + columns - 1; ++x)
      leaves_out |= lowest[x] == -std::numeric_limits<T>::infinity();
    alignas(64) T padded[kTile] = {};
    for (int64_t c = 0; c < columns; ++c, --line) {
      const T* source = line;
      if (rows < kTile) {
        std::copy_n(line, rows, padded);
        source = padded;
      }
      if (leaves_out) leave_out_minus_infinity(c, source);
      add_line(c, source, has_float_mask(p));
    }
  }

  // Adds the biases that an index picks from tables to the float mask, if there is one.
  void add_tables(
      const AttentionProblem& p, const Sequence& s, int64_t h, int64_t i, int64_t rows, int64_t j,
      int64_t columns) {
    bool beside_others = has_float_mask(p);
    // Query r of the tile reads a key's table from element r · step on.
    const auto add = [&](const auto& table_of, int64_t step) {
      for (int64_t c = 0; c < columns; ++c) {
        const int32_t* column = s.columns(p, i, j + c);
        const T* table = table_of(j + c);
        alignas(64) T line[kTile] = {};
        for (int64_t r = 0; r < rows; ++r) line[r] = table[r * step + column[r]];
        leave_out_minus_infinity(c, line);
        add_line(c, line, beside_others);
      }
      beside_others = true;
    };
    if (p.relative_bias.data) {
      const T* shared = static_cast<const T*>(p.relative_bias.data) +
          s.index * p.relative_bias.stride[0] + h * p.relative_bias.stride[1];
      add([&](int64_t) { return shared; }, 0);
    }
    if (p.query_bias.data) {
      const T* own = s.query_row<const T>(p.query_bias, h, i);
      add([&](int64_t) { return own; }, p.query_bias.stride[2]);
    }
    if (p.key_bias.data)
      add([&](int64_t key) { return s.key_row<const T>(p.key_bias, h, key); }, 0);
  }

  // Sets the biases of key c to a line of 64 numbers, or adds the line to them.
  void add_line(int64_t c, const T* line, bool beside_others) {
    using Vec = Vectorized<T>;
    T* sum = bias + c * kTile;
    if (!beside_others) {
      std::copy_n(line, kTile, sum);
    } else {
      for (int64_t l = 0; l < kTile; l += Vec::size())
        (Vec::loadu(sum + l) + Vec::loadu(line + l)).store(sum + l);
    }
  }

  // Leaves out the pairs of key c whose bias is -inf.
  void leave_out_minus_infinity(int64_t c, const T* biases) {
    using Vec = Vectorized<T>;
    uint64_t out = 0;
    for (int64_t l = 0; l < kTile; l += Vec::size())
      out |= equal_bits(Vec::loadu(biases + l), -std::numeric_limits<T>::infinity()) << l;
    bits[c] &= ~out;
  }
};

// Turns products into scores in nats: they are scaled, capped, and the bias is added. Rows have
// kTile elements, and so do those of `bias`. Writes the cap's slope 1 - tanh²(score / c) unless it
// is null.
template <class T>
inline void finish_scores(
    const AttentionProblem& p, const T* bias, const Scale<T>& scale, int64_t rows, int64_t lanes,
    T* scores, T* slope = nullptr) {
  using Vec = Vectorized<T>;
  if (!scale.scores_in_nats) return;
  const auto update = [&](auto new_score) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t l = 0; l < lanes; l += Vec::size()) {
        T* row = scores + r * kTile + l;
        new_score(Vec::loadu(row), r * kTile + l).store(row);
      }
  };
  const Vec factor(scale.product);
  if (p.softcap > 0) {
    const Vec cap(static_cast<T>(p.softcap)), one(T(1));
    update([&](Vec x, int64_t at) {
      const Vec y = TRIFUSE_CAPABILITY::tanh(x * factor / cap);
      if (slope) (one - y * y).store(slope + at);
      return y * cap;
    });
    if (has_bias(p)) update([&](Vec x, int64_t at) { return x + Vec::loadu(bias + at); });
  } else if (has_bias(p)) {
    update([&](Vec x, int64_t at) { return at::vec::fmadd(x, factor, Vec::loadu(bias + at)); });
  } else {
    update([&](Vec x, int64_t) { return x * factor; });
  }
}

// Prefetches nothing between the parts of a product.
struct NoFetch {
  static constexpr bool done() { return true; }
  static constexpr void some() {}
};

// The rows of a product between two fetches, in whole register blocks.
constexpr int64_t kFetchRows = int64_t{4} * kRegisterRows;

// Computes the product [key][query] of keys, or values, with `queries` (K, 64). If a tile is
// stepped, elements without a pair keep their previous values.
template <class E, class T = AccumulatorOf<E>, class Fetch = NoFetch>
inline void product_by_keys(
    const TileMask<T>& mask, Operand<E> rows, const E* queries, int64_t K, int64_t keys,
    int64_t lanes, T* product, Fetch&& fetch = {}) {
  if (!mask.stepped && (kUsesMatrixUnit<E> || fetch.done())) {
    fetch.some();
    return tile_gemm(keys, lanes, K, rows.data, rows.ld, 1, queries, kTile, product, kTile);
  }
  const int64_t step = mask.stepped ? kStep : kFetchRows;
  for (int64_t c = 0; c < keys; c += step) {
    fetch.some();
    const Part part = mask.stepped ? mask.queries_of[c / kStep] : Part{0, kTile};
    const int64_t width = std::min(part.last, lanes) - part.first;
    if (width > 0)
      tile_gemm(
          std::min(step, keys - c), width, K, rows.data + c * rows.ld, rows.ld, 1,
          queries + part.first, kTile, product + c * kTile + part.first, kTile);
  }
}

// C (M x N) += A (M x K) B (K x N), or C = A B, depending on `accumulate`. Along k are the pairs of
// A's rows; parts[m / 16] holds all pairs of 16 rows, unless it is null.
template <class E, class T = AccumulatorOf<E>, class Fetch = NoFetch>
inline void add_product(
    const Part* parts, int64_t M, int64_t N, int64_t K, Operand<E> a, bool a_by_columns,
    Operand<E> b, T* c, int64_t ldc, Accumulate<T> accumulate = {true}, Fetch&& fetch = {}) {
  const int64_t a_m = a_by_columns ? 1 : a.ld, a_k = a_by_columns ? a.ld : 1;
  if (!parts && (kUsesMatrixUnit<E> || fetch.done())) {
    fetch.some();
    return tile_gemm(M, N, K, a.data, a_m, a_k, b.data, b.ld, c, ldc, accumulate);
  }
  const int64_t step = parts ? kStep : kFetchRows;
  for (int64_t m = 0; m < M; m += step) {
    fetch.some();
    Accumulate<T> rows = accumulate;
    if (rows.scale) rows.scale += m;
    const Part part = parts ? parts[m / kStep] : Part{0, kTile};
    const int64_t k = part.first / kPack<E>, depth = std::min(elements<E>(part.last), K) - k;
    if (depth > 0)
      tile_gemm(
          std::min(step, M - m), N, depth, a.data + m * a_m + k * a_k, a_m, a_k, b.data + k * b.ld,
          b.ld, c + m * ldc, ldc, rows);
  }
}

// Computes a tile's scores [key][query].
template <class E, class T = AccumulatorOf<E>, class Fetch = NoFetch>
inline void tile_scores(
    const AttentionProblem& p, const TileMask<T>& mask, const Scale<T>& scale, Operand<E> key,
    const E* query_t, int64_t keys, int64_t lanes, T* scores, T* slope = nullptr,
    Fetch&& fetch = {}) {
  product_by_keys(mask, key, query_t, elements<E>(p.E), keys, lanes, scores, fetch);
  finish_scores(p, mask.bias, scale, keys, lanes, scores, slope);
}

// Turns a tile's scores into weights. The maximum and sum of a row without pairs do not change.
template <class E, class T = AccumulatorOf<E>>
inline void tile_softmax(
    Softmax<E>& softmax, const TileMask<T>& mask, Cover cover, int64_t keys, int64_t lanes,
    T* scores) {
  softmax.start_tile();
  if (cover == Cover::Full) {
    softmax.template tile<false>(scores, mask.bits, 0, keys, 0, lanes);
  } else if (!mask.stepped) {
    softmax.template tile<true>(scores, mask.bits, 0, keys, 0, lanes);
  } else {
    for (int64_t lane = 0; lane < lanes; lane += kStep) {
      const Part part = mask.keys_of[lane / kStep];
      softmax.template tile<true>(
          scores, mask.bits, part.first, std::min(part.last, keys), lane,
          std::min(lane + kStep, lanes));
    }
  }
}

// Sets bit i of bits[j] if dropout keeps the pair of query i and key j.
inline void dropout_tile(
    const AttentionProblem& p, const Sequence& s, int64_t h, int64_t i, int64_t rows, int64_t j,
    uint64_t bits[kTile]) {
  const Dropout& draw = p.dropout;
  const uint64_t plane = draw.place.unit(s.index * p.heads + h);
  for (int64_t r = 0; r < rows; ++r)
    bits[r] = dropout_row(
        draw.seed, plane, draw.place.row + i + r, draw.place.column + j, draw.threshold);
  std::fill(bits + rows, bits + kTile, 0);
  transpose_bits(bits);
}

// Makes pairs of a tile's neighbouring rows: buffer[c / 2][i] holds rows c and c + 1 of source. The
// buffer may be the source. If E is not a pair, the tile itself is used.
template <class E, class T>
inline Operand<E> pair_rows(const T* source, int64_t columns, int64_t lanes, E* buffer) {
  if constexpr (kPack<E> == 1) {
    return {source, kTile};
  } else {
#ifdef __AVX512BF16__
    // The lower half of a rounded vector is row c, and the upper half is row c + 1. They are
    // interleaved in steps of 16 bits.
    const __m512i order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
        19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t c = 0; c < columns; c += 2) {
      for (int64_t l = 0; l < lanes; l += 16) {
        const float* row = source + c * kTile + l;
        const __m512 low = _mm512_loadu_ps(row);
        const __m512 high = c + 1 < columns ? _mm512_loadu_ps(row + kTile) : _mm512_setzero_ps();
        _mm512_storeu_si512(
            buffer + c / 2 * kTile + l,
            _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
      }
    }
#endif
    return {buffer, kTile};
  }
}

// Returns a tile's weights, or its score gradients, as A of a product over the keys: [query][key],
// by columns unless the matrix unit multiplies. Their pairs are written over the tile, to stay in
// the L1 cache: the lower half holds them by key, and the upper half by query.
template <class E, class T>
inline Operand<E> operand_by_query(T* tile, int64_t keys, int64_t lanes) {
  const auto pairs = pair_rows(tile, keys, lanes, reinterpret_cast<E*>(tile));
  if constexpr (!kUsesMatrixUnit<E>) {
    return pairs;
  } else {
    E* rows = reinterpret_cast<E*>(tile + kTile * kTile / 2);
    transpose(pairs.data, pairs.ld, elements<E>(keys), lanes, rows, kTile / 2);
    return {rows, kTile / 2};
  }
}

// Makes pairs of a row's neighbouring values: buffer[r][i / 2] holds columns i and i + 1 of row r.
// If `columns` is odd, the last pair's upper half is 0, whatever the source holds there, which may
// be the NaN of a query past the end. The buffer may be the source.
template <class E, class T>
inline Operand<E> pair_columns(const T* source, int64_t rows, int64_t columns, E* buffer) {
  if constexpr (kPack<E> == 1) {
    return {source, kTile};
  } else {
#ifdef __AVX512BF16__
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t l = 0; l < kTile; l += 32) {
        const float* row = source + r * kTile + l;
        _mm512_storeu_si512(
            buffer + (r * kTile + l) / 2,
            (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + 16), _mm512_loadu_ps(row)));
      }
      if (columns % 2) buffer[(r * kTile + columns) / 2].high = 0;
    }
#endif
    return {buffer, kTile / 2};
  }
}

// Returns NaN for an infinite sum. Finite sums keep their bits.
template <class T>
inline T infinite_to_nan(T x) {
  return x * 0 + x;
}

// Sets those sums to NaN that a NaN or Inf in `rows` enters through a pair that takes part.
// reached(k) returns the outputs that row k enters, as bits.
template <class Scalar, class T, class Reached>
inline void spread_nan(
    Rows<Scalar> rows, int64_t n, int64_t columns, T* sums, int64_t ld, Reached reached) {
  for (int64_t k = 0; k < n; ++k) {
    const uint64_t outputs = reached(k);
    for (int64_t c = 0; c < columns; ++c) {
      if (std::isfinite(static_cast<double>(rows.row(k)[c * rows.column_stride]))) continue;
      for (int64_t m = 0; m < kTile; ++m)
        if (outputs >> m & 1) sums[m * ld + c] = std::numeric_limits<T>::quiet_NaN();
    }
  }
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
