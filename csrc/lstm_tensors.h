// The tensors of an LSTM, a GRU or an RNN: slots of the parameters, and checks before any is read.

#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <limits>
#include <optional>

#include "arguments.h"
#include "cell.h"

namespace trifuse {

// Slots of the parameters of one direction or layer, in the order of the ops' argument.
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
  kLstmSlots,
  kSlotsWithoutOptions = WeightHr  // of a GRU or an RNN
};

// The options of a call that change its results. Those of an LSTM come in the order of the ops'
// arguments.
struct LstmOptions {
  bool coupled = false;
  double forget_bias = 0;
  double cell_clip = std::numeric_limits<double>::infinity();
  double proj_clip = std::numeric_limits<double>::infinity();
  double eps = 0, zoneout_h = 0, zoneout_c = 0, recurrent_dropout = 0;
  bool training = false;
  bool relu = false;                // the activation of an RNN
  bool linear_before_reset = true;  // a GRU's: whether its reset gate follows the product with W_hn
};

inline LstmOptions rnn_options(bool relu) {
  LstmOptions options;
  options.relu = relu;
  return options;
}

inline LstmOptions gru_options(bool linear_before_reset) {
  LstmOptions options;
  options.linear_before_reset = linear_before_reset;
  return options;
}

// Returns the number of parameters of one direction or layer.
constexpr int slots_of(Cell cell) { return cell == Cell::Lstm ? kLstmSlots : kSlotsWithoutOptions; }

// Returns the type that a vector or a cell must have: the accumulation type if it has that type,
// otherwise the input's.
inline at::ScalarType plain_or_wide(const Tensor& t, const Tensor& input) {
  const at::ScalarType dtype = input.scalar_type(), wide = accumulation_type(dtype);
  return t.scalar_type() == wide ? wide : dtype;
}

// Checks that the parameters of one direction or layer fit each other. A saved tensor's data may
// have been replaced before the backward, and an op may be called without the public function's
// checks. `given(slot)` is a parameter. weight_hh has G·H rows.
template <class Given>
void check_parameters(
    int64_t G, int64_t H, int64_t R, int slots, const Tensor& input, int64_t input_size,
    const Given& given) {
  struct Expected {
    const char* name;
    std::array<int64_t, 2> sizes;  // the second is -1 for a vector
  };
  const Expected of[kLstmSlots] = {
      {"weight_ih", {G * H, input_size}},
      {"weight_hh", {G * H, R}},
      {"bias_ih", {G * H, -1}},
      {"bias_hh", {G * H, -1}},
      {"weight_hr", {R, H}},
      {"weight_peephole", {G - 1, H}},
      {"norm_ih_weight", {G * H, -1}},
      {"norm_hh_weight", {G * H, -1}},
      {"norm_cell_weight", {H, -1}},
      {"norm_cell_bias", {H, -1}}};
  for (int slot = 0; slot < slots; ++slot) {
    const OptionalTensor& t = given(slot);
    const auto& [name, sizes] = of[slot];
    if (t) {
      check_shape(name, *t, at::IntArrayRef(sizes).slice(0, sizes[1] < 0 ? 1 : 2));
      const bool in_product = slot <= WeightHh || slot == WeightHr;
      check_type(name, *t, in_product ? input.scalar_type() : plain_or_wide(*t, input), input);
    }
    TORCH_CHECK_VALUE(t || slot > WeightHh, name, ": expected a tensor; got None");
  }
  TORCH_CHECK_VALUE(
      R == H || (slots > WeightHr && given(WeightHr)), "weight_hh: expected ", H,
      " columns, or weight_hr; got ", R);
}

// Checks the states before the first step. h0_name is the argument's name: h0, or hx in a GRU and
// an RNN, which have no c0.
inline void check_states(
    const char* h0_name, const OptionalTensor& h0, at::IntArrayRef h0_sizes,
    const OptionalTensor& c0, at::IntArrayRef c0_sizes, const Tensor& input) {
  check_shape(h0_name, h0, h0_sizes);
  check_shape("c0", c0, c0_sizes);
  if (h0) check_type(h0_name, *h0, input.scalar_type(), input);
  if (c0) check_type("c0", *c0, plain_or_wide(*c0, input), input);
}

// Checks that a backward's input has the steps and rows of the saved output.
inline void check_input(const Tensor& input, const Tensor& output) {
  at::DimVector sizes(output.sizes());
  if (!sizes.empty() && input.dim() > 0) sizes.back() = input.size(-1);
  check_shape("input", input, sizes);
}

// Checks that weight_hh is (rows, columns). The sizes of h and of the cells are taken from it.
inline void check_hidden(
    const OptionalTensor& weight_hh, std::optional<int64_t> rows, std::optional<int64_t> columns) {
  TORCH_CHECK_VALUE(weight_hh && weight_hh->dim() == 2, "weight_hh: expected 2 dimensions");
  check_shape(
      "weight_hh", *weight_hh,
      {rows.value_or(weight_hh->size(0)), columns.value_or(weight_hh->size(1))});
}

}  // namespace trifuse
