// Shared by the LSTM, GRU and RNN kernels: units in registers, the order of a layer's columns, the
// packing of its weights, products with packed and unpacked weights, and rows sorted by length.
//
// The gates of 16 neighbouring units lie side by side, in a panel. A thread that owns a panel has
// all products that the next state of these units depends on, and no other thread needs them.

#pragma once

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "cpu/crew.h"
#include "cpu/lstm.h"
#include "cpu/operand.h"
#include "cpu/philox.h"
#include "cpu/row.h"
#include "cpu/unpacked_weight.h"
#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

constexpr int64_t kUnits = kStripRows;

// The type in which states and gates are stored. A pair is two neighbouring values of a row.
template <class E>
using Stored = std::conditional_t<kPack<E> == 2, c10::BFloat16, E>;

// 16 units in registers.
template <class T>
struct Units : Lanes<Units<T>, T, kUnits> {
  using Base = Lanes<Units<T>, T, kUnits>;
  using typename Base::Vec;
  using Base::kVecs, Base::v;

  Units() = default;
  explicit Units(T value) : Units(Base::full(value)) {}

  template <class S>
  static Units load(const S* from) {
    Units u;
    if constexpr (std::is_same_v<S, T>) {
      for (int i = 0; i < kVecs; ++i) u.v[i] = Vec::loadu(from + i * Vec::size());
    } else {
#ifdef __AVX512BF16__
      const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      u.v[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
#endif
    }
    return u;
  }
  template <class S>
  void store(S* to) const {
    if constexpr (std::is_same_v<S, T>) {
      for (int i = 0; i < kVecs; ++i) v[i].store(to + i * Vec::size());
    } else {
#ifdef __AVX512BF16__
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded());
#endif
    }
  }
  // The same for the first `count` units; load sets the others to 0.
  template <class S>
  static Units load(const S* from, int64_t count) {
    if (count == kUnits) return load(from);
    alignas(64) S padded[kUnits] = {};
    std::copy_n(from, count, padded);
    return load(padded);
  }
  template <class S>
  void store(S* to, int64_t count) const {
    if (count == kUnits) return store(to);
    alignas(64) S padded[kUnits];
    store(padded);
    std::copy_n(padded, count, to);
  }

  // Stores past the caches, to an address that is a multiple of the units' size. fence_streams()
  // must follow before another thread may read them.
  template <class S>
  TRIFUSE_INLINE void stream(S* to) const {
    if constexpr (std::is_same_v<S, T>) {
      for (int i = 0; i < kVecs; ++i) stream_vector(v[i], to + i * Vec::size());
    } else {
#ifdef __AVX512BF16__
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), rounded());
#endif
    }
  }

#ifdef __AVX512BF16__
  // Returns the units rounded to bfloat16.
  __m256i rounded() const { return (__m256i)_mm512_cvtneps_pbh(v[0]); }
#endif

  // Returns a product that is rounded by itself: the compiler does not fuse it with a sum into one
  // multiply-add. So a function has the same bits wherever it is inlined.
  friend Units rounded_product(Units a) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#ifdef CPU_CAPABILITY_AVX512
    __m512 bits;
#else
    __m256 bits;
#endif
    for (Vec& x : a.v) {
      std::memcpy(&bits, &x, sizeof bits);
      asm("" : "+v"(bits));
      std::memcpy(static_cast<void*>(&x), &bits, sizeof bits);
    }
#endif
    return a;
  }

  friend Units sigmoid(const Units& a) {
    return map([](Vec x) { return TRIFUSE_CAPABILITY::sigmoid(x); }, a);
  }
  friend Units tanh(const Units& a) {
    return map([](Vec x) { return TRIFUSE_CAPABILITY::tanh(x); }, a);
  }
  // max(a, 0); a NaN stays.
  friend Units relu(const Units& a) {
    return map([](Vec x) { return at::vec::clamp_min(x, Vec(T(0))); }, a);
  }
  // Returns the gradient at a, from relu(a) and its gradient: 0 where relu(a) is 0.
  friend Units relu_backward(const Units& grad, const Units& result) {
    return map(
        [](Vec g, Vec y) { return Vec::blendv(g, Vec(T(0)), y <= Vec(T(0))); }, grad, result);
  }
  // Clamps to [-limit, limit]; a NaN stays.
  friend Units clip(const Units& a, double limit) {
    const Vec low(static_cast<T>(-limit)), high(static_cast<T>(limit));
    return map([&](Vec x) { return at::vec::clamp(x, low, high); }, a);
  }
  // Returns the bits of the units that clip changes.
  friend uint16_t clipped_bits(const Units& x, double limit) {
    uint64_t bits = 0;
    for (int i = 0; i < kVecs; ++i)
      bits |= greater_bits(x.v[i].abs(), static_cast<T>(limit)) << i * Vec::size();
    return static_cast<uint16_t>(bits);
  }
};

// The order of columns: panels of 16 units, each of up to four blocks of 16 columns.
//
// At each step one thread owns a panel, for all rows of a row group that have the step. The panel's
// products are [rows][width]. Lane u of each block of panel q belongs to hidden unit q * 16 + u:
//
//                      block 0     block 1     block 2     block 3
//   lane               0 ... 15    0 ... 15    0 ... 15    0 ... 15
//   LSTM             |    i      |    f      |    g      |    o      |
//   coupled LSTM     |    i      |    g      |    o      |               no block of f
//   GRU, W_ih x      |    n      |    r      |    z      |           |
//   GRU, W_hh h      |           |    r      |    z      |    n      |
//   GRU, reset first |    r      |    z      |    n      |               n by W_hn (r h)
//   RNN              |    h      |                                       one block
//
// A block of an LSTM or an RNN holds W_ih x + W_hh h + bias. With layer normalisation W_ih x and
// W_hh h are two such sets of products, because each has its own norm. In a GRU, r and z are sums
// of both products, and n's two products stay separate, unless the reset gate precedes the product.
// Then n is a sum too, but its product follows those of r and z.
//
// So all gates of a unit lie in the same lane of neighbouring vectors. In the last panel the lanes
// past H are padding.
struct Panels {
  // Neighbouring blocks that are multiplied at once.
  struct Blocks {
    int first, count;
    int64_t width() const { return count * kUnits; }
  };

  // The gate in each block, -1 for none, for W_ih and for W_hh. They differ only in a GRU, where
  // the two products of n may stay separate.
  int ih_gate[4], hh_gate[4];
  int blocks;
  int ih_first, ih_blocks;  // the product with W_ih fills neighbouring blocks
  int hh_first, hh_blocks;
  int64_t count;              // of panels
  bool resets_first = false;  // n is multiplied by r h, after the product of r and z with h

  explicit Panels(const LstmProblem& p) : count((p.H + kUnits - 1) / kUnits) {
    // ih_gate, hh_gate, blocks, ih_first, ih_blocks, hh_first, hh_blocks, count
    if (p.cell == Cell::Rnn) {
      *this = {{0, -1, -1, -1}, {0, -1, -1, -1}, 1, 0, 1, 0, 1, count};
    } else if (p.cell == Cell::Gru && p.linear_before_reset) {
      *this = {{2, 0, 1, -1}, {-1, 0, 1, 2}, 4, 0, 3, 1, 3, count};
    } else {
      const int gates = static_cast<int>(p.gates());
      *this = {{0, 1, 2, 3}, {0, 1, 2, 3}, gates, 0, gates, 0, gates, count};
      resets_first = p.resets_first();
    }
  }
  int64_t width() const { return blocks * kUnits; }
  int64_t ih_width() const { return ih_blocks * kUnits; }
  int64_t hh_width() const { return hh_blocks * kUnits; }
  Blocks ih() const { return {ih_first, ih_blocks}; }
  // The blocks that W_hh's product with h fills, and those of its product with r h.
  Blocks with_h() const { return {hh_first, resets_first ? 2 : hh_blocks}; }
  Blocks with_reset_h() const { return {2, resets_first ? 1 : 0}; }

 private:
  Panels(
      std::initializer_list<int> ih, std::initializer_list<int> hh, int blocks, int ih_first,
      int ih_blocks, int hh_first, int hh_blocks, int64_t count)
      : blocks(blocks), ih_first(ih_first), ih_blocks(ih_blocks), hh_first(hh_first),
        hh_blocks(hh_blocks), count(count) {
    std::copy(ih.begin(), ih.end(), ih_gate);
    std::copy(hh.begin(), hh.end(), hh_gate);
  }
};

inline int64_t units_of(const LstmProblem& p, int64_t panel) {
  return std::min(kUnits, p.H - panel * kUnits);
}

// Allocates memory in pieces; an empty piece is a null pointer. With a null base all pieces are
// null, and used() is the number of bytes needed.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = base_ && count ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += round_up(count * static_cast<int64_t>(sizeof(T)), 64);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// The most terms of a chain of multiply-adds. A block of B has as many rows.
constexpr int64_t kChain = 128;
constexpr int64_t chain_length(bool ahead) { return ahead ? kChain / 2 : kChain; }

// C (M x N) = or += A (M x K) B (K x N), in chains of multiply-adds. All rows of A are multiplied
// by one block of B, which fits the L1 cache, before the next block. K counts elements; a pair is
// one element. With `start`, a row of N numbers, every row of C is that row + A B.
//
// With `ahead`, B is read once from end to end, and is not in a near cache: while A is multiplied
// by a block, the next block is prefetched, some cache lines for every k. Blocks are then half as
// long, so that they stay in the L1 cache beside what is read from the L2 cache. If A is read by
// columns, a few rows at a time pass through the cache beside the block. (The matrix unit does not
// read such an A.)
template <class E>
inline void product(
    int64_t M, int64_t N, int64_t K, const E* a, int64_t a_m, int64_t a_k, const E* b, int64_t ldb,
    AccumulatorOf<E>* c, int64_t ldc, bool add, bool ahead = false,
    const AccumulatorOf<E>* start = nullptr) {
  using T = AccumulatorOf<E>;
  const int64_t chain = chain_length(ahead);
  const int64_t rows = a_k == 1 ? M : 24;
  for (int64_t k = 0; k < K; k += chain) {
    const int64_t depth = std::min(chain, K - k);
    const Accumulate<T> accumulate = {add || start || k > 0, nullptr, k > 0 ? nullptr : start};
    if constexpr (!kUsesMatrixUnit<E>)
      if (ahead) {
        const int64_t calls = register_blocks<T>(M, N) * depth;
        const int64_t lines = chain * ldb * static_cast<int64_t>(sizeof(E)) / 64;
        const FetchAhead fetch = {
            reinterpret_cast<const char*>(b + (k + chain) * ldb), (lines + calls - 1) / calls};
        tile_gemm<E>(
            M, N, depth, a + k * a_k, a_m, a_k, b + k * ldb, ldb, c, ldc, accumulate, fetch);
        continue;
      }
    for (int64_t m = 0; m < M; m += rows)
      tile_gemm<E>(
          std::min(rows, M - m), N, depth, a + m * a_m + k * a_k, a_m, a_k, b + k * ldb, ldb,
          c + m * ldc, ldc, accumulate);
  }
}

// Weights that are packed and then read at every step. The matrix unit reads them in tiles
// (matrix_unit.h), other instruction sets row by row.
//
// Returns the number of rows of such a B.
template <class E>
constexpr int64_t packed_rows(int64_t K) {
#ifdef __AMX_BF16__
  return round_up(K, kUnitPairs);
#else
  return K;
#endif
}
// Returns the number of rows of the A that is multiplied by such a B, if M rows are needed.
template <class E>
constexpr int64_t left_rows_of(int64_t M) {
  return kUsesMatrixUnit<E> ? round_up(M, 16) : M;
}

// C (M x N) = or += A (M x K) B for N columns of a packed B, from `first` on. B has `ldb` columns.
// With `start`, every row of C is that row + A B, for K > 0. On the matrix unit A's rows are 0 past
// K, up to a whole tile.
template <class E>
inline void product_with_packed(
    int64_t M, int64_t N, int64_t K, const E* a, int64_t a_m, const E* b, int64_t ldb,
    int64_t first, AccumulatorOf<E>* c, int64_t ldc, bool add, bool ahead,
    const AccumulatorOf<E>* start = nullptr) {
#ifdef __AMX_BF16__
  if (K == 0 && !add)
    for (int64_t m = 0; m < M; ++m) std::fill_n(c + m * ldc, N, 0.0f);
  const float* from = add ? c : nullptr;
  if (start) from = start;
  multiply_tiled(M, N, K, {a, a_m}, b + first * kUnitPairs, ldb, from, start ? 0 : ldc, c, ldc);
#else
  product<E>(M, N, K, a, a_m, 1, b + first, ldb, c, ldc, add, ahead, start);
#endif
}

// With one gate a panel is 16 columns wide. If that is one vector, each element of A is loaded for
// only one multiply-add, and loads take longer than multiply-adds. So four panels are multiplied at
// once.
constexpr int kPanelsAtOnce = 4;
template <class E>
constexpr bool kOneVectorPanels =
    Vectorized<AccumulatorOf<E>>::size() == kUnits && !kUsesMatrixUnit<E>;

// C (M x 16) += A (M x K) B (K x 16) for four B's, b_panel apart, and four C's, c_panel apart,
// whose rows are ldc apart. The chains are those of `product`, so results have the same bits.
template <class E>
inline void product_with_four_panels(
    int64_t M, int64_t K, const E* a, int64_t a_m, const E* b, int64_t b_panel, AccumulatorOf<E>* c,
    int64_t ldc, int64_t c_panel) {
  using Vec = Vectorized<AccumulatorOf<E>>;
  static_assert(kOneVectorPanels<E>);
  for (int64_t first = 0; first < K; first += kChain) {
    const int64_t end = std::min(first + kChain, K);
    const auto multiply = [&]<int rows>(int64_t m) TRIFUSE_INLINE {
      Vec sum[rows][kPanelsAtOnce];
#pragma GCC unroll 8
      for (auto& row : sum)
#pragma GCC unroll 4
        for (Vec& x : row) x = Vec(0);
      for (int64_t k = first; k < end; ++k) {
        typename Element<E>::Vector column[kPanelsAtOnce];
#pragma GCC unroll 4
        for (int q = 0; q < kPanelsAtOnce; ++q)
          column[q] = Element<E>::load(b + q * b_panel + k * kUnits);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
          const auto x = Element<E>::broadcast(a + (m + r) * a_m + k);
#pragma GCC unroll 4
          for (int q = 0; q < kPanelsAtOnce; ++q)
            sum[r][q] = Element<E>::multiply_add(x, column[q], sum[r][q]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
        for (int q = 0; q < kPanelsAtOnce; ++q) {
          auto* target = c + q * c_panel + (m + r) * ldc;
          (Vec::loadu(target) + sum[r][q]).store(target);
        }
    };
    int64_t m = 0;
    for (; m + kRegisterRows <= M; m += kRegisterRows)
      multiply.template operator()<kRegisterRows>(m);
    for (; m + 2 <= M; m += 2) multiply.template operator()<2>(m);
    if (m < M) multiply.template operator()<1>(m);
  }
}

// Returns whether weights exceed the caches near a core, and so should be prefetched.
template <class E>
constexpr bool exceeds_cache(int64_t count) {
  return count * static_cast<int64_t>(sizeof(E)) > int64_t(8) << 20;
}

// Returns up to how many products of few rows with a weight of `bytes` are at least as fast with
// the weight as it is stored as with a packed weight, including the packing. This holds for a
// single product on every CPU. The other numbers are those of Emerald Rapids, two threads with
// AVX-512. From 2 MB on, packed weights break even after 8 steps in float32 and 4 in bfloat16.
// ELMo's 32 MB, which are read from the L3 cache either way, break even after 24 steps of one or
// two rows.
template <class E>
inline int64_t products_worth_reading_in_place(int64_t rows, int64_t bytes) {
  if (Vectorized<float>::size() < kUnits || !is_intel() || bytes < int64_t(2) << 20) return 1;
  if constexpr (!std::is_same_v<E, float>) return 2;
  return rows <= 2 && bytes > int64_t(16) << 20 ? 16 : 6;
}

// Calls f(tile, first, columns) for a thread's share of a matrix's columns, in whole blocks of 16:
// `columns` columns of a tile of 64, beginning with column `first` of the tile. Matrices that are
// read at every step are best read alternately forwards and backwards, so that the part that a
// cache still holds is read first.
template <class F>
inline void for_tiles(const Team& team, int64_t columns, const F& f, bool descending = false) {
  const Range blocks = team.share((columns + kUnits - 1) / kUnits);
  const int64_t begin = blocks.first * kUnits, last = blocks.last * kUnits;
  if (begin == last) return;
  const int64_t first_tile = begin / kTile, tiles = (last - 1) / kTile + 1 - first_tile;
  for (int64_t k = 0; k < tiles; ++k) {
    const int64_t tile = first_tile + (descending ? tiles - 1 - k : k);
    const int64_t first = std::max(begin, tile * kTile);
    f(tile, first % kTile, std::min((tile + 1) * kTile, last) - first);
  }
}

// Packing -----------------------------------------------------------------------------------------

// Transposes at most 16 rows of K elements into 16 columns of a packed B, block `block` of its
// `width` columns.
template <class E>
inline void pack_strip(
    const Operand<E>& source, int64_t rows, int64_t K, int64_t block, int64_t width, E* target) {
#ifdef __AMX_BF16__
  for (int64_t k = 0; k < K; k += kUnitPairs) {
    E* tile = target + tiled_row(k, width) + block * kUnits * kUnitPairs;
    const int64_t depth = std::min(K - k, kUnitPairs);
    transpose_strip(source.data + k, source.ld, rows, depth, tile, kUnits);
    std::fill_n(tile + depth * kUnits, (kUnitPairs - depth) * kUnits, E{});
  }
#else
  transpose_strip(source.data, source.ld, rows, K, target + block * kUnits, width);
#endif
}

// Packs the rows of one panel of a weight (G·H, columns) as B of the forward's products: 16 columns
// for each block. `row_buffer` holds 16 rows.
template <class E>
inline void pack_panel_columns(
    const LstmProblem& p, const Stored<E>* weight, int64_t columns, const int* gate,
    const Panels::Blocks& blocks, int64_t panel, E* row_buffer, E* target) {
  using S = Stored<E>;
  const int64_t units = units_of(p, panel);
  for (int block = 0; block < blocks.count; ++block) {
    const S* rows = weight + (gate[blocks.first + block] * p.H + panel * kUnits) * columns;
    const Operand<E> source = left_rows<E>(Rows<S>{rows, columns, 1}, units, columns, row_buffer);
    pack_strip(source, units, elements<E>(columns), block, blocks.width(), target);
  }
}

// Packs `rows` rows of a weight (R, columns), at most 64, as a B of 64 columns.
template <class E>
inline void pack_rows_as_columns(
    const Stored<E>* weight, int64_t rows, int64_t columns, E* row_buffer, E* target) {
  using S = Stored<E>;
  for (int64_t first = 0; first < kTile; first += kUnits) {
    const int64_t count = std::clamp<int64_t>(rows - first, 0, kUnits);
    const Operand<E> source = left_rows<E>(
        Rows<S>{weight + (count ? first * columns : 0), columns, 1}, count, columns, row_buffer);
    pack_strip(source, count, elements<E>(columns), first / kUnits, kTile, target);
  }
}

// Packs `n` rows of at most 64 columns as rows of a B of 64 columns, from row k on. In a B of pairs
// `n` is even, unless these are the last.
template <class E>
inline void pack_rows(Rows<Stored<E>> rows, int64_t n, int64_t columns, int64_t k, E* target) {
#ifdef __AMX_BF16__
  alignas(64) E whole[kUnitPairs * kTile];
  for (int64_t r = 0; r < n; r += 2 * kUnitPairs) {
    const int64_t count = std::min(n - r, 2 * kUnitPairs);
    copy_right_rows<E>(
        Rows<Stored<E>>{rows.row(r), rows.row_stride, rows.column_stride}, count, columns, kTile,
        whole);
    for (int64_t j = 0; j < elements<E>(count); ++j)
      for (int64_t c = 0; c < kTile; c += kUnitColumns)
        std::copy_n(
            whole + j * kTile + c, kUnitColumns,
            target + tiled_row(k + r / 2 + j, kTile) + c * kUnitPairs);
  }
#else
  copy_right_rows<E>(rows, n, columns, kTile, target + k * kTile);
#endif
}
// Sets rows of such a B to 0, from row k to row `last`.
template <class E>
inline void clear_rows(int64_t k, int64_t last, E* target) {
  for (; k < last; ++k)
#ifdef __AMX_BF16__
    for (int64_t c = 0; c < kTile; c += kUnitColumns)
      std::fill_n(target + tiled_row(k, kTile) + c * kUnitPairs, kUnitColumns, E{});
#else
    std::fill_n(target + k * kTile, kTile, E{});
#endif
}

// Packs `columns` columns, from `first` on, of 16 rows of a weight as 16 values of k of a B with 64
// columns. `rows` of the rows exist; the others are 0.
template <class E>
inline void pack_unit_rows(
    const Stored<E>* weight, int64_t row_size, int64_t rows, int64_t first, int64_t columns,
    E* target) {
  using S = Stored<E>;
  copy_right_rows<E>(Rows<S>{weight + first, row_size, 1}, rows, columns, kTile, target);
  std::fill(target + elements<E>(rows) * kTile, target + elements<E>(kUnits) * kTile, E{});
}

// Products with unpacked weights ------------------------------------------------------------------

// C (M x count) = A (M x K) B, where B's columns are `count` rows of a weight (.., columns). C is
// written in whole blocks of 16 columns.
template <class E>
inline void product_with_rows(
    const Stored<E>* weight, int64_t count, int64_t columns, E* row_buffer, int64_t M, const E* a,
    int64_t a_m, AccumulatorOf<E>* c, int64_t ldc, bool ahead) {
  for (int64_t first = 0; first < count; first += kUnits) {
    const int64_t units = std::min(count - first, kUnits);
    const Stored<E>* rows = weight + first * columns;
    const Operand<E> b =
        left_rows<E>(Rows<Stored<E>>{rows, columns, 1}, units, columns, row_buffer);
    const Fetched next = fetched_meanwhile(b.data, rows, rows + units * columns);
    multiply_strip(
        M, elements<E>(columns), a, a_m, b.data, b.ld, units, next, c + first, ldc, false,
        chain_length(ahead));
  }
}

// Multiplies few rows by a panel of a weight (G·H, columns), whose columns have the order of
// pack_panel_columns. `row_buffer` holds 16 rows.
template <class E>
inline void product_with_panel(
    const LstmProblem& p, const Stored<E>* weight, int64_t columns, const int* gate,
    const Panels::Blocks& blocks, int64_t panel, E* row_buffer, int64_t M, const E* a, int64_t a_m,
    AccumulatorOf<E>* c, int64_t ldc, bool add, bool ahead) {
  using S = Stored<E>;
  const int64_t units = units_of(p, panel);
  const auto rows_of = [&](int block, int64_t panel) {
    return weight + (gate[blocks.first + block] * p.H + panel * kUnits) * columns;
  };
  for (int block = 0; block < blocks.count; ++block) {
    const Operand<E> rows =
        left_rows<E>(Rows<S>{rows_of(block, panel), columns, 1}, units, columns, row_buffer);
    const S* next = block + 1 < blocks.count ? rows_of(block + 1, panel) : rows_of(0, panel + 1);
    multiply_strip(
        M, elements<E>(columns), a, a_m, rows.data, rows.ld, units,
        fetched_meanwhile(rows.data, rows_of(block, panel), next), c + block * kUnits, ldc, add,
        chain_length(ahead));
  }
}

// Adds a vector (G·H,) to target, in the order of panels.
template <class T>
inline void add_to_panels(
    const LstmProblem& p, const Panels& panels, const int* gate, const void* vector, T* target) {
  if (!vector) return;
  const T* from = static_cast<const T*>(vector);
  for (int64_t q = 0; q < panels.count; ++q)
    for (int block = 0; block < panels.blocks; ++block)
      if (gate[block] >= 0)
        for (int64_t u = 0; u < units_of(p, q); ++u)
          target[q * panels.width() + block * kUnits + u] +=
              from[gate[block] * p.H + q * kUnits + u];
}

// Rows --------------------------------------------------------------------------------------------

// One direction's rows, or one group of them, sorted by length.
struct RowGroup {
  const LstmProblem& p;
  int64_t index;  // of the direction
  int64_t group = 0, groups = 1;
  const LstmDirection& d = p.direction[index];

  int64_t among(int64_t ranks) const { return (ranks - group + groups - 1) / groups; }
  int64_t rows() const { return among(p.B); }
  // Returns how many rows have step s; 0 past the last step.
  int64_t active(int64_t s) const { return s < p.steps ? among(p.active[s]) : 0; }

  int64_t rank(int64_t i) const { return i * groups + group; }
  int64_t row(int64_t i) const { return p.order[rank(i)]; }
  int64_t length(int64_t i) const { return p.length[rank(i)]; }
  // Returns the time at which row i has step s.
  int64_t position(int64_t i, int64_t s) const { return d.reverse ? length(i) - 1 - s : s; }
  int64_t token(int64_t i, int64_t s) const { return p.start[s] + rank(i); }

  // Returns row i's h after step s, or null for zeros. Step -1 is the initial state.
  template <class S>
  const S* h(int64_t i, int64_t s) const {
    if (s < 0) return d.h0 ? static_cast<const S*>(d.h0) + row(i) * p.R : nullptr;
    return output<S>(p.output, i, s);
  }
  template <class S>
  S* output(void* tensor, int64_t i, int64_t s) const {
    return static_cast<S*>(tensor) + ((position(i, s) * p.B + row(i)) * p.directions + index) * p.R;
  }
  template <class S>
  const S* output(const void* tensor, int64_t i, int64_t s) const {
    return output<S>(const_cast<void*>(tensor), i, s);
  }
  template <class T>
  T* cells(int64_t i, int64_t s) const {
    return static_cast<T*>(d.cells) + (position(i, s) * p.B + row(i)) * p.H;
  }
  uint16_t* clipped(int64_t i, int64_t s) const {
    return static_cast<uint16_t*>(d.clipped) + (position(i, s) * p.B + row(i)) * p.clip_words();
  }
  template <class T>
  const T* c(int64_t i, int64_t s) const {
    if (s < 0) return d.c0 ? static_cast<const T*>(d.c0) + row(i) * p.H : nullptr;
    return cells<T>(i, s);
  }

  // Draws 64 bits: bit t is set if column `column` + t is kept.
  enum Kind { RecurrentDropout, ZoneoutH, ZoneoutC };
  uint64_t kept(const Dropout& draw, Kind kind, int64_t i, int64_t s, int64_t column) const {
    const uint64_t plane = ((kind == RecurrentDropout ? 0 : position(i, s)) * 3 + kind) * 2 + index;
    return dropout_row(draw.seed, plane, draw.place.unit(row(i)), column, draw.threshold);
  }
};

}  // namespace trifuse::TRIFUSE_CAPABILITY
