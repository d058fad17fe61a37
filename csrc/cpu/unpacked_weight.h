// The product of few rows with a weight as torch stores it, C (M x 16) = A (M x K) B, where B's
// columns are 16 rows of the weight. With few rows, packing a weight would take longer than
// multiplying by it.
//
// The vectors of tile_gemm run along B's rows, whose elements lie a whole row of the weight apart.
// So one vector of each of the 16 rows is loaded at a time, the square is transposed in registers,
// and its columns are used for all rows of A, which are in the L1 cache:
//
//                  k   k+1 ...          16 rows of the weight at a time
//     row 0        .    .
//     row 1        .    .      ->    row 0 .. 15 of k   | row 0 .. 15 of k+1   | ...
//      ...
//     row 15       .    .
//
// An element of C is the same sum of chains as with a packed weight, so it has the same bits.
//
// The matrix unit multiplies the unchanged rows of the weight by transposed rows of A, and the
// product is transposed.
//
// Floor: the bytes of the weight divided by the rate at which memory is read. For each vector of
// the weight, transposing takes log2(lanes) shuffles, and M multiply-adds follow.

#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/capability.h"
#include "cpu/operand.h"

namespace trifuse::TRIFUSE_CAPABILITY {

constexpr int64_t kStripRows = 16;

// The most rows of A in one pass over the weight.
constexpr int kRowsAtOnce = 8;

// target[c * ld + r] = source[r * source_ld + c] for 16 rows. Rows from `rows` on do not exist, and
// count as 0.
template <class E>
TRIFUSE_INLINE inline void transpose_strip(
    const E* source, int64_t source_ld, int64_t rows, int64_t columns, E* target, int64_t ld) {
  int64_t first = 0;
  if (rows == kStripRows) {
    constexpr int64_t block = Vectorized<Moved<E>>::size();
    const auto* from = reinterpret_cast<const Moved<E>*>(source);
    auto* to = reinterpret_cast<Moved<E>*>(target);
    for (; first + block <= columns; first += block)
      for (int64_t r = 0; r < kStripRows; r += block)
        transpose_square(from + r * source_ld + first, source_ld, to + first * ld + r, ld);
  }
  for (int64_t c = first; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) target[c * ld + r] = source[r * source_ld + c];
    std::fill(target + c * ld + rows, target + c * ld + kStripRows, E{});
  }
}

// With 32 registers of 64 bytes, the columns of a square fill half of them.
constexpr int kUnrolledColumns = Vectorized<float>::size() == kStripRows ? kStripRows : 1;

// Fetched names the memory that multiply_strip prefetches into the L2 cache while it multiplies by
// a strip. With one row and a float32 weight, the weight is then read at these rates, in GB/s:
//
//                                     with     without   into the L1 cache
// Zen 4, 384 to 1536 features       27 to 33   19 to 33       19 to 25
// Emerald Rapids, 768 features      24 to 26   20 to 22
//
// Prefetches into the L1 cache delay the loads of the strip itself.
struct Fetched {
  const void* next = nullptr;  // the rows that are read after the strip; null: nothing is fetched
  // Whether to fetch from the strip's own rows the lines that are kLinesAhead further on, and near
  // the rows' end the first lines of the next rows. Otherwise the next rows are fetched, from first
  // to last.
  bool same_rows = false;
};
constexpr int64_t kLinesAhead = 12;

// Returns what to prefetch if `strip` is these `stored` rows of a weight, or a converted copy of
// them. The copy is in the caches already.
template <class E>
inline Fetched fetched_meanwhile(const E* strip, const void* stored, const void* next) {
  if (strip == stored) return {next, true};
  return {fetches_rows_ahead() ? next : nullptr};
}

// C = or += A B for M <= kRowsAtOnce. The first `rows` columns of B are rows of a weight, ld apart;
// the others are 0. Each chain has `chain` multiply-adds.
template <int most = kRowsAtOnce, class E>
inline void multiply_strip(
    int64_t M, int64_t K, const E* a, int64_t a_m, const E* weight, int64_t ld, int64_t rows,
    Fetched fetched, AccumulatorOf<E>* c, int64_t ldc, bool add, int64_t chain) {
  if constexpr (most > 1)
    if (M <= most / 2)
      return multiply_strip<most / 2>(M, K, a, a_m, weight, ld, rows, fetched, c, ldc, add, chain);
  using T = AccumulatorOf<E>;
  using Vec = Vectorized<T>;
  constexpr int kVectors = kStripRows / Vec::size();
  const E* row[most];  // the last row replaces missing ones
  for (int m = 0; m < most; ++m) row[m] = a + std::min<int64_t>(m, M - 1) * a_m;
  constexpr int64_t kVectorElements = Vectorized<Moved<E>>::size();
  alignas(64) E transposed[kVectorElements * kStripRows];
  constexpr int64_t kLines = sizeof transposed / 64, kLineElements = 64 / sizeof(E);
  constexpr int64_t kAhead = kLinesAhead * kLineElements;
  const auto* const next = static_cast<const E*>(fetched.next);
  for (int64_t first = 0; first < K; first += chain) {
    const int64_t end = std::min(first + chain, K);
    Vec sum[most][kVectors];
#pragma GCC unroll 8
    for (auto& of_row : sum)
#pragma GCC unroll 4
      for (Vec& x : of_row) x = Vec(T(0));
    const auto multiply_columns = [&](int64_t k, int64_t depth) TRIFUSE_INLINE {
      transpose_strip(weight + k, ld, rows, depth, transposed, kStripRows);
#pragma GCC unroll kUnrolledColumns
      for (int64_t j = 0; j < depth; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const auto column = Element<E>::load(transposed + j * kStripRows + v * Vec::size());
#pragma GCC unroll 8
          for (int m = 0; m < most; ++m)
            sum[m][v] =
                Element<E>::multiply_add(Element<E>::broadcast(row[m] + k + j), column, sum[m][v]);
        }
    };
    int64_t k = first;
    for (; k + kVectorElements <= end; k += kVectorElements) {
      if (next && !fetched.same_rows) {
        for (int64_t line = 0; line < kLines; ++line)
          __builtin_prefetch(next + k * kStripRows + line * kLineElements, 0, 2);
      } else if (next) {
        const E* ahead = k + kAhead < K ? weight + k + kAhead : next + (k + kAhead - K);
        // With vectors of half a line (AVX2), a line takes two steps, and each prefetches half of
        // the rows.
        const int64_t r = k / kVectorElements * kLines % kStripRows;
        for (int64_t line = 0; line < kLines; ++line)
          __builtin_prefetch(ahead + (r + line) * ld, 0, 2);
      }
      multiply_columns(k, kVectorElements);
    }
    if (k < end) multiply_columns(k, end - k);
#pragma GCC unroll 8
    for (int m = 0; m < most; ++m) {
      if (m == M) break;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        T* target = c + m * ldc + v * Vec::size();
        // C's former contents are added last, as in tile_gemm.
        if (add || first > 0) sum[m][v] = at::vec::fmadd(Vec::loadu(target), Vec(T(1)), sum[m][v]);
        sum[m][v].store(target);
      }
    }
  }
}

// C = A B on the matrix unit for rows of A given as a_t (K, ld): M rows, and garbage up to a
// multiple of 16. The first `rows` columns of B are rows of a weight, weight_ld apart. `product`
// (16, ld) is scratch memory. Writes as many rows of C as a_t has columns. Meanwhile the same
// number of bytes of `next`, which is read afterwards, is prefetched, unless `next` is null.
template <class E>
inline void multiply_strip_on_matrix_unit(
    int64_t M, int64_t K, const E* a_t, int64_t ld, const E* weight, int64_t weight_ld,
    int64_t rows, const void* next, float* product, float* c, int64_t ldc) {
  constexpr int64_t kDepth = 128;
  if (K == 0) std::fill_n(product, kStripRows * ld, 0.0f);
  for (int64_t k = 0; k < K; k += kDepth) {
    const int64_t depth = std::min(K - k, kDepth);
    const char* fetched =
        next ? static_cast<const char*>(next) + k * kStripRows * sizeof(E) : nullptr;
    for (int64_t line = 0; next && line < depth; ++line)
      __builtin_prefetch(fetched + 64 * line, 0, 2);
    tile_gemm<E>(rows, M, depth, weight + k, weight_ld, 1, a_t + k * ld, ld, product, ld, {k > 0});
  }
  for (int64_t m = 0; m < M; m += kStripRows) transpose_square(product + m, ld, c + m * ldc, ldc);
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
