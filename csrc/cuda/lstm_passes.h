// The forward and the backward of one call on a GPU, as tensors. This file computes the products
// over all tokens, those of the input and of the weights' gradients; lstm_schedules.h runs the
// steps.

#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <string>
#include <vector>

#include "cuda/lstm_call.h"
#include "cuda/lstm_schedules.h"
#include "lstm_tensors.h"

namespace trifuse::cuda {

// Forward -----------------------------------------------------------------------------------------

// Values of lstm_forward's argument `save`: SAVE_NOTHING, SAVE_STATES and SAVE_ALL of
// pytorch_ext/ops/_operator.py. A GRU saves only gates, an RNN nothing.
enum Save { kNothing, kCells, kGatesAndCells };

// Results of a forward of D chains. The output of layers is (D, T, B, R). Only an LSTM has c, cells
// and clipped.
struct LstmResults {
  Tensor output, h, c, gates, cells, clipped;
};

// Returns the results' tensors, with h0 and c0 in h and c.
inline LstmResults make_results(
    const LstmCall& call, const Tensor& input, int64_t D, const OptionalTensor& h0,
    const OptionalTensor& c0, int64_t save) {
  const int64_t T = call.p.T, B = call.p.B, H = call.p.H, R = call.p.R;
  const int64_t columns = call.p.clipped_columns();
  const bool lstm = call.p.cell == Cell::Lstm;
  check_states(lstm ? "h0" : "hx", h0, {D, B, R}, c0, {D, B, H}, input);
  LstmResults all;
  all.output = call.p.layers ? call.empty_tokens({D, T, B, R}, call.dtype)
                             : call.empty_tokens({T, B, D * R}, call.dtype);
  all.h = call.state(h0, D, R, call.dtype);
  all.gates = call.empty({0}, call.dtype);
  if (save == kGatesAndCells) all.gates = call.empty({D, T, B, call.saved_gates() * H}, call.dtype);
  if (!lstm) return all;
  all.c = call.state(c0, D, H, call.wide);
  all.cells = call.empty({0}, call.wide);
  all.clipped = call.empty({0}, at::kBool);
  if (save != kNothing) all.cells = call.empty({D, T, B, H}, call.wide);
  if (save != kNothing && columns) all.clipped = call.empty({D, T, B, columns}, at::kBool);
  return all;
}

// Checks the lengths on the device, because reading them here would wait for the device.
inline void check_lengths(const LstmCall& call) {
  if (!call.lengths.defined()) return;
  const int64_t T = call.p.T;
  const Tensor right = call.lengths.ge(0).logical_and(call.lengths.le(T)).all();
  at::_assert_async(right, "lengths: expected lengths in [0, " + std::to_string(T) + "]");
}

// An undefined tensor has no elements.
inline bool has_elements(const Tensor& t) { return t.defined() && t.numel(); }

inline void forward_pass(LstmCall& call, const Tensor& input, const LstmResults& results) {
  Lstm& p = call.p;
  if (p.T == 0 || p.B == 0) return;
  const auto& [output, h, c, gates, cells, clipped] = results;
  const Tensor from_input = call.empty(call.gates_shape(), call.dtype);
  call.multiply_input(from_input, input.flatten(0, 1));
  const Tensor h_dropped = p.dropout ? call.dropped(h) : h;
  p.from_input = data(from_input);
  p.output = data(output);
  p.gates = has_elements(gates) ? data(gates) : nullptr;
  p.cells = has_elements(cells) ? data(cells) : nullptr;
  p.clipped = has_elements(clipped) ? clipped.data_ptr<bool>() : nullptr;
  p.h = data(h);
  p.h_dropped = data(h_dropped);
  p.c = data(c);
  if (lstm_fits_sequence(p, false)) forward_sequence(call, from_input, output, h_dropped);
  else forward_steps(call, h_dropped);
}

// Backward ----------------------------------------------------------------------------------------

// Results of the forward that the backward reads. Only a GRU and an LSTM have gates, and only an
// LSTM has cells and clipped.
struct LstmSaved {
  std::vector<Tensor> outputs;  // of each chain, (T, B, R)
  Tensor gates, cells, clipped;
  Tensor output;  // of an RNN, (T, B, D·R) and contiguous
  bool has_gates() const { return gates.defined() && gates.dim() != 1; }
};

// Returns whether an LSTM's gates were not saved, so that the backward computes them again.
inline bool recomputes(const LstmCall& call, const LstmSaved& saved) {
  return call.p.cell == Cell::Lstm && !saved.has_gates();
}

// Returns h before each step, (D, T, B, R), 0 past a row's length.
inline Tensor states_before(
    const LstmCall& call, const std::vector<Tensor>& outputs, const Tensor& h0) {
  const Lstm& p = call.p;
  std::vector<Tensor> all;
  for (int64_t d = 0; d < p.chains; ++d) {
    const Tensor& h = outputs[d];
    const Tensor first = h0.narrow(0, d, 1);
    Tensor before = p.reverse[d] ? at::cat({h.narrow(0, 1, p.T - 1), first})
                                 : at::cat({first, h.narrow(0, 0, p.T - 1)});
    if (call.lengths.defined()) {
      if (p.reverse[d]) {
        const Tensor steps = at::arange(p.T, call.lengths.options()).unsqueeze(1);
        before = at::where(steps.eq(call.lengths - 1).unsqueeze(2), first, before);
      }
      before = before.masked_fill(call.valid.logical_not(), 0);
    }
    all.push_back(before);
  }
  return all.size() == 1 ? all[0].unsqueeze(0) : at::stack(all);
}

inline void check_backward(
    const LstmCall& call, const Tensor& grad_output, const OptionalTensor& grad_h_n,
    const OptionalTensor& grad_c_n, const Tensor& input, const OptionalTensor& h0,
    const OptionalTensor& c0, const LstmSaved& saved) {
  const Lstm& p = call.p;
  const int64_t D = p.chains, T = p.T, B = p.B, H = p.H, R = p.R;
  for (const Tensor& output : saved.outputs) check_shape("output", output, {T, B, R});
  if (call.saved_gates() && !recomputes(call, saved))
    check_shape("gates", saved.gates, {D, T, B, call.saved_gates() * H});
  if (p.cell == Cell::Lstm) check_shape("cells", saved.cells, {D, T, B, H});
  if (has_elements(saved.clipped))
    check_shape("clipped", saved.clipped, {D, T, B, p.clipped_columns()});
  check_states(p.cell == Cell::Lstm ? "h0" : "hx", h0, {D, B, R}, c0, {D, B, H}, input);
  check_shape("grad_output", grad_output, {T, B, p.layers ? R : D * R});
  check_shape("grad_h_n", grad_h_n, {D, B, R});
  check_shape("grad_c_n", grad_c_n, {D, B, H});
}

// Returns the tokens as they are before the steps run. Products that the forward did not save are
// computed again, in the memory of their gradients. h0 is (D, B, R).
inline BackwardTokens prepare_tokens(
    const LstmCall& call, const Tensor& grad_output, const Tensor& input, const Tensor& h0,
    const LstmSaved& saved) {
  const Lstm& p = call.p;
  const int64_t D = p.chains, T = p.T, B = p.B, R = p.R;
  const bool norm = p.norm_hh != nullptr, recompute = recomputes(call, saved);
  BackwardTokens tokens;
  if (call.lengths.defined()) tokens.padding = call.valid.logical_not();
  tokens.x = tokens.padding.defined() ? input.masked_fill(tokens.padding, 0) : input;
  tokens.x = tokens.x.flatten(0, 1);
  tokens.h_dropped = call.empty({D, 0, R}, call.dtype);
  if (T) {
    const Tensor before = states_before(call, saved.outputs, h0).transpose(0, 1);  // (T, D, B, R)
    tokens.h_dropped = call.dropped(before).transpose(0, 1).reshape({D, T * B, R});
  }
  tokens.grad_from_input = norm || recompute ? call.empty(call.gates_shape(), call.dtype)
                                             : call.empty_tokens(call.gates_shape(), call.dtype);
  tokens.grad_from_hidden = norm              ? call.empty(call.gates_shape(), call.dtype)
      : p.cell == Cell::Gru && !p.reset_first ? call.empty_tokens(call.gates_shape(), call.dtype)
                                              : tokens.grad_from_input;
  if (norm || recompute) call.multiply_input(tokens.grad_from_input, tokens.x);
  for (int64_t d = 0; d < D; ++d) {
    const Tensor weight = call.weight_hh[d].t();
    if (recompute && p.layers && d > 0)
      call.multiply_below(tokens.grad_from_input, saved.outputs[d - 1], d, {0, T});
    if (norm) call.chain_tokens(tokens.grad_from_hidden, d).copy_(tokens.h_dropped[d].mm(weight));
    else if (recompute)
      call.chain_tokens(tokens.grad_from_input, d).addmm_(tokens.h_dropped[d], weight);
  }
  tokens.grad_output = grad_output.contiguous();
  if (p.layers && D > 1) {
    tokens.grad_output = call.empty({D, T, B, R}, call.dtype);
    tokens.grad_output.select(0, D - 1).copy_(grad_output);
  }
  return tokens;
}

// Returns the gradient of W_hh, (H·3, H), in a GRU whose reset gate comes first: W_hr and W_hz
// multiply h, and W_hn multiplies r h.
inline Tensor reset_first_weight_gradient(
    const LstmCall& call, const BackwardTokens& tokens, const LstmSaved& saved, int64_t d) {
  const Lstm& p = call.p;
  const Tensor& h = tokens.h_dropped[d];  // (T·B, H)
  const Tensor grad = call.chain_tokens(tokens.grad_from_input, d).unflatten(1, {p.H, 3});
  const Tensor r = saved.gates[d].flatten(0, 1).unflatten(1, {p.H, 3}).select(2, 0);
  Tensor reset_h = r * h;
  // The forward writes no gates past a row's length.
  if (tokens.padding.defined()) reset_h.masked_fill_(tokens.padding.flatten(0, 1), 0);
  const Tensor gates = grad.narrow(2, 0, 2).flatten(1).t().mm(h).unflatten(0, {p.H, 2});
  const Tensor candidate = grad.select(2, 2).t().mm(reset_h).unsqueeze(1);
  return at::cat({gates, candidate}, 1).flatten(0, 1);
}

// Returns the gradient of a parameter of chain d, from tokens that the steps have run over.
// `vector_grads` is (D, p.vector_grad_runs(), B, p.vector_grad_count(), H).
inline Tensor parameter_gradient(
    const LstmCall& call, const BackwardTokens& tokens, const LstmSaved& saved,
    const Tensor& vector_grads, int64_t d, Slot slot) {
  const Lstm& p = call.p;
  const auto outside = [&](const Tensor& t) { return with_gates_outside(t, p.H, p.coupled); };
  // Returns `count` vectors' gradients from `first` on, summed over runs and rows: (count, H).
  const auto vectors = [&](int64_t first, int64_t count) {
    return vector_grads[d].narrow(2, first, count).sum(at::IntArrayRef({0, 1}));
  };
  const auto gates_vector = [&](int64_t first) { return outside(vectors(first, 4).t().flatten()); };
  switch (slot) {
    case WeightIh: {
      const Tensor x = p.layers && d > 0 ? saved.outputs[d - 1].flatten(0, 1) : tokens.x;
      return outside(call.chain_tokens(tokens.grad_from_input, d).t().mm(x));
    }
    case WeightHh:
      if (p.reset_first) return outside(reset_first_weight_gradient(call, tokens, saved, d));
      return outside(call.chain_tokens(tokens.grad_from_hidden, d).t().mm(tokens.h_dropped[d]));
    case BiasIh:
    case BiasHh: {
      if (p.norm_hh) return gates_vector(Lstm::kGradBias);
      const Tensor& grad = slot == BiasIh ? tokens.grad_from_input : tokens.grad_from_hidden;
      return outside(call.chain_tokens(grad, d).sum(0, false, call.wide));
    }
    case WeightHr:
      if (!tokens.m.defined()) return at::zeros({p.R, p.H}, tokens.x.options());
      return tokens.grad_projected[d].flatten(0, 1).t().mm(tokens.m[d].flatten(0, 1));
    case WeightPeephole: {
      const Tensor all = vectors(Lstm::kGradPeephole, 3);
      return p.coupled ? at::stack({all[0], all[2]}) : all;
    }
    case NormIh: return gates_vector(Lstm::kGradNormIh);
    case NormHh: return gates_vector(Lstm::kGradNormHh);
    case NormCell: return vectors(Lstm::kGradNormCell, 1);
    case NormCellBias: return vectors(Lstm::kGradNormCell + 1, 1);
    default: return {};
  }
}

// Returns the gradients of input, h0, c0 and parameters; those that are not needed have no
// elements. For layers, `grad_output` is that of the last layer's output.
inline std::vector<Tensor> backward_pass(
    LstmCall& call, const Tensor& grad_output, const OptionalTensor& grad_h_n,
    const OptionalTensor& grad_c_n, const Tensor& input, const OptionalTensor& h0,
    const OptionalTensor& c0, const LstmSaved& saved, const Flags& needs_grad) {
  check_backward(call, grad_output, grad_h_n, grad_c_n, input, h0, c0, saved);
  Lstm& p = call.p;
  const int64_t D = p.chains, T = p.T, B = p.B, H = p.H, R = p.R;
  const bool norm = p.norm_hh != nullptr, recompute = recomputes(call, saved);
  const Tensor first_h = call.state(h0, R, call.dtype);
  const Tensor grad_h = call.state(grad_h_n, R, call.wide);
  Tensor first_c, grad_c;
  if (p.cell == Cell::Lstm) {
    first_c = call.state(c0, H, call.wide);
    grad_c = call.state(grad_c_n, H, call.wide);
  }
  BackwardTokens tokens = prepare_tokens(call, grad_output, input, first_h, saved);
  Tensor vector_grads;
  if (norm || p.peephole)
    vector_grads =
        at::zeros({D, p.vector_grad_runs(), B, p.vector_grad_count(), H}, grad_h.options());
  p.from_input = data(tokens.grad_from_input);
  p.from_hidden = norm || p.cell == Cell::Gru ? data(tokens.grad_from_hidden) : nullptr;
  p.h_before = data(tokens.h_dropped);
  p.output = data(saved.output);
  p.gates = recompute ? nullptr : data(saved.gates);
  p.cells = data(saved.cells);
  p.clipped = has_elements(saved.clipped) ? saved.clipped.data_ptr<bool>() : nullptr;
  p.grad_output = data(tokens.grad_output);
  p.c0 = data(first_c);
  p.grad_h = data(grad_h);
  p.grad_c = data(grad_c);
  p.vector_grads = data(vector_grads);
  if (T && B) {
    if (p.projected) {
      tokens.m = call.empty_tokens({D, T, B, H}, call.dtype);
      tokens.grad_projected = call.empty_tokens({D, T, B, R}, call.dtype);
      p.m = data(tokens.m);
    }
    if (lstm_fits_sequence(p, true)) backward_sequence(call, tokens);
    else backward_steps(call, grad_h, tokens);
  }
  if (tokens.padding.defined() && (norm || recompute)) {
    const Tensor gates_padding = p.layers ? tokens.padding : tokens.padding.unsqueeze(3);
    tokens.grad_from_input.masked_fill_(gates_padding, 0);
    tokens.grad_from_hidden.masked_fill_(gates_padding, 0);
  }

  const int64_t slots = slots_of(p.cell), first = 1 + call.states();  // of the parameters
  std::vector<Tensor> results(first + slots * D);
  const auto give = [&](int64_t index, const Tensor& like, const Tensor& grad) {
    results[index] = grad.to(like.scalar_type()).reshape(like.sizes()).contiguous();
  };
  if (needs_grad.get(0))
    give(0, input, call.input_tokens(tokens.grad_from_input).mm(call.weight_ih.flatten(0, 1)));
  // A caller that passes the gradient of h to an earlier call keeps it unrounded.
  const bool wide = p.cell == Cell::Lstm && grad_h_n && grad_h_n->scalar_type() == call.wide;
  if (h0 && needs_grad.get(1)) give(1, wide ? *grad_h_n : *h0, grad_h);
  if (c0 && needs_grad.get(2)) give(2, *c0, grad_c);
  // Both biases have the same gradient, except in a GRU whose reset gate multiplies one of them.
  const bool one_bias_gradient = norm || tokens.grad_from_hidden.is_same(tokens.grad_from_input);
  for (int64_t index = 0; index < slots * D; ++index) {
    const OptionalTensor parameter = call.parameters.get(index);
    if (!parameter || !needs_grad.get(first + index)) continue;
    const int64_t d = index / slots;
    const Slot slot = static_cast<Slot>(index % slots);
    if (const Tensor& other = results[first + index - (BiasHh - BiasIh)];
        slot == BiasHh && one_bias_gradient && other.defined()) {
      results[first + index] = other.clone();
      continue;
    }
    give(first + index, *parameter, parameter_gradient(call, tokens, saved, vector_grads, d, slot));
  }
  for (Tensor& grad : results)  // no two results may be the same tensor
    if (!grad.defined()) grad = call.empty({0}, call.dtype);
  return results;
}

}  // namespace trifuse::cuda
