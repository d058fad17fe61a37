// The dropout parameters of a kernel, as specified in pytorch_ext/reference/philox.py.

#pragma once

#include <cstdint>

#include "dtype.h"

namespace trifuse {

struct Dropout {
  uint32_t threshold = 0;  // number of 16-bit values that drop an element; 0: no dropout
  double scale = 1;        // of the kept elements
  uint64_t seed = 0;
};

// One call of dropout alone. Elements are numbered in order: element i takes the random bits of row
// i / kLongRow and column i % kLongRow of Philox's plane 0.
constexpr int64_t kLongRow = int64_t(1) << 30;
struct DropoutProblem {
  DType dtype;
  int64_t count;
  const void* x;
  void* out;
  Dropout dropout;
};

}  // namespace trifuse
