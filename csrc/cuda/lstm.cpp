// torch.ops.trifuse.lstm_{forward,backward}.cuda and lstm_stack_{forward,backward}.cuda: tensors
// in, tensors out.
//
// Shapes, dtypes and devices have been checked in pytorch_ext/ops/lstm.py. This file computes the
// products over all tokens, those of the input and of the weights' gradients. If the recurrent
// weights don't fit the multiprocessors, it also computes the products of every step. Layers of a
// stack run at once, as many as fit, or one by one.

#include "cuda/lstm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "arguments.h"
#include "cuda/tensors.h"
#include "lstm_tensors.h"

namespace trifuse::cuda {
namespace {

using Parameters = c10::List<OptionalTensor>;
using Flags = c10::List<bool>;

// Slots of the parameters of one direction.
enum Slot {
  WeightIh,
  WeightHh,
  BiasIh,
  BiasHh,
  WeightHr,
  WeightPeephole,
  NormIh,
  NormHh,
  NormCell,
  NormCellBias,
  kSlots
};

struct Options {
  Flags reverse;
  bool coupled;
  double forget_bias, cell_clip, proj_clip, eps, zoneout_h, zoneout_c, recurrent_dropout;
  bool training;
  bool layers = false;  // the flags in `reverse` are of a stack's layers instead of directions
};

void* data(const Tensor& t) { return t.defined() ? t.data_ptr() : nullptr; }

// Returns a call with the fields that lstm_fits_sequence reads, except `layers`.
Lstm sizes(const Tensor& input, const Parameters& parameters, bool coupled, int64_t directions) {
  Lstm p{};
  const Tensor weight_hh = *parameters.get(WeightHh);
  p.dtype = kernel_type(input.scalar_type());
  p.T = input.size(0);
  p.B = input.size(1);
  p.R = weight_hh.size(1);
  p.coupled = coupled;
  p.H = weight_hh.size(0) / (coupled ? 3 : 4);
  p.directions = directions;
  p.projected = parameters.get(WeightHr).has_value();
  if (const OptionalTensor norm = parameters.get(NormHh)) p.norm_hh = norm->data_ptr();
  return p;
}

// A call as the kernels take it, and the tensors that it points into.
class Call {
 public:
  Lstm p{};
  const OnDeviceOf device;
  const at::ScalarType dtype, wide;
  const Parameters parameters;
  Tensor weight_ih;     // (D, H·4, I), a unit's gates side by side; for layers the first's only
  Tensor weight_above;  // W_ih of the layers above it, (D - 1, H·4, R), or undefined
  Tensor weight_hh;     // (D, H·4, R)
  Tensor weight_hr;     // (D, R, H), or undefined
  Tensor lengths;       // (B,) or undefined
  Tensor valid;         // (T, B, 1): whether a row has the step; undefined: all have

  Call(
      const Tensor& input, const Parameters& parameters, const OptionalTensor& row_lengths,
      const OptionalTensor& seed, const Options& o)
      : device(input), dtype(input.scalar_type()), wide(accumulation_type(dtype)),
        parameters(parameters), options_(input.options()) {
    check_hidden(parameters.get(WeightHh), {}, {});
    p = sizes(input, parameters, o.coupled, o.reverse.size());
    p.layers = o.layers;
    check_memory("input", input);
    for (int64_t d = 0; d < p.directions; ++d)
      check_parameters(
          saved_gates(), p.H, p.R, kSlots, input, p.layers && d > 0 ? p.R : input.size(2),
          [&](int slot) { return parameters.get(d * kSlots + slot); });
    check_integers("lengths", row_lengths, p.B, input);
    check_seed(seed, input);
    for (int64_t d = 0; d < p.directions; ++d) p.reverse[d] = o.reverse.get(d);
    p.training = o.training;
    p.cell_clip = o.cell_clip;
    p.proj_clip = o.proj_clip;
    p.eps = o.eps;
    p.zoneout_h = o.zoneout_h;
    p.zoneout_c = o.zoneout_c;
    p.threshold_h = kernel_dropout(o.zoneout_h).threshold;
    p.threshold_c = kernel_dropout(o.zoneout_c).threshold;
    p.seed = seed ? seed->const_data_ptr<int64_t>() : nullptr;
    if (row_lengths) {
      lengths = row_lengths->to(at::kLong).contiguous();
      p.lengths = lengths.const_data_ptr<int64_t>();
      const Tensor steps = at::arange(p.T, lengths.options());
      valid = steps.unsqueeze(1).lt(lengths).unsqueeze(2);
    }

    weight_ih = interleaved(WeightIh, dtype, 0, p.layers ? 1 : p.directions);
    if (p.layers) weight_above = interleaved(WeightIh, dtype, 1);
    weight_hh = interleaved(WeightHh, dtype);
    weight_hr = stacked(WeightHr, dtype);
    bias_ = bias(o.forget_bias);
    peephole_ = stacked(WeightPeephole, wide);
    if (p.coupled && peephole_.defined()) {
      const Tensor of_i = peephole_.select(1, 0), of_o = peephole_.select(1, 1);
      peephole_ = at::stack({of_i, at::zeros_like(of_i), of_o}, 1);
    }
    norm_ih_ = interleaved(NormIh, wide);
    norm_hh_ = interleaved(NormHh, wide);
    norm_cell_weight_ = stacked(NormCell, wide);
    norm_cell_bias_ = stacked(NormCellBias, wide);
    p.bias = data(bias_);
    p.peephole = data(peephole_);
    p.norm_ih = data(norm_ih_);
    p.norm_hh = data(norm_hh_);
    p.norm_cell_weight = data(norm_cell_weight_);
    p.norm_cell_bias = data(norm_cell_bias_);
    if (const int64_t bytes = lstm_workspace(p)) {
      workspace_ = empty({bytes}, at::kByte);
      p.workspace = data(workspace_);
    }
    const Dropout drawn = kernel_dropout(o.recurrent_dropout);
    if (o.training && drawn.threshold) {
      dropout_ = empty({p.directions, p.B, p.R}, wide);
      if (p.B) lstm_dropout(p, data(dropout_), drawn.threshold, drawn.scale, device.stream());
      p.dropout = data(dropout_);
    }
  }

  int64_t saved_gates() const { return p.coupled ? 3 : 4; }

  Tensor empty(at::IntArrayRef sizes, at::ScalarType type) const {
    return at::empty(sizes, options_.dtype(type));
  }
  // Returns memory for all steps: zeros if rows have lengths, as kernels write nothing past them.
  Tensor empty_tokens(at::IntArrayRef sizes, at::ScalarType type) const {
    return lengths.defined() ? at::zeros(sizes, options_.dtype(type)) : empty(sizes, type);
  }

  // Returns a new tensor, (D, B, N) and contiguous: a copy of `t`, or zeros.
  Tensor state(const OptionalTensor& t, int64_t N, at::ScalarType type) const {
    return state(t, p.directions, N, type);
  }
  Tensor state(const OptionalTensor& t, int64_t D, int64_t N, at::ScalarType type) const {
    if (!t) return at::zeros({D, p.B, N}, options_.dtype(type));
    return empty({D, p.B, N}, type).copy_(*t);
  }

  // Returns h after recurrent dropout.
  Tensor dropped(const Tensor& h) const {
    return dropout_.defined() ? (h * dropout_).to(h.scalar_type()) : h;
  }
  // Returns the gradient of h from `through`, the gradient of h after recurrent dropout.
  Tensor dropped_gradient(const Tensor& through) const {
    return dropout_.defined() ? through * dropout_ : through;
  }

  // Shape of the gates of all tokens: (T, B, D, 4·H), or for layers (D, T, B, 4·H).
  at::DimVector all_gates() const {
    if (p.layers) return {p.directions, p.T, p.B, 4 * p.H};
    return {p.T, p.B, p.directions, 4 * p.H};
  }
  // Views of a tensor in that layout: `tokens` is one direction or layer, (T·B, 4·H); `of_readers`
  // is all that read the input: all directions, (T·B, D·4·H), or the first layer, (T·B, 4·H).
  Tensor tokens(const Tensor& t, int64_t d) const {
    return t.select(p.layers ? 0 : 2, d).flatten(0, 1);
  }
  Tensor of_readers(const Tensor& t) const {
    return p.layers ? tokens(t, 0) : t.flatten(2).flatten(0, 1);
  }

  // Computes W_ih x for all directions, or for the first layer, from x (T·B, I).
  void multiply_input(const Tensor& from_input, const Tensor& x) const {
    Tensor product = of_readers(from_input);
    at::mm_out(product, x, weight_ih.flatten(0, 1).t());
  }
  // Computes W_ih x of layer d > 0 over some steps; x is the output of the layer below, (T, B, R).
  void multiply_below(
      const Tensor& from_input, const Tensor& below, int64_t d, LstmSequence::Steps steps) const {
    Tensor product = of_steps(tokens(from_input, d), steps);
    at::mm_out(product, of_steps(below.flatten(0, 1), steps), weight_above[d - 1].t());
  }
  // Backward: computes the gradient of layer d's output from the gates' gradients of layer d + 1.
  void multiply_above(
      const Tensor& grad_output, const Tensor& grad, int64_t d, LstmSequence::Steps steps) const {
    Tensor product = of_steps(tokens(grad_output, d), steps);
    at::mm_out(product, of_steps(tokens(grad, d + 1), steps), weight_above[d]);
  }

  // Returns the tensors of all directions, stacked and contiguous; undefined if the call has none.
  // With a single direction the result may share the parameter's memory.
  Tensor stacked(Slot slot, at::ScalarType type) const {
    if (!parameters.get(slot)) return {};
    std::vector<Tensor> all;
    for (int64_t d = 0; d < p.directions; ++d)
      all.push_back(parameters.get(d * kSlots + slot)->to(type));
    return all.size() == 1 ? all[0].contiguous().unsqueeze(0) : at::stack(all);
  }
  // Returns (D, H·4, ...) in new memory, from parameters (G·H, ...); zeros for f if coupled.
  Tensor interleaved(
      Slot slot, at::ScalarType type, int64_t first = 0, std::optional<int64_t> last = {}) const {
    const int64_t end = last.value_or(p.directions);
    if (first == end || !parameters.get(slot)) return {};
    const Tensor like = *parameters.get(first * kSlots + slot);
    at::DimVector sizes{end - first, p.H, 4};
    sizes.append(like.sizes().begin() + 1, like.sizes().end());
    const Tensor all = p.coupled ? at::zeros(sizes, options_.dtype(type)) : empty(sizes, type);
    for (int64_t d = first; d < end; ++d) {
      const Tensor from = parameters.get(d * kSlots + slot)->unflatten(0, {saved_gates(), p.H});
      const Tensor to = all[d - first].transpose(0, 1);
      if (p.coupled) {
        to[0].copy_(from[0]);
        to.narrow(0, 2, 2).copy_(from.narrow(0, 1, 2));
      } else {
        to.copy_(from);
      }
    }
    return all.flatten(1, 2);
  }
  // The inverse for one direction: from (H·4, ...) to (G·H, ...).
  Tensor with_gates_outside(const Tensor& t) const {
    Tensor gates = t.unflatten(0, {p.H, 4}).transpose(0, 1);
    if (p.coupled) gates = at::cat({gates.narrow(0, 0, 1), gates.narrow(0, 2, 2)});
    return gates.flatten(0, 1);
  }

 private:
  Tensor of_steps(const Tensor& tokens, LstmSequence::Steps steps) const {
    return tokens.slice(0, steps.first * p.B, steps.last * p.B);
  }

  // (D, H·4): both biases and the forget bias.
  Tensor bias(double forget_bias) const {
    Tensor sum = interleaved(BiasIh, wide);
    const Tensor other = interleaved(BiasHh, wide);
    if (!sum.defined()) sum = other;
    else if (other.defined()) sum = sum + other;
    if (forget_bias == 0) return sum;
    if (!sum.defined()) sum = at::zeros({p.directions, 4 * p.H}, options_.dtype(wide));
    sum.unflatten(1, {p.H, 4}).select(2, 1).add_(forget_bias);
    return sum;
  }

  // Keep autograd and autocast away from the products here.
  const at::AutoDispatchBelowADInplaceOrView no_autograd_;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  const at::TensorOptions options_;
  Tensor bias_, peephole_, norm_ih_, norm_hh_, norm_cell_weight_, norm_cell_bias_, dropout_;
  Tensor workspace_;
};

// Returns the steps of a layer per launch, C. A launch costs as much as some steps, because blocks
// read their weights again; how many is estimated, not measured. There are T + (D - 1) C steps one
// after the other, in T / C + D - 1 launches; the root below is the best C.
int64_t chunk_of(const Lstm& p) {
  constexpr double kStepsOfLaunch = 5;
  if (!p.layers || p.directions == 1) return p.T;
  return std::lround(std::sqrt(kStepsOfLaunch * p.T / (p.directions - 1)));
}

// The arguments of whole-sequence launches beside the call, and the tensors that they point into.
struct Exchange {
  LstmSequence sequence{};
  Tensor operand, hidden, arrivals, lengths, order;

  // Rows of `operand` have `columns` numbers; with a projection, those of `hidden` have `others`.
  Exchange(const Call& call, int64_t columns, int64_t others) {
    const Lstm& p = call.p;
    const auto rows = [&](int64_t states, int64_t N) {
      const auto options = call.weight_hh.options();
      return at::zeros({states, p.directions, p.B, (N + 7) / 8 * 8}, options);
    };
    operand = rows(2, columns);
    if (p.projected) hidden = rows(1, others);
    arrivals = call.empty({LstmSequence::kArrivals}, at::kInt);
    sequence.chunk = chunk_of(p);
    sequence.weight_hh = data(call.weight_hh);
    sequence.weight_hr = data(call.weight_hr);
    if (call.lengths.defined()) {
      std::tie(lengths, order) = call.lengths.sort(/*stable=*/true, 0, /*descending=*/true);
      sequence.order = order.const_data_ptr<int64_t>();
      sequence.lengths = lengths.const_data_ptr<int64_t>();
    }
    sequence.operand = data(operand);
    sequence.hidden = data(hidden);
    sequence.arrivals = static_cast<uint32_t*>(data(arrivals));
  }
};

// Forward -----------------------------------------------------------------------------------------

// Values of lstm_forward's argument `save`.
enum Save { kNothing, kCells, kGatesAndCells };

// Results of a forward of D directions or D layers. The output of layers is (D, T, B, R).
struct Results {
  Tensor output, h, c, gates, cells, clipped;
};

Results results_of(
    const Call& call, int64_t D, const OptionalTensor& h0, const OptionalTensor& c0, int64_t save) {
  const int64_t T = call.p.T, B = call.p.B, H = call.p.H, R = call.p.R;
  const int64_t columns = call.p.clipped_columns();
  check_shape("h0", h0, {D, B, R});
  check_shape("c0", c0, {D, B, H});
  Results all;
  all.output = call.p.layers ? call.empty_tokens({D, T, B, R}, call.dtype)
                             : call.empty_tokens({T, B, D * R}, call.dtype);
  all.h = call.state(h0, D, R, call.dtype);
  all.c = call.state(c0, D, H, call.wide);
  all.gates = call.empty({0}, call.dtype);
  all.cells = call.empty({0}, call.wide);
  all.clipped = call.empty({0}, at::kBool);
  if (save == kGatesAndCells) all.gates = call.empty({D, T, B, call.saved_gates() * H}, call.dtype);
  if (save != kNothing) all.cells = call.empty({D, T, B, H}, call.wide);
  if (save != kNothing && columns) all.clipped = call.empty({D, T, B, columns}, at::kBool);
  return all;
}

// Checks the lengths on the device: reading them here would wait for it.
void check_lengths(const Call& call) {
  if (!call.lengths.defined()) return;
  const int64_t T = call.p.T;
  const Tensor right = call.lengths.ge(0).logical_and(call.lengths.le(T)).all();
  at::_assert_async(right, "lengths: expected lengths in [0, " + std::to_string(T) + "]");
}

void forward(Call& call, const Tensor& input, const Results& results) {
  Lstm& p = call.p;
  const int64_t D = p.directions, T = p.T, B = p.B, H = p.H, R = p.R;
  if (T == 0 || B == 0) return;
  const auto& [output, h, c, gates, cells, clipped] = results;
  const Tensor from_input = call.empty(call.all_gates(), call.dtype);
  call.multiply_input(from_input, input.flatten(0, 1));
  const Tensor operand = p.dropout ? call.dropped(h) : h;
  p.from_input = data(from_input);
  p.output = data(output);
  p.gates = gates.numel() ? data(gates) : nullptr;
  p.cells = cells.numel() ? data(cells) : nullptr;
  p.clipped = clipped.numel() ? clipped.data_ptr<bool>() : nullptr;
  p.h = data(h);
  p.operand = data(operand);
  p.c = data(c);
  void* const stream = call.device.stream();

  if (lstm_fits_sequence(p, false)) {
    Exchange exchange(call, R, H);
    exchange.operand.select(0, 0).narrow(2, 0, R).copy_(operand);
    LstmSequence& sequence = exchange.sequence;
    for (; sequence.wave < sequence.waves(p); ++sequence.wave) {
      for (int64_t d = 1; p.layers && d < D; ++d)
        call.multiply_below(from_input, output[d - 1], d, sequence.steps(p, d));
      lstm_forward_sequence(p, sequence, stream);
    }
    return;
  }
  Tensor from_hidden = call.empty({D, B, 4 * H}, call.dtype), m, projected;
  if (p.projected) {
    m = call.state({}, H, call.dtype);
    projected = call.empty({D, B, R}, call.dtype);
  }
  const Tensor weight_hh = call.weight_hh.mT(), weight_hr = p.projected ? call.weight_hr.mT() : m;
  for (int64_t step = 0; step < T; ++step) {
    at::bmm_out(from_hidden, operand, weight_hh);
    lstm_forward_step(p, step, data(from_hidden), data(m), stream);
    if (!p.projected) continue;
    at::bmm_out(projected, m, weight_hr);
    lstm_forward_projection(p, step, data(projected), stream);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_forward(
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Flags& reverse, bool coupled, double forget_bias, OptionalLimit cell_clip,
    OptionalLimit proj_clip, double eps, double zoneout_h, double zoneout_c,
    double recurrent_dropout, bool training, int64_t save) {
  Call call(
      input, parameters, lengths, seed,
      {reverse, coupled, forget_bias, limit(cell_clip), limit(proj_clip), eps, zoneout_h, zoneout_c,
       recurrent_dropout, training});
  check_lengths(call);
  const Results results = results_of(call, call.p.directions, h0, c0, save);
  forward(call, input, results);
  const auto& [output, h, c, gates, cells, clipped] = results;
  return {output, h, c, gates, cells, clipped};
}

// Backward ----------------------------------------------------------------------------------------

// Returns h before each step, (D, T, B, R), 0 past a row's length.
Tensor states_before(const Call& call, const std::vector<Tensor>& outputs, const Tensor& h0) {
  const Lstm& p = call.p;
  std::vector<Tensor> all;
  for (int64_t d = 0; d < p.directions; ++d) {
    const Tensor h = outputs[d], first = h0.narrow(0, d, 1);
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
  return at::stack(all);
}

// The backward's tensors over all tokens. In the end all but `arriving` are 0 past a row's length.
struct Tokens {
  Tensor x;               // (T·B, I)
  Tensor arriving;        // (T, B, D·R): gradients of outputs; of several layers (D, T, B, R), all
                          // but the last layer's filled in during the backward
  Tensor hd;              // (D, T·B, R): h before each step, after dropout
  Tensor of_input;        // all_gates(): gradients of W_ih x
  Tensor of_hidden;       // all_gates(): of W_hh h; without layer norm the same tensor
  Tensor m;               // (D, T, B, H), with a projection
  Tensor grad_projected;  // (D, T, B, R), of W_hr m
};

// Runs from the last step to the first. Leaves the gradient of h0 in grad_h.
void backward_steps(const Call& call, const Tensor& grad_h, Tokens& over) {
  const Lstm& p = call.p;
  const int64_t D = p.directions, T = p.T, B = p.B, H = p.H, R = p.R;
  void* const stream = call.device.stream();
  if (p.projected) {
    over.m = call.empty_tokens({D, T, B, H}, call.dtype);
    over.grad_projected = call.empty_tokens({D, T, B, R}, call.dtype);
    lstm_hidden(p, data(over.m), stream);
  }
  if (lstm_fits_sequence(p, true)) {
    Exchange exchange(call, 4 * H, R);
    const Tensor parts = call.empty({lstm_backward_parts(p)}, at::kFloat);
    LstmSequence& sequence = exchange.sequence;
    sequence.parts = static_cast<float*>(data(parts));
    sequence.grad_projected = data(over.grad_projected);
    for (sequence.wave = sequence.waves(p) - 1; sequence.wave >= 0; --sequence.wave) {
      for (int64_t d = 0; p.layers && d < D - 1; ++d)
        call.multiply_above(over.arriving, over.of_input, d, sequence.steps(p, d));
      lstm_backward_sequence(p, sequence, stream);
    }
    return;
  }
  Tensor through = call.state({}, R, call.dtype), operand = call.empty({D, B, 4 * H}, call.dtype);
  Tensor dq, dm;
  if (p.projected) {
    dq = call.empty({D, B, R}, call.dtype);
    dm = call.empty({D, B, H}, call.dtype);
  }
  for (int64_t step = T - 1; step >= 0; --step) {
    if (p.projected) {
      lstm_backward_projection(p, step, data(through), data(dq), data(over.grad_projected), stream);
      at::bmm_out(dm, dq, call.weight_hr);
    }
    lstm_backward_step(p, step, data(p.projected ? dm : through), data(operand), stream);
    at::bmm_out(through, operand, call.weight_hh);
  }
  grad_h.add_(call.dropped_gradient(through));
}

// Results of the forward that the backward reads.
struct Kept {
  std::vector<Tensor> outputs;  // of each direction or layer, (T, B, R)
  Tensor gates, cells, clipped;
};

// Returns the gradients of input, h0, c0 and parameters. For layers, `grad_output` is that of the
// last layer's output.
std::vector<Tensor> backward(
    Call& call, const Tensor& grad_output, const OptionalTensor& grad_h_n,
    const OptionalTensor& grad_c_n, const Tensor& input, const OptionalTensor& h0,
    const OptionalTensor& c0, const Kept& kept, const Flags& wanted) {
  Lstm& p = call.p;
  const auto& [outputs, gates, cells, clipped] = kept;
  const int64_t D = p.directions, T = p.T, B = p.B, H = p.H, R = p.R;
  const bool recompute = gates.dim() == 1, norm = p.norm_hh != nullptr;
  for (const Tensor& output : outputs) check_shape("output", output, {T, B, R});
  if (!recompute) check_shape("gates", gates, {D, T, B, call.saved_gates() * H});
  check_shape("cells", cells, {D, T, B, H});
  if (clipped.numel()) check_shape("clipped", clipped, {D, T, B, p.clipped_columns()});
  check_shape("h0", h0, {D, B, R});
  check_shape("c0", c0, {D, B, H});
  if (h0) check_type("h0", *h0, call.dtype, input);
  if (c0) check_type("c0", *c0, plain_or_wide(*c0, input), input);
  check_shape("grad_output", grad_output, {T, B, p.layers ? R : D * R});
  check_shape("grad_h_n", grad_h_n, {D, B, R});
  check_shape("grad_c_n", grad_c_n, {D, B, H});
  const Tensor first_h = call.state(h0, R, call.dtype), first_c = call.state(c0, H, call.wide);
  const Tensor grad_h = call.state(grad_h_n, R, call.wide);
  const Tensor grad_c = call.state(grad_c_n, H, call.wide);
  const Tensor padding = call.lengths.defined() ? call.valid.logical_not() : Tensor();

  Tokens over;
  over.x = padding.defined() ? input.masked_fill(padding, 0) : input;
  over.x = over.x.flatten(0, 1);
  over.hd = call.empty({D, 0, R}, call.dtype);
  if (T) {
    const Tensor before = states_before(call, outputs, first_h).transpose(0, 1);  // (T, D, B, R)
    over.hd = call.dropped(before).transpose(0, 1).reshape({D, T * B, R});
  }
  // Products that the forward did not save are computed again, in the memory of their gradients.
  over.of_input = norm || recompute ? call.empty(call.all_gates(), call.dtype)
                                    : call.empty_tokens(call.all_gates(), call.dtype);
  over.of_hidden = norm ? call.empty(call.all_gates(), call.dtype) : over.of_input;
  if (norm || recompute) call.multiply_input(over.of_input, over.x);
  for (int64_t d = 0; d < D; ++d) {
    const Tensor weight = call.weight_hh[d].t();
    if (recompute && p.layers && d > 0)
      call.multiply_below(over.of_input, outputs[d - 1], d, {0, T});
    if (norm) call.tokens(over.of_hidden, d).copy_(over.hd[d].mm(weight));
    else if (recompute) call.tokens(over.of_input, d).addmm_(over.hd[d], weight);
  }
  Tensor shares;
  if (norm || p.peephole) shares = at::zeros({D, B, p.shares_count(), H}, grad_c.options());

  over.arriving = grad_output.contiguous();
  if (p.layers && D > 1) {
    over.arriving = call.empty({D, T, B, R}, call.dtype);
    over.arriving.select(0, D - 1).copy_(grad_output);
  }
  p.from_input = data(over.of_input);
  p.from_hidden = norm ? data(over.of_hidden) : nullptr;
  p.gates = recompute ? nullptr : data(gates);
  p.cells = data(cells);
  p.clipped = clipped.numel() ? clipped.data_ptr<bool>() : nullptr;
  p.grad_output = data(over.arriving);
  p.c0 = data(first_c);
  p.grad_h = data(grad_h);
  p.grad_c = data(grad_c);
  p.shares = data(shares);
  if (T && B) backward_steps(call, grad_h, over);
  if (padding.defined() && (norm || recompute)) {
    const Tensor of_gates = p.layers ? padding : padding.unsqueeze(3);
    over.of_input.masked_fill_(of_gates, 0);
    over.of_hidden.masked_fill_(of_gates, 0);
  }

  const auto wants = [&](int64_t index) { return wanted.get(index); };
  std::vector<Tensor> results(3 + kSlots * D);
  const auto give = [&](int64_t index, const Tensor& like, const Tensor& grad) {
    results[index] = grad.to(like.scalar_type()).reshape(like.sizes()).contiguous();
  };
  if (wants(0)) give(0, input, call.of_readers(over.of_input).mm(call.weight_ih.flatten(0, 1)));
  if (h0 && wants(1)) give(1, *h0, grad_h);
  if (c0 && wants(2)) give(2, *c0, grad_c);
  for (int64_t d = 0; d < D; ++d) {
    const auto give_slot = [&](Slot slot, const auto& gradient) {
      const int64_t index = d * kSlots + slot;
      const OptionalTensor like = call.parameters.get(index);
      if (like && wants(3 + index)) give(3 + index, *like, gradient());
    };
    // Takes (H·4, ...).
    const auto outside = [&](const Tensor& t) { return call.with_gates_outside(t); };
    // Returns the sum over rows of `count` vectors of the shares, from `first` on: (count, H).
    const auto share = [&](int64_t first, int64_t count) {
      return shares[d].narrow(1, first, count).sum(0);
    };
    const auto of_gates = [&](int64_t first) {  // (4, H)
      return outside(share(first, 4).t().flatten());
    };
    const auto bias = [&] {
      return norm ? of_gates(Lstm::OfBias)
                  : outside(call.tokens(over.of_input, d).sum(0, false, call.wide));
    };
    give_slot(WeightIh, [&] {
      const Tensor x = p.layers && d > 0 ? outputs[d - 1].flatten(0, 1) : over.x;
      return outside(call.tokens(over.of_input, d).t().mm(x));
    });
    give_slot(WeightHh, [&] { return outside(call.tokens(over.of_hidden, d).t().mm(over.hd[d])); });
    give_slot(BiasIh, bias);
    give_slot(BiasHh, bias);
    give_slot(WeightHr, [&] {
      if (!over.m.defined()) return at::zeros({R, H}, input.options());
      return over.grad_projected[d].flatten(0, 1).t().mm(over.m[d].flatten(0, 1));
    });
    give_slot(WeightPeephole, [&] {
      const Tensor all = share(Lstm::OfPeephole, 3);
      return p.coupled ? at::stack({all[0], all[2]}) : all;
    });
    give_slot(NormIh, [&] { return of_gates(Lstm::OfNormIh); });
    give_slot(NormHh, [&] { return of_gates(Lstm::OfNormHh); });
    give_slot(NormCell, [&] { return share(Lstm::OfNormCell, 1); });
    give_slot(NormCellBias, [&] { return share(Lstm::OfNormCell + 1, 1); });
  }
  for (Tensor& grad : results)  // no two results may be the same tensor
    if (!grad.defined()) grad = call.empty({0}, call.dtype);
  return results;
}

std::vector<Tensor> lstm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const OptionalTensor& grad_c_n,
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Tensor& output, const Tensor& gates, const Tensor& cells, const Tensor& clipped,
    const Flags& reverse, bool coupled, double forget_bias, OptionalLimit cell_clip,
    OptionalLimit proj_clip, double eps, double zoneout_h, double zoneout_c,
    double recurrent_dropout, bool training, const Flags& wanted) {
  const int64_t D = static_cast<int64_t>(reverse.size());
  check_input(input, output);
  check_hidden(parameters.get(WeightHh), cells.size(-1) * (coupled ? 3 : 4), output.size(-1) / D);
  Call call(
      input, parameters, lengths, seed,
      {reverse, coupled, forget_bias, limit(cell_clip), limit(proj_clip), eps, zoneout_h, zoneout_c,
       recurrent_dropout, training});
  const Kept kept{output.split(call.p.R, 2), gates, cells, clipped};
  return backward(call, grad_output, grad_h_n, grad_c_n, input, h0, c0, kept, wanted);
}

// Returns why such a call runs step by step; empty if it is one launch.
std::string lstm_step_by_step(
    const Tensor& input, const Parameters& parameters, bool coupled, bool backward) {
  const OnDeviceOf device(input);
  std::string why;
  const int64_t directions = static_cast<int64_t>(parameters.size()) / kSlots;
  lstm_fits_sequence(sizes(input, parameters, coupled, directions), backward, &why);
  return why;
}

// Stacks ------------------------------------------------------------------------------------------

// Returns how many layers of a stack run at once, in groups of nearly equal size, and why not more.
std::tuple<int64_t, std::string> layers_at_once(
    const Tensor& input, const Parameters& parameters, bool coupled, bool backward) {
  constexpr int64_t kFewestSteps = 32;  // an estimate, not measured
  const OnDeviceOf device(input);
  const int64_t layers = static_cast<int64_t>(parameters.size()) / kSlots;
  int64_t most = std::min<int64_t>(layers, Lstm::kMaxDirections);
  std::string why = most < layers ? "more never do" : "", reason;
  if (input.size(0) < kFewestSteps) {
    why = "fewer than " + std::to_string(kFewestSteps) + " steps";
    most = 1;
  }
  for (; most > 1; --most) {
    Lstm p = sizes(input, parameters, coupled, most);
    p.layers = true;
    if (lstm_fits_sequence(p, backward, &reason)) break;
    why = reason;
  }
  const int64_t groups = (layers + most - 1) / most;
  return {(layers + groups - 1) / groups, why};
}

// Consecutive layers of a stack.
struct Layers {
  int64_t first, count;

  // Return these layers' part of a list, which has `others` elements and then `each` per layer, of
  // a tensor (L, ...), and of the results and options of all layers.
  template <class List>
  List of(const List& all, int64_t each, int64_t others = 0) const {
    List part;
    for (int64_t i = first * each; i < (first + count) * each; ++i)
      part.push_back(all.get(others + i));
    return part;
  }
  OptionalTensor of(const OptionalTensor& t) const {
    return t && t->dim() > 1 ? t->narrow(0, first, count) : t;
  }
  Results of(const Results& all) const {
    return {*of(all.output), *of(all.h),     *of(all.c),
            *of(all.gates),  *of(all.cells), *of(all.clipped)};
  }
  Options of(Options options) const {
    options.reverse = of(options.reverse, 1);
    options.layers = true;
    return options;
  }
};

// The first result is the output of the last layer. The last result is the outputs of the layers
// below, (L - 1, T, B, R), or empty if nothing is kept.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_stack_forward(
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Flags& reverse, bool coupled, double forget_bias, OptionalLimit cell_clip,
    OptionalLimit proj_clip, double eps, double zoneout_h, double zoneout_c,
    double recurrent_dropout, bool training, int64_t save) {
  const Options options{reverse, coupled,   forget_bias, limit(cell_clip),  limit(proj_clip),
                        eps,     zoneout_h, zoneout_c,   recurrent_dropout, training};
  const int64_t L = static_cast<int64_t>(reverse.size());
  const int64_t at_once = std::get<0>(layers_at_once(input, parameters, coupled, false));
  Results all;
  for (Layers some{0, at_once}; some.first < L; some.first += at_once) {
    some.count = std::min(at_once, L - some.first);
    const Tensor x = some.first ? all.output[some.first - 1] : input;
    Call call(x, some.of(parameters, kSlots), lengths, seed, some.of(options));
    if (some.first == 0) {
      check_lengths(call);
      all = results_of(call, L, h0, c0, save);
    }
    forward(call, x, some.of(all));
  }
  const auto& [outputs, h, c, gates, cells, clipped] = all;
  const Tensor below =
      save == kNothing ? at::empty({0}, input.options()) : outputs.narrow(0, 0, L - 1);
  return {outputs[L - 1].clone(), h, c, gates, cells, clipped, below};
}

std::vector<Tensor> lstm_stack_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const OptionalTensor& grad_c_n,
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Tensor& output, const Tensor& gates, const Tensor& cells, const Tensor& clipped,
    const Tensor& below, const Flags& reverse, bool coupled, double forget_bias,
    OptionalLimit cell_clip, OptionalLimit proj_clip, double eps, double zoneout_h,
    double zoneout_c, double recurrent_dropout, bool training, const Flags& wanted) {
  const Options options{reverse, coupled,   forget_bias, limit(cell_clip),  limit(proj_clip),
                        eps,     zoneout_h, zoneout_c,   recurrent_dropout, training};
  const int64_t L = static_cast<int64_t>(reverse.size());
  check_input(input, output);
  for (int64_t layer = 0; layer < L; ++layer)
    check_hidden(
        parameters.get(layer * kSlots + WeightHh), cells.size(-1) * (coupled ? 3 : 4),
        output.size(-1));
  const int64_t at_once = std::get<0>(layers_at_once(input, parameters, coupled, true));
  std::vector<Tensor> results(3 + kSlots * L);
  Tensor arriving = grad_output;
  for (int64_t first = (L - 1) / at_once * at_once; first >= 0; first -= at_once) {
    const Layers some{first, std::min(at_once, L - first)};
    const Tensor x = first ? below[first - 1] : input;
    Call call(x, some.of(parameters, kSlots), lengths, seed, some.of(options));
    Kept kept{{}, *some.of(gates), *some.of(cells), *some.of(clipped)};
    for (int64_t d = first; d < first + some.count; ++d)
      kept.outputs.push_back(d < L - 1 ? below[d] : output);
    Flags own({first > 0 || wanted.get(0), wanted.get(1), wanted.get(2)});
    own.append(some.of(wanted, kSlots, 3));
    const std::vector<Tensor> part = backward(
        call, arriving, some.of(grad_h_n), some.of(grad_c_n), x, some.of(h0), some.of(c0), kept,
        own);
    arriving = part[0];
    for (int64_t state : {1, 2})
      results[state] =
          results[state].defined() ? at::cat({part[state], results[state]}) : part[state];
    std::copy(part.begin() + 3, part.end(), results.begin() + 3 + first * kSlots);
  }
  results[0] = arriving;
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, TRIFUSE_CUDA, m) {
  m.impl("lstm_step_by_step.cuda", lstm_step_by_step);
  m.impl("lstm_forward.cuda", lstm_forward);
  m.impl("lstm_backward.cuda", lstm_backward);
  m.impl("lstm_layers_at_once.cuda", layers_at_once);
  m.impl("lstm_stack_forward.cuda", lstm_stack_forward);
  m.impl("lstm_stack_backward.cuda", lstm_stack_backward);
}

}  // namespace trifuse::cuda
