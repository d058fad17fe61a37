// The activations between linear layers, and one call of an activation by itself.

#pragma once

#include <cstdint>

#include "dtype.h"

namespace trifuse {

enum class Activation { None, Relu, Gelu, GeluTanh, QuickGelu, Silu };

// QuickGelu is x sigmoid(kQuickGelu x), an approximation of GELU (Hendrycks and Gimpel, "Gaussian
// Error Linear Units", 2016).
constexpr double kQuickGelu = 1.702;

// Forward:   out = f(x), or f(x) * up for a gate.
// Backward:  out = grad * f'(x), or grad * up * f'(x); grad_up = grad * f(x).
// Strides from row to row count elements; columns are contiguous.
struct ActivationProblem {
  DType dtype;
  Activation activation;  // not None or Relu
  int64_t M, N;
  int64_t rows_per_task;
  const void* x;  // (M, N)
  int64_t x_row;
  const void* up = nullptr;  // (M, N), or null
  int64_t up_row = 0;
  const void* grad = nullptr;  // (M, N), for the backward
  int64_t grad_row = 0;
  void* out;  // (M, N)
  int64_t out_row;
  void* grad_up = nullptr;  // (M, N), beside up
  int64_t grad_up_row = 0;
  bool stream = false;  // whether results are stored past the caches

  int64_t tasks() const { return (M + rows_per_task - 1) / rows_per_task; }
};

}  // namespace trifuse
