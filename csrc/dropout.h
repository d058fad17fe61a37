// Dropout as kernels are told of it: pytorch_ext/reference/philox.py.

#pragma once

#include <cstdint>

namespace trifuse {

struct Dropout {
  uint32_t threshold = 0;  // of 65,536 values of 16 bits, how many drop an element; 0: no dropout
  double scale = 1;        // of what is kept
  uint64_t seed = 0;
};

}  // namespace trifuse
