// The gradient of a linear layer's bias, and of what ReLU gets from the layer.

#pragma once

#include <cstdint>

#include "dtype.h"

namespace trifuse {

// grad_sum = out > 0 ? grad : 0, where ReLU follows the layer; otherwise grad itself.
// grad_bias = the sum of grad_sum over its rows.
// Strides from row to row count elements; columns are contiguous.
struct BiasGradientProblem {
  DType dtype;  // Float32 or BFloat16
  int64_t M, N;
  const void* grad;  // (M, N)
  int64_t grad_row;
  const void* out = nullptr;  // (M, N), what ReLU returned; or null
  int64_t out_row = 0;
  void* grad_sum = nullptr;  // (M, N), contiguous, beside out
  double* sums;              // (blocks of rows, N), the sums of each block
  void* grad_bias;           // (N,)
  bool stream = false;       // whether grad_sum is stored past the caches
};

}  // namespace trifuse
