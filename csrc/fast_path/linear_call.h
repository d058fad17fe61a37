// Plain calls of linear layers without gradients, gated ones too.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>
#include <vector>

#include "fast_path/ops.h"

namespace trifuse::fast_path {

// A call without gradients, with a weight (N, K), packed or not.
struct LinearCall {
  using Activation = std::optional<c10::string_view>;

  Tensor x, weight;
  OptionalTensor bias;
  Activation activation;
  OptionalTensor up, up_bias;  // of a gated layer
  int64_t N, K;

  bool fits() const {
    if (x.dim() == 0 || x.size(-1) != K || x.numel() == 0 || N == 0) return false;
    const at::ScalarType type = x.scalar_type();
    return (type == at::kFloat || type == at::kBFloat16) &&
        (!bias || bias->scalar_type() == type) && (!up_bias || up_bias->scalar_type() == type) &&
        !records(x, weight, bias, up, up_bias);
  }

  // `limit`: the least number of rows that does not count as few.
  bool fits_unpacked(int64_t limit) {
    if (weight.dim() != 2 || weight.scalar_type() != x.scalar_type()) return false;
    // A gated product reads rows of the weights.
    if (up && (up->scalar_type() != x.scalar_type() || weight.stride(1) != 1 || up->stride(1) != 1))
      return false;
    N = weight.size(0);
    K = weight.size(1);
    return fits() && x.numel() / K < limit;
  }

  Tensor run_unpacked() const {
    static const auto op = find<Tensor(
        const Tensor&, const Tensor&, const OptionalTensor&, Activation, const OptionalTensor&,
        const OptionalTensor&)>("trifuse::linear_unpacked", "");
    return run(
        [&](const Tensor& rows) { return op.call(rows, weight, bias, activation, up, up_bias); });
  }

  Tensor run_packed() const {
    static const auto op = find<Tensor(
        const Tensor&, const Tensor&, int64_t, const OptionalTensor&, Activation,
        const OptionalTensor&, const OptionalTensor&)>("trifuse::linear_packed", "");
    return run([&](const Tensor& rows) {
      return op.call(rows, weight, N, bias, activation, up, up_bias);
    });
  }

 private:
  template <class F>
  Tensor run(const F& f) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (x.dim() == 2) return f(x);
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = N;
    return f(x.reshape({-1, K})).view(shape);
  }
};

}  // namespace trifuse::fast_path
