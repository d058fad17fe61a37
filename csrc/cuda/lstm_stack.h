// Stacks of LSTM layers on a GPU. The layers of a group, as many as fit, run at once as the chains
// of one call. Groups run one after the other.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/lstm_call.h"
#include "cuda/lstm_passes.h"

namespace trifuse::cuda {

// Returns how many layers of a stack run at once, in groups of nearly equal size, and why there are
// not more.
inline std::tuple<int64_t, std::string> layers_at_once(
    const Tensor& input, const Parameters& parameters, bool coupled, bool backward) {
  constexpr int64_t kFewestSteps = 32;  // an estimate, not measured
  const OnDeviceOf device(input);
  const int64_t layers = static_cast<int64_t>(parameters.size()) / kLstmSlots;
  int64_t most = std::min<int64_t>(layers, Lstm::kMaxChains);
  std::string why, reason;
  if (most < layers) why = "at most " + std::to_string(most) + " run at once";
  if (input.size(0) < kFewestSteps) {
    why = "fewer than " + std::to_string(kFewestSteps) + " steps";
    most = 1;
  }
  for (; most > 1; --most) {
    Lstm p = lstm_sizes(input, parameters, {{coupled}, Flags()}, most);
    p.layers = true;
    if (lstm_fits_sequence(p, backward, &reason)) break;
    why = reason;
  }
  const int64_t groups = (layers + most - 1) / most;
  return {(layers + groups - 1) / groups, why};
}

// Consecutive layers of a stack.
struct LayerGroup {
  int64_t first, count;

  // Return the part for these layers of a list (which has `before` elements and then `each` per
  // layer), of a tensor (L, ...), and of the results and options of all layers.
  template <class List>
  List part(const List& all, int64_t each, int64_t before = 0) const {
    List slice;
    for (int64_t i = first * each; i < (first + count) * each; ++i)
      slice.push_back(all.get(before + i));
    return slice;
  }
  OptionalTensor part(const OptionalTensor& t) const {
    return t && t->dim() > 1 ? t->narrow(0, first, count) : t;
  }
  LstmResults part(const LstmResults& all) const {
    return {*part(all.output), *part(all.h),     *part(all.c),
            *part(all.gates),  *part(all.cells), *part(all.clipped)};
  }
  ChainOptions part(ChainOptions options) const {
    options.reverse = part(options.reverse, 1);
    options.layers = true;
    return options;
  }
};

// The first result is the output of the last layer. The last result is the outputs of the layers
// below, (L - 1, T, B, R), or empty if nothing is kept.
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> stack_forward(
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const ChainOptions& options, int64_t save) {
  const int64_t L = static_cast<int64_t>(options.reverse.size());
  const int64_t at_once = std::get<0>(layers_at_once(input, parameters, options.coupled, false));
  LstmResults all;
  for (LayerGroup group{0, at_once}; group.first < L; group.first += at_once) {
    group.count = std::min(at_once, L - group.first);
    const Tensor x = group.first ? all.output[group.first - 1] : input;
    LstmCall call(x, group.part(parameters, kLstmSlots), lengths, seed, group.part(options));
    if (group.first == 0) {
      check_lengths(call);
      all = make_results(call, input, L, h0, c0, save);
    }
    forward_pass(call, x, group.part(all));
  }
  const auto& [outputs, h, c, gates, cells, clipped] = all;
  const Tensor below =
      save == kNothing ? at::empty({0}, input.options()) : outputs.narrow(0, 0, L - 1);
  return {outputs[L - 1].clone(), h, c, gates, cells, clipped, below};
}

inline std::vector<Tensor> stack_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const OptionalTensor& grad_c_n,
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Tensor& output, const Tensor& gates, const Tensor& cells, const Tensor& clipped,
    const Tensor& below, const ChainOptions& options, const Flags& needs_grad) {
  const int64_t L = static_cast<int64_t>(options.reverse.size());
  check_input(input, output);
  for (int64_t layer = 0; layer < L; ++layer)
    check_hidden(
        parameters.get(layer * kLstmSlots + WeightHh), cells.size(-1) * (options.coupled ? 3 : 4),
        output.size(-1));
  const int64_t at_once = std::get<0>(layers_at_once(input, parameters, options.coupled, true));
  std::vector<Tensor> results(3 + kLstmSlots * L);
  Tensor grad = grad_output;
  for (int64_t first = (L - 1) / at_once * at_once; first >= 0; first -= at_once) {
    const LayerGroup group{first, std::min(at_once, L - first)};
    const Tensor x = first ? below[first - 1] : input;
    LstmCall call(x, group.part(parameters, kLstmSlots), lengths, seed, group.part(options));
    LstmSaved saved{{}, *group.part(gates), *group.part(cells), *group.part(clipped), {}};
    for (int64_t d = first; d < first + group.count; ++d)
      saved.outputs.push_back(d < L - 1 ? below[d] : output);
    Flags own({first > 0 || needs_grad.get(0), needs_grad.get(1), needs_grad.get(2)});
    own.append(group.part(needs_grad, kLstmSlots, 3));
    const std::vector<Tensor> grads = backward_pass(
        call, grad, group.part(grad_h_n), group.part(grad_c_n), x, group.part(h0), group.part(c0),
        saved, own);
    grad = grads[0];
    for (int64_t state : {1, 2})
      results[state] =
          results[state].defined() ? at::cat({grads[state], results[state]}) : grads[state];
    std::copy(grads.begin() + 3, grads.end(), results.begin() + 3 + first * kLstmSlots);
  }
  results[0] = grad;
  return results;
}

}  // namespace trifuse::cuda
