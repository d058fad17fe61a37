// Philox4x32-7 for rows of a matrix: pytorch_ext/reference/philox.py, which specifies it.

#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// Which of 64 neighbours (row, column .. column + 63) of a plane dropout keeps, column a multiple of
// 64; bit t for column + t. Eight counters side by side, each word in a 64-bit lane of its own: the
// 32 x 32 -> 64 multiplications then need no shuffles, and what is above bit 31 is never looked at.
inline uint64_t dropout_row(
    uint64_t seed, uint64_t plane, uint64_t row, uint64_t column, uint32_t threshold) {
  constexpr int kCounters = 8, kRounds = 7;
  uint64_t c0[kCounters], c1[kCounters], c2[kCounters], c3[kCounters];
  for (int l = 0; l < kCounters; ++l) {
    c0[l] = column / 8 + l;
    c1[l] = row;
    c2[l] = plane;
    c3[l] = 0;
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    for (int l = 0; l < kCounters; ++l) {
      const uint64_t p0 = (c0[l] & 0xFFFFFFFF) * 0xD2511F53u;
      const uint64_t p1 = (c2[l] & 0xFFFFFFFF) * 0xCD9E8D57u;
      c0[l] = (p1 >> 32) ^ c1[l] ^ key0;
      c1[l] = p1;
      c2[l] = (p0 >> 32) ^ c3[l] ^ key1;
      c3[l] = p0;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  // Words 0 to 3 of a counter are eight half-words, low halves first.
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "half-words are read from the low end");
  uint64_t words[2 * kCounters];
  for (int l = 0; l < kCounters; ++l) {
    words[2 * l] = (c0[l] & 0xFFFFFFFF) | c1[l] << 32;
    words[2 * l + 1] = (c2[l] & 0xFFFFFFFF) | c3[l] << 32;
  }
  uint16_t halves[8 * kCounters];
  std::memcpy(halves, words, sizeof words);
  return at_least_bits(halves, static_cast<uint16_t>(threshold));
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
