// Philox4x32-7 for rows of a matrix, as specified in pytorch_ext/reference/philox.py.

#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// Eight counters side by side, with a 32-bit word in each 64-bit lane, so that 32 x 32 -> 64
// multiplications need no shuffles. The upper 32 bits of a lane are ignored.
using Words = uint64_t __attribute__((vector_size(64)));

inline Words multiply_low(Words x, uint32_t by) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Words)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(by));
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i half[2];
  std::memcpy(half, &x, sizeof x);
  for (auto& h : half) h = _mm256_mul_epu32(h, _mm256_set1_epi64x(by));
  std::memcpy(&x, half, sizeof x);
  return x;
#else
  return (x & 0xFFFFFFFF) * by;
#endif
}

// Returns which of the 64 elements (row, column .. column + 63) of a plane dropout keeps, as bit t
// for column + t. `column` is a multiple of 8.
inline uint64_t dropout_row(
    uint64_t seed, uint64_t plane, uint64_t row, uint64_t column, uint32_t threshold) {
  if (threshold > 0xFFFF) return 0;  // p = 1: no half-word is as large
  constexpr int kRounds = 7;
  const Words zero = {};
  Words c0 = zero + column / 8 + Words{0, 1, 2, 3, 4, 5, 6, 7};
  Words c1 = zero + row, c2 = zero + plane, c3 = zero;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < kRounds; ++round) {
    const Words p0 = multiply_low(c0, 0xD2511F53), p1 = multiply_low(c2, 0xCD9E8D57);
    c0 = (p1 >> 32) ^ c1 ^ key0;
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ key1;
    c3 = p0;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  // Words 0 to 3 of a counter are eight half-words, low halves first.
  const Words low = (c0 & 0xFFFFFFFF) | c1 << 32, high = (c2 & 0xFFFFFFFF) | c3 << 32;
  Words word[2] = {
      __builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11),
      __builtin_shufflevector(low, high, 4, 12, 5, 13, 6, 14, 7, 15)};
  uint64_t words[16];
  std::memcpy(words, word, sizeof words);
  return at_least_bits(words, static_cast<uint16_t>(threshold));
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
