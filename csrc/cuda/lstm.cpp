// torch.ops.trifuse.{lstm,lstm_stack,gru,rnn}_{forward,backward}.cuda: tensors in, tensors out.
// Shapes, dtypes and devices have been checked in pytorch_ext/ops/lstm.py, gru.py and rnn.py.
//
// lstm_packing.h packs the parameters, lstm_call.h checks a call, lstm_schedules.h runs its steps,
// lstm_passes.h computes a forward or a backward of one call, and lstm_stack.h those of stacks.
// They are headers, not sources, because torch's headers take longer to compile than all of them
// together.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "cuda/lstm_call.h"
#include "cuda/lstm_passes.h"
#include "cuda/lstm_stack.h"

namespace trifuse::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_forward(
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Flags& reverse, bool coupled, double forget_bias, OptionalLimit cell_clip,
    OptionalLimit proj_clip, double eps, double zoneout_h, double zoneout_c,
    double recurrent_dropout, bool training, int64_t save) {
  LstmCall call(
      input, parameters, lengths, seed,
      {{coupled, forget_bias, limit(cell_clip), limit(proj_clip), eps, zoneout_h, zoneout_c,
        recurrent_dropout, training},
       reverse});
  check_lengths(call);
  const LstmResults results = make_results(call, input, call.p.chains, h0, c0, save);
  forward_pass(call, input, results);
  const auto& [output, h, c, gates, cells, clipped] = results;
  return {output, h, c, gates, cells, clipped};
}

std::vector<Tensor> lstm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const OptionalTensor& grad_c_n,
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Tensor& output, const Tensor& gates, const Tensor& cells, const Tensor& clipped,
    const Flags& reverse, bool coupled, double forget_bias, OptionalLimit cell_clip,
    OptionalLimit proj_clip, double eps, double zoneout_h, double zoneout_c,
    double recurrent_dropout, bool training, const Flags& needs_grad) {
  const int64_t D = static_cast<int64_t>(reverse.size());
  check_input(input, output);
  check_hidden(parameters.get(WeightHh), cells.size(-1) * (coupled ? 3 : 4), output.size(-1) / D);
  LstmCall call(
      input, parameters, lengths, seed,
      {{coupled, forget_bias, limit(cell_clip), limit(proj_clip), eps, zoneout_h, zoneout_c,
        recurrent_dropout, training},
       reverse});
  const LstmSaved saved{output.split(call.p.R, 2), gates, cells, clipped, {}};
  return backward_pass(call, grad_output, grad_h_n, grad_c_n, input, h0, c0, saved, needs_grad);
}

// Returns why such a call runs step by step; empty if it is one launch.
std::string step_by_step(
    const ChainOptions& o, const Tensor& input, const Parameters& parameters, bool backward) {
  const OnDeviceOf device(input);
  std::string why;
  const int64_t directions = static_cast<int64_t>(parameters.size()) / slots_of(o.cell);
  lstm_fits_sequence(lstm_sizes(input, parameters, o, directions), backward, &why);
  return why;
}

std::string lstm_step_by_step(
    const Tensor& input, const Parameters& parameters, bool coupled, bool backward) {
  return step_by_step({{coupled}, Flags()}, input, parameters, backward);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_stack_forward(
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Flags& reverse, bool coupled, double forget_bias, OptionalLimit cell_clip,
    OptionalLimit proj_clip, double eps, double zoneout_h, double zoneout_c,
    double recurrent_dropout, bool training, int64_t save) {
  return stack_forward(
      input, h0, c0, parameters, lengths, seed,
      {{coupled, forget_bias, limit(cell_clip), limit(proj_clip), eps, zoneout_h, zoneout_c,
        recurrent_dropout, training},
       reverse},
      save);
}

std::vector<Tensor> lstm_stack_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const OptionalTensor& grad_c_n,
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Tensor& output, const Tensor& gates, const Tensor& cells, const Tensor& clipped,
    const Tensor& below, const Flags& reverse, bool coupled, double forget_bias,
    OptionalLimit cell_clip, OptionalLimit proj_clip, double eps, double zoneout_h,
    double zoneout_c, double recurrent_dropout, bool training, const Flags& needs_grad) {
  return stack_backward(
      grad_output, grad_h_n, grad_c_n, input, h0, c0, parameters, lengths, seed, output, gates,
      cells, clipped, below,
      {{coupled, forget_bias, limit(cell_clip), limit(proj_clip), eps, zoneout_h, zoneout_c,
        recurrent_dropout, training},
       reverse},
      needs_grad);
}

// A GRU and an RNN --------------------------------------------------------------------------------

LstmResults forward_without_c(
    const Tensor& input, const OptionalTensor& h0, const Parameters& parameters,
    const OptionalTensor& lengths, const ChainOptions& options, int64_t save) {
  LstmCall call(input, parameters, lengths, {}, options);
  check_lengths(call);
  const LstmResults results = make_results(call, input, call.p.chains, h0, {}, save);
  forward_pass(call, input, results);
  return results;
}

std::vector<Tensor> backward_without_c(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const Tensor& input,
    const OptionalTensor& h0, const Parameters& parameters, const OptionalTensor& lengths,
    const Tensor& output, const Tensor& gates, const ChainOptions& options,
    const Flags& needs_grad) {
  check_input(input, output);
  const int64_t R = output.size(-1) / static_cast<int64_t>(options.reverse.size());
  check_hidden(parameters.get(WeightHh), gates_of(options.cell) * R, R);
  LstmCall call(input, parameters, lengths, {}, options);
  const LstmSaved saved{output.split(R, 2), gates, {}, {}, output.contiguous()};
  return backward_pass(call, grad_output, grad_h_n, {}, input, h0, {}, saved, needs_grad);
}

std::string gru_step_by_step(
    const Tensor& input, const Parameters& parameters, bool linear_before_reset, bool backward) {
  return step_by_step(
      {gru_options(linear_before_reset), Flags(), Cell::Gru}, input, parameters, backward);
}

std::string rnn_step_by_step(const Tensor& input, const Parameters& parameters, bool backward) {
  return step_by_step({rnn_options(false), Flags(), Cell::Rnn}, input, parameters, backward);
}

std::tuple<Tensor, Tensor, Tensor> gru_forward(
    const Tensor& input, const OptionalTensor& h0, const Parameters& parameters,
    const OptionalTensor& lengths, const Flags& reverse, bool linear_before_reset, int64_t save) {
  const ChainOptions options{gru_options(linear_before_reset), reverse, Cell::Gru};
  const LstmResults r =
      forward_without_c(input, h0, parameters, lengths, options, save ? kGatesAndCells : kNothing);
  return {r.output, r.h, r.gates};
}

std::vector<Tensor> gru_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const Tensor& input,
    const OptionalTensor& h0, const Parameters& parameters, const OptionalTensor& lengths,
    const Tensor& output, const Tensor& gates, const Flags& reverse, bool linear_before_reset,
    const Flags& needs_grad) {
  return backward_without_c(
      grad_output, grad_h_n, input, h0, parameters, lengths, output, gates,
      {gru_options(linear_before_reset), reverse, Cell::Gru}, needs_grad);
}

std::tuple<Tensor, Tensor> rnn_forward(
    const Tensor& input, const OptionalTensor& h0, const Parameters& parameters,
    const OptionalTensor& lengths, const Flags& reverse, bool relu) {
  const ChainOptions options{rnn_options(relu), reverse, Cell::Rnn};
  const LstmResults r = forward_without_c(input, h0, parameters, lengths, options, kNothing);
  return {r.output, r.h};
}

std::vector<Tensor> rnn_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const Tensor& input,
    const OptionalTensor& h0, const Parameters& parameters, const OptionalTensor& lengths,
    const Tensor& output, const Flags& reverse, bool relu, const Flags& needs_grad) {
  return backward_without_c(
      grad_output, grad_h_n, input, h0, parameters, lengths, output, {},
      {rnn_options(relu), reverse, Cell::Rnn}, needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, TRIFUSE_CUDA, m) {
  m.impl("lstm_step_by_step.cuda", lstm_step_by_step);
  m.impl("lstm_forward.cuda", lstm_forward);
  m.impl("lstm_backward.cuda", lstm_backward);
  m.impl("lstm_layers_at_once.cuda", layers_at_once);
  m.impl("lstm_stack_forward.cuda", lstm_stack_forward);
  m.impl("lstm_stack_backward.cuda", lstm_stack_backward);
  m.impl("gru_step_by_step.cuda", gru_step_by_step);
  m.impl("gru_forward.cuda", gru_forward);
  m.impl("gru_backward.cuda", gru_backward);
  m.impl("rnn_step_by_step.cuda", rnn_step_by_step);
  m.impl("rnn_forward.cuda", rnn_forward);
  m.impl("rnn_backward.cuda", rnn_backward);
}

}  // namespace trifuse::cuda
