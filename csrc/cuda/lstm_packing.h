// The parameters of a call as the kernels read them: one tensor for all chains, with the gates of a
// unit side by side. A coupled LSTM has no weights for f; zeros replace them.

#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <vector>

#include "arguments.h"
#include "lstm_tensors.h"

namespace trifuse::cuda {

using Parameters = c10::List<OptionalTensor>;

class LstmPacking {
 public:
  LstmPacking(
      const Parameters& parameters, Cell cell, int64_t chains, int64_t H, bool coupled,
      at::TensorOptions options)
      : parameters_(parameters), cell_(cell), chains_(chains), H_(H), coupled_(coupled),
        options_(options) {}

  // Returns the tensors of all chains, stacked and contiguous; undefined if the call has none. With
  // a single chain the result may share the parameter's memory.
  Tensor stacked(Slot slot, at::ScalarType type) const {
    if (!given(0, slot)) return {};
    std::vector<Tensor> all;
    all.reserve(chains_);
    for (int64_t d = 0; d < chains_; ++d) all.push_back(given(d, slot)->to(type));
    return all.size() == 1 ? all[0].contiguous().unsqueeze(0) : at::stack(all);
  }

  // Returns (D, H·G, ...) from parameters (G·H, ...), in new memory unless G is 1; zeros for f if
  // coupled.
  Tensor interleaved(Slot slot, at::ScalarType type) const {
    return interleaved(slot, type, 0, chains_);
  }
  // The same for chains `first` to `last` - 1; undefined if there are none.
  Tensor interleaved(Slot slot, at::ScalarType type, int64_t first, int64_t last) const {
    if (first == last || !given(0, slot)) return {};
    if (cell_ == Cell::Rnn) return stacked(slot, type);
    const Tensor like = *given(first, slot);
    const int64_t G = gates_of(cell_);
    at::DimVector sizes{last - first, H_, G};
    sizes.append(like.sizes().begin() + 1, like.sizes().end());
    const auto options = options_.dtype(type);
    const Tensor all = coupled_ ? at::zeros(sizes, options) : at::empty(sizes, options);
    for (int64_t d = first; d < last; ++d) {
      const Tensor from = given(d, slot)->unflatten(0, {coupled_ ? 3 : G, H_});
      const Tensor to = all[d - first].transpose(0, 1);
      if (coupled_) {
        to[0].copy_(from[0]);
        to.narrow(0, 2, 2).copy_(from.narrow(0, 1, 2));
      } else {
        to.copy_(from);
      }
    }
    return all.flatten(1, 2);
  }

  // Returns (D, H·G): both biases and the forget bias; of a GRU (D, H·4), see Lstm::bias.
  Tensor bias(at::ScalarType type, double forget_bias) const {
    Tensor sum = interleaved(BiasIh, type);
    Tensor other = interleaved(BiasHh, type);
    if (cell_ == Cell::Gru && (sum.defined() || other.defined())) {
      if (!sum.defined()) sum = at::zeros_like(other);
      if (!other.defined()) other = at::zeros_like(sum);
      const Tensor ih = sum.unflatten(1, {H_, 3}), hh = other.unflatten(1, {H_, 3});
      const Tensor both = ih.narrow(2, 0, 2) + hh.narrow(2, 0, 2);
      return at::cat({both, ih.narrow(2, 2, 1), hh.narrow(2, 2, 1)}, 2);
    }
    if (!sum.defined()) sum = other;
    else if (other.defined()) sum = sum + other;
    if (forget_bias == 0) return sum;
    if (!sum.defined()) sum = at::zeros({chains_, 4 * H_}, options_.dtype(type));
    sum.unflatten(1, {H_, 4}).select(2, 1).add_(forget_bias);
    return sum;
  }

  // Returns (D, 3, H): i, f, o.
  Tensor peephole(at::ScalarType type) const {
    Tensor given = stacked(WeightPeephole, type);
    if (!coupled_ || !given.defined()) return given;
    const Tensor i = given.select(1, 0), o = given.select(1, 1);
    return at::stack({i, at::zeros_like(i), o}, 1);
  }

 private:
  OptionalTensor given(int64_t d, Slot slot) const {
    const int slots = slots_of(cell_);
    return slot < slots ? parameters_.get(d * slots + slot) : OptionalTensor();
  }

  const Parameters& parameters_;
  const Cell cell_;
  const int64_t chains_, H_;
  const bool coupled_;
  const at::TensorOptions options_;
};

// Returns the gradient of one chain's parameter in the caller's order: from (H·G, ...), as
// LstmPacking interleaves it, to (G·H, ...), without f if coupled.
inline Tensor with_gates_outside(const Tensor& t, int64_t H, bool coupled) {
  Tensor gates = t.unflatten(0, {H, -1}).transpose(0, 1);
  if (coupled) gates = at::cat({gates.narrow(0, 0, 1), gates.narrow(0, 2, 2)});
  return gates.flatten(0, 1);
}

}  // namespace trifuse::cuda
