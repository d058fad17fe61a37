// torch.ops.trifuse.activate and its gradients: tensors in, tensors out.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/run.h"
#include "cpu/streaming.h"

namespace trifuse {
namespace {

// Returns an argument (M, N) of the kernel, with contiguous columns.
Tensor activation_rows(const char* name, const Tensor& t, const Tensor& x) {
  check_shape(name, t, x.sizes());
  check_type(name, t, x.scalar_type(), x);
  return with_contiguous_last(t);
}

// This holds the problem of x (M, N), `up` and `grad`, and their tensors. The caller sets the
// results.
struct ActivationCall {
  ActivationProblem p{};
  Tensor x, up, grad;

  ActivationCall(
      const Tensor& given, const OptionalTensor& other, const OptionalTensor& upstream,
      c10::string_view activation) {
    TORCH_CHECK_VALUE(given.dim() == 2, "x: expected 2 dimensions; got shape ", given.sizes());
    p.dtype = kernel_type(given.scalar_type());
    p.activation = activation_of(activation);
    TORCH_CHECK_VALUE(
        p.activation != Activation::Relu,
        "activation: expected gelu, gelu_tanh, quick_gelu or silu; got relu");
    p.M = given.size(0);
    p.N = given.size(1);
    constexpr int64_t kElements = 1 << 14;  // of a task
    p.rows_per_task = std::max<int64_t>(1, kElements / std::max<int64_t>(1, p.N));
    x = activation_rows("x", given, given);
    p.x = x.const_data_ptr();
    p.x_row = x.stride(0);
    if (other) {
      up = activation_rows("up", *other, given);
      p.up = up.const_data_ptr();
      p.up_row = up.stride(0);
    }
    if (upstream) {
      grad = activation_rows("grad", *upstream, given);
      p.grad = grad.const_data_ptr();
      p.grad_row = grad.stride(0);
    }
  }

  void set_out(const Tensor& t) {
    p.out = t.mutable_data_ptr();
    p.out_row = t.stride(0);
  }
  void set_grad_up(const Tensor& t) {
    p.grad_up = t.mutable_data_ptr();
    p.grad_up_row = t.stride(0);
  }

  void run(void (*kernel)(const ActivationProblem&, int64_t)) {
    p.stream = streams_to_products(p.M, p.N * element_size(p.dtype), at::get_num_threads());
    const double operations = 40.0 * static_cast<double>(p.M * p.N);
    parallel_tasks(p.tasks(), 1, operations, [&](int64_t task) { kernel(p, task); });
  }
};

// Returns f(x), or f(x) * up.
Tensor activate(const Tensor& x, const OptionalTensor& up, c10::string_view activation) {
  ActivationCall call(x, up, {}, activation);
  const Tensor out = empty(x.sizes(), x.options());
  call.set_out(out);
  call.run(kernels().activation.forward);
  return out;
}

// Returns the gradient of x.
Tensor activate_backward(const Tensor& grad, const Tensor& x, c10::string_view activation) {
  ActivationCall call(x, {}, grad, activation);
  const Tensor out = empty(x.sizes(), x.options());
  call.set_out(out);
  call.run(kernels().activation.backward);
  return out;
}

// Returns the gradients of x and up.
std::tuple<Tensor, Tensor> gate_backward(
    const Tensor& grad, const Tensor& x, const Tensor& up, c10::string_view activation) {
  ActivationCall call(x, up, grad, activation);
  const Tensor out = empty(x.sizes(), x.options()), grad_up = empty(x.sizes(), x.options());
  call.set_out(out);
  call.set_grad_up(grad_up);
  call.run(kernels().activation.backward);
  return {out, grad_up};
}

// Returns the gradient of a matrix (M, 2 N) whose halves are x and up, x being half `first`.
Tensor gate_halves_backward(
    const Tensor& grad, const Tensor& both, int64_t first, c10::string_view activation) {
  TORCH_CHECK_VALUE(
      both.dim() == 2 && both.size(1) % 2 == 0,
      "both: expected 2 dimensions, the last one even; got shape ", both.sizes());
  TORCH_CHECK_VALUE(first == 0 || first == 1, "first: expected 0 or 1; got ", first);
  const int64_t N = both.size(1) / 2;
  const auto half = [&](const Tensor& t, int64_t i) { return t.narrow(1, i * N, N); };
  ActivationCall call(half(both, first), half(both, 1 - first), grad, activation);
  const Tensor out = empty(both.sizes(), both.options());
  call.set_out(half(out, first));
  call.set_grad_up(half(out, 1 - first));
  call.run(kernels().activation.backward);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) {
  m.impl("activate", activate);
  m.impl("activate_backward", activate_backward);
  m.impl("gate_backward", gate_backward);
  m.impl("gate_halves_backward", gate_halves_backward);
}

}  // namespace trifuse
