// Plain calls of activations and gates, with and without gradients.

#pragma once

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fast_path/ops.h"

namespace trifuse::fast_path {

// f(x), or f(x) * up. If `first` is 0 or 1, the two are the halves of x, and f is applied to that
// one.
struct ActivationCall {
  Tensor x;
  OptionalTensor up;
  c10::string_view activation;
  int64_t first;

  bool is_halved() const { return first >= 0; }

  bool fits() const {
    if (x.dim() == 0 || x.numel() == 0 || !is_floating(x.scalar_type())) return false;
    if (activation != "gelu" && activation != "gelu_tanh" && activation != "quick_gelu" &&
        activation != "silu")
      return false;
    if (is_halved()) return !up && first <= 1 && x.size(-1) % 2 == 0;
    return !up || (up->sizes() == x.sizes() && up->scalar_type() == x.scalar_type());
  }
};

// quick_gelu is x sigmoid(kQuickGelu x); the same number as in cpu/activation.h.
constexpr double kQuickGelu = 1.702;

// f(x) and grad f'(x) in torch's operations, on any device and with derivatives of their own, for
// the activations that ActivationCall::fits names.
inline Tensor activate_by_torch(const Tensor& x, c10::string_view activation) {
  if (activation == "silu") return at::silu(x);
  if (activation == "quick_gelu") return at::mul(x, at::sigmoid(at::mul(x, kQuickGelu)));
  return at::gelu(x, activation == "gelu" ? "none" : "tanh");
}

inline Tensor activate_backward_by_torch(
    const Tensor& grad, const Tensor& x, c10::string_view activation) {
  const bool silu = activation == "silu";
  if (!silu && activation != "quick_gelu")
    return at::gelu_backward(grad, x, activation == "gelu" ? "none" : "tanh");
  // torch's own operation has no derivative.
  if (silu && !at::GradMode::is_enabled()) return at::silu_backward(grad, x);
  // s + a x s (1 - s). s (1 - s) is 0 before a x overflows.
  const double a = silu ? 1 : kQuickGelu;
  const Tensor s = at::sigmoid(silu ? x : at::mul(x, a));
  return at::mul(grad, at::add(s, at::mul(x, at::mul(s, at::rsub(s, 1))), a));
}

inline Tensor rows_of(const Tensor& t) { return t.dim() == 2 ? t : t.reshape({-1, t.size(-1)}); }

class Activate : public torch::autograd::Function<Activate> {
 public:
  static Tensor run(const ActivationCall& call) {
    static const auto op = find<Tensor(const Tensor&, const OptionalTensor&, c10::string_view)>(
        "trifuse::activate", "");
    const at::AutoDispatchBelowADInplaceOrView guard;
    const Tensor rows = rows_of(call.x);
    std::vector<int64_t> shape = call.x.sizes().vec();
    if (!call.is_halved())
      return op
          .call(rows, call.up ? OptionalTensor(rows_of(*call.up)) : std::nullopt, call.activation)
          .view(shape);
    shape.back() /= 2;
    const auto halves = rows.chunk(2, 1);
    return op.call(halves[call.first], halves[1 - call.first], call.activation).view(shape);
  }

  static Tensor forward(
      AutogradContext* context, const Tensor& x, const OptionalTensor& up,
      const ActivationCall& call) {
    context->save_for_backward({x, or_undefined(up)});
    keep(*context, std::string(call.activation), call.first);
    return run(call);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &up = saved[1], &grad = grads[0];
    const auto options = kept(*context);
    const std::string& activation = options[0].toStringRef();
    const int64_t first = options[1].toInt();
    const bool plain = is_plain(grad) && all_plain(saved) && grad.scalar_type() == x.scalar_type();
    return kernels_suffice(plain) ? by_kernels(grad, x, up, activation, first)
                                  : by_torch(grad, x, up, activation, first);
  }

  // The gradient of x without a gate, on a CPU and below autograd.
  static Tensor run_backward(const Tensor& grad, const Tensor& x, c10::string_view activation) {
    static const auto op = find<Tensor(const Tensor&, const Tensor&, c10::string_view)>(
        "trifuse::activate_backward", "");
    return run_kernel(op, rows_of(grad), rows_of(x), activation).view(x.sizes());
  }

 private:
  // Both return one gradient for each argument of forward.

  static variable_list by_kernels(
      const Tensor& grad, const Tensor& x, const Tensor& up, const std::string& activation,
      int64_t first) {
    static const auto gate = find<std::tuple<Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, c10::string_view)>(
        "trifuse::gate_backward", "");
    static const auto halves =
        find<Tensor(const Tensor&, const Tensor&, int64_t, c10::string_view)>(
            "trifuse::gate_halves_backward", "");
    const Tensor upstream = rows_of(grad), rows = rows_of(x);
    if (first >= 0) {
      const Tensor of_both = run_kernel(halves, upstream, rows, first, activation);
      return {of_both.view(x.sizes()), Tensor(), Tensor()};
    }
    if (!up.defined()) return {run_backward(grad, x, activation), Tensor(), Tensor()};
    const auto [of_x, of_up] = run_kernel(gate, upstream, rows, rows_of(up), activation);
    return {of_x.view(x.sizes()), of_up.view(x.sizes()), Tensor()};
  }

  static variable_list by_torch(
      const Tensor& grad, const Tensor& x, const Tensor& up, const std::string& activation,
      int64_t first) {
    const auto factors = [&](const Tensor& gate, const Tensor& other) {
      return std::pair(
          activate_backward_by_torch(at::mul(grad, other), gate, activation),
          at::mul(grad, activate_by_torch(gate, activation)));
    };
    if (first >= 0) {
      const auto halves = x.chunk(2, -1);
      auto [of_first, of_last] = factors(halves[first], halves[1 - first]);
      if (first == 1) std::swap(of_first, of_last);
      return {at::cat({of_first, of_last}, -1), Tensor(), Tensor()};
    }
    if (!up.defined()) return {activate_backward_by_torch(grad, x, activation), Tensor(), Tensor()};
    const auto [of_x, of_up] = factors(x, up);
    return {of_x, of_up, Tensor()};
  }
};

inline Tensor run(const ActivationCall& call) {
  if (records(call.x, call.up)) return Activate::apply(call.x, call.up, call);
  return Activate::run(call);
}

}  // namespace trifuse::fast_path
