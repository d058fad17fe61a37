// torch.ops.trifuse.dropout_add_layer_norm_{forward,backward}.cuda: tensors in, tensors out.
//
// Shapes, dtypes and devices have been checked in pytorch_ext/ops/dropout_add_layer_norm.py.

#include "cuda/dropout_add_layer_norm.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "arguments.h"
#include "cuda/tensors.h"
#include "row_tensor.h"

namespace trifuse::cuda {
namespace {

// Describes a tensor's rows, which are wide if they have the accumulation type and `dtype` is
// narrower. Copies the tensor if its rows need more strides than a Matrix has, or if kernels would
// move them 16 bytes at a time but they do not begin at multiples of 16 bytes.
Matrix matrix_of(const Tensor& t, at::ScalarType dtype, Held& held) {
  const RowTensor rows = rows_of(t, held);
  const int64_t size = t.element_size();
  bool fits = rows.dims <= 2;
  if (t.size(-1) % 8 == 0) {
    fits &= reinterpret_cast<uintptr_t>(rows.data) % 16 == 0;
    for (int d = 0; d < rows.dims; ++d) fits &= rows.stride[d] * size % 16 == 0;
  }
  if (!fits) return matrix_of(t.clone(at::MemoryFormat::Contiguous), dtype, held);
  Matrix matrix{rows.data, t.scalar_type() != dtype};
  if (rows.dims == 1) matrix.stride = rows.stride[0] * size;
  if (rows.dims == 2) {
    matrix.inner = static_cast<uint32_t>(rows.size[1]);
    matrix.stride = rows.stride[1] * size;
    matrix.outer_stride = rows.stride[0] * size;
  }
  return matrix;
}

Vector vector_of(const OptionalTensor& t, at::ScalarType dtype, Held& held) {
  if (!t) return {};
  Tensor vector = t->contiguous();
  if (reinterpret_cast<uintptr_t>(vector.const_data_ptr()) % 16) vector = vector.clone();
  held.push_back(vector);
  return {vector.data_ptr(), vector.scalar_type() != dtype};
}

int64_t count_rows(const Tensor& t) {
  const int64_t rows = c10::multiply_integers(t.sizes().slice(0, t.dim() - 1));
  TORCH_CHECK_VALUE(rows <= UINT32_MAX, "x: expected fewer than 2^32 rows; got ", rows);
  return rows;
}

void set_dropout(DropoutAddLayerNorm& call, double dropout_p, const OptionalTensor& seed) {
  if (!seed) return;
  const Dropout dropout = kernel_dropout(dropout_p);
  call.threshold = dropout.threshold;
  call.scale = dropout.scale;
  call.seed = seed->const_data_ptr<int64_t>();
  call.placed = seed->numel() == kSeedAndPlace;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
    const OptionalTensor& bias, const OptionalTensor& x_bias, const OptionalTensor& seed,
    double dropout_p, double eps, bool rms_norm, bool prenorm, at::ScalarType sum_dtype) {
  const OnDeviceOf device(x);
  const at::ScalarType dtype = x.scalar_type(), wide = accumulation_type(dtype);
  check_arguments(x, residual, weight, bias, x_bias, seed, dtype, false);
  Held held;
  DropoutAddLayerNorm call{};
  call.dtype = kernel_type(dtype);
  call.N = x.size(-1);
  call.rows = count_rows(x);
  call.x = matrix_of(x, dtype, held);
  if (residual) call.residual = matrix_of(*residual, dtype, held);
  call.weight = vector_of(weight, dtype, held);
  call.bias = vector_of(bias, dtype, held);
  call.x_bias = vector_of(x_bias, dtype, held);
  call.eps = eps;
  call.rms_norm = rms_norm;
  set_dropout(call, dropout_p, seed);

  const auto leading = x.sizes().slice(0, x.dim() - 1);
  const Tensor out = at::empty(x.sizes(), x.options());
  const auto sum_options = x.options().dtype(sum_dtype);
  const Tensor sum = prenorm ? at::empty(x.sizes(), sum_options) : at::empty({0}, sum_options);
  const Tensor mean = at::empty(leading, x.options().dtype(wide));
  const Tensor rstd = at::empty(leading, x.options().dtype(wide));
  call.out = matrix_of(out, dtype, held);
  if (prenorm) call.sum = matrix_of(sum, dtype, held);
  call.mean = mean.data_ptr();
  call.rstd = rstd.data_ptr();
  dropout_add_layer_norm_forward(call, device.stream());
  return {out, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, const OptionalTensor& grad_sum, const Tensor& x,
    const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& x_bias, const OptionalTensor& seed, const Tensor& mean,
    const Tensor& rstd, double dropout_p, double /*eps*/, bool rms_norm, bool prenorm,
    at::ScalarType /*sum_dtype*/, std::array<bool, 5> needs_grad) {
  const OnDeviceOf device(x);
  const at::ScalarType dtype = grad_out.scalar_type();
  const at::ScalarType sum_dtype = residual ? residual->scalar_type() : x.scalar_type();
  check_backward_arguments(grad_out, grad_sum, x, mean, rstd);
  check_arguments(x, residual, weight, bias, x_bias, seed, dtype, prenorm);
  Held held;
  DropoutAddLayerNorm call{};
  call.dtype = kernel_type(dtype);
  call.N = x.size(-1);
  call.rows = count_rows(x);
  if (prenorm) call.sum = matrix_of(x, dtype, held);
  else call.x = matrix_of(x, dtype, held);
  if (residual) call.residual = matrix_of(*residual, dtype, held);
  call.weight = vector_of(weight, dtype, held);
  call.x_bias = vector_of(x_bias, dtype, held);
  held.push_back(mean.contiguous());
  call.mean = held.back().data_ptr();
  held.push_back(rstd.contiguous());
  call.rstd = held.back().data_ptr();
  call.rms_norm = rms_norm;
  set_dropout(call, dropout_p, seed);
  call.grad_out = matrix_of(grad_out, dtype, held);
  if (grad_sum) call.grad_sum = matrix_of(grad_sum->to(sum_dtype), dtype, held);

  // Returns a tensor without elements if the gradient is not needed.
  const auto empty_like = [&](bool needed, const Tensor& t, at::ScalarType dtype) {
    const auto options = t.options().dtype(dtype);
    return needed ? at::empty(t.sizes(), options) : at::empty({0}, options);
  };
  const Tensor grad_x = empty_like(needs_grad[0], x, dtype);
  if (needs_grad[0]) call.grad_x = matrix_of(grad_x, dtype, held);
  const Tensor grad_residual = empty_like(needs_grad[1], x, sum_dtype);
  if (needs_grad[1]) call.grad_residual = matrix_of(grad_residual, dtype, held);
  const auto grad_of_vector = [&](int i, const OptionalTensor& like, Vector& vector) {
    const Tensor& t = like ? *like : grad_out;
    const Tensor grad = empty_like(needs_grad[i], t, t.scalar_type());
    if (needs_grad[i]) vector = vector_of(grad, dtype, held);
    return grad;
  };
  const Tensor grad_weight = grad_of_vector(2, weight, call.grad_weight);
  const Tensor grad_bias = grad_of_vector(3, bias, call.grad_bias);
  const Tensor grad_x_bias = grad_of_vector(4, x_bias, call.grad_x_bias);

  const Tensor workspace =
      at::empty({dropout_add_layer_norm_backward_workspace(call)}, x.options().dtype(at::kByte));
  dropout_add_layer_norm_backward(call, workspace.data_ptr(), device.stream());
  return {grad_x, grad_residual, grad_weight, grad_bias, grad_x_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, TRIFUSE_CUDA, m) {
  m.impl("dropout_add_layer_norm_forward.cuda", forward);
  m.impl("dropout_add_layer_norm_backward.cuda", backward);
}

}  // namespace trifuse::cuda
