// Products of bfloat16 pairs on the matrix unit of x86 CPUs (AMX), C (M x N) += A (M x K) B (K x
// N).
//
// The unit has eight registers of 16 rows of 64 bytes. One instruction multiplies a register of A
// by one of B and adds to one of C:
//
//   A  16 rows x 16 pairs along k      B  16 pairs along k x 16 columns      C  16 x 16 float
//
// Four registers hold a block of C, 32 x 32 or 16 x 64, while A and B pass through the others. If B
// has 32 pairs along k, as in the products of attention's whole tiles, four registers hold 32 of
// its columns instead, while A and C pass through the others. This saves up to a quarter of the
// loads. Incomplete blocks of A or B are copied to the stack and padded with 0, because changing
// the shape of a register takes longer, about 250 cycles.
//
// An element of C starts from its former value. The sums of 16 pairs are added to it one after the
// other; each is a chain over the lower values plus a chain over the upper ones. Subnormal numbers
// count as 0. This order depends only on k, so a result does not depend on M, N and the blocking.
//
// If the CPU has no such unit, multiply_in_software replaces it, with the same bits, so that tests
// of the code around it run on other machines too.
//
// Floor: 16 cycles for each product of registers, 16 x 16 x 32 multiply-adds. A block of 32 x 32
// takes four of them for four loads of 8 cycles each. The L2 cache is the limit: it delivers a line
// of 64 bytes in about two cycles, so half of the operands have to lie in the L1 cache.

#pragma once

#include <ATen/cpu/vec/vec.h>
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "cpu/bfloat16_pair.h"
#include "cpu/capability.h"
#include "cpu/scratch.h"

namespace trifuse::TRIFUSE_CAPABILITY {

constexpr int64_t kUnitRows = 16, kUnitPairs = 16, kUnitColumns = 16;  // of a register
constexpr int64_t kUnitDepth = 128;  // pairs along k that a block of C sums up in registers

// The shapes of the registers, as the instruction LDTILECFG reads them: 16 rows of so many bytes.
struct alignas(64) RegisterShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline constexpr RegisterShapes kWholeRegisters{.row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}};

// A product with one column (multiply_by_column) has C in register 0, passes A through registers 2
// and 3, and keeps B in the last four. A row of C and B is one number, or one pair.
inline constexpr RegisterShapes kColumnRegisters{.row_bytes = {4, 4, 64, 64, 4, 4, 4, 4}};

// A task that multiplies has one of these. The thread acquires the unit at its first product and
// releases it when the task ends, because other code configures the registers differently, and
// registers in use slow down the switch to another thread.
class MatrixUnit {
 public:
  MatrixUnit() { ++tasks; }
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
  ~MatrixUnit() {
    if (--tasks == 0 && taken) {
      _tile_release();
      taken = nullptr;
    }
  }
  static void take(const RegisterShapes& shapes = kWholeRegisters) {
    if (taken == &shapes) return;
    _tile_loadconfig(&shapes);
    taken = tasks > 0 ? &shapes : nullptr;
  }

 private:
  static inline thread_local const RegisterShapes* taken = nullptr;
  static inline thread_local int tasks = 0;  // of this thread
};

// Rows of pairs, ld apart.
struct PairRows {
  const BFloat16Pair* data;
  int64_t ld;
};

// B as tiles of 16 pairs along k by 16 columns, whose rows are `ld` apart: tiles of neighbouring
// columns lie `across` apart, those of the next 16 pairs `down`.
struct PairTiles {
  const BFloat16Pair* data = nullptr;
  int64_t ld = 0, across = 0, down = 0;

  PairTiles() = default;
  PairTiles(const BFloat16Pair* data, int64_t ld, int64_t across, int64_t down)
      : data(data), ld(ld), across(across), down(down) {}
  explicit PairTiles(PairRows rows)
      : PairTiles(rows.data, rows.ld, kUnitColumns, kUnitPairs * rows.ld) {}
  const BFloat16Pair* row(int64_t k) const {
    return data + k / kUnitPairs * down + k % kUnitPairs * ld;
  }
};

// The operands of a block of C: its former values, or null; `steps` times 16 pairs along k; and 16
// more pairs if tail_b is not null. A block of one register's height has no `lower`.
struct BlockOperands {
  const float* start;
  int64_t start_ld;
  int64_t steps;
  PairRows upper, lower;
  PairTiles b;
  PairRows tail_upper, tail_lower;
  PairTiles tail_b;
};

// A block of C of MR x NR registers: 2 x 1, 2 x 2, or 1 x 1 to 1 x 4.
template <int MR, int NR>
void multiply_block(const BlockOperands& from, float* c, int64_t ldc) {
  static_assert(MR * NR <= 4);
  // GCC 12's register loads do not declare that they read memory.
  asm volatile("" ::: "memory");
  const auto place = [](auto* block, int64_t ld, int i) {
    return MR == 2 ? block + i % 2 * kUnitRows * ld + i / 2 * kUnitColumns
                   : block + i * kUnitColumns;
  };
  if (from.start) {
    const int64_t start_bytes = from.start_ld * int64_t{sizeof(float)};
    _tile_loadd(0, from.start, start_bytes);
    if constexpr (MR * NR > 1) _tile_loadd(1, place(from.start, from.start_ld, 1), start_bytes);
    if constexpr (MR * NR > 2) _tile_loadd(2, place(from.start, from.start_ld, 2), start_bytes);
    if constexpr (MR * NR > 3) _tile_loadd(3, place(from.start, from.start_ld, 3), start_bytes);
  } else {
    _tile_zero(0);
    if constexpr (MR * NR > 1) _tile_zero(1);
    if constexpr (MR * NR > 2) _tile_zero(2);
    if constexpr (MR * NR > 3) _tile_zero(3);
  }
  const auto bytes = [](PairRows rows) { return rows.ld * int64_t{sizeof(BFloat16Pair)}; };
  const auto step = [&](PairRows upper, PairRows lower, const PairTiles& b, int64_t s)
                        __attribute__((always_inline)) {
                          const BFloat16Pair* row = b.data + s * b.down;
                          const int64_t k = s * kUnitPairs;
                          const int64_t b_bytes = b.ld * int64_t{sizeof(BFloat16Pair)};
                          _tile_loadd(4, upper.data + k, bytes(upper));
                          _tile_loadd(6, row, b_bytes);
                          _tile_dpbf16ps(0, 4, 6);
                          if constexpr (MR == 2) {
                            _tile_loadd(5, lower.data + k, bytes(lower));
                            _tile_dpbf16ps(1, 5, 6);
                            if constexpr (NR == 2) {
                              _tile_loadd(7, row + b.across, b_bytes);
                              _tile_dpbf16ps(2, 4, 7);
                              _tile_dpbf16ps(3, 5, 7);
                            }
                          } else {
                            if constexpr (NR > 1) {
                              _tile_loadd(7, row + b.across, b_bytes);
                              _tile_dpbf16ps(1, 4, 7);
                            }
                            if constexpr (NR > 2) {
                              _tile_loadd(6, row + 2 * b.across, b_bytes);
                              _tile_dpbf16ps(2, 4, 6);
                            }
                            if constexpr (NR > 3) {
                              _tile_loadd(7, row + 3 * b.across, b_bytes);
                              _tile_dpbf16ps(3, 4, 7);
                            }
                          }
                        };
  for (int64_t s = 0; s < from.steps; ++s) step(from.upper, from.lower, from.b, s);
  if (from.tail_b.data) step(from.tail_upper, from.tail_lower, from.tail_b, 0);
  const int64_t c_bytes = ldc * int64_t{sizeof *c};
  _tile_stored(0, c, c_bytes);
  if constexpr (MR * NR > 1) _tile_stored(1, place(c, ldc, 1), c_bytes);
  if constexpr (MR * NR > 2) _tile_stored(2, place(c, ldc, 2), c_bytes);
  if constexpr (MR * NR > 3) _tile_stored(3, place(c, ldc, 3), c_bytes);
}

// multiply_block with vector instructions, with the bits of the matrix unit.
inline void multiply_in_software(
    int height, int width, const BlockOperands& from, float* c, int64_t ldc) {
  const NoSubnormals mode;
  for (int64_t m = 0; m < height * kUnitRows; ++m) {
    const bool is_lower = m >= kUnitRows;
    const auto row = [&](PairRows upper, PairRows lower) {
      return is_lower ? lower.data + (m - kUnitRows) * lower.ld : upper.data + m * upper.ld;
    };
    for (int64_t n = 0; n < width * kUnitColumns; n += kUnitColumns) {
      __m512 total =
          from.start ? _mm512_loadu_ps(from.start + m * from.start_ld + n) : _mm512_setzero_ps();
      const auto step = [&](const BFloat16Pair* a, const PairTiles& b, int64_t k) {
        __m512 lower = _mm512_setzero_ps(), upper = _mm512_setzero_ps();
        for (int64_t i = k; i < k + kUnitPairs; ++i) {
          const __m512i x =
              _mm512_set1_epi32(static_cast<int>(uint32_t{a[i].low} | uint32_t{a[i].high} << 16));
          const __m512i y = _mm512_loadu_si512(b.row(i) + n / kUnitColumns * b.across);
          lower = _mm512_fmadd_ps(lower_values(x), lower_values(y), lower);
          upper = _mm512_fmadd_ps(upper_values(x), upper_values(y), upper);
        }
        total = _mm512_add_ps(total, _mm512_add_ps(lower, upper));
      };
      for (int64_t s = 0; s < from.steps; ++s)
        step(row(from.upper, from.lower), from.b, s * kUnitPairs);
      if (from.tail_b.data) step(row(from.tail_upper, from.tail_lower), from.tail_b, 0);
      _mm512_storeu_ps(c + m * ldc + n, total);
    }
  }
}

// c[m] = row m of A (16 x K) · b, with the bits of multiply_block, for `blocks` blocks of 16 rows.
// K is a multiple of 16. Requires a working unit. A whole C would compute 16 columns instead of
// one.
inline void multiply_by_column(
    int64_t blocks, int64_t K, PairRows a, const BFloat16Pair* b, float* c) {
  MatrixUnit::take(kColumnRegisters);
  asm volatile("" ::: "memory");
  constexpr int64_t kPair = sizeof(BFloat16Pair);
  const int64_t steps = K / kUnitPairs, bytes = a.ld * kPair;
  const auto part = [&](int64_t step) { return b + step * kUnitPairs; };
  // The first three parts of b stay in registers.
  if (steps > 0) _tile_loadd(4, part(0), kPair);
  if (steps > 1) _tile_loadd(5, part(1), kPair);
  if (steps > 2) _tile_loadd(6, part(2), kPair);
  for (int64_t m = 0; m < blocks; ++m) {
    const BFloat16Pair* row = a.data + m * kUnitRows * a.ld;
    _tile_zero(0);
    if (steps > 0) {
      _tile_loadd(2, row, bytes);
      _tile_dpbf16ps(0, 2, 4);
    }
    if (steps > 1) {
      _tile_loadd(3, row + kUnitPairs, bytes);
      _tile_dpbf16ps(0, 3, 5);
    }
    if (steps > 2) {
      _tile_loadd(2, row + 2 * kUnitPairs, bytes);
      _tile_dpbf16ps(0, 2, 6);
    }
    for (int64_t s = 3; s < steps; ++s) {
      _tile_loadd(7, part(s), kPair);
      _tile_loadd(3, row + s * kUnitPairs, bytes);
      _tile_dpbf16ps(0, 3, 7);
    }
    _tile_stored(0, c + m * kUnitRows, sizeof *c);
  }
  asm volatile("" ::: "memory");
}

// c (N) += x (K) B (K x N) with vector instructions, with the bits of the unit. x holds values of
// bfloat16, and B rows of them, ld apart. These are not pairs of rows, so B is read in place. N is
// a multiple of 32.
//
// A word holds two columns. A shift and a mask split a vector into one of the even columns and one
// of the odd columns. With the multiply-adds these are four vector instructions for 32 columns of a
// row. Calls beside(k) once, before row k.
template <int NR, class Beside>
void add_row_product(
    int64_t K, const float* x, const uint16_t* b, int64_t ld, float* c, const Beside& beside) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  constexpr int kVectors = 2 * NR;
  __m512 total[kVectors];
#pragma GCC unroll 2
  for (int n = 0; n < NR; ++n) {
    const __m512 first = _mm512_loadu_ps(c + 32 * n), second = _mm512_loadu_ps(c + 32 * n + 16);
    total[2 * n] = _mm512_permutex2var_ps(first, even, second);
    total[2 * n + 1] = _mm512_permutex2var_ps(first, odd, second);
  }
  const auto add_row = [&](int64_t k, __m512* sum) __attribute__((always_inline)) {
    const __m512 factor = _mm512_set1_ps(x[k]);
#pragma GCC unroll 2
    for (int n = 0; n < NR; ++n) {
      const __m512i row = _mm512_loadu_si512(b + k * ld + 32 * n);
      sum[2 * n] = _mm512_fmadd_ps(factor, lower_values(row), sum[2 * n]);
      sum[2 * n + 1] = _mm512_fmadd_ps(factor, upper_values(row), sum[2 * n + 1]);
    }
  };
  for (int64_t k = 0; k < K; k += 2 * kUnitPairs) {
    __m512 lower[kVectors], upper[kVectors];
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) lower[n] = upper[n] = _mm512_setzero_ps();
    const int64_t last = std::min(K, k + 2 * kUnitPairs);
    int64_t i = k;
    for (; i + 1 < last; i += 2) {
      beside(i);
      add_row(i, lower);
      beside(i + 1);
      add_row(i + 1, upper);
    }
    if (i < last) {
      beside(i);
      add_row(i, lower);
    }
    // The unit also multiplies zeros past K. Adding them changes a sum only if it is -0.
#pragma GCC unroll 4
    for (int n = 0; n < kVectors; ++n) {
      if (last < k + 2 * kUnitPairs) {
        lower[n] = _mm512_add_ps(lower[n], _mm512_setzero_ps());
        upper[n] = _mm512_add_ps(upper[n], _mm512_setzero_ps());
      }
      total[n] = _mm512_add_ps(total[n], _mm512_add_ps(lower[n], upper[n]));
    }
  }
#pragma GCC unroll 2
  for (int n = 0; n < NR; ++n) {
    const Columns columns(total[2 * n], total[2 * n + 1]);
    _mm512_storeu_ps(c + 32 * n, columns.first);
    _mm512_storeu_ps(c + 32 * n + 16, columns.last);
  }
}

template <class Beside>
inline void add_row_product(
    int64_t K, int64_t N, const float* x, const uint16_t* b, int64_t ld, float* c,
    const Beside& beside) {
  const NoSubnormals mode;
  const auto nothing = [](int64_t) {};
  int64_t n = 0;
  if (N >= 64) {
    add_row_product<2>(K, x, b, ld, c, beside);
    for (n = 64; n + 64 <= N; n += 64) add_row_product<2>(K, x, b + n, ld, c + n, nothing);
    if (n < N) add_row_product<1>(K, x, b + n, ld, c + n, nothing);
  } else if (N > 0) {
    add_row_product<1>(K, x, b, ld, c, beside);
  }
}

// Returns a register's 16 rows from `rows` on, of which `count` exist. The others hold arbitrary
// values, which only affect rows of C that are not kept.
inline PairRows missing_rows(PairRows rows, int64_t count, int64_t pairs, BFloat16Pair* buffer) {
  if (count == 1) return {rows.data, 0};
  for (int64_t r = 0; r < count; ++r)
    std::copy_n(rows.data + r * rows.ld, pairs, buffer + r * pairs);
  return {buffer, pairs};
}

// Copies `count` x `pairs` pairs to the first of `all` rows of `ld`; the others become 0.
inline PairRows padded_rows(
    PairRows rows, int64_t count, int64_t pairs, int64_t all, int64_t ld, BFloat16Pair* buffer) {
  std::fill_n(buffer, all * ld, BFloat16Pair{});
  for (int64_t r = 0; r < count; ++r) std::copy_n(rows.data + r * rows.ld, pairs, buffer + r * ld);
  return {buffer, ld};
}

// Whether the unit multiplies here; otherwise multiply_in_software does.
inline bool matrix_unit_works() {
  static const bool present = has_matrix_unit();
  return present && !matrix_unit_off.load(std::memory_order_relaxed);
}

// A block of C of `height` x NR registers.
template <int NR>
void any_block(int64_t height, const BlockOperands& from, float* c, int64_t ldc) {
  if (!matrix_unit_works()) return multiply_in_software(static_cast<int>(height), NR, from, c, ldc);
  MatrixUnit::take();
  if constexpr (NR <= 2)
    if (height == 2) return multiply_block<2, NR>(from, c, ldc);
  multiply_block<1, NR>(from, c, ldc);
}

// A block for which rows of A or C are missing, or pairs of A and B. It is computed in a copy,
// padded with zeros. Not inlined, so that whole blocks need no stack.
template <int NR>
[[gnu::noinline]] void partial_block(
    int64_t M, int64_t K, PairRows a, PairRows b, float* c, int64_t ldc, bool add) {
  constexpr int64_t ld = NR * kUnitColumns;
  alignas(64) BFloat16Pair rows[kUnitRows * kUnitDepth];
  alignas(64) BFloat16Pair tail_rows[2 * kUnitRows * kUnitPairs], tail_b[kUnitPairs * ld];
  alignas(64) float sums[2 * kUnitRows * 2 * kUnitColumns];
  const int64_t height = M > kUnitRows ? 2 : 1, tail = K % kUnitPairs, whole = K - tail;
  BlockOperands from{
      nullptr, ld, K / kUnitPairs, a, {a.data + kUnitRows * a.ld, a.ld}, PairTiles(b), {}, {}, {}};
  if (M % kUnitRows != 0 && whole > 0) {
    PairRows& last = height == 2 ? from.lower : from.upper;
    last = missing_rows(last, M % kUnitRows, whole, rows);
  }
  if (tail) {
    from.tail_upper =
        padded_rows({a.data + whole, a.ld}, M, tail, height * kUnitRows, kUnitPairs, tail_rows);
    from.tail_lower = {from.tail_upper.data + kUnitRows * kUnitPairs, kUnitPairs};
    from.tail_b =
        PairTiles(padded_rows({b.data + whole * b.ld, b.ld}, tail, ld, kUnitPairs, ld, tail_b));
  }
  if (add) {
    for (int64_t m = 0; m < M; ++m) std::copy_n(c + m * ldc, ld, sums + m * ld);
    from.start = sums;
  }
  any_block<NR>(height, from, sums, ld);
  for (int64_t m = 0; m < M; ++m) std::copy_n(sums + m * ld, ld, c + m * ldc);
}

// C = A B, or if `add`, C = C + A B, for a block of C of at most 32 rows and NR registers of
// columns. K <= kUnitDepth.
template <int NR>
inline void block_on_matrix_unit(
    int64_t M, int64_t K, PairRows a, PairRows b, float* c, int64_t ldc, bool add) {
  if (M % kUnitRows != 0 || K % kUnitPairs != 0) return partial_block<NR>(M, K, a, b, c, ldc, add);
  const BlockOperands from{
      add ? c : nullptr,
      ldc,
      K / kUnitPairs,
      a,
      {a.data + kUnitRows * a.ld, a.ld},
      PairTiles(b),
      {},
      {},
      {}};
  any_block<NR>(M / kUnitRows, from, c, ldc);
}

// C (M x 32) = A B, or if `add`, C = C + A B, for a B of 32 pairs along k. B's four registers are
// loaded once for all rows of A; multiply_block loads them for every 32 rows. M is a multiple
// of 16. The bits are those of multiply_block.
inline void multiply_32_columns(
    int64_t M, PairRows a, PairRows b, float* c, int64_t ldc, bool add) {
  // GCC 12's register loads do not declare that they read memory.
  asm volatile("" ::: "memory");
  constexpr int64_t kPair = sizeof(BFloat16Pair);
  const int64_t a_bytes = a.ld * kPair, b_bytes = b.ld * kPair;
  const int64_t c_bytes = ldc * int64_t{sizeof *c};
  const BFloat16Pair* lower = b.data + kUnitPairs * b.ld;
  _tile_loadd(4, b.data, b_bytes);
  _tile_loadd(5, b.data + kUnitColumns, b_bytes);
  _tile_loadd(6, lower, b_bytes);
  _tile_loadd(7, lower + kUnitColumns, b_bytes);
  for (int64_t m = 0; m < M; m += kUnitRows) {
    const BFloat16Pair* row = a.data + m * a.ld;
    float* target = c + m * ldc;
    _tile_loadd(2, row, a_bytes);
    _tile_loadd(3, row + kUnitPairs, a_bytes);
    if (add) {
      _tile_loadd(0, target, c_bytes);
      _tile_loadd(1, target + kUnitColumns, c_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    _tile_dpbf16ps(0, 2, 4);
    _tile_dpbf16ps(1, 2, 5);
    _tile_dpbf16ps(0, 3, 6);
    _tile_dpbf16ps(1, 3, 7);
    _tile_stored(0, target, c_bytes);
    _tile_stored(1, target + kUnitColumns, c_bytes);
  }
}

// C = A B, or if `add`, C = C + A B. C's and B's rows are padded to whole vectors.
inline void multiply_on_matrix_unit(
    int64_t M, int64_t N, int64_t K, PairRows a, PairRows b, float* c, int64_t ldc, bool add) {
  if (K == 2 * kUnitPairs && M > 2 * kUnitRows && M % kUnitRows == 0 &&
      N % (2 * kUnitColumns) == 0 && matrix_unit_works()) {
    MatrixUnit::take();
    for (int64_t n = 0; n < N; n += 2 * kUnitColumns)
      multiply_32_columns(M, a, {b.data + n, b.ld}, c + n, ldc, add);
    return;
  }
  for (int64_t k = 0; k < K; k += kUnitDepth, add = true) {
    const int64_t depth = std::min(K - k, kUnitDepth);
    const auto block = [&]<int NR>(int64_t m, int64_t rows, int64_t n) {
      block_on_matrix_unit<NR>(
          rows, depth, {a.data + m * a.ld + k, a.ld}, {b.data + k * b.ld + n, b.ld},
          c + m * ldc + n, ldc, add);
    };
    for (int64_t m = 0; m < M; m += 2 * kUnitRows) {
      const int64_t rows = std::min(M - m, 2 * kUnitRows);
      int64_t n = 0;
      if (rows <= kUnitRows)
        for (; n + 3 * kUnitColumns < N; n += 4 * kUnitColumns)
          block.template operator()<4>(m, rows, n);
      for (; n + kUnitColumns < N; n += 2 * kUnitColumns) block.template operator()<2>(m, rows, n);
      if (n < N) block.template operator()<1>(m, rows, n);
    }
  }
}

// Returns the offset of row k in a B of `ld` columns in tiles: tiles of 1 KB one after the other,
// with those of the same 16 pairs together. So B is read from front to back, and the hardware
// prefetches it. With rows of 64 columns, of which a register reads 64 bytes each, the hardware
// reads the L3 cache half as fast.
constexpr int64_t tiled_row(int64_t k, int64_t ld) {
  return k / kUnitPairs * kUnitPairs * ld + k % kUnitPairs * kUnitColumns;
}

// One block of multiply_tiled. Rows of C past M are computed in a copy. Not inlined, so that whole
// blocks need no stack.
template <int NR>
[[gnu::noinline]] void tiled_block_aside(int64_t M, BlockOperands from, float* c, int64_t ldc) {
  constexpr int64_t ld = NR * kUnitColumns;
  alignas(64) float sums[2 * kUnitRows * ld];
  if (from.start) {
    for (int64_t m = 0; m < M; ++m) std::copy_n(from.start + m * from.start_ld, ld, sums + m * ld);
    from.start = sums;
    from.start_ld = ld;
  }
  any_block<NR>((M + kUnitRows - 1) / kUnitRows, from, sums, ld);
  for (int64_t m = 0; m < M; ++m) std::copy_n(sums + m * ld, ld, c + m * ldc);
}

// C (M x N) = `start` + A (M x K) B, where the rows of `start` are start_ld apart (0: all rows are
// the same). If `start` is null, it counts as 0. `start` may be C. The bits are those of
// multiply_on_matrix_unit. B is in tiles of `b_ld` columns, of which N are multiplied, and is 0
// past row K. A has whole tiles too: its rows are 0 past K, and rows past M hold arbitrary values.
// N is a multiple of 16.
inline void multiply_tiled(
    int64_t M, int64_t N, int64_t K, PairRows a, const BFloat16Pair* b, int64_t b_ld,
    const float* start, int64_t start_ld, float* c, int64_t ldc) {
  constexpr int64_t kTileSize = kUnitPairs * kUnitColumns;
  // A few rows take all of k at once, so that their A stays in the L1 cache and B is read once.
  const int64_t block_depth = M <= kUnitRows ? round_up(K, kUnitPairs) : kUnitDepth;
  for (int64_t k = 0; k < K; k += block_depth, start = c, start_ld = ldc) {
    const int64_t steps = round_up(std::min(K - k, block_depth), kUnitPairs) / kUnitPairs;
    for (int64_t m = 0; m < M; m += 2 * kUnitRows) {
      const int64_t rows = std::min(M - m, 2 * kUnitRows);
      const auto block = [&]<int NR>(int64_t n) {
        float* target = c + m * ldc + n;
        // One row is repeated 16 times.
        const PairRows upper = {a.data + m * a.ld + k, M == 1 ? 0 : a.ld};
        const BlockOperands from{
            start ? start + m * start_ld + n : nullptr,
            start_ld,
            steps,
            upper,
            {upper.data + kUnitRows * a.ld, a.ld},
            {b + k * b_ld + n / kUnitColumns * kTileSize, kUnitColumns, kTileSize,
             kUnitPairs * b_ld},
            {},
            {},
            {}};
        if (rows % kUnitRows == 0) any_block<NR>(rows / kUnitRows, from, target, ldc);
        else tiled_block_aside<NR>(rows, from, target, ldc);
      };
      int64_t n = 0;
      if (rows <= kUnitRows) {
        for (; n + 3 * kUnitColumns < N; n += 4 * kUnitColumns) block.template operator()<4>(n);
        if (n + 2 * kUnitColumns < N) {
          block.template operator()<3>(n);
          continue;
        }
      }
      for (; n + kUnitColumns < N; n += 2 * kUnitColumns) block.template operator()<2>(n);
      if (n < N) block.template operator()<1>(n);
    }
  }
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
