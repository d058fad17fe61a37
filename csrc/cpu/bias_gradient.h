// The gradient of a linear layer's bias, and of what ReLU gets from the layer.

#pragma once

#include <cstdint>

#include "dtype.h"

namespace trifuse {

// The layer computes y = x weightᵀ + bias. Where ReLU follows it, grad is the gradient of out:
//   grad_y = out > 0 ? grad : 0
// Otherwise grad is already that of y, and grad_y isn't written. grad_bias is the sum of the rows
// of y's gradient. Strides from row to row count elements; columns are contiguous.
struct BiasGradientProblem {
  DType dtype;  // Float32 or BFloat16
  int64_t M, N;
  const void* grad;  // (M, N)
  int64_t grad_row;
  const void* out = nullptr;  // (M, N), what ReLU returned; or null
  int64_t out_row = 0;
  void* grad_y = nullptr;  // (M, N), contiguous, beside out
  double* sums;            // (blocks(), N), the sums of each block of rows
  void* grad_bias;         // (N,)
  bool stream = false;     // whether grad_y is stored past the caches

  // The sizes of a task, and how many tasks there are in each dimension.
  static constexpr int64_t kRows = 128, kColumns = 512;
  int64_t blocks() const { return (M + kRows - 1) / kRows; }
  int64_t groups() const { return (N + kColumns - 1) / kColumns; }
};

}  // namespace trifuse
