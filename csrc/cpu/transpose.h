// Transposed copies of matrices of 32-bit and 64-bit elements, by squares of a vector's size.

#pragma once

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>

namespace trifuse::TRIFUSE_CAPABILITY {

using at::vec::Vectorized;

constexpr int64_t kTile = 64;  // queries of a tile, and keys

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
// A vector consists of lanes of 128 bits. These functions treat each of them separately.
#ifdef CPU_CAPABILITY_AVX512
// Loads 4 numbers of each of 4 rows, `at` numbers from these places on.
inline __m512 load_rows(const float* const (&row)[4], int64_t at) {
  __m512 loaded = _mm512_castps128_ps512(_mm_loadu_ps(row[0] + at));
  loaded = _mm512_insertf32x4(loaded, _mm_loadu_ps(row[1] + at), 1);
  loaded = _mm512_insertf32x4(loaded, _mm_loadu_ps(row[2] + at), 2);
  return _mm512_insertf32x4(loaded, _mm_loadu_ps(row[3] + at), 3);
}
inline __m512 interleave_low(__m512 a, __m512 b) { return _mm512_unpacklo_ps(a, b); }
inline __m512 interleave_high(__m512 a, __m512 b) { return _mm512_unpackhi_ps(a, b); }
inline __m512 join_low(__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0x44); }
inline __m512 join_high(__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0xee); }
#else
// Loads 4 numbers of each of 2 rows, `at` numbers from these places on.
inline __m256 load_rows(const float* const (&row)[2], int64_t at) {
  const __m256 loaded = _mm256_castps128_ps256(_mm_loadu_ps(row[0] + at));
  return _mm256_insertf128_ps(loaded, _mm_loadu_ps(row[1] + at), 1);
}
inline __m256 interleave_low(__m256 a, __m256 b) { return _mm256_unpacklo_ps(a, b); }
inline __m256 interleave_high(__m256 a, __m256 b) { return _mm256_unpackhi_ps(a, b); }
inline __m256 join_low(__m256 a, __m256 b) { return _mm256_shuffle_ps(a, b, 0x44); }
inline __m256 join_high(__m256 a, __m256 b) { return _mm256_shuffle_ps(a, b, 0xee); }
#endif

// A vector's size of rows, of which every fourth has its address in a register. There are too few
// registers for the address of each.
struct TransposedRows {
  static constexpr int64_t size = Vectorized<float>::size();
  const float* fourth[size / 4];
  int64_t ld;

  TRIFUSE_INLINE TransposedRows(const float* first, int64_t ld) : ld(ld) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < size / 4; ++r) {
      fourth[r] = first + 4 * r * ld;
      asm("" : "+r"(fourth[r]));
    }
  }

  // Calls use(i, column c + i) for 4 columns, whose vectors run along the rows. They are transposed
  // in squares of 4: the numbers of rows r to r + 3 lie in the same 128 bits of four vectors. Loads
  // put them there, which saves half the shuffles of a transposition that loads whole rows.
  template <class Use>
  TRIFUSE_INLINE void for_columns(int64_t c, const Use& use) const {
    const auto row0 = load_rows(fourth, c), row1 = load_rows(fourth, c + ld),
               row2 = load_rows(fourth, c + 2 * ld), row3 = load_rows(fourth, c + 3 * ld);
    const auto low01 = interleave_low(row0, row1), high01 = interleave_high(row0, row1);
    const auto low23 = interleave_low(row2, row3), high23 = interleave_high(row2, row3);
    use(0, join_low(low01, low23));
    use(1, join_high(low01, low23));
    use(2, join_low(high01, high23));
    use(3, join_high(high01, high23));
  }
};

// target[c][r] = source[r][c] for a vector's size of rows, and as many columns or fewer.
template <int64_t columns = Vectorized<float>::size()>
inline void transpose_square(const float* source, int64_t ld, float* target, int64_t target_ld) {
  static_assert(columns % 4 == 0 && columns <= TransposedRows::size);
  const TransposedRows rows(source, ld);
#pragma GCC unroll 4
  for (int64_t c = 0; c < columns; c += 4)
    rows.for_columns(c, [&](int64_t i, Vectorized<float> column) TRIFUSE_INLINE {
      column.store(target + (c + i) * target_ld);
    });
}
#else
// Flattened, because the compiler otherwise leaves ATen's functions as calls, whose sizes are not
// constants.
[[gnu::flatten]] inline void transpose_square(
    const float* source, int64_t ld, float* target, int64_t target_ld) {
  constexpr int64_t size = Vectorized<float>::size();
  at::vec::transpose_mxn<float, size, size>(source, ld, target, target_ld);
}
#endif
// ATen has no such function for doubles. Consider an element's row and column as one binary number.
// Interleaving rows i and i + size / 2 rotates this number by one digit, and log2(size) rotations
// swap row and column.
[[gnu::flatten]] inline void transpose_square(
    const double* source, int64_t ld, double* target, int64_t target_ld) {
  using Vec = Vectorized<double>;
  constexpr int64_t size = Vec::size(), half = size / 2;
  Vec rows[size], rotated[size];
#pragma GCC unroll 8
  for (int64_t r = 0; r < size; ++r) rows[r] = Vec::loadu(source + r * ld);
#pragma GCC unroll 3
  for (int64_t rotations = 1; rotations < size; rotations *= 2) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < half; ++r)
      std::tie(rotated[2 * r], rotated[2 * r + 1]) = at::vec::interleave2(rows[r], rows[r + half]);
#pragma GCC unroll 8
    for (int64_t r = 0; r < size; ++r) rows[r] = rotated[r];
  }
#pragma GCC unroll 8
  for (int64_t r = 0; r < size; ++r) rows[r].store(target + r * target_ld);
}

// The type as which transpose_square moves elements of 32 or 64 bits. E's alignment suffices,
// because only whole vectors are accessed, with unaligned instructions.
template <class E>
using Moved = std::conditional_t<sizeof(E) == sizeof(float), float, double>;

// target[c * target_ld + r] = source[r * ld + c].
template <class E>
inline void transpose(
    const E* source, int64_t ld, int64_t rows, int64_t columns, E* target, int64_t target_ld) {
  const auto* from = reinterpret_cast<const Moved<E>*>(source);
  auto* to = reinterpret_cast<Moved<E>*>(target);
  constexpr int64_t block = Vectorized<Moved<E>>::size();
  int64_t r = 0;
  for (; r + block <= rows; r += block) {
    int64_t c = 0;
    for (; c + block <= columns; c += block)
      transpose_square(from + r * ld + c, ld, to + c * target_ld + r, target_ld);
    for (; c < columns; ++c)
      for (int64_t k = r; k < r + block; ++k) target[c * target_ld + k] = source[k * ld + c];
  }
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t k = r; k < rows; ++k) target[c * target_ld + k] = source[k * ld + c];
}

// As transpose, with a target of kTile columns, zeros past `rows`.
template <class E>
inline void transpose_tile(const E* source, int64_t ld, int64_t rows, int64_t columns, E* target) {
  transpose(source, ld, rows, columns, target, kTile);
  if (rows < kTile) {
    for (int64_t c = 0; c < columns; ++c) std::fill_n(target + c * kTile + rows, kTile - rows, E{});
  }
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
