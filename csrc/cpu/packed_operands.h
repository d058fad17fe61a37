// Operands of a product too large for a cache, C (M x N) = A (M x K) B (K x N): packs B into panels
// and prepares blocks of A for tile_gemm. The loops over them are the caller's.
//
// B is packed into panels of 64 columns, one after the other, and a panel into blocks of
// kBlockDepth rows (32 KB, in float64 64 KB), in the order of k. A block stays in the caches
// together with its parts of A and C, and is used for as many rows of A as a caller has ready. It
// holds strips of columns, as wide as tile_gemm's register block. With few rows of A, the time is
// that of reading B, and the hardware prefetches data that is read from front to back. With AVX-512
// the strip is the panel, in float64 half of it.
//
//   panel, K = 256, AVX2 in float32:   strips of 16 columns
//
//     k   0 .. 127   | 0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63 |   one block: 4 strips (128, 16)
//     k 128 .. 255   | 0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63 |
//
// Each element of C is the sum, block by block of k, of chains of kBlockDepth multiply-adds. It
// does not depend on how the product is cut into tasks, or on the number of threads.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/operand.h"

namespace trifuse::TRIFUSE_CAPABILITY {

template <class E>
constexpr int64_t kBlockDepth = 128 * kPack<E>;  // values of k in a block

// Columns of a strip. Strip s of a block of `depth` rows begins at element s * kStripWidth * depth.
template <class E>
constexpr int64_t kStripWidth =
    std::min<int64_t>(kTile, kRegisterVectors* Vectorized<AccumulatorOf<E>>::size());

// Number of elements of one packed panel.
template <class E>
constexpr int64_t panel_size(int64_t K) {
  return elements<E>(K) * kTile;
}

// Packs blocks of B, whose element (k, n) is at b + k * b_k + n * b_n. A Packer needs `bytes` of
// memory.
template <class E>
class Packer {
 public:
  static int64_t bytes() { return Scratch::bytes<E>(kBuffer) + Scratch::bytes<E>(kRows); }

  explicit Packer(Scratch& scratch)
      : buffer_(scratch.take<E>(kBuffer)), rows_(scratch.take<E>(kRows)) {}

  // Packs at most kBlockDepth rows of at most 64 columns.
  template <class Scalar>
  void block(
      const Scalar* b, int64_t b_k, int64_t b_n, int64_t depth, int64_t columns, E* target) const {
    E* whole = kInStrips ? rows_ : target;  // (depth, 64)
    if (b_k == 1) {
      right_transposed<E>(Rows<Scalar>{b, b_n, 1}, columns, depth, 1.0f, buffer_, whole);
    } else {
      copy_right_rows<E>(Rows<Scalar>{b, b_k, b_n}, depth, columns, kTile, whole);
    }
    if constexpr (kInStrips)
      for (int64_t n = 0; n < kTile; n += kStripWidth<E>)
        for (int64_t r = 0; r < elements<E>(depth); ++r, target += kStripWidth<E>)
          std::copy_n(rows_ + r * kTile + n, kStripWidth<E>, target);
  }

  // Packs all K rows of at most 64 columns.
  template <class Scalar>
  void panel(
      const Scalar* b, int64_t b_k, int64_t b_n, int64_t K, int64_t columns, E* target) const {
    for (int64_t k = 0; k < K; k += kBlockDepth<E>)
      block(
          b + k * b_k, b_k, b_n, std::min(K - k, kBlockDepth<E>), columns,
          target + panel_size<E>(k));
  }

 private:
  static constexpr bool kInStrips = kStripWidth<E> < kTile;
  static constexpr int64_t kBuffer = left_rows_size<E>(kTile, kBlockDepth<E>),
                           kRows = kInStrips ? panel_size<E>(kBlockDepth<E>) : 0;
  E *buffer_, *rows_;
};

// The inverse of Packer::panel: writes the panel's columns of B as contiguous rows of K numbers.
template <class E, class Scalar>
void unpack_panel(const E* panel, int64_t K, int64_t columns, Scalar* rows) {
  using Stored = std::conditional_t<kPack<E> == 2, Scalar, E>;
  for (int64_t k0 = 0; k0 < K; k0 += kBlockDepth<E>) {
    const int64_t depth = std::min(K - k0, kBlockDepth<E>);
    for (int64_t n = 0; n < columns; ++n) {
      const E* strip =
          panel + panel_size<E>(k0) + n / kStripWidth<E> * kStripWidth<E> * elements<E>(depth);
      const auto* element = reinterpret_cast<const Stored*>(strip + n % kStripWidth<E>);
      for (int64_t k = 0; k < depth; ++k)
        rows[n * K + k0 + k] =
            static_cast<Scalar>(element[k / kPack<E> * kStripWidth<E> * kPack<E> + k % kPack<E>]);
    }
  }
}

// Returns the number of elements of left_block's buffer: the rows and, if columns are converted
// first, 64 of these.
template <class E, class Scalar>
constexpr int64_t left_block_size(int64_t rows, int64_t a_m) {
  const bool converts = a_m == 1 && !std::is_same_v<E, Scalar>;
  return left_rows_size<E>(rows, kBlockDepth<E>) + (converts ? panel_size<E>(kBlockDepth<E>) : 0);
}

// Prepares a block of A, whose element (m, k) is at a + m * a_m + k * a_k. Rows are read in place
// if possible. If A is stored by columns, it is transposed. Otherwise a register block would use
// only a few numbers of each cache line of a column, and the lines of all columns do not fit in the
// L1 cache together with B.
template <class E, class Scalar>
Operand<E> left_block(
    const Scalar* a, int64_t a_m, int64_t a_k, int64_t rows, int64_t depth, E* buffer) {
  if (a_m != 1 || a_k == 1) return left_rows<E>(Rows<Scalar>{a, a_m, a_k}, rows, depth, buffer);
  const int64_t ld = elements<E>(kBlockDepth<E>);
  [[maybe_unused]] E* const columns = buffer + rows * ld;
  for (int64_t m = 0; m < rows; m += kTile) {
    const int64_t count = std::min(rows - m, kTile);
    E* const target = buffer + m * ld;
    if constexpr (std::is_same_v<E, Scalar>) {
      transpose(a + m, a_k, depth, count, target, ld);
    } else {
      copy_right_rows<E>(Rows<Scalar>{a + m, a_k, 1}, depth, count, kTile, columns);
      transpose(columns, kTile, elements<E>(depth), count, target, ld);
    }
  }
  return {buffer, ld};
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
