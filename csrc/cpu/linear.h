// One call of a linear layer as plain pointers, sizes and strides.

#pragma once

#include <cstdint>

#include "cpu/activation.h"
#include "dtype.h"
#include "feature_vector.h"

namespace trifuse {

// out = activation(x weight^T + bias) or, in a gated layer, activation(x weight^T + bias) *
// (x up^T + up_bias). Strides count elements.
struct LinearProblem {
  DType dtype;      // of x, weight and out
  int64_t M, N, K;  // rows, out_features, in_features

  const void* x;  // (M, K)
  int64_t x_row, x_column;
  const void* weight;  // (N, K), if it isn't packed; one stride is 1 for `run_unpacked`
  int64_t weight_row, weight_column;
  void* packed;  // the weight in the layout that `pack` writes, or null
  FeatureVector bias, up_bias;
  Activation activation = Activation::None;
  bool gated = false;
  const void* up = nullptr;   // (N, K), packed if `packed` is not null
  int64_t up_row, up_column;  // for `run_unpacked`, weight_column and up_column are 1
  void* out;                  // (M, N), contiguous; for `unpack`, the weight (N, K)
  bool streams = false;       // whether out is stored past the caches: in whole lines, by `run`

  // A task owns rows_per_task x columns_per_task of out.
  int64_t rows_per_task, columns_per_task;
};

}  // namespace trifuse
