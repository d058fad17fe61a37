// Plain calls of dropout, with and without gradients.

#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "fast_path/ops.h"

namespace trifuse::fast_path {

struct DropoutCall {
  Tensor x;
  double dropout_p;

  bool fits() const {
    return x.numel() > 0 && is_floating(x.scalar_type()) && is_probability(dropout_p) &&
        dropout_p != 0;
  }
};

// Dropout with a fixed seed is linear in x, so that it is its own backward.
class Dropout : public torch::autograd::Function<Dropout> {
 public:
  static Tensor run(const Tensor& x, const Tensor& seed, double dropout_p) {
    return run_kernel(op(), x, seed, dropout_p);
  }

  static Tensor forward(
      AutogradContext* context, const Tensor& x, const Tensor& seed, double dropout_p) {
    context->save_for_backward({seed});
    keep(*context, dropout_p);
    context->set_materialize_grads(false);
    return run(x, seed, dropout_p);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found(3);  // one for each argument of forward
    if (!grads[0].defined()) return found;
    const Tensor seed = context->get_saved_variables()[0];
    const bool plain = is_plain(grads[0]) && is_plain(seed);
    found[0] = run_backward(plain, op(), grads[0], seed, kept(*context)[0].toDouble());
    return found;
  }

 private:
  using Signature = Tensor(const Tensor&, const Tensor&, double);

  static const c10::TypedOperatorHandle<Signature>& op() {
    static const auto op = find<Signature>("trifuse::dropout", "cpp");
    return op;
  }
};

inline Tensor run(const DropoutCall& call) {
  const Tensor seed = random_seeds(1, call.x);
  if (records(call.x)) return Dropout::apply(call.x, seed, call.dropout_p);
  return Dropout::run(call.x, seed, call.dropout_p);
}

}  // namespace trifuse::fast_path
