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

// target[c][r] = source[r][c] for a square of a vector's size. Flattened, because the compiler
// leaves ATen's functions as calls, whose sizes are not constants and whose registers are an array.
[[gnu::flatten]] inline void transpose_square(
    const float* source, int64_t ld, float* target, int64_t target_ld) {
  constexpr int64_t size = Vectorized<float>::size();
  at::vec::transpose_mxn<float, size, size>(source, ld, target, target_ld);
}
// ATen has no such function for doubles. Take an element's row and column as one binary number:
// interleaving rows i and i + size / 2 rotates it by a digit; log2(size) rotations swap row and
// column.
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

// The type as which transpose_square moves elements of 32 or 64 bits. E's alignment suffices: only
// whole vectors are accessed, unaligned.
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
