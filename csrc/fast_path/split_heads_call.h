// Plain calls that view a joint projection of query, key and value as heads.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/stack.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "fast_path/ops.h"

namespace trifuse::fast_path {

// Returns whether tensors (B, H, L, E) lie side by side in memory of the order (B, L, n, H, E) or
// (L, B, n, H, E), n being their number.
inline bool side_by_side(at::TensorList heads) {
  const Tensor& first = heads[0];
  const auto n = static_cast<int64_t>(heads.size());
  if (first.dim() != 4 || first.numel() == 0) return false;
  const int64_t B = first.size(0), H = first.size(1), L = first.size(2), E = first.size(3);
  const int64_t token = n * H * E;
  const bool batch_first =
      (L == 1 || first.stride(2) == token) && (B == 1 || first.stride(0) == L * token);
  const bool length_first =
      (B == 1 || first.stride(0) == token) && (L == 1 || first.stride(2) == B * token);
  if (first.stride(3) != 1 || first.stride(1) != E || !(batch_first || length_first)) return false;
  for (int64_t i = 1; i < n; ++i)
    if (heads[i].sizes() != first.sizes() || heads[i].strides() != first.strides() ||
        !heads[i].is_alias_of(first) ||
        heads[i].storage_offset() != first.storage_offset() + i * H * E)
      return false;
  return true;
}

// SplitHeadsCall views a projection (B, L, n · H · E), or (L, B, n · H · E), as n tensors of heads
// (B, H, L, E).
struct SplitHeadsCall {
  Tensor x;
  int64_t count, heads;
  bool batch_first;

  bool fits() const {
    return x.dim() == 3 && x.numel() > 0 && count > 0 && heads > 0 && x.size(2) % count == 0 &&
        x.size(2) / count % heads == 0;
  }

  // The results share the version counter of x, so that changes in place are noticed.
  variable_list run() const {
    const int64_t E = x.size(2) / (count * heads);
    const Tensor all = x.view({x.size(0), x.size(1), count, heads, E});
    variable_list results;
    for (int64_t i = 0; i < count; ++i) {
      const Tensor each = all.select(2, i);
      results.push_back(batch_first ? each.transpose(1, 2) : each.permute({1, 2, 0, 3}));
    }
    return results;
  }
};

// The backward of SplitHeads copies nothing if the gradients lie side by side, as attention's
// backward returns them. The gradient of x is then a view of their memory, as the gradient of any
// view is.
class SplitHeads : public torch::autograd::Function<SplitHeads> {
 public:
  static variable_list forward(
      AutogradContext* context, const Tensor& /*x*/, const SplitHeadsCall& call) {
    keep(*context, call.batch_first);
    return call.run();
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const bool batch_first = kept(*context)[0].toBool();
    const auto joined = [&] {
      const int64_t outer = batch_first ? 1 : 3, inner = 4 - outer;
      const Tensor all = at::stack(grads).permute({outer, inner, 0, 2, 4});
      return all.reshape({all.size(0), all.size(1), -1});
    };
    if (!kernels_suffice(all_plain(grads))) return {joined(), Tensor()};
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (!side_by_side(grads)) return {joined(), Tensor()};
    const Tensor& first = grads[0];
    const auto n = static_cast<int64_t>(grads.size());
    const int64_t outer = batch_first ? 0 : 2, inner = 2 - outer;
    return {
        first.as_strided(
            {first.size(outer), first.size(inner), n * first.size(1) * first.size(3)},
            {first.stride(outer), first.stride(inner), 1}),
        Tensor()};
  }
};

inline variable_list run(const SplitHeadsCall& call) {
  return records(call.x) ? SplitHeads::apply(call.x, call) : call.run();
}

}  // namespace trifuse::fast_path
