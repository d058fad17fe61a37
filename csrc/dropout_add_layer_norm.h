// One call of dropout_add_layer_norm as plain pointers, sizes and strides.
//
// Names and rules are those of pytorch_ext/reference/dropout_add_layer_norm.py. The accumulation
// type is float, or double for Float64.

#pragma once

#include <cstdint>

#include "dropout.h"
#include "dtype.h"
#include "feature_vector.h"

namespace trifuse {

// (rows, N): rows are numbered over a tensor's leading dimensions, and dimensions that one stride
// can cover are merged. Strides count elements; the stride within a row is 1.
struct RowTensor {
  static constexpr int kMaxDims = 4;
  void* data = nullptr;
  int dims = 0;
  int64_t size[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};

  int64_t offset(int64_t row) const {
    int64_t result = 0;
    for (int d = dims - 1; d > 0; --d) {
      result += row % size[d] * stride[d];
      row /= size[d];
    }
    return dims ? result + row * stride[0] : 0;
  }
  template <class Scalar>
  Scalar* row(int64_t r) const {
    return static_cast<Scalar*>(data) + offset(r);
  }
  explicit operator bool() const { return data != nullptr; }
};

struct DropoutAddLayerNormProblem {
  DType dtype;      // of x, out and their gradients
  DType sum_dtype;  // of residual, sum and their gradients: the same or Float32
  int64_t rows, N;

  RowTensor x;         // (rows, N); null in the backward if sum is given instead
  RowTensor residual;  // (rows, N) or null
  RowTensor sum;       // (rows, N) or null
  RowTensor out;       // (rows, N)
  FeatureVector weight, bias, x_bias;
  void* mean = nullptr;  // (rows,) in the accumulation type
  void* rstd = nullptr;

  double eps;
  bool rms_norm;
  Dropout dropout;
  bool stream = false;  // write results past the caches

  // Backward only.
  RowTensor grad_out;       // (rows, N)
  RowTensor grad_sum;       // (rows, N) or null
  RowTensor grad_x;         // (rows, N) or null
  RowTensor grad_residual;  // (rows, N) or null
  // A task takes one block of rows, in the forward too. In the backward each block sums its own
  // gradients of the three vectors; the blocks' sums are added up last. The split must depend only
  // on rows and N, so that results are reproducible.
  int64_t blocks, rows_per_block;
  void* grad_weight = nullptr;  // (blocks, N) in the accumulation type, or null
  void* grad_bias = nullptr;
  void* grad_x_bias = nullptr;
};

}  // namespace trifuse
