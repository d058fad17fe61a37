// The two schedules of a call's steps: one launch for the whole sequence, or for a chunk of
// it in a stack, if the multiprocessors can hold the recurrent weights; otherwise step by step,
// with the recurrent products computed here.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <tuple>

#include "cuda/lstm.h"
#include "cuda/lstm_call.h"

namespace trifuse::cuda {

// Returns the steps of a layer per launch, C. A launch costs as much as a few steps, because blocks
// read their weights again; this number of steps is estimated, not measured. There are T + (D - 1)
// C consecutive steps, in T / C + D - 1 launches; the root below is the best C.
inline int64_t steps_per_launch(const Lstm& p) {
  constexpr double kStepsOfLaunch = 5;
  if (!p.layers || p.chains == 1) return p.T;
  return std::lround(std::sqrt(kStepsOfLaunch * p.T / (p.chains - 1)));
}

// The arguments of whole-sequence launches in addition to the call, and the tensors that they point
// into.
struct SequenceBuffers {
  LstmSequence sequence{};
  Tensor operand_hh, operand_hr, arrivals, lengths, order;

  // Rows of operand_hh have `hh_columns` numbers; with a projection, those of operand_hr have
  // `hr_columns`.
  SequenceBuffers(const LstmCall& call, int64_t hh_columns, int64_t hr_columns) {
    const Lstm& p = call.p;
    const auto padded_rows = [&](int64_t states, int64_t N) {
      const at::DimVector sizes{states, p.chains, p.B, (N + 7) / 8 * 8};
      return N % 8 ? at::zeros(sizes, call.weight_hh.options()) : call.empty(sizes, call.dtype);
    };
    operand_hh = padded_rows(2, hh_columns);
    if (p.projected) operand_hr = padded_rows(1, hr_columns);
    arrivals = call.empty({LstmSequence::kArrivals}, at::kInt);
    sequence.chunk = steps_per_launch(p);
    sequence.weight_hh = data(call.weight_hh);
    sequence.weight_hr = data(call.weight_hr);
    if (call.lengths.defined()) {
      std::tie(lengths, order) = call.lengths.sort(/*stable=*/true, 0, /*descending=*/true);
      sequence.order = order.const_data_ptr<int64_t>();
      sequence.lengths = lengths.const_data_ptr<int64_t>();
    }
    sequence.operand_hh = data(operand_hh);
    sequence.operand_hr = data(operand_hr);
    sequence.arrivals = static_cast<uint32_t*>(data(arrivals));
  }
};

// Forward -----------------------------------------------------------------------------------------

// `h_dropped`, (D, B, R), is h0 after recurrent dropout. For layers, the input's products of all
// layers except the first are computed here, from the output of the layer below, (T, B, R).
inline void forward_sequence(
    const LstmCall& call, const Tensor& from_input, const Tensor& output, const Tensor& h_dropped) {
  const Lstm& p = call.p;
  SequenceBuffers buffers(call, p.R, p.H);
  buffers.operand_hh.select(0, 0).narrow(2, 0, p.R).copy_(h_dropped);
  LstmSequence& sequence = buffers.sequence;
  for (; sequence.wave < sequence.waves(p); ++sequence.wave) {
    for (int64_t d = 1; p.layers && d < p.chains; ++d)
      call.multiply_below(from_input, output[d - 1], d, sequence.steps(p, d));
    lstm_forward_sequence(p, sequence, call.device.stream());
  }
}

// W_hh of r and z, (D, H·2, H), and of n, (D, H, H).
struct ResetFirstWeights {
  Tensor gates, candidate;

  explicit ResetFirstWeights(const LstmCall& call) {
    const Tensor all = call.weight_hh.unflatten(1, {call.p.H, 3});
    gates = all.narrow(2, 0, 2).flatten(1, 2);
    candidate = all.select(2, 2).contiguous();
  }
};

// A GRU whose reset gate comes first. Each step replaces h, (D, B, H), by the next.
inline void forward_steps_reset_first(const LstmCall& call, const Tensor& h) {
  const Lstm& p = call.p;
  void* const stream = call.device.stream();
  const ResetFirstWeights weights(call);
  const Tensor weight_gates = weights.gates.mT(), weight_candidate = weights.candidate.mT();
  Tensor from_hidden = call.empty({p.chains, p.B, 2 * p.H}, call.dtype);
  Tensor from_reset_h = call.empty({p.chains, p.B, p.H}, call.dtype);
  const Tensor reset_h = call.state({}, p.H, call.dtype);
  for (int64_t step = 0; step < p.T; ++step) {
    at::bmm_out(from_hidden, h, weight_gates);
    gru_forward_reset(p, step, data(from_hidden), data(reset_h), stream);
    at::bmm_out(from_reset_h, reset_h, weight_candidate);
    gru_forward_reset_first(p, step, data(from_hidden), data(from_reset_h), stream);
  }
}

// Each step replaces `h_dropped`, (D, B, R), h after recurrent dropout, by the next.
inline void forward_steps(const LstmCall& call, const Tensor& h_dropped) {
  const Lstm& p = call.p;
  if (p.reset_first) return forward_steps_reset_first(call, h_dropped);
  void* const stream = call.device.stream();
  const int64_t gates = p.gates_per_unit() * p.H;
  Tensor from_hidden = call.empty({p.chains, p.B, gates}, call.dtype), m, projected;
  if (p.projected) {
    m = call.state({}, p.H, call.dtype);
    projected = call.empty({p.chains, p.B, p.R}, call.dtype);
  }
  const Tensor weight_hh = call.weight_hh.mT(), weight_hr = p.projected ? call.weight_hr.mT() : m;
  for (int64_t step = 0; step < p.T; ++step) {
    at::bmm_out(from_hidden, h_dropped, weight_hh);
    if (p.cell != Cell::Lstm) {
      gru_forward_step(p, step, data(from_hidden), stream);
      continue;
    }
    lstm_forward_step(p, step, data(from_hidden), data(m), stream);
    if (!p.projected) continue;
    at::bmm_out(projected, m, weight_hr);
    lstm_forward_projection(p, step, data(projected), stream);
  }
}

// Backward ----------------------------------------------------------------------------------------

// The backward's tensors over all tokens. At the end, all except padding and grad_output are 0 past
// a row's length.
struct BackwardTokens {
  Tensor padding;           // (T, B, 1): whether a row lacks the step; undefined: none does
  Tensor x;                 // (T·B, I)
  Tensor grad_output;       // (T, B, D·R); of several layers (D, T, B, R), all but the last layer's
                            // filled in during the backward
  Tensor h_dropped;         // (D, T·B, R): h before each step, after dropout
  Tensor grad_from_input;   // gates_shape(): gradients of W_ih x
  Tensor grad_from_hidden;  // gates_shape(): of W_hh h; the same tensor, except with layer norm and
                            // in a GRU whose reset gate comes last
  Tensor m;                 // (D, T, B, H), with a projection
  Tensor grad_projected;    // (D, T, B, R), of W_hr m
};

// These functions run from the last step to the first, and leave the gradient of h0 in
// call.p.grad_h. Those that run step by step get this tensor as `grad_h`.
inline void backward_sequence(const LstmCall& call, const BackwardTokens& tokens) {
  const Lstm& p = call.p;
  SequenceBuffers buffers(call, p.gates_per_unit() * p.H, p.R);
  const Tensor parts = call.empty({lstm_backward_parts(p)}, at::kFloat);
  LstmSequence& sequence = buffers.sequence;
  sequence.parts = static_cast<float*>(data(parts));
  sequence.grad_projected = data(tokens.grad_projected);
  for (sequence.wave = sequence.waves(p) - 1; sequence.wave >= 0; --sequence.wave) {
    for (int64_t d = 0; p.layers && d < p.chains - 1; ++d)
      call.multiply_above(tokens.grad_output, tokens.grad_from_input, d, sequence.steps(p, d));
    lstm_backward_sequence(p, sequence, call.device.stream());
  }
}

inline void backward_steps_reset_first(const LstmCall& call, const Tensor& grad_h) {
  const Lstm& p = call.p;
  void* const stream = call.device.stream();
  const ResetFirstWeights weights(call);
  Tensor dh_recurrent = call.state({}, p.H, call.dtype);
  const Tensor dn = call.state({}, p.H, call.dtype);
  Tensor d_reset_h = call.empty({p.chains, p.B, p.H}, call.dtype);
  const Tensor da = call.empty({p.chains, p.B, 2 * p.H}, call.dtype);
  for (int64_t step = p.T - 1; step >= 0; --step) {
    gru_backward_reset_first(p, step, data(dh_recurrent), data(dn), stream);
    at::bmm_out(d_reset_h, dn, weights.candidate);
    gru_backward_reset(p, step, data(d_reset_h), data(da), stream);
    at::bmm_out(dh_recurrent, da, weights.gates);
  }
  grad_h.add_(dh_recurrent);
}

inline void backward_steps(
    const LstmCall& call, const Tensor& grad_h, const BackwardTokens& tokens) {
  const Lstm& p = call.p;
  if (p.reset_first) return backward_steps_reset_first(call, grad_h);
  void* const stream = call.device.stream();
  Tensor dh_recurrent = call.state({}, p.R, call.dtype);
  Tensor da = call.empty({p.chains, p.B, p.gates_per_unit() * p.H}, call.dtype), dq, dm;
  if (p.projected) {
    dq = call.empty({p.chains, p.B, p.R}, call.dtype);
    dm = call.empty({p.chains, p.B, p.H}, call.dtype);
  }
  for (int64_t step = p.T - 1; step >= 0; --step) {
    if (p.projected) {
      lstm_backward_projection(
          p, step, data(dh_recurrent), data(dq), data(tokens.grad_projected), stream);
      at::bmm_out(dm, dq, call.weight_hr);
    }
    if (p.cell != Cell::Lstm) gru_backward_step(p, step, data(dh_recurrent), data(da), stream);
    else lstm_backward_step(p, step, data(p.projected ? dm : dh_recurrent), data(da), stream);
    at::bmm_out(dh_recurrent, da, call.weight_hh);
  }
  grad_h.add_(call.dropped_gradient(dh_recurrent));
}

}  // namespace trifuse::cuda
