// The matrix product that all CPU kernels use: C (M x N) = A (M x K) B (K x N) on tiles in the L1
// and L2 caches.
//
// Vectors run along N: for every k, a few vectors of B's row k are multiplied by single elements of
// A, which are broadcast. So A may have any strides, and as long as it lies in the L1 cache, a
// transposed A costs nothing. But if A holds pairs, one of its strides must be 1:
//
//   A(m, k) at a + m * a_m + k * a_k     B(k, n) at b + k * ldb + n     C(m, n) at c + m * ldc + n
//
// C's rows hold a whole number of vectors (`padded`), and so do B's; columns past N may hold
// garbage, in B and in C. Each element of C is one chain of fused multiply-adds over k in order,
// for any M, N and blocking, so a result does not depend on its neighbours.
//
// Floor: M N K / (lanes x FMA pipes) cycles. A register block of MR x NR vectors needs NR loads of
// B and MR broadcasts of A for MR NR multiply-adds; with the sizes below both pipes stay busy.

#pragma once

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/bfloat16_pair.h"
#include "cpu/capability.h"
#ifdef __AMX_BF16__
#include "cpu/matrix_unit.h"
#endif

namespace trifuse::TRIFUSE_CAPABILITY {

using at::vec::Vectorized;

template <class E>
struct Element {  // float, double
  using Accumulator = E;
  using Vector = Vectorized<E>;
  static Vector load(const E* p) { return Vector::loadu(p); }
  static Vector broadcast(const E* p) { return Vector(*p); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return at::vec::fmadd(a, b, c); }
};

#ifdef __AVX512BF16__
template <>
struct Element<BFloat16Pair> {
  using Accumulator = float;
  using Vector = __m512bh;
  static Vector load(const BFloat16Pair* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Vector broadcast(const BFloat16Pair* p) {
    int bits;
    std::memcpy(&bits, p, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
  }
  static Vectorized<float> multiply_add(Vector a, Vector b, Vectorized<float> c) {
    return _mm512_dpbf16_ps(c, a, b);
  }
};
#endif

template <class E>
using AccumulatorOf = typename Element<E>::Accumulator;

// The register block: as many accumulators as fit in the registers beside a row of B.
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRegisterRows = 6, kRegisterVectors = 4;  // 24 of 32 registers
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int kRegisterRows = 6, kRegisterVectors = 2;  // 12 of 16
#else
constexpr int kRegisterRows = 2, kRegisterVectors = 2;  // a portable vector is two of the machine's
#endif

// Whether the product is added to C.
template <class T>
struct Accumulate {
  bool enabled = false;      // otherwise it overwrites C
  const T* scale = nullptr;  // if enabled: row m of C is first multiplied by scale[m]
  const T* start = nullptr;  // if enabled: added to every row in place of C's contents; the matrix
                             // unit's products have parameters for that (multiply_tiled)
};

// Called for every k of a register block, to prefetch data that is read later. next_block() is
// called after each register block of K terms.
struct FetchNothing {
  void operator()(int64_t) const {}
  void next_block(int64_t) const {}
};

// Prefetches memory from `next` on into the L2 cache, a number of cache lines for every k. Into the
// L1 cache fewer lines can be on their way from memory at a time.
struct FetchAhead {
  const char* next;
  int64_t lines;

  TRIFUSE_INLINE void operator()(int64_t k) const {
    for (int64_t line = k * lines; line < (k + 1) * lines; ++line)
      __builtin_prefetch(next + line * 64, 0, 2);
  }
  void next_block(int64_t K) { next += K * lines * 64; }
};

#ifdef __AVX512BF16__

// The values of a block of A, at most 8 rows of pairs, as float: all upper values, then all lower
// ones. They are stored by rows or by columns, like the pairs.
struct SplitPairs {
  static constexpr int64_t kDepth = 128, kRows = 8;
  alignas(64) float upper[kRows * kDepth], lower[kRows * kDepth];

  // Reads `lines` of `length` pairs each, from_ld apart; the lines of values are ld apart.
  void read(const BFloat16Pair* from, int64_t from_ld, int64_t lines, int64_t length, int64_t ld) {
    for (int64_t l = 0; l < lines; ++l)
      for (int64_t i = 0; i < length; i += 16) {
        const auto some = static_cast<__mmask16>((1u << std::min<int64_t>(length - i, 16)) - 1);
        const __m512i pairs = _mm512_maskz_loadu_epi32(some, from + l * from_ld + i);
        _mm512_mask_storeu_ps(upper + l * ld + i, some, upper_values(pairs));
        _mm512_mask_storeu_ps(lower + l * ld + i, some, lower_values(pairs));
      }
  }
};

#endif

// C (MR x NR vectors), with the instruction for E's products; or, if `split`, with two
// multiply-adds for a pair: first the upper values, then the lower ones, which gives the bits of
// the dot product.
template <int MR, int NR, bool split, class E, class Fetch>
void register_block_of(
    int64_t K, const E* a, int64_t a_m, int64_t a_k, const E* b, int64_t ldb, AccumulatorOf<E>* c,
    int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate, Fetch fetch) {
  using T = AccumulatorOf<E>;
  using Vec = Vectorized<T>;
  Vec sum[MR][NR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) sum[m][n] = Vec(T(0));
  // Adds the products of a column of A, whose elements are a_m apart, and a row of B.
  const auto add = []<class Factor>(
                       Vec(&sum)[MR][NR], const Factor* column, int64_t a_m,
                       const typename Element<Factor>::Vector* row) TRIFUSE_INLINE {
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const auto x = Element<Factor>::broadcast(column + m * a_m);
#pragma GCC unroll 8
      for (int n = 0; n < NR; ++n) sum[m][n] = Element<Factor>::multiply_add(x, row[n], sum[m][n]);
    }
  };
  if constexpr (split) {
#ifdef __AVX512BF16__
    static_assert(MR <= SplitPairs::kRows);
    const NoSubnormals mode;
    SplitPairs left;
    const auto multiply = [&]<int64_t left_m, int64_t left_k>(
                              int64_t first, int64_t depth) TRIFUSE_INLINE {
      // A copy that no other code reads stays in registers, whereas `sum` would be stored for every
      // k.
      Vec part[MR][NR];
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) part[m][n] = sum[m][n];
      for (int64_t k = 0; k < depth; ++k) {
        fetch(first + k);
        const E* pairs = b + (first + k) * ldb;
        Vec row[NR];
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n)
          row[n] = upper_values(_mm512_loadu_si512(pairs + n * Vec::size()));
        add(part, left.upper + k * left_k, left_m, row);
        // B's pairs are loaded twice, because there are no registers to keep them.
        asm("" : "+r"(pairs));
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n)
          row[n] = lower_values(_mm512_loadu_si512(pairs + n * Vec::size()));
        add(part, left.lower + k * left_k, left_m, row);
      }
#pragma GCC unroll 8
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < NR; ++n) sum[m][n] = part[m][n];
    };
    for (int64_t first = 0; first < K; first += SplitPairs::kDepth) {
      const int64_t depth = std::min(K - first, SplitPairs::kDepth);
      if (a_m == 1) {
        left.read(a + first * a_k, a_k, depth, MR, SplitPairs::kRows);
        multiply.template operator()<1, SplitPairs::kRows>(first, depth);
      } else {
        left.read(a + first, a_m, MR, depth, SplitPairs::kDepth);
        multiply.template operator()<SplitPairs::kDepth, 1>(first, depth);
      }
    }
#endif
  } else {
    for (int64_t k = 0; k < K; ++k) {
      fetch(k);
      typename Element<E>::Vector row[NR];
#pragma GCC unroll 8
      for (int n = 0; n < NR; ++n) row[n] = Element<E>::load(b + k * ldb + n * Vec::size());
      add(sum, a + k * a_k, a_m, row);
    }
  }
  // C's former contents are added last, so that a sum over many tiles has the error of a sum of
  // sums, not of one chain.
  if (accumulate.enabled) {
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const Vec scale(accumulate.scale ? accumulate.scale[m] : T(1));
#pragma GCC unroll 8
      for (int n = 0; n < NR; ++n)
        sum[m][n] = at::vec::fmadd(
            Vec::loadu((accumulate.start ? accumulate.start : c + m * ldc) + n * Vec::size()),
            scale, sum[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) sum[m][n].store(c + m * ldc + n * Vec::size());
}

// C (MR x NR vectors), in the form that suits the CPU.
template <int MR, int NR, class E, class Fetch = FetchNothing>
void register_block(
    int64_t K, const E* a, int64_t a_m, int64_t a_k, const E* b, int64_t ldb, AccumulatorOf<E>* c,
    int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate, Fetch fetch = {}) {
#ifdef __AVX512BF16__
  // For 1 or 2 rows, splitting A and B takes as much time as it saves.
  if constexpr (std::is_same_v<E, BFloat16Pair> && MR > 2)
    if (splits_pairs.load(std::memory_order_relaxed))
      return register_block_of<MR, NR, true>(K, a, a_m, a_k, b, ldb, c, ldc, accumulate, fetch);
#endif
  register_block_of<MR, NR, false>(K, a, a_m, a_k, b, ldb, c, ldc, accumulate, fetch);
}

// All rows of A by NR vectors of columns of B; the last rows in a smaller register block.
template <int NR, class E, class Fetch>
void column_block(
    int64_t M, int64_t K, const E* a, int64_t a_m, int64_t a_k, const E* b, int64_t ldb,
    AccumulatorOf<E>* c, int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate, Fetch& fetch) {
  int64_t m = 0;
  auto block = [&]<int MR>() {
    register_block<MR, NR>(K, a + m * a_m, a_m, a_k, b, ldb, c + m * ldc, ldc, accumulate, fetch);
    fetch.next_block(K);
    if (accumulate.scale) accumulate.scale += MR;
    m += MR;
  };
  while (m + kRegisterRows <= M) block.template operator()<kRegisterRows>();
  if constexpr (kRegisterRows > 4)
    if (m + 4 <= M) block.template operator()<4>();
  if constexpr (kRegisterRows > 2)
    if (m + 2 <= M) block.template operator()<2>();
  if (m < M) block.template operator()<1>();
}

template <class E, class Fetch = FetchNothing>
void tile_gemm(
    int64_t M, int64_t N, int64_t K, const E* a, int64_t a_m, int64_t a_k, const E* b, int64_t ldb,
    AccumulatorOf<E>* c, int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate = {},
    Fetch fetch = {}) {
  constexpr int64_t lanes = Vectorized<AccumulatorOf<E>>::size();
  int64_t n = 0;
  auto columns = [&]<int NR>() {
    column_block<NR>(M, K, a, a_m, a_k, b + n, ldb, c + n, ldc, accumulate, fetch);
    if (accumulate.start) accumulate.start += NR * lanes;
    n += NR * lanes;
  };
  while (n + (kRegisterVectors - 1) * lanes < N) columns.template operator()<kRegisterVectors>();
  if constexpr (kRegisterVectors > 3)
    if (n + 2 * lanes < N) columns.template operator()<3>();
  if constexpr (kRegisterVectors > 2)
    if (n + lanes < N) columns.template operator()<2>();
  if (n < N) columns.template operator()<1>();
}

// Returns the number of register blocks in which tile_gemm multiplies M rows by N columns.
template <class T>
constexpr int64_t register_blocks(int64_t M, int64_t N) {
  constexpr int64_t columns = kRegisterVectors * Vectorized<T>::size();
  int64_t rest = M % kRegisterRows, rows = M / kRegisterRows;
  if constexpr (kRegisterRows > 4) rows += rest / 4, rest %= 4;
  if constexpr (kRegisterRows > 2) rows += rest / 2, rest %= 2;
  return (rows + rest) * ((N + columns - 1) / columns);
}

// Multiplies row m of C (M x N) by scale[m].
inline void scale_rows(int64_t M, int64_t N, const float* scale, float* c, int64_t ldc) {
  using Vec = Vectorized<float>;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; n += Vec::size()) {
      float* sum = c + m * ldc + n;
      (Vec::loadu(sum) * Vec(scale[m])).store(sum);
    }
}

#ifdef __AMX_BF16__

// The matrix unit needs rows of A that are contiguous along k: a_k is 1.
template <>
inline void tile_gemm(
    int64_t M, int64_t N, int64_t K, const BFloat16Pair* a, int64_t a_m, int64_t,
    const BFloat16Pair* b, int64_t ldb, float* c, int64_t ldc, Accumulate<float> accumulate,
    FetchNothing) {
  if (K == 0 && !accumulate.enabled)
    for (int64_t m = 0; m < M; ++m) std::fill_n(c + m * ldc, N, 0.0f);
  if (accumulate.scale) scale_rows(M, N, accumulate.scale, c, ldc);
  multiply_on_matrix_unit(M, N, K, {a, a_m}, {b, ldb}, c, ldc, accumulate.enabled);
}

#else

struct MatrixUnit {};

#endif

}  // namespace trifuse::TRIFUSE_CAPABILITY
