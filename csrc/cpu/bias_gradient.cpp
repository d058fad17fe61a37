// torch.ops.trifuse.bias_gradient: tensors in, tensors out. It has no derivative.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/streaming.h"

namespace trifuse {
namespace {

// Args: grad (M, N), the gradient of a linear layer's result y, or of `out` (M, N), which ReLU
// returned for y. Returns two gradients: that of y, undefined without `out`, and that of the bias
// (N,).
std::tuple<Tensor, Tensor> bias_gradient(const Tensor& grad, const OptionalTensor& out) {
  TORCH_CHECK_VALUE(grad.dim() == 2, "grad: expected 2 dimensions; got shape ", grad.sizes());
  check_memory("grad", grad);
  TORCH_CHECK_TYPE(
      grad.scalar_type() == at::kFloat || grad.scalar_type() == at::kBFloat16,
      "grad: expected float32 or bfloat16; got ", grad.scalar_type());
  check_shape("out", out, grad.sizes());
  if (out) check_type("out", *out, grad.scalar_type(), grad);
  const Tensor upstream = with_contiguous_last(grad);
  const Tensor kept = out ? with_contiguous_last(*out) : Tensor();
  BiasGradientProblem p{};
  p.dtype = kernel_type(grad.scalar_type());
  p.M = grad.size(0);
  p.N = grad.size(1);
  p.grad = upstream.const_data_ptr();
  p.grad_row = upstream.stride(0);
  Tensor grad_y;
  if (out) {
    p.out = kept.const_data_ptr();
    p.out_row = kept.stride(0);
    grad_y = empty(grad.sizes(), grad.options());
    p.grad_y = grad_y.mutable_data_ptr();
    p.stream = streams_to_products(p.M, p.N * element_size(p.dtype), at::get_num_threads());
  }
  const int64_t blocks = p.blocks(), groups = p.groups();
  const Tensor sums = empty({blocks, p.N}, grad.options().dtype(at::kDouble));
  const Tensor grad_bias = empty({p.N}, grad.options());
  p.sums = sums.mutable_data_ptr<double>();
  p.grad_bias = grad_bias.mutable_data_ptr();
  const auto kernel = kernels().bias_gradient;
  parallel_tasks(blocks * groups, 1, 8.0 * static_cast<double>(p.M * p.N), [&](int64_t task) {
    kernel.run(p, task);
  });
  parallel_tasks(groups, 1, 4.0 * static_cast<double>(blocks * p.N), [&](int64_t group) {
    kernel.reduce(p, group);
  });
  return {grad_y, grad_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) { m.impl("bias_gradient", bias_gradient); }

}  // namespace trifuse
