// One call of an LSTM, a GRU or an RNN on a GPU, checked and in the form that the kernels take,
// with the tensors that it points into.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "arguments.h"
#include "cuda/lstm.h"
#include "cuda/lstm_packing.h"
#include "cuda/tensors.h"
#include "lstm_tensors.h"

namespace trifuse::cuda {

using Flags = c10::List<bool>;

// The options of a call, and the kind of its chains.
struct ChainOptions : LstmOptions {
  Flags reverse;  // of each chain
  Cell cell = Cell::Lstm;
  bool layers = false;  // whether the chains are layers of a stack instead of directions
};

inline void* data(const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }

// Returns a call with the fields that lstm_fits_sequence reads, except `layers`.
inline Lstm lstm_sizes(
    const Tensor& input, const Parameters& parameters, const ChainOptions& o, int64_t chains) {
  Lstm p{};
  const Tensor weight_hh = *parameters.get(WeightHh);
  p.dtype = kernel_type(input.scalar_type());
  p.cell = o.cell;
  p.reset_first = !o.linear_before_reset;
  p.T = input.size(0);
  p.B = input.size(1);
  p.R = weight_hh.size(1);
  p.coupled = o.coupled;
  p.H = weight_hh.size(0) / (o.coupled ? 3 : gates_of(o.cell));
  p.chains = chains;
  if (o.cell != Cell::Lstm) return p;
  p.projected = parameters.get(WeightHr).has_value();
  if (const OptionalTensor norm = parameters.get(NormHh)) p.norm_hh = norm->data_ptr();
  return p;
}

class LstmCall {
 public:
  Lstm p{};
  const OnDeviceOf device;
  const at::ScalarType dtype, wide;
  const Parameters parameters;
  Tensor weight_ih;     // (D, H·G, I), a unit's gates side by side; for layers the first's only
  Tensor weight_above;  // W_ih of the layers above it, (D - 1, H·G, R), or undefined
  Tensor weight_hh;     // (D, H·G, R)
  Tensor weight_hr;     // (D, R, H), or undefined
  Tensor lengths;       // (B,) or undefined
  Tensor valid;         // (T, B, 1): whether a row has the step; undefined: all have

  LstmCall(
      const Tensor& input, const Parameters& parameters, const OptionalTensor& row_lengths,
      const OptionalTensor& seed, const ChainOptions& o)
      : device(input), dtype(input.scalar_type()), wide(accumulation_type(dtype)),
        parameters(parameters), options_(input.options()) {
    check_hidden(parameters.get(WeightHh), {}, {});
    p = lstm_sizes(input, parameters, o, o.reverse.size());
    p.layers = o.layers;
    check(input, row_lengths, seed);
    set_options(o);
    p.seed = seed ? seed->const_data_ptr<int64_t>() : nullptr;
    p.placed = seed && seed->numel() == kSeedAndPlace;
    if (row_lengths) {
      lengths = row_lengths->to(at::kLong).contiguous();
      p.lengths = lengths.const_data_ptr<int64_t>();
      const Tensor steps = at::arange(p.T, lengths.options());
      valid = steps.unsqueeze(1).lt(lengths).unsqueeze(2);
    }
    pack_parameters(o.forget_bias);
    if (const int64_t bytes = lstm_workspace(p)) {
      workspace_ = empty({bytes}, at::kByte);
      p.workspace = data(workspace_);
    }
    const Dropout drawn = kernel_dropout(o.recurrent_dropout);
    if (o.training && drawn.threshold) {
      dropout_ = empty({p.chains, p.B, p.R}, wide);
      if (p.B) lstm_dropout(p, data(dropout_), drawn.threshold, drawn.scale, device.stream());
      p.dropout = data(dropout_);
    }
  }

  // Return the number of gates in the parameters, and the number of values that the forward saves
  // for each unit. An RNN's backward needs none. A GRU's backward also needs k, unless its reset
  // gate comes first.
  int64_t parameter_gates() const { return p.coupled ? 3 : gates_of(p.cell); }
  int64_t saved_gates() const {
    if (p.cell == Cell::Rnn) return 0;
    return parameter_gates() + (p.cell == Cell::Gru && !p.reset_first);
  }
  // Returns the number of states: h and, in an LSTM, c.
  int64_t states() const { return p.cell == Cell::Lstm ? 2 : 1; }

  Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const {
    return at::empty(sizes, options_.dtype(type));
  }
  // Returns memory for all steps, filled with zeros if rows have lengths, because kernels write
  // nothing past them.
  Tensor empty_tokens(at::IntArrayRef sizes, at::ScalarType type) const {
    return lengths.defined() ? at::zeros(sizes, options_.dtype(type)) : empty(sizes, type);
  }

  // Returns a new tensor, (D, B, N) and contiguous: a copy of `t`, or zeros.
  Tensor state(const OptionalTensor& t, int64_t N, at::ScalarType type) const {
    return state(t, p.chains, N, type);
  }
  Tensor state(const OptionalTensor& t, int64_t D, int64_t N, at::ScalarType type) const {
    if (!t) return at::zeros({D, p.B, N}, options_.dtype(type));
    return empty({D, p.B, N}, type).copy_(*t);
  }

  // Returns h after recurrent dropout.
  Tensor dropped(const Tensor& h) const {
    return dropout_.defined() ? (h * dropout_).to(h.scalar_type()) : h;
  }
  // Returns the gradient of h from `grad`, the gradient of h after recurrent dropout.
  Tensor dropped_gradient(const Tensor& grad) const {
    return dropout_.defined() ? grad * dropout_ : grad;
  }

  // Shape of the gates of all tokens: (T, B, D, G·H), or for layers (D, T, B, G·H).
  at::DimVector gates_shape() const {
    const int64_t gates = p.gates_per_unit() * p.H;
    if (p.layers) return {p.chains, p.T, p.B, gates};
    return {p.T, p.B, p.chains, gates};
  }
  // Return views of a tensor in that layout: the part of one chain, (T·B, G·H), and the part of all
  // chains that read the input, which are all directions, (T·B, D·G·H), or the first layer,
  // (T·B, G·H).
  Tensor chain_tokens(const Tensor& t, int64_t d) const {
    return t.select(p.layers ? 0 : 2, d).flatten(0, 1);
  }
  Tensor input_tokens(const Tensor& t) const {
    return p.layers ? chain_tokens(t, 0) : t.flatten(2).flatten(0, 1);
  }

  // Computes W_ih x for all directions, or for the first layer, from x (T·B, I).
  void multiply_input(const Tensor& from_input, const Tensor& x) const {
    Tensor product = input_tokens(from_input);
    at::mm_out(product, x, weight_ih.flatten(0, 1).t());
  }
  // Computes W_ih x of layer d > 0 over some steps; x is the output of the layer below, (T, B, R).
  void multiply_below(
      const Tensor& from_input, const Tensor& below, int64_t d, LstmSequence::Steps steps) const {
    Tensor product = slice_steps(chain_tokens(from_input, d), steps);
    at::mm_out(product, slice_steps(below.flatten(0, 1), steps), weight_above[d - 1].t());
  }
  // Backward: computes the gradient of layer d's output from the gates' gradients of layer d + 1.
  void multiply_above(
      const Tensor& grad_output, const Tensor& grad, int64_t d, LstmSequence::Steps steps) const {
    Tensor product = slice_steps(chain_tokens(grad_output, d), steps);
    at::mm_out(product, slice_steps(chain_tokens(grad, d + 1), steps), weight_above[d]);
  }

 private:
  void check(const Tensor& input, const OptionalTensor& row_lengths, const OptionalTensor& seed) {
    check_memory("input", input);
    const int slots = slots_of(p.cell);
    for (int64_t d = 0; d < p.chains; ++d)
      check_parameters(
          parameter_gates(), p.H, p.R, slots, input, p.layers && d > 0 ? p.R : input.size(2),
          [&](int slot) { return parameters.get(d * slots + slot); });
    check_integers("lengths", row_lengths, p.B, input);
    check_seed(seed, input);
  }

  void set_options(const ChainOptions& o) {
    for (int64_t d = 0; d < p.chains; ++d) p.reverse[d] = o.reverse.get(d);
    p.relu = o.relu;
    p.training = o.training;
    p.cell_clip = o.cell_clip;
    p.proj_clip = o.proj_clip;
    p.eps = o.eps;
    p.zoneout_h = o.zoneout_h;
    p.zoneout_c = o.zoneout_c;
    p.threshold_h = kernel_dropout(o.zoneout_h).threshold;
    p.threshold_c = kernel_dropout(o.zoneout_c).threshold;
  }

  void pack_parameters(double forget_bias) {
    const LstmPacking packing(parameters, p.cell, p.chains, p.H, p.coupled, options_);
    weight_ih = packing.interleaved(WeightIh, dtype, 0, p.layers ? 1 : p.chains);
    if (p.layers) weight_above = packing.interleaved(WeightIh, dtype, 1, p.chains);
    weight_hh = packing.interleaved(WeightHh, dtype);
    weight_hr = packing.stacked(WeightHr, dtype);
    bias_ = packing.bias(wide, forget_bias);
    peephole_ = packing.peephole(wide);
    norm_ih_ = packing.interleaved(NormIh, wide);
    norm_hh_ = packing.interleaved(NormHh, wide);
    norm_cell_weight_ = packing.stacked(NormCell, wide);
    norm_cell_bias_ = packing.stacked(NormCellBias, wide);
    p.bias = data(bias_);
    p.peephole = data(peephole_);
    p.norm_ih = data(norm_ih_);
    p.norm_hh = data(norm_hh_);
    p.norm_cell_weight = data(norm_cell_weight_);
    p.norm_cell_bias = data(norm_cell_bias_);
  }

  // Returns the rows of some steps, from tokens (T·B, N).
  Tensor slice_steps(const Tensor& tokens, LstmSequence::Steps steps) const {
    return tokens.slice(0, steps.first * p.B, steps.last * p.B);
  }

  // Keep autograd and autocast away from the products here.
  const at::AutoDispatchBelowADInplaceOrView no_autograd_;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  const at::TensorOptions options_;
  Tensor bias_, peephole_, norm_ih_, norm_hh_, norm_cell_weight_, norm_cell_bias_, dropout_;
  Tensor workspace_;
};

}  // namespace trifuse::cuda
