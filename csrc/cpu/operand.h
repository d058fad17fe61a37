// Rows of a tensor as operands of tile_gemm.
//
// A tensor's rows reach the product in one of three ways. left_rows and right_rows copy them only
// if their type, strides or padding require it:
//
//   left_rows          A: rows as they are, k along the columns
//   right_transposed   B: k along the columns, one column of B per row
//   right_rows         B: k along the rows
//
// With an element type of pairs (tile_gemm.h) two neighbouring values of k share an element; a
// missing partner is 0.

#pragma once

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "cpu/row.h"
#include "cpu/scratch.h"
#include "cpu/tile_gemm.h"
#include "cpu/transpose.h"
#include "cpu/vector.h"
#include "dtype.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// The element type in which a tensor's type is computed.
template <class Scalar>
struct Compute {
  using Element = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;
};
#ifdef __AVX512BF16__
template <>
struct Compute<c10::BFloat16> {
  using Element = BFloat16Pair;
};
#endif

// Calls f.template operator()<Scalar>() for a problem's type. Instruction sets with bfloat16
// products are compiled only for bfloat16 (capability.h).
template <class F>
auto for_type([[maybe_unused]] DType dtype, const F& f) {
#ifdef __AVX512BF16__
  return f.template operator()<c10::BFloat16>();
#else
  switch (dtype) {
    case DType::BFloat16: return f.template operator()<c10::BFloat16>();
    case DType::Float16: return f.template operator()<c10::Half>();
    case DType::Float64: return f.template operator()<double>();
    default: return f.template operator()<float>();
  }
#endif
}

template <class E>
constexpr int64_t kPack = std::is_same_v<E, BFloat16Pair> ? 2 : 1;  // values of k in an element

// True if the matrix unit computes the products (matrix_unit.h).
#ifdef __AMX_BF16__
template <class E>
constexpr bool kUsesMatrixUnit = kPack<E> == 2;
#else
template <class E>
constexpr bool kUsesMatrixUnit = false;
#endif

// Rows of a strided matrix: value (r, c) is at data + r * row_stride + c * column_stride.
template <class Scalar>
struct Rows {
  const Scalar* data;
  int64_t row_stride, column_stride;
  const Scalar* row(int64_t r) const { return data + r * row_stride; }
};

// Prefetches part of a line of each of `count` rows into the L2 cache. Call it between other work,
// for a few lines at a time, because prefetches in a burst, or into the L1 cache, hinder other
// loads. Always inlined, because GCC drops calls of functions that only prefetch.
template <int count, class Scalar>
TRIFUSE_INLINE inline void prefetch_rows(
    Rows<Scalar> rows, int64_t first, int64_t column) {
  const Scalar* row = rows.row(first) + column * rows.column_stride;
#pragma GCC unroll 16
  for (int i = 0; i < count; ++i) __builtin_prefetch(row + i * rows.row_stride, 0, 2);
}

// Conversion --------------------------------------------------------------------------------------

template <class Scalar, class T>
inline void widen(const Scalar* source, int64_t stride, int64_t n, T* target) {
  int64_t i = 0;
  if constexpr (kReduced<Scalar>) {
    if (stride == 1) {
      for (; i + Vectorized<Scalar>::size() <= n; i += Vectorized<Scalar>::size()) {
        const auto [low, high] =
            at::vec::convert_to_float<Scalar>(Vectorized<Scalar>::loadu(source + i));
        low.store(target + i);
        high.store(target + i + Vectorized<float>::size());
      }
    }
  }
  for (; i < n; ++i) target[i] = static_cast<T>(source[i * stride]);
}

template <class T, class Scalar>
inline void narrow(const T* source, int64_t n, Scalar* target, int64_t stride) {
  int64_t i = 0;
  if constexpr (kReduced<Scalar>) {
    if (stride == 1) {
      for (; i + Vectorized<Scalar>::size() <= n; i += Vectorized<Scalar>::size()) {
        rounded_to<Scalar>(
            Vectorized<float>::loadu(source + i),
            Vectorized<float>::loadu(source + i + Vectorized<float>::size()))
            .store(target + i);
      }
    }
  }
  for (; i < n; ++i) target[i * stride] = rounded_to<Scalar>(source[i]);
}

// Returns the inner product of two contiguous rows.
template <class T, class Scalar>
inline T dot(const Scalar* x, const Scalar* y, int64_t n) {
  using Vec = Vectorized<T>;
  Vec sum(T(0)), rest(T(0));
  int64_t i = 0;
  for (; i + Vectorized<Scalar>::size() <= n; i += Vectorized<Scalar>::size()) {
    const auto a = Vectorized<Scalar>::loadu(x + i), b = Vectorized<Scalar>::loadu(y + i);
    if constexpr (kReduced<Scalar>) {
      const auto [a0, a1] = at::vec::convert_to_float<Scalar>(a);
      const auto [b0, b1] = at::vec::convert_to_float<Scalar>(b);
      sum = at::vec::fmadd(a0, b0, sum);
      rest = at::vec::fmadd(a1, b1, rest);
    } else {
      sum = at::vec::fmadd(a, b, sum);
    }
  }
  T total = at::vec::vec_reduce_all([](Vec& a, Vec& b) { return a + b; }, sum + rest);
  for (; i < n; ++i) total += static_cast<T>(x[i]) * static_cast<T>(y[i]);
  return total;
}

// Returns whether rows [0, n) hold no NaN or Inf: x - x is 0 only for a finite x.
template <class Scalar>
inline bool all_finite(Rows<Scalar> rows, int64_t n, int64_t columns) {
  using T = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;
  auto sum = Strip<T>::full(0);
  for (int64_t r = 0; r < n; ++r) {
    const Scalar* row = rows.row(r);
    if (rows.column_stride == 1) {
      for_strips(columns, [&](int64_t c, auto count) TRIFUSE_INLINE {
        const auto x = Strip<T>::load(row + c, count);
        sum = sum + (x - x);
      });
    } else {
      for (int64_t c = 0; c < columns; ++c)
        if (!std::isfinite(static_cast<double>(row[c * rows.column_stride]))) return false;
    }
  }
  return sum.total() == 0;
}

// Operands ----------------------------------------------------------------------------------------

template <class E>
struct Operand {
  const E* data;
  int64_t ld;
};

// Number of elements that hold `columns` values along k.
template <class E>
constexpr int64_t elements(int64_t columns) {
  return (columns + kPack<E> - 1) / kPack<E>;
}

// Number of elements of `buffer` that left_rows may need.
template <class E>
constexpr int64_t left_rows_size(int64_t rows, int64_t columns) {
  return rows * elements<E>(columns);
}

// Returns n rows as A, read in place or copied to `buffer`. `factor`, 1 or the sign of a scale,
// multiplies every value.
template <class E, class Scalar>
inline Operand<E> left_rows(
    Rows<Scalar> rows, int64_t n, int64_t columns, E* buffer, float factor = 1.0f) {
  constexpr bool same = std::is_same_v<Scalar, E>;
  constexpr bool pairs = kPack<E> == 2;
  if (factor == 1.0f && rows.column_stride == 1) {
    if constexpr (same) return {rows.data, rows.row_stride};
    if constexpr (pairs) {
      // Pairs are read in place, unless one straddles two rows.
      if (columns % 2 == 0 && rows.row_stride % 2 == 0)
        return {reinterpret_cast<const E*>(rows.data), rows.row_stride / 2};
    }
  }
  const int64_t ld = elements<E>(columns);
  for (int64_t r = 0; r < n; ++r) {
    if constexpr (pairs) {
      auto* target = reinterpret_cast<c10::BFloat16*>(buffer + r * ld);
      for (int64_t c = 0; c < columns; ++c) {
        const c10::BFloat16 x = rows.row(r)[c * rows.column_stride];
        target[c] = factor == 1.0f ? x : c10::BFloat16(static_cast<float>(x) * factor);
      }
      if (columns % 2) target[columns] = c10::BFloat16(0.0f);
    } else {
      widen(rows.row(r), rows.column_stride, columns, buffer + r * ld);
      if (factor != 1.0f)
        for (int64_t c = 0; c < columns; ++c) buffer[r * ld + c] *= factor;
    }
  }
  return {buffer, ld};
}

template <class E>
constexpr int64_t right_transposed_size(int64_t columns) {
  return elements<E>(columns) * kTile;
}

// Transposes at most kTile rows into B, whose rows hold kTile elements, zeros past row n.
template <class E, class Scalar>
inline void right_transposed(
    Rows<Scalar> rows, int64_t n, int64_t columns, float factor, E* left_buffer, E* target) {
  const Operand<E> left = left_rows<E>(rows, n, columns, left_buffer, factor);
  transpose_tile(left.data, left.ld, n, elements<E>(columns), target);
}

// Length of B's rows: a whole number of vectors.
template <class E>
constexpr int64_t padded(int64_t columns) {
  return round_up(columns, Vectorized<AccumulatorOf<E>>::size());
}

template <class E>
constexpr int64_t right_rows_size(int64_t rows, int64_t columns) {
  return elements<E>(rows) * padded<E>(columns);
}

// Copies rows to B, whose rows hold `ld` elements, with zeros past the last column. With
// `zero_nonfinite`, a NaN or Inf becomes 0, and the caller must set the results that it reaches.
template <class E, class Scalar>
inline void copy_right_rows(
    Rows<Scalar> rows, int64_t n, int64_t columns, int64_t ld, E* buffer,
    bool zero_nonfinite = false) {
  const auto value = [&](int64_t r, int64_t c) {
    const Scalar x = rows.row(r)[c * rows.column_stride];
    return zero_nonfinite && !std::isfinite(static_cast<double>(x)) ? Scalar(0) : x;
  };
  if constexpr (kPack<E> == 2) {
    for (int64_t r = 0; r < n; r += 2) {
      auto* target = reinterpret_cast<c10::BFloat16*>(buffer + r / 2 * ld);
      int64_t c = 0;
#ifdef __AVX512BF16__
      if (!zero_nonfinite && rows.column_stride == 1) {
        // 32 columns of two rows, interleaved in 16-bit steps.
        const __m512i low = _mm512_set_epi16(
            47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
            4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        for (; c + 32 <= columns; c += 32) {
          const __m512i x = _mm512_loadu_si512(rows.row(r) + c);
          const __m512i y =
              r + 1 < n ? _mm512_loadu_si512(rows.row(r + 1) + c) : _mm512_setzero_si512();
          _mm512_storeu_si512(target + 2 * c, _mm512_permutex2var_epi16(x, low, y));
          _mm512_storeu_si512(target + 2 * c + 32, _mm512_permutex2var_epi16(x, high, y));
        }
      }
#endif
      for (; c < columns; ++c) {
        target[2 * c] = value(r, c);
        target[2 * c + 1] = r + 1 < n ? value(r + 1, c) : Scalar(0);
      }
      std::fill(target + 2 * columns, target + 2 * ld, Scalar(0));
    }
  } else {
    for (int64_t r = 0; r < n; ++r) {
      widen(rows.row(r), rows.column_stride, columns, buffer + r * ld);
      std::fill(buffer + r * ld + columns, buffer + (r + 1) * ld, E(0));
      if (zero_nonfinite)
        for (int64_t c = 0; c < columns; ++c) buffer[r * ld + c] = static_cast<E>(value(r, c));
    }
  }
}

template <class E, class Scalar>
inline Operand<E> right_rows(
    Rows<Scalar> rows, int64_t n, int64_t columns, E* buffer, bool zero_nonfinite = false) {
  const int64_t ld = padded<E>(columns);
  if constexpr (std::is_same_v<Scalar, E>) {
    if (!zero_nonfinite && rows.column_stride == 1 && ld == columns)
      return {rows.data, rows.row_stride};
  }
  copy_right_rows(rows, n, columns, ld, buffer, zero_nonfinite);
  return {buffer, ld};
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
