// torch.ops.trifuse.dropout_add_layer_norm_{forward,backward}.cpp: tensors in, tensors out.
//
// Shapes, dtypes and devices have been checked in pytorch_ext/ops/dropout_add_layer_norm.py.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/run.h"
#include "cpu/streaming.h"
#include "row_tensor.h"

namespace trifuse {
namespace {

// Returns the number of rows of a forward task. A task has about 128 KiB, because shorter runs
// would interrupt hardware prefetching, or less if that gives each thread the same number of tasks.
int64_t forward_rows(int64_t rows, int64_t N) {
  const int64_t threads = at::get_num_threads();
  const int64_t most = std::max<int64_t>(32768 / std::max<int64_t>(N, 1), 1);
  const int64_t rounds = (rows + threads * most - 1) / (threads * most);
  return std::max<int64_t>(
      (rows + threads * rounds - 1) / std::max<int64_t>(threads * rounds, 1), 1);
}

// Returns the number of rows of a backward block. A block produces up to three rows of sums. So
// there are few blocks relative to the data, but with many rows enough for many threads. A block
// has at least 16 rows, or if that is less, about 8192 elements and 4 rows.
int64_t backward_rows(int64_t rows, int64_t N) {
  const int64_t features = std::max<int64_t>(N, 1);
  const int64_t blocks = std::clamp<int64_t>((1 << 17) / features, 16, 128);
  return std::max((rows + blocks - 1) / blocks, std::clamp<int64_t>(8192 / features, 4, 16));
}

// The cost that decides whether to wake threads: an element costs about as much as 45 multiply-adds
// in the forward, and 60 in the backward.
double operations(const DropoutAddLayerNormProblem& p, double per_element) {
  return per_element * static_cast<double>(p.rows) * static_cast<double>(p.N);
}

bool streams(int64_t rows, int64_t row_bytes) {
  return exceeds_caches(rows * row_bytes) && fills_lines(row_bytes);
}

}  // namespace

void run_dropout_add_layer_norm(DropoutAddLayerNormProblem& p) {
  p.stream |= streams(p.rows, p.N * element_size(p.dtype));
  p.rows_per_block = forward_rows(p.rows, p.N);
  p.blocks = p.N ? (p.rows + p.rows_per_block - 1) / p.rows_per_block : 0;
  const auto run = kernels(p.dtype).dropout_add_layer_norm_forward.run;
  parallel_tasks(p.blocks, 1, operations(p, 45), [&](int64_t block) { run(p, block); });
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_forward(
    const Tensor& x, const OptionalTensor& residual, const OptionalTensor& weight,
    const OptionalTensor& bias, const OptionalTensor& x_bias, const OptionalTensor& seed,
    double dropout_p, double eps, bool rms_norm, bool prenorm, at::ScalarType sum_dtype) {
  const at::ScalarType dtype = x.scalar_type(), wide = accumulation_type(dtype);
  check_arguments(x, residual, weight, bias, x_bias, seed, dtype, false);
  Held held;
  DropoutAddLayerNormProblem p{};
  p.dtype = kernel_type(dtype);
  // A kernel reads the residual in the type in which it writes the sum.
  const auto between = residual && !prenorm ? residual->scalar_type() : sum_dtype;
  p.sum_dtype = kernel_type(between);
  p.N = x.size(-1);
  p.rows = x.numel() / std::max<int64_t>(p.N, 1);
  p.x = rows_of(x, held);
  if (residual) p.residual = rows_of(residual->to(between), held);
  p.weight = feature_vector(weight, dtype, held);
  p.bias = feature_vector(bias, dtype, held);
  p.x_bias = feature_vector(x_bias, dtype, held);
  p.eps = eps;
  p.rms_norm = rms_norm;
  p.dropout = kernel_dropout(dropout_p, seed);

  const auto row_shape = x.sizes().slice(0, x.dim() - 1);
  const Tensor out = empty(x.sizes(), x.options());
  const Tensor sum = prenorm ? empty(x.sizes(), x.options().dtype(sum_dtype))
                             : at::empty({0}, x.options().dtype(sum_dtype));
  const Tensor mean = empty(row_shape, x.options().dtype(wide));
  const Tensor rstd = empty(row_shape, x.options().dtype(wide));
  p.out = rows_of(out, held);
  if (prenorm) p.sum = rows_of(sum, held);
  p.mean = mean.data_ptr();
  p.rstd = rstd.data_ptr();
  run_dropout_add_layer_norm(p);
  return {out, sum, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> dropout_add_layer_norm_backward(
    const Tensor& grad_out, const OptionalTensor& grad_sum, const Tensor& x,
    const OptionalTensor& residual, const OptionalTensor& weight, const OptionalTensor& bias,
    const OptionalTensor& x_bias, const OptionalTensor& seed, const Tensor& mean,
    const Tensor& rstd, double dropout_p, double eps, bool rms_norm, bool prenorm,
    at::ScalarType /*sum_dtype*/, std::array<bool, 5> needs_grad) {
  const at::ScalarType dtype = grad_out.scalar_type(), wide = accumulation_type(dtype);
  const at::ScalarType sum_dtype = residual ? residual->scalar_type() : x.scalar_type();
  check_backward_arguments(grad_out, grad_sum, x, mean, rstd);
  check_arguments(x, residual, weight, bias, x_bias, seed, dtype, prenorm);
  Held held;
  DropoutAddLayerNormProblem p{};
  p.dtype = kernel_type(dtype);
  p.sum_dtype = kernel_type(sum_dtype);
  p.N = x.size(-1);
  p.rows = x.numel() / std::max<int64_t>(p.N, 1);
  (prenorm ? p.sum : p.x) = rows_of(x, held);
  if (residual) p.residual = rows_of(*residual, held);
  p.weight = feature_vector(weight, dtype, held);
  p.x_bias = feature_vector(x_bias, dtype, held);
  held.push_back(mean.contiguous());
  p.mean = held.back().data_ptr();
  held.push_back(rstd.contiguous());
  p.rstd = held.back().data_ptr();
  p.eps = eps;
  p.rms_norm = rms_norm;
  p.dropout = kernel_dropout(dropout_p, seed);
  p.stream = streams(p.rows, p.N * x.element_size());
  p.grad_out = rows_of(grad_out, held);
  if (grad_sum) p.grad_sum = rows_of(grad_sum->to(sum_dtype), held);
  p.rows_per_block = backward_rows(p.rows, p.N);
  p.blocks = p.N ? (p.rows + p.rows_per_block - 1) / p.rows_per_block : 0;

  // A gradient that is not needed has no elements.
  const auto grad_of_rows = [&](bool needed, at::ScalarType dtype, RowTensor& rows) {
    const auto options = x.options().dtype(dtype);
    const Tensor grad = needed ? empty(x.sizes(), options) : at::empty({0}, options);
    rows = rows_of(grad, held);
    return grad;
  };
  const Tensor grad_x = grad_of_rows(needs_grad[0], dtype, p.grad_x);
  const Tensor grad_residual = grad_of_rows(needs_grad[1], sum_dtype, p.grad_residual);
  Tensor blocks[3];
  void** pointers[3] = {&p.grad_weight, &p.grad_bias, &p.grad_x_bias};
  for (int i = 0; i < 3; ++i) {
    if (!needs_grad[2 + i]) continue;
    blocks[i] = p.blocks == 1 ? at::empty({p.N}, grad_out.options().dtype(wide))
                              : empty({p.blocks, p.N}, grad_out.options().dtype(wide));
    *pointers[i] = blocks[i].data_ptr();
  }

  const DropoutAddLayerNormBackward kernel = kernels(p.dtype).dropout_add_layer_norm_backward;
  parallel_tasks(p.blocks, 1, operations(p, 60), [&](int64_t block) { kernel.run(p, block); });
  if (p.blocks > 1 && (needs_grad[2] || needs_grad[3] || needs_grad[4]))
    parallel_tasks(
        (p.N + 63) / 64, 1, 30.0 * static_cast<double>(p.blocks * p.N),
        [&](int64_t strip) { kernel.reduce(p, strip); });

  const auto sum_over_rows = [&](int i, const OptionalTensor& like) {
    if (!needs_grad[2 + i]) return at::empty({0}, like ? like->options() : grad_out.options());
    if (!p.blocks) return at::zeros(like->sizes(), like->options());
    if (like->scalar_type() == at::kBFloat16 && wide == at::kFloat) {
      // torch's conversion takes longer than the norm of a row.
      const Tensor sum = at::empty({p.N}, like->options());
      const auto* from = blocks[i].const_data_ptr<float>();
      auto* to = sum.mutable_data_ptr<c10::BFloat16>();
      for (int64_t n = 0; n < p.N; ++n) to[n] = from[n];
      return sum;
    }
    Tensor sum = blocks[i];
    if (p.blocks > 1) {  // copies the first row, so that the blocks are freed
      sum = at::empty({p.N}, grad_out.options().dtype(wide));
      std::memcpy(sum.mutable_data_ptr(), blocks[i].const_data_ptr(), sum.nbytes());
    }
    return sum.to(like->scalar_type());
  };
  return {
      grad_x, grad_residual, sum_over_rows(0, weight), sum_over_rows(1, bias),
      sum_over_rows(2, x_bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) {
  m.impl("dropout_add_layer_norm_forward.cpp", dropout_add_layer_norm_forward);
  m.impl("dropout_add_layer_norm_backward.cpp", dropout_add_layer_norm_backward);
}

}  // namespace trifuse
