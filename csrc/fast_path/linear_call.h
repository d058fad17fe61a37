// Plain calls of linear layers, with and without gradients, and of gated ones without.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "fast_path/activation_call.h"
#include "fast_path/ops.h"

namespace trifuse::fast_path {

using ActivationName = std::optional<c10::string_view>;

// Returns rows (M, N) in the shape of `like` (..., K) with N features.
inline Tensor shaped_as(const Tensor& like, const Tensor& rows) {
  if (like.dim() == 2) return rows;
  std::vector<int64_t> shape = like.sizes().vec();
  shape.back() = rows.size(1);
  return rows.view(shape);
}

// Linear computes x weightᵀ + bias, followed by ReLU or nothing. The gradients of x and weight are
// two more such products.
class Linear : public torch::autograd::Function<Linear> {
 public:
  // x (..., K), weight (N, K), bias (N,).
  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
      bool relu) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const ActivationName activation = relu ? ActivationName("relu") : std::nullopt;
    const Tensor rows = rows_of(x);
    const Tensor out = shaped_as(x, op().call(rows, weight, bias, activation));
    // Each of x and weight is read only for the gradient of the other. If the rows are a copy of x,
    // x itself may change.
    const Tensor& kept_x = rows.is_alias_of(x) ? x : rows;
    context->save_for_backward(
        {weight.requires_grad() ? kept_x : Tensor(), x.requires_grad() ? weight : Tensor(),
         relu ? out : Tensor()});
    const bool by_columns = weight.stride(0) == 1 && !weight.is_contiguous();
    keep(*context, given_bits({true, true, bias.has_value()}), by_columns);
    context->set_materialize_grads(false);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found(4);  // one for each argument of forward
    if (!grads[0].defined()) return found;
    const variable_list saved = context->get_saved_variables();
    const auto options = kept(*context);
    const auto needed = needed_gradients<3>(*context, options[0].toInt());
    const bool by_columns = options[1].toBool();
    const Tensor& out = saved[2];
    // Hooks may have kept ReLU's result in another form.
    const bool plain = is_plain(grads[0]) && all_plain(saved) &&
        (!out.defined() ||
         (out.sizes() == grads[0].sizes() && out.scalar_type() == grads[0].scalar_type()));
    if (!kernels_suffice(plain)) {
      const Tensor of_sum = out.defined() ? at::threshold_backward(grads[0], out, 0) : grads[0];
      const Tensor rows = rows_of(of_sum);
      if (needed[2]) found[2] = rows.sum(0);
      differentiate(rows, grads[0], saved, needed, by_columns, found);
      return found;
    }
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
    Tensor rows = rows_of(grads[0]);
    if (needed[2] || out.defined()) {
      const auto [of_sum, of_bias] = bias_gradient(rows, out);
      if (of_sum.defined()) rows = of_sum;
      if (needed[2]) found[2] = of_bias;
    }
    differentiate(rows, grads[0], saved, needed, by_columns, found);
    return found;
  }

 private:
  using Signature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, ActivationName);

  static const c10::TypedOperatorHandle<Signature>& op() {
    static const auto op = find<Signature>("trifuse::linear", "");
    return op;
  }

  // Returns x wᵀ.
  static Tensor product(const Tensor& x, const Tensor& w) { return op().call(x, w, {}, {}); }

  // Returns two gradients: that of x weightᵀ + bias, undefined without ReLU, and that of the bias.
  // `out` is what ReLU returned, or undefined.
  static std::tuple<Tensor, Tensor> bias_gradient(const Tensor& grad, const Tensor& out) {
    static const auto op = find<std::tuple<Tensor, Tensor>(const Tensor&, const OptionalTensor&)>(
        "trifuse::bias_gradient", "");
    return op.call(grad, out.defined() ? OptionalTensor(rows_of(out)) : std::nullopt);
  }

  // Computes the gradients of x, in the shape of `like`, and of the weight from `rows`, the
  // gradient (M, N) of x weightᵀ + bias. `saved`: x and the weight, undefined where they aren't
  // read.
  static void differentiate(
      const Tensor& rows, const Tensor& like, const variable_list& saved,
      const std::array<bool, 3>& needed, bool by_columns, variable_list& found) {
    const Tensor &x = saved[0], &weight = saved[1];
    if (needed[0]) found[0] = shaped_as(like, product(rows, weight.t()));
    // In the weight's own layout, so that no optimizer copies it.
    if (needed[1])
      found[1] =
          by_columns ? product(rows_of(x).t(), rows.t()).t() : product(rows.t(), rows_of(x).t());
  }
};

// A call with a weight (N, K), packed or not.
struct LinearCall {
  Tensor x, weight;
  OptionalTensor bias;
  ActivationName activation;
  OptionalTensor up, up_bias;  // of a gated layer
  int64_t N, K;

  bool records() const { return fast_path::records(x, weight, bias, up, up_bias); }
  int64_t rows() const { return x.numel() / K; }

  bool fits() const {
    if (x.dim() == 0 || x.size(-1) != K || x.numel() == 0 || N == 0) return false;
    const at::ScalarType type = x.scalar_type();
    return (type == at::kFloat || type == at::kBFloat16) &&
        (!bias || bias->scalar_type() == type) && (!up_bias || up_bias->scalar_type() == type);
  }

  bool fits_unpacked() {
    if (weight.dim() != 2 || weight.scalar_type() != x.scalar_type()) return false;
    // A gated product reads rows of the weights.
    if (up && (up->scalar_type() != x.scalar_type() || weight.stride(1) != 1 || up->stride(1) != 1))
      return false;
    N = weight.size(0);
    K = weight.size(1);
    return fits();
  }

  // Returns whether run_recorded takes the call. It has no gated form.
  bool fits_recorded() const {
    return !up && (!bias || bias->sizes() == at::IntArrayRef{N}) &&
        (!activation || *activation == "relu" || activation_call(x).fits());
  }

  Tensor run_unpacked() const {
    static const auto op = find<Tensor(
        const Tensor&, const Tensor&, const OptionalTensor&, ActivationName, const OptionalTensor&,
        const OptionalTensor&)>("trifuse::linear_unpacked", "");
    const at::AutoDispatchBelowADInplaceOrView guard;
    return shaped_as(x, op.call(rows_of(x), weight, bias, activation, up, up_bias));
  }

  Tensor run_packed() const {
    static const auto op = find<Tensor(
        const Tensor&, const Tensor&, int64_t, const OptionalTensor&, ActivationName,
        const OptionalTensor&, const OptionalTensor&)>("trifuse::linear_packed", "");
    const at::AutoDispatchBelowADInplaceOrView guard;
    return shaped_as(x, op.call(rows_of(x), weight, N, bias, activation, up, up_bias));
  }

  // Runs a call that needs gradients, by trifuse's product or by torch's. Of the activations only
  // ReLU is part of the product, because the derivatives of the others read their input.
  Tensor run_recorded(bool by_product) const {
    const bool relu = activation && *activation == "relu";
    if (by_product) {
      const Tensor out = Linear::apply(x, weight, bias, relu);
      return relu || !activation ? out : fast_path::run(activation_call(out));
    }
    // On AMX, torch 2.13 multiplies the memory between such rows by 0, so a NaN there would spread.
    const bool gathers = x.scalar_type() == at::kBFloat16 && !x.is_contiguous();
    const Tensor out = at::linear(gathers ? x.contiguous() : x, weight, bias);
    if (relu) return at::relu(out);
    return activation ? fast_path::run(activation_call(out)) : out;
  }

 private:
  ActivationCall activation_call(const Tensor& t) const { return {t, {}, *activation, -1}; }
};

}  // namespace trifuse::fast_path
