// Philox4x32-7 on a GPU, as specified in pytorch_ext/reference/philox.py.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../dropout.h"

namespace trifuse::cuda {

// Returns four random words for a counter.
__device__ __forceinline__ uint4 philox(uint4 c, uint64_t seed) {
  constexpr int kRounds = 7;
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    c = make_uint4(
        __umulhi(0xCD9E8D57, c.z) ^ c.y ^ key0, 0xCD9E8D57 * c.z,
        __umulhi(0xD2511F53, c.x) ^ c.w ^ key1, 0xD2511F53 * c.x);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return c;
}

// Returns where a unit of a call lies in the whole, as Place::unit does, in the 32 bits of a
// counter. `placed`: whether a Place follows the seed.
__device__ __forceinline__ uint32_t drawn_unit(const int64_t* seed, bool placed, uint32_t unit) {
  if (!placed) return unit;
  const Place place = Place::read(seed);
  // A division of 64 bits would take several times the instructions and registers.
  const uint32_t run = place.block <= UINT32_MAX ? unit / static_cast<uint32_t>(place.block) : 0;
  const uint32_t rest = unit - run * static_cast<uint32_t>(place.block);
  const int64_t jump = rest >= place.fold ? place.jump : 0;
  return static_cast<uint32_t>(place.offset + run * place.stride + rest + jump);
}

// Returns which elements of a plane dropout keeps in columns 8 group to 8 group + 7 of a row: bit j
// is set if column 8 group + j is kept. `threshold` is 1 to 65536; 65536 keeps none.
__device__ __forceinline__ uint32_t
dropout_keep(uint64_t seed, uint32_t plane, uint32_t row, uint32_t group, uint32_t threshold) {
  const uint4 words = philox(make_uint4(group, row, plane, 0), seed);
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
  // The low 16 bits of a word never affect the result of a comparison.
  const uint32_t largest_dropped = (threshold << 16) - 1;
  uint32_t keep = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    keep |= uint32_t((word[i] << 16) > largest_dropped) << 2 * i;
    keep |= uint32_t(word[i] > largest_dropped) << (2 * i + 1);
  }
  return keep;
}

}  // namespace trifuse::cuda
