// Plain calls of lstm, gru and rnn: a layer without options or lengths, or one step of it.
//
// Most of the checks are those of the ops lstm_plain, gru_plain and rnn_plain, which throw
// NotImplementedError if a call is not plain.

#pragma once

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <tuple>
#include <vector>

#include "fast_path/ops.h"
#include "lstm_tensors.h"

namespace trifuse::fast_path {

struct RecurrentCall {
  using Tensors = c10::List<OptionalTensor>;

  Cell cell = Cell::Rnn;
  bool option = false;       // linear_before_reset of a GRU; relu of an RNN
  Tensor input;              // (T, B, I); for one step (B, I) or (I,)
  OptionalTensor h0, c0;     // (directions, B, R or H); for one step (B, R or H) or (R or H,)
  variable_list parameters;  // those of each direction in turn, undefined where there is none

  bool one_step() const { return input.dim() < 3; }
  bool is_lstm() const { return cell == Cell::Lstm; }
  size_t states() const { return is_lstm() ? 2 : 1; }
  size_t directions() const { return parameters.size() / slots_of(cell); }
  Tensors list() const {
    Tensors list;
    list.reserve(parameters.size());
    for (const Tensor& each : parameters) list.push_back(optional(each));
    return list;
  }
  c10::List<bool> reverse() const {
    c10::List<bool> reverse({false});
    if (directions() == 2) reverse.push_back(true);
    return reverse;
  }

  // Returns the output, h_n and, of an LSTM, c_n; and then what a backward reads besides the
  // output, with `save`. In one step the output is h, and h_n is undefined.
  variable_list run(bool save) const {
    if (cell == Cell::Lstm) {
      static const auto op = find<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
          const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensors&, bool)>(
          "trifuse::lstm_plain", "cpp");
      auto [output, h_n, c_n, gates, cells, clipped] = run_kernel(op, input, h0, c0, list(), save);
      return {output, h_n, c_n, gates, cells, clipped};
    }
    if (cell == Cell::Gru) {
      static const auto op = find<std::tuple<Tensor, Tensor, Tensor>(
          const Tensor&, const OptionalTensor&, const Tensors&, bool, bool)>(
          "trifuse::gru_plain", "cpp");
      auto [output, h_n, gates] = run_kernel(op, input, h0, list(), option, save);
      return {output, h_n, gates};
    }
    static const auto op = find<std::tuple<Tensor, Tensor>(
        const Tensor&, const OptionalTensor&, const Tensors&, bool)>("trifuse::rnn_plain", "cpp");
    auto [output, h_n] = run_kernel(op, input, h0, list(), option);
    return {output, h_n};
  }

  // Returns the gradients of the input, the states and the parameters, from those of what run()
  // returns and from what it saved.
  std::vector<Tensor> differentiate(
      bool plain, const Tensor& grad_output, const OptionalTensor& grad_h_n,
      const OptionalTensor& grad_c_n, const Tensor& output, const Tensor* saved,
      const c10::List<bool>& needed) const {
    using Flags = c10::List<bool>;
    using Found = std::vector<Tensor>;
    const OptionalTensor absent;
    if (cell == Cell::Lstm) {
      using Limit = std::optional<double>;
      static const auto op = find<Found(
          const Tensor&, const OptionalTensor&, const OptionalTensor&, const Tensor&,
          const OptionalTensor&, const OptionalTensor&, const Tensors&, const OptionalTensor&,
          const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
          const Flags&, bool, double, Limit, Limit, double, double, double, double, bool,
          const Flags&)>("trifuse::lstm_backward", "cpp");
      const LstmOptions none;
      return run_backward(
          plain, op, grad_output, grad_h_n, grad_c_n, input, h0, c0, list(), absent, absent, output,
          saved[0], saved[1], saved[2], reverse(), none.coupled, none.forget_bias, Limit(), Limit(),
          none.eps, none.zoneout_h, none.zoneout_c, none.recurrent_dropout, none.training, needed);
    }
    if (cell == Cell::Gru) {
      static const auto op = find<Found(
          const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
          const Tensors&, const OptionalTensor&, const Tensor&, const Tensor&, const Flags&, bool,
          const Flags&)>("trifuse::gru_backward", "cpp");
      return run_backward(
          plain, op, grad_output, grad_h_n, input, h0, list(), absent, output, saved[0], reverse(),
          option, needed);
    }
    static const auto op = find<Found(
        const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&, const Tensors&,
        const OptionalTensor&, const Tensor&, const Flags&, bool, const Flags&)>(
        "trifuse::rnn_backward", "cpp");
    return run_backward(
        plain, op, grad_output, grad_h_n, input, h0, list(), absent, output, reverse(), option,
        needed);
  }
};

class Recurrent : public torch::autograd::Function<Recurrent> {
 public:
  // Returns the output, h_n and c_n, as far as there are these. `given` holds the input, the states
  // and the parameters, as far as they are defined.
  static variable_list forward(
      AutogradContext* context, at::TensorList /*given*/, const RecurrentCall& call) {
    variable_list results = call.run(/*save=*/true);
    const Tensor& output = results[0];
    const size_t returned = 1 + call.states();
    // The backward reads the h before each step. Of one step it needs only h0, but that of an RNN
    // also reads the h of the step.
    const bool reads_output = call.cell == Cell::Rnn || (!call.one_step() && output.size(0) > 1);
    const bool hooked = at::SavedTensorDefaultHooks::get_hooks().has_value();
    variable_list saved;
    saved.push_back(!reads_output ? Tensor() : hooked ? output.detach() : output.variable_data());
    saved.insert(saved.end(), results.begin() + static_cast<int64_t>(returned), results.end());
    int64_t given = 0, bit = 1;
    const auto save = [&](const Tensor& t) {
      if (t.defined()) given |= bit;
      bit <<= 1;
      saved.push_back(t);
    };
    save(call.input);
    save(or_undefined(call.h0));
    if (call.is_lstm()) save(or_undefined(call.c0));
    for (const Tensor& each : call.parameters) save(each);
    context->save_for_backward(std::move(saved));
    keep(
        *context, given, static_cast<int64_t>(call.cell), call.option, output.sizes().vec(),
        hooked ? Tensor() : changes_of(output), static_cast<int64_t>(output._version()));
    context->set_materialize_grads(false);
    results.resize(returned);
    if (call.one_step()) results.erase(results.begin() + 1);  // there is no h_n
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto options = kept(*context);
    const int64_t given = options[0].toInt();
    RecurrentCall call;
    call.cell = static_cast<Cell>(options[1].toInt());
    call.option = options[2].toBool();
    const variable_list saved =
        none_defined(grads) ? variable_list() : context->get_saved_variables();
    variable_list results;  // one for each tensor that was given, and one for the call
    if (saved.empty()) {
      for (int64_t bits = given; bits; bits &= bits - 1) results.emplace_back();
      results.emplace_back();
      return results;
    }
    const size_t count = call.is_lstm() ? 3 : call.cell == Cell::Gru ? 1 : 0;
    const Tensor* next = saved.data() + 1 + count;
    call.input = *next++;
    call.h0 = optional(*next++);
    if (call.is_lstm()) call.c0 = optional(*next++);
    call.parameters.assign(next, saved.data() + saved.size());

    const auto sizes = options[3].toIntVector();
    Tensor grad_output = grads[0].defined() ? grads[0] : at::zeros(sizes, call.input.options());
    Tensor output = saved[0];
    if (!output.defined()) {
      grad_output = grad_output.contiguous();
      output = grad_output;  // of the same shape; not read
    } else if (was_changed(output, options[4].toTensor(), options[5].toInt())) {
      output = call.run(/*save=*/false)[0];
    }
    const bool one_step = call.one_step();
    OptionalTensor grad_h_n, grad_c_n;
    if (!one_step) grad_h_n = optional(grads[1]);
    if (call.is_lstm()) grad_c_n = optional(grads[one_step ? 1 : 2]);

    c10::List<bool> needed;
    size_t edge = 0;
    const size_t inputs = 1 + call.states() + call.parameters.size();
    for (size_t i = 0; i < inputs; ++i)
      needed.push_back((given >> i & 1) && context->needs_input_grad(edge++));
    const bool plain = all_plain(grads) && all_plain(saved);
    std::vector<Tensor> found;
    if (one_step && !kernels_suffice(plain)) {
      found = differentiate_as_layer(call, grad_output, grad_c_n, output, saved.data() + 1, needed);
    } else {
      found = call.differentiate(
          plain, grad_output, grad_h_n, grad_c_n, output, saved.data() + 1, needed);
    }
    for (size_t i = 0; i < inputs; ++i)
      if (given >> i & 1) results.push_back(needed[i] ? found[i] : Tensor());
    results.emplace_back();
    return results;
  }

 private:
  // Returns a tensor without elements that counts the changes of another one. The caller may change
  // the output before the backward. torch would raise then; here the output is computed again.
  static Tensor changes_of(const Tensor& t) {
    const Tensor counter = at::empty({0}, t.options());
    torch::autograd::impl::set_version_counter(counter, torch::autograd::impl::version_counter(t));
    return counter;
  }

  // Returns whether an output may have changed since it had this version. If hooks saved it, they
  // provide it now, and it counts its changes itself.
  static bool was_changed(const Tensor& output, const Tensor& counter, int64_t version) {
    return static_cast<int64_t>((counter.defined() ? counter : output)._version()) != version;
  }

  // Computes the gradients of one step as those of a layer of one step, whose formula can itself be
  // differentiated or batched.
  static std::vector<Tensor> differentiate_as_layer(
      const RecurrentCall& step, const Tensor& grad_output, const OptionalTensor& grad_c_n,
      const Tensor& output, const Tensor* saved, const c10::List<bool>& needed) {
    // Sizes come from the step, because a batched gradient hides its batch dimension.
    const auto rows = [&](const Tensor& t) {
      return t.reshape({1, step.input.dim() == 1 ? 1 : step.input.size(0), t.size(-1)});
    };
    const auto rows_if_any = [&](const OptionalTensor& t) {
      return t ? OptionalTensor(rows(*t)) : std::nullopt;
    };
    RecurrentCall layer = step;
    layer.input = rows(step.input);
    layer.h0 = rows_if_any(step.h0);
    layer.c0 = rows_if_any(step.c0);
    std::vector<Tensor> found = layer.differentiate(
        false, rows(grad_output), {}, rows_if_any(grad_c_n), rows(output), saved, needed);
    const OptionalTensor* const states[] = {&step.h0, &step.c0};
    if (needed[0]) found[0] = found[0].reshape(step.input.sizes());
    for (size_t i = 0; i < step.states(); ++i)
      if (needed[1 + i]) found[1 + i] = found[1 + i].reshape((*states[i])->sizes());
    return found;
  }
};

// Returns the output, h_n and, of an LSTM, c_n. In one step h_n is undefined.
inline variable_list run(const RecurrentCall& call) {
  variable_list given{call.input};
  for (const OptionalTensor* each : {&call.h0, &call.c0})
    if (*each) given.push_back(**each);
  for (const Tensor& each : call.parameters)
    if (each.defined()) given.push_back(each);
  bool recorded = false;
  for (const Tensor& each : given) recorded |= records(each);
  if (!recorded) {
    variable_list results = call.run(/*save=*/false);
    results.resize(1 + call.states());
    return results;
  }
  variable_list results = Recurrent::apply(at::TensorList(given), call);
  if (call.one_step()) results.insert(results.begin() + 1, Tensor());
  return results;
}

}  // namespace trifuse::fast_path
