// Elements of products in bfloat16.

#pragma once

#include <cstdint>

namespace trifuse {

// Two neighbouring values of k in 32 bits, the unit of the bfloat16 dot product: the lower k in the
// lower half. With this element type of A and B, K counts pairs and C is float. Rows of bfloat16
// may start at any even address and are read as pairs in place, so a pair is aligned to 2 bytes.
struct BFloat16Pair {
  uint16_t low, high;
};
static_assert(sizeof(BFloat16Pair) == 4 && alignof(BFloat16Pair) == 2);

}  // namespace trifuse
