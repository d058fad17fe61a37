// Dropout as kernels are told of it: pytorch_ext/reference/philox.py.

#pragma once

#include <cstdint>

#include "dtype.h"

namespace trifuse {

struct Dropout {
  uint32_t threshold = 0;  // of 65,536 values of 16 bits, how many drop an element; 0: no dropout
  double scale = 1;        // of what is kept
  uint64_t seed = 0;
};

// One call of dropout alone. Elements are numbered in order: element i is that of row i / kLongRow and
// column i % kLongRow in Philox's plane 0.
constexpr int64_t kLongRow = int64_t(1) << 30;
struct DropoutProblem {
  DType dtype;
  int64_t count;
  const void* x;
  void* out;
  Dropout dropout;
};

}  // namespace trifuse
