// Plain calls of dropout_add_layer_norm, with and without gradients.

#pragma once

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <tuple>

#include "fast_path/ops.h"

namespace trifuse::fast_path {

struct NormCall {
  Tensor x;
  OptionalTensor residual, weight, bias, x_bias, seed;
  double dropout_p, eps;
  bool rms_norm, prenorm;

  at::ScalarType sum_dtype() const { return residual ? residual->scalar_type() : x.scalar_type(); }

  void autocast() {}  // autocast does not change the norm's tensors

  // Some valid calls don't fit, because they need a conversion, which Python does.
  bool fits() const {
    const at::ScalarType dtype = x.scalar_type(), wide = accumulation_type(dtype);
    if (x.dim() == 0 || !is_floating(dtype) || eps < 0) return false;
    const auto fits = [&](const OptionalTensor& t, at::IntArrayRef sizes) {
      return !t || (t->sizes() == sizes && (t->scalar_type() == dtype || t->scalar_type() == wide));
    };
    const auto features = x.sizes().slice(x.dim() - 1);
    return fits(residual, x.sizes()) && fits(weight, features) && fits(bias, features) &&
        fits(x_bias, features);
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor> run() const {
    static const Overloads<std::tuple<Tensor, Tensor, Tensor, Tensor>(
        const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, double, double, bool, bool, at::ScalarType)>
        op("trifuse::dropout_add_layer_norm_forward");
    return run_kernel(
        op.of(x), x, residual, weight, bias, x_bias, seed, dropout_p, eps, rms_norm, prenorm,
        sum_dtype());
  }
};

using NormBackward = Overloads<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const Tensor&, const Tensor&, double, double, bool, bool, at::ScalarType, std::array<bool, 5>)>;

inline const NormBackward& norm_backward_op() {
  static const NormBackward op("trifuse::dropout_add_layer_norm_backward");
  return op;
}

class Norm : public torch::autograd::Function<Norm> {
 public:
  // Returns out, and the sum if it is requested.
  static variable_list forward(
      AutogradContext* context, const Tensor& x, const OptionalTensor& residual,
      const OptionalTensor& weight, const OptionalTensor& bias, const OptionalTensor& x_bias,
      const NormCall& call) {
    auto [out, sum, mean, rstd] = call.run();
    // The sum stays alive as an output, so that keeping it in place of its terms costs nothing.
    const bool prenorm = call.prenorm;
    context->save_for_backward(
        {prenorm ? sum : x, prenorm ? Tensor() : or_undefined(residual), or_undefined(weight),
         or_undefined(bias), or_undefined(x_bias), or_undefined(call.seed), mean, rstd});
    // x and residual have one gradient if nothing is dropped or rounded between them.
    const bool shared = !call.seed && call.sum_dtype() == x.scalar_type();
    const int64_t given = given_bits(
        {true, residual.has_value(), weight.has_value(), bias.has_value(), x_bias.has_value()});
    keep(
        *context, given, shared, call.dropout_p, call.eps, call.rms_norm, prenorm,
        static_cast<int64_t>(x.scalar_type()), static_cast<int64_t>(call.sum_dtype()));
    context->set_materialize_grads(false);
    if (prenorm) return {out, sum};
    return {out};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found(6);  // one for each argument of forward
    if (none_defined(grads)) return found;
    const variable_list saved = context->get_saved_variables();
    const Tensor &x = saved[0], &mean = saved[6], &rstd = saved[7];
    const auto options = kept(*context);
    const bool shared = options[1].toBool();
    const auto dtype = static_cast<at::ScalarType>(options[6].toInt());
    const auto sum_dtype = static_cast<at::ScalarType>(options[7].toInt());
    const Tensor grad_out = grads[0].defined()
        ? grads[0]
        : at::zeros(grads[1].sizes(), grads[1].options().dtype(dtype));
    const auto needed = needed_gradients<5>(*context, options[0].toInt());
    auto computed = needed;
    if (shared) {
      computed[0] = needed[0] || needed[1];
      computed[1] = false;
    }
    std::tie(found[0], found[1], found[2], found[3], found[4]) = run_backward(
        all_plain(grads) && all_plain(saved), norm_backward_op().of(x), grad_out,
        grads.size() > 1 ? optional(grads[1]) : std::nullopt, x, optional(saved[1]),
        optional(saved[2]), optional(saved[3]), optional(saved[4]), optional(saved[5]), mean, rstd,
        options[2].toDouble(), options[3].toDouble(), options[4].toBool(), options[5].toBool(),
        sum_dtype, computed);
    if (shared) found[1] = found[0];
    for (size_t i = 0; i < needed.size(); ++i)
      if (!needed[i]) found[i] = Tensor();
    return found;
  }
};

// Returns out or, with prenorm, (out, sum).
inline variable_list run(NormCall& call) {
  if (records(call.x, call.residual, call.weight, call.bias, call.x_bias))
    return Norm::apply(call.x, call.residual, call.weight, call.bias, call.x_bias, call);
  auto [out, sum, mean, rstd] = call.run();
  if (call.prenorm) return {out, sum};
  return {out};
}

}  // namespace trifuse::fast_path
