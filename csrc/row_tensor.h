// Checks the tensors of dropout_add_layer_norm and describes their rows to its kernels.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "arguments.h"
#include "dropout_add_layer_norm.h"

namespace trifuse {

// Checks that tensors fit each other, before any is read. A saved tensor's data may have been
// replaced before the backward, and an op may be called without the public function's checks.
// `dtype` is that of out. In the backward `x` may be the sum.
inline void check_arguments(
    const at::Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
    const OptionalTensor& bias, const OptionalTensor& x_bias, const OptionalTensor& seed,
    at::ScalarType dtype, bool x_is_sum) {
  const at::ScalarType wide = accumulation_type(dtype);
  const auto either = [&](const at::Tensor& t) { return t.scalar_type() == wide ? wide : dtype; };
  TORCH_CHECK_VALUE(x.dim() > 0, "x: expected at least 1 dimension; got a scalar");
  check_memory("x", x);
  check_type("x", x, x_is_sum ? either(x) : dtype, x);
  if (residual) {
    check_shape("residual", *residual, x.sizes());
    check_type("residual", *residual, either(*residual), x);
  }
  const auto check_vector = [&](const char* name, const OptionalTensor& t) {
    if (!t) return;
    check_shape(name, *t, {x.size(-1)});
    check_type(name, *t, either(*t), x);
  };
  check_vector("weight", weight);
  check_vector("bias", bias);
  check_vector("x_bias", x_bias);
  check_seed(seed, x);
}

// Checks the forward's saved results and the upstream gradients. Runs before check_arguments,
// because the shape of x is checked against the upstream gradient.
inline void check_backward_arguments(
    const at::Tensor& grad_out, const OptionalTensor& grad_sum, const at::Tensor& x,
    const at::Tensor& mean, const at::Tensor& rstd) {
  const at::ScalarType wide = accumulation_type(grad_out.scalar_type());
  const auto row_shape = x.sizes().slice(0, x.dim() - 1);
  check_memory("grad_out", grad_out);
  check_shape("x", x, grad_out.sizes());
  check_shape("grad_sum", grad_sum, x.sizes());
  check_shape("mean", mean, row_shape);
  check_shape("rstd", rstd, row_shape);
  check_type("mean", mean, wide, x);
  check_type("rstd", rstd, wide, x);
}

// Describes the rows of a tensor in place, or those of a contiguous copy if the elements of a row
// are not neighbours or the rows need more strides than a RowTensor has.
inline RowTensor rows_of(const at::Tensor& t, Held& held) {
  const int64_t last = t.dim() - 1;
  RowTensor rows;
  if (t.numel() == 0) return rows;  // no copy, which would have the same strides
  bool fits = t.stride(last) == 1 || t.size(last) <= 1;
  for (int64_t d = 0; d < last && fits; ++d) {
    if (t.size(d) == 1) continue;
    int64_t& inner = rows.stride[std::max(rows.dims - 1, 0)];
    if (rows.dims && inner == t.size(d) * t.stride(d)) {
      rows.size[rows.dims - 1] *= t.size(d);
      inner = t.stride(d);
    } else if (rows.dims < RowTensor::kMaxDims) {
      rows.size[rows.dims] = t.size(d);
      rows.stride[rows.dims++] = t.stride(d);
    } else {
      fits = false;
    }
  }
  if (!fits) return rows_of(t.contiguous(), held);
  held.push_back(t);
  rows.data = t.data_ptr();
  return rows;
}

}  // namespace trifuse
