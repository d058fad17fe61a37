// Philox4x32-7 on a GPU: pytorch_ext/reference/philox.py, which specifies it.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace trifuse::cuda {

// Four random words for a counter.
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

// Which of the elements (row, 8 group .. 8 group + 7) of a plane dropout keeps: bit j for 8 group + j.
// threshold is 1 to 65536, of which the last keeps none.
__device__ __forceinline__ uint32_t dropout_keep(
    uint64_t seed, uint32_t plane, uint32_t row, uint32_t group, uint32_t threshold) {
  const uint4 words = philox(make_uint4(group, row, plane, 0), seed);
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
  const uint32_t most = (threshold << 16) - 1;  // what lies below the upper half changes no comparison
  uint32_t keep = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    keep |= uint32_t((word[i] << 16) > most) << 2 * i;
    keep |= uint32_t(word[i] > most) << (2 * i + 1);
  }
  return keep;
}

}  // namespace trifuse::cuda
