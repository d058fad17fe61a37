// Pairs of bfloat16, the elements of products: their type, and helpers to multiply them with
// instructions other than those for pairs.

#pragma once

#include <cstdint>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace trifuse {

// Two neighbouring values of k in 32 bits, the unit of the bfloat16 dot product: the lower k in the
// lower half. With this element type of A and B, K counts pairs and C is float. Rows of bfloat16
// may start at any even address and are read as pairs in place, so a pair is aligned to 2 bytes.
struct BFloat16Pair {
  uint16_t low, high;
};
static_assert(sizeof(BFloat16Pair) == 4 && alignof(BFloat16Pair) == 2);

}  // namespace trifuse

#ifdef __AVX512BF16__

namespace trifuse::TRIFUSE_CAPABILITY {

// The lower and the upper values of 16 pairs, as float.
inline __m512 lower_values(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}
inline __m512 upper_values(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-0x10000)));
}

// The dot product and the matrix unit treat subnormal numbers in pairs as 0. While an object of
// this class lives, all instructions do.
class NoSubnormals {
 public:
  NoSubnormals() : mode(_mm_getcsr()) {
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
  }
  NoSubnormals(const NoSubnormals&) = delete;
  NoSubnormals& operator=(const NoSubnormals&) = delete;
  ~NoSubnormals() { _mm_setcsr(mode); }

 private:
  const unsigned mode;
};

// Joins the even and the odd columns of 32 neighbouring columns.
struct Columns {
  __m512 first, last;

  Columns(__m512 even, __m512 odd) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    first = _mm512_permutex2var_ps(even, low, odd);
    last = _mm512_permutex2var_ps(even, high, odd);
  }
};

}  // namespace trifuse::TRIFUSE_CAPABILITY

#endif
