// The running softmax of a block of queries, over keys that are processed a tile at a time.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018): each query keeps a
// running maximum (`row_max`) beside its sum of exponentials (`row_sum`), and whenever the maximum
// rises, the sum is scaled down. `row` is a query's row of the score matrix, which tiles store
// transposed: [key][query].
//
// Weights that are rounded to bfloat16 need neither an exact exponential nor the exact maximum of
// the scores. For them, a score becomes row_max only if it is more than 8 exponents higher. So
// row_max seldom rises after the first tile, and no weight is above 2^8 (Zadouri et al.,
// "FlashAttention-4", 2026).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "cpu/operand.h"
#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

constexpr double kLog2e = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

template <class E>
struct Softmax {
  using T = AccumulatorOf<E>;
  static constexpr T infinity = std::numeric_limits<T>::infinity();
  static constexpr bool kCoarse = kPack<E> == 2;  // weights are rounded to bfloat16

  const T factor;                // exponents of 2 are (score - row_max) · factor
  const T slack;                 // a score becomes row_max if it is higher by more than this
  alignas(64) T row_max[kTile];  // a query's highest score, within slack; -inf before its first key
  alignas(64) T row_sum[kTile];  // a query's sum of exponentials
  alignas(64) T rescale[kTile];  // factor by which the last tile scaled the sums before it
  // Whether any row_max rose in the last tile. If none did, the earlier sums need no scaling: those
  // of a row without a key are 0, and a row with +inf is NaN anyway.
  bool rescales = false;

  explicit Softmax(T factor) : factor(factor), slack(kCoarse ? T(8) / factor : T(0)) { restart(); }

  // Returns to the state before the first tile.
  void restart() {
    std::fill_n(row_max, kTile, -infinity);
    std::fill_n(row_sum, kTile, T(0));
    rescales = false;
  }

  TRIFUSE_INLINE static Vectorized<T> power_of_2(Vectorized<T> x) {
    if constexpr (kCoarse) return exp2_for_bfloat16(x);
    else return exp2(x);
  }

  // The caller calls this once for each tile, before `tile` handles its lanes.
  void start_tile() { rescales = false; }

  // Turns a tile's scores [key][query] into weights in place, for keys [first, last) and lanes
  // [lane, last_lane). If Partial, only pairs in `bits` take part.
  template <bool Partial>
  void tile(
      T* scores, const uint64_t* bits, int64_t first, int64_t last, int64_t lane,
      int64_t last_lane) {
    constexpr int64_t L = Vectorized<T>::size();
    for (; lane + 4 * L <= last_lane; lane += 4 * L)
      columns<4, Partial>(scores, bits, first, last, lane);
    for (; lane < last_lane; lane += L) columns<1, Partial>(scores, bits, first, last, lane);
  }

  // As `tile`, for at most kTile rows of scores [row][key] whose vectors run along the keys. Bit j
  // of bits[r] is set if row r attends to key j. The sums have the order of `tile`, key by key.
  // Without `sums`, the caller computes them in this order and adds them with add_sum.
  void by_rows(T* scores, const uint64_t* bits, int64_t rows, int64_t keys, bool sums = true) {
    using Vec = Vectorized<T>;
    constexpr int64_t L = Vec::size();
    alignas(64) T base[kTile], tile_sum[kTile];
    rescales = false;
    for (int64_t r = 0; r < rows; ++r) {
      Vec top(-infinity);
      for (int64_t l = 0; l < keys; l += L)
        top = larger(top, select(bits[r] >> l, Vec::loadu(scores + r * kTile + l), Vec(-infinity)));
      const T before = row_max[r];
      const T highest = at::vec::vec_reduce_all([](Vec& a, Vec& b) { return larger(a, b); }, top);
      const T now = highest > before + slack ? highest : before;
      rescales |= now != before;
      row_max[r] = now;
      base[r] = now == -infinity ? T(0) : now;
      rescale[r] = (before - base[r]) * factor;
    }
    const int64_t padding = round_up(rows, L) - rows;
    std::fill_n(rescale + rows, padding, T(0));
    std::fill_n(tile_sum + rows, padding, T(0));
    for (int64_t r = 0; r < rows; r += L) power_of_2(Vec::loadu(rescale + r)).store(rescale + r);
    for (int64_t r = 0; r < rows; ++r) {
      T* row = scores + r * kTile;
      for (int64_t l = 0; l < keys; l += L) {
        const Vec p = power_of_2((Vec::loadu(row + l) - Vec(base[r])) * Vec(factor));
        select(bits[r] >> l, p, Vec(T(0))).store(row + l);
      }
    }
    if (!sums) return;
    // A sum is a chain of additions, so several rows are summed side by side.
    const auto add = [&]<int chains>(int64_t first) TRIFUSE_INLINE {
      T sum[chains] = {};
      for (int64_t j = 0; j < keys; ++j)
#pragma GCC unroll 8
        for (int i = 0; i < chains; ++i) sum[i] += scores[(first + i) * kTile + j];
      std::copy_n(sum, chains, tile_sum + first);
    };
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) add.template operator()<8>(r);
    for (; r + 4 <= rows; r += 4) add.template operator()<4>(r);
    for (; r + 2 <= rows; r += 2) add.template operator()<2>(r);
    for (; r < rows; ++r) add.template operator()<1>(r);
    for (int64_t r = 0; r < rows; r += L)
      at::vec::fmadd(Vec::loadu(row_sum + r), Vec::loadu(rescale + r), Vec::loadu(tile_sum + r))
          .store(row_sum + r);
  }

  void add_sum(int64_t row, T tile_sum) {
    row_sum[row] = std::fma(row_sum[row], rescale[row], tile_sum);
  }

  // Joins the maxima and sums of later keys to those of earlier ones. Writes the factors of each
  // row's earlier and later sums. Reads and writes whole vectors.
  void join(const T* later_max, const T* later_sum, int64_t rows, T* earlier, T* later) {
    using Vec = Vectorized<T>;
    for (int64_t l = 0; l < rows; l += Vec::size()) {
      const Vec before = Vec::loadu(row_max + l), added = Vec::loadu(later_max + l);
      const Vec now = larger(before, added);
      const Vec base = select(equal_bits(now, -infinity), Vec(T(0)), now);
      const Vec a = exp2((before - base) * Vec(factor)), b = exp2((added - base) * Vec(factor));
      at::vec::fmadd(Vec::loadu(row_sum + l), a, Vec::loadu(later_sum + l) * b).store(row_sum + l);
      now.store(row_max + l);
      a.store(earlier + l);
      b.store(later + l);
    }
  }

  // Writes log2 of the first `rows` sums, in double, because it must not be rounded before it is
  // added to a maximum. Writes whole vectors.
  void log2_sum(double* result, int64_t rows = kTile) const {
    using Vec = Vectorized<double>;
    std::copy_n(row_sum, kTile, result);
    for (int64_t l = 0; l < rows; l += Vec::size()) Vec::loadu(result + l).log2().store(result + l);
  }

  // Writes the logsumexp of the first `rows` rows in nats, -inf for a query without a key.
  // score_unit is one unit of score in nats.
  void logsumexp(double score_unit, int64_t rows, T* result) const {
    double log2[kTile];
    log2_sum(log2, rows);
    for (int64_t l = 0; l < rows; ++l)
      result[l] = static_cast<T>(row_max[l] * score_unit + log2[l] * kLn2);
  }

 private:
  // V vectors of queries at a time: independent chains keep the pipes busy.
  template <int V, bool Partial>
  void columns(T* scores, const uint64_t* bits, int64_t first, int64_t last, int64_t lane) {
    using Vec = Vectorized<T>;
    constexpr int64_t L = Vec::size();
    Vec top[V], base[V], tile_sum[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) top[v] = Vec(-infinity);
    for (int64_t j = first; j < last; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        Vec x = Vec::loadu(scores + j * kTile + lane + v * L);
        if constexpr (Partial) x = select(bits[j] >> (lane + v * L), x, Vec(-infinity));
        top[v] = larger(top[v], x);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const Vec before = Vec::loadu(row_max + lane + v * L);
      Vec now = larger(before, top[v]);
      if constexpr (kCoarse) now = Vec::blendv(before, now, now > before + Vec(slack));
      rescales |= greater_bits(now - before, T(0)) != 0;
      now.store(row_max + lane + v * L);
      // 0 in place of a missing maximum avoids -inf - -inf in the exponents.
      base[v] = select(equal_bits(now, -infinity), Vec(T(0)), now);
      power_of_2((before - base[v]) * Vec(factor)).store(rescale + lane + v * L);
      tile_sum[v] = Vec(T(0));
    }
    for (int64_t j = first; j < last; ++j) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        T* row = scores + j * kTile + lane + v * L;
        // The maximum is subtracted first, so that the weight of the maximum is exactly 1.
        Vec p = power_of_2((Vec::loadu(row) - base[v]) * Vec(factor));
        if constexpr (Partial) p = select(bits[j] >> (lane + v * L), p, Vec(T(0)));
        tile_sum[v] = tile_sum[v] + p;
        p.store(row);
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      T* sum = row_sum + lane + v * L;
      at::vec::fmadd(Vec::loadu(sum), Vec::loadu(rescale + lane + v * L), tile_sum[v]).store(sum);
    }
  }
};

}  // namespace trifuse::TRIFUSE_CAPABILITY
