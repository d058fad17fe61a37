// torch.ops.trifuse.{lstm,gru,rnn}_{forward,backward,plain}.cpp: tensors in, tensors out.
//
// Shapes, dtypes and devices have been checked in pytorch_ext/ops/lstm.py, gru.py and rnn.py,
// except those of a plain call, which are checked here.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "lstm_tensors.h"

namespace trifuse {
namespace {

using Parameters = std::vector<OptionalTensor>;
using ParameterList = c10::List<OptionalTensor>;
using Flags = c10::List<bool>;

// A problem, and the tensors that it points into.
class LstmCall {
 public:
  LstmProblem p;
  at::ScalarType dtype, wide;  // of the input, and of accumulation
  // The type that the kernel computes in. A 16-bit type without products of its own is widened
  // here, and h is rounded at every step.
  at::ScalarType stored;
  const bool one_step;  // input (B, I) or (I,), and states likewise

  LstmCall(
      Cell cell, const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
      const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
      const Flags& reverse, const LstmOptions& options)
      : one_step(input.dim() < 3), input_sizes_(input.sizes()), slots_(slots_of(cell)) {
    dtype = input.scalar_type();
    wide = accumulation_type(dtype);
    p.cell = cell;
    p.coupled = options.coupled;
    p.relu = options.relu;
    p.linear_before_reset = options.linear_before_reset;
    p.directions = static_cast<int64_t>(reverse.size());
    check(input, h0, c0, parameters, lengths, seed);
    const bool native =
        dtype == wide || (dtype == at::kBFloat16 && kernels().lstm_forward.bfloat16);
    stored = native ? dtype : wide;
    p.dtype = kernel_type(stored);
    p.rounding = native ? DType::Float32 : kernel_type(dtype);
    const Tensor x = hold(converted(input, stored));
    p.input = x.const_data_ptr();
    int64_t* const sizes[] = {&p.T, &p.B, &p.I};
    for (int64_t d = 2, given = x.dim() - 1; d >= 0; --d, --given) {
      *sizes[d] = given < 0 ? 1 : x.size(given);
      p.input_stride[d] = given < 0 ? 0 : x.stride(given);
    }
    p.forget_bias = options.forget_bias;
    p.cell_clip = options.cell_clip;
    p.proj_clip = options.proj_clip;
    p.eps = options.eps;
    p.training = options.training;
    p.zoneout_h = options.zoneout_h;
    p.zoneout_c = options.zoneout_c;
    if (options.training) {
      p.draw_h = kernel_dropout(options.zoneout_h, seed);
      p.draw_c = kernel_dropout(options.zoneout_c, seed);
      p.recurrent_dropout = kernel_dropout(options.recurrent_dropout, seed);
    }

    for (int64_t d = 0; d < p.directions; ++d) {
      LstmDirection& direction = p.direction[d];
      direction.reverse = reverse.get(d);
      const auto given = [&](int slot) -> OptionalTensor {
        return slot < slots_ ? parameters[d * slots_ + slot] : OptionalTensor();
      };
      direction.weight_ih = data(given(WeightIh), stored);
      direction.weight_hh = data(given(WeightHh), stored);
      direction.bias_ih = data(given(BiasIh), wide);
      direction.bias_hh = data(given(BiasHh), wide);
      direction.weight_hr = data(given(WeightHr), stored);
      direction.weight_peephole = data(given(WeightPeephole), wide);
      direction.norm_ih_weight = data(given(NormIh), wide);
      direction.norm_hh_weight = data(given(NormHh), wide);
      direction.norm_cell_weight = data(given(NormCell), wide);
      direction.norm_cell_bias = data(given(NormCellBias), wide);
    }
    each_direction(&LstmDirection::h0, h0, stored);
    each_direction(&LstmDirection::c0, c0, wide);
    sort_rows(lengths);
    p.groups = row_groups();
  }

  Tensor hold(const Tensor& t) {
    held_.push_back(t);
    return t;
  }
  const void* data(const OptionalTensor& t, at::ScalarType type) {
    return t ? hold(converted(*t, type).contiguous()).const_data_ptr() : nullptr;
  }
  // Points member `which` of each direction at its part of a tensor (directions, ...).
  template <class Pointer>
  void each_direction(
      Pointer LstmDirection::* which, const OptionalTensor& t, at::ScalarType type) {
    if (!t) return;
    char* all = static_cast<char*>(const_cast<void*>(data(t, type)));
    const int64_t bytes = t->numel() / p.directions * c10::elementSize(type);
    for (int64_t d = 0; d < p.directions; ++d) p.direction[d].*which = all + d * bytes;
  }
  // Returns the sizes (count, B, columns), or for one step (B, columns) or (columns,).
  at::DimVector rows(int64_t count, int64_t columns) const {
    if (!one_step) return {count, p.B, columns};
    at::DimVector sizes(input_sizes_);
    sizes.back() = columns;
    return sizes;
  }
  // Returns a result of these sizes, and keeps it alive.
  Tensor result(at::IntArrayRef sizes, at::ScalarType type) {
    return hold(empty(sizes, at::TensorOptions(type)));
  }

  // With layer normalisation the forward saves products, in type `wide`, instead of gates.
  bool normalises() const { return p.direction[0].norm_ih_weight; }
  at::ScalarType gates_type() const { return normalises() ? wide : stored; }

  // Checks and keeps the saved results of a forward; a tensor that it did not save has no elements.
  void take_saved(
      const Tensor& output, const OptionalTensor& gates, const OptionalTensor& cells,
      const OptionalTensor& clipped) {
    const auto check = [&](const char* name, const OptionalTensor& t, int64_t columns) {
      if (t && t->numel()) check_shape(name, *t, {p.directions, p.T, p.B, columns});
    };
    check_shape("output", output, rows(p.T, p.directions * p.R));
    check("gates", gates, p.saved_gates() * (normalises() ? 2 : 1) * p.H);
    check("cells", cells, p.H);
    check("clipped", clipped, p.clip_words());
    p.output = const_cast<void*>(data(output, stored));
    if (gates && gates->numel()) each_direction(&LstmDirection::gates, gates, gates_type());
    if (cells && cells->numel()) each_direction(&LstmDirection::cells, cells, wide);
    if (clipped && clipped->numel()) each_direction(&LstmDirection::clipped, clipped, at::kShort);
  }

  // Returns the recurrent multiply-adds of one step of all rows of a direction.
  double step_size() const {
    return static_cast<double>(p.B) * static_cast<double>(p.H) *
        static_cast<double>(p.gates() * p.R + (p.direction[0].weight_hr ? p.R : 0));
  }

  // Returns how many threads are worth waking, and keeping awake with a barrier at every step.
  int64_t threads() const {
    const int64_t available = in_parallel_region() ? 1 : at::get_num_threads();
    constexpr double kWorthwhile = 30000;  // about a microsecond
    const bool apart = p.directions * p.groups > 1;
    if (step_size() * (apart ? 8 : 1) < kWorthwhile) return 1;
    return available;
  }

  template <class Kernel>
  void run(const Kernel& kernel) {
    const int64_t count = threads();
    const Tensor memory = trifuse::workspace(kernel.workspace(p, count));
    void* workspace = memory.mutable_data_ptr();
    Crew crew(count);
    crew.run(count, [&](int64_t index) { kernel.run(p, workspace, count, crew, index); });
  }

 private:
  // Tensor::to takes a third of a microsecond even if there is nothing to convert.
  static Tensor converted(const Tensor& t, at::ScalarType type) {
    return t.scalar_type() == type ? t : t.to(type);
  }

  // Checks all tensors before any is read. Sets H, R and B.
  void check(
      const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
      const Parameters& parameters, const OptionalTensor& lengths, const OptionalTensor& seed) {
    TORCH_CHECK_VALUE(
        p.directions >= 1 && p.directions <= LstmProblem::kMaxDirections,
        "reverse: expected one or two directions; got ", p.directions);
    TORCH_CHECK_VALUE(
        static_cast<int64_t>(parameters.size()) == p.directions * slots_, "parameters: expected ",
        p.directions * slots_, "; got ", parameters.size());
    check_hidden(parameters[WeightHh], {}, {});
    p.H = parameters[WeightHh]->size(0) / p.gates();
    p.R = parameters[WeightHh]->size(1);
    TORCH_CHECK_VALUE(
        input.dim() >= 1 && input.dim() <= 3,
        "input: expected shape (T, B, I), (B, I) or (I,); got ", input.sizes());
    check_memory("input", input);
    for (int64_t d = 0; d < p.directions; ++d)
      check_parameters(
          p.gates(), p.H, p.R, slots_, input, input.size(-1),
          [&](int slot) -> const OptionalTensor& { return parameters[d * slots_ + slot]; });
    p.B =
        one_step ? c10::multiply_integers(input.sizes().slice(0, input.dim() - 1)) : input.size(1);
    check_states(
        p.cell == Cell::Lstm ? "h0" : "hx", h0, rows(p.directions, p.R), c0,
        rows(p.directions, p.H), input);
    check_integers("lengths", lengths, p.B, input);
    check_seed(seed, input);
  }

  void sort_rows(const OptionalTensor& lengths) {
    Vector<int64_t> given(p.B, p.T, kLists);
    if (lengths) {
      const Tensor dense = lengths->to(at::kLong).contiguous();
      given.assign(dense.const_data_ptr<int64_t>(), dense.const_data_ptr<int64_t>() + p.B);
      for (int64_t length : given)
        TORCH_CHECK_VALUE(
            length >= 0 && length <= p.T, "lengths: expected lengths in [0, ", p.T, "]; got ",
            at::IntArrayRef(given));
    }
    order_.resize(p.B);
    std::iota(order_.begin(), order_.end(), 0);
    if (lengths)
      std::stable_sort(
          order_.begin(), order_.end(), [&](int64_t a, int64_t b) { return given[a] > given[b]; });
    length_.reserve(p.B);
    for (int64_t row : order_) length_.push_back(given[row]);
    p.steps = p.B ? length_[0] : 0;
    active_.reserve(p.steps);
    start_.reserve(p.steps + 1);
    start_.push_back(0);
    for (int64_t s = 0, rows = p.B; s < p.steps; ++s) {
      while (length_[rows - 1] <= s) --rows;
      active_.push_back(rows);
      start_.push_back(start_.back() + rows);
    }
    p.order = order_.data();
    p.length = length_.data();
    p.active = active_.data();
    p.start = start_.data();
  }

  // Returns the number of groups of rows. Groups need no barrier between them, but each reads all
  // of W_hh at every step. This pays off if W_hh fits into a core's L2 cache or, for groups of many
  // rows, into the L3 cache. It gains most where cores share no L3 cache: without groups, each core
  // would read the others' parts of h from memory. With peepholes or layer normalisation there is
  // one group, because the kernel then adds up sums over rows, whose bits must not depend on the
  // number of threads.
  int64_t row_groups() const {
    constexpr double kNear = 1 << 20, kShared = 4 << 20;
    constexpr int64_t kManyRows = 16;
    const double bytes = static_cast<double>(p.gates() * p.H) * static_cast<double>(p.R) *
        static_cast<double>(c10::elementSize(stored));
    const auto& direction = p.direction[0];
    constexpr int64_t kSteps = 8;  // with fewer, packing the weights takes most of the time
    if (p.steps < kSteps || direction.weight_peephole || direction.norm_ih_weight) return 1;
    const int64_t most =
        std::min<int64_t>({at::get_num_threads() / p.directions, p.B / 4, LstmProblem::kMaxGroups});
    if (most <= 1 || bytes > (p.B / most < kManyRows ? kNear : kShared)) return 1;
    return most;
  }

  const at::DimVector input_sizes_;
  const int slots_;
  std::deque<Tensor> held_;
  static constexpr Allocator<int64_t> kLists{"the steps of sequences"};
  Vector<int64_t> order_{kLists}, length_{kLists}, active_{kLists}, start_{kLists};
};

struct ForwardResults {
  Tensor output, h_n, c_n, gates, cells, clipped;  // undefined where there is none
};

// Runs the forward. It saves `gate_blocks` values of gates, or of products, per unit; 0 for none.
ForwardResults forward(LstmCall& call, int64_t gate_blocks, bool save_cells) {
  LstmProblem& p = call.p;
  const int64_t D = p.directions;
  ForwardResults r;
  r.output = call.result(call.rows(p.T, D * p.R), call.stored);
  p.output = r.output.mutable_data_ptr();
  if (!call.one_step) {
    r.h_n = call.result({D, p.B, p.R}, call.stored);
    call.each_direction(&LstmDirection::h_n, r.h_n, call.stored);
  }
  if (p.cell == Cell::Lstm) {
    r.c_n = call.result(call.rows(D, p.H), call.wide);
    call.each_direction(&LstmDirection::c_n, r.c_n, call.wide);
  }
  if (gate_blocks) {
    r.gates = call.result({D, p.T, p.B, gate_blocks * p.H}, call.gates_type());
    call.each_direction(&LstmDirection::gates, r.gates, call.gates_type());
  }
  if (save_cells) {
    r.cells = call.result({D, p.T, p.B, p.H}, call.wide);
    call.each_direction(&LstmDirection::cells, r.cells, call.wide);
  }
  if (save_cells && p.clip_words()) {
    r.clipped = call.result({D, p.T, p.B, p.clip_words()}, at::kShort);
    call.each_direction(&LstmDirection::clipped, r.clipped, at::kShort);
  }
  if (p.B) call.run(kernels(p.dtype).lstm_forward);
  if (call.stored != call.dtype) {
    r.output = r.output.to(call.dtype);
    if (r.h_n.defined()) r.h_n = r.h_n.to(call.dtype);
    if (r.gates.defined() && !call.normalises()) r.gates = r.gates.to(call.dtype);
  }
  return r;
}

Tensor or_empty(const Tensor& t, at::ScalarType type) {
  return t.defined() ? t : at::empty({0}, type);
}

// `save`: 0, 1 or 2, SAVE_NOTHING, SAVE_STATES or SAVE_ALL of pytorch_ext/ops/_operator.py.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_forward(
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const ParameterList& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Flags& reverse, bool coupled, double forget_bias, OptionalLimit cell_clip,
    OptionalLimit proj_clip, double eps, double zoneout_h, double zoneout_c,
    double recurrent_dropout, bool training, int64_t save) {
  LstmCall call(
      Cell::Lstm, input, h0, c0, parameters.vec(), lengths, seed, reverse,
      {coupled, forget_bias, limit(cell_clip), limit(proj_clip), eps, zoneout_h, zoneout_c,
       recurrent_dropout, training});
  auto r = forward(call, save == 2 ? call.p.gates() * (call.normalises() ? 2 : 1) : 0, save >= 1);
  return {
      r.output,
      r.h_n,
      r.c_n,
      or_empty(r.gates, call.dtype),
      or_empty(r.cells, call.wide),
      or_empty(r.clipped, at::kShort)};
}

std::tuple<Tensor, Tensor, Tensor> gru_forward(
    const Tensor& input, const OptionalTensor& h0, const ParameterList& parameters,
    const OptionalTensor& lengths, const Flags& reverse, bool linear_before_reset, int64_t save) {
  LstmCall call(
      Cell::Gru, input, h0, {}, parameters.vec(), lengths, {}, reverse,
      gru_options(linear_before_reset));
  auto r = forward(call, save ? call.p.saved_gates() : 0, false);
  return {r.output, r.h_n, or_empty(r.gates, call.dtype)};
}

std::tuple<Tensor, Tensor> rnn_forward(
    const Tensor& input, const OptionalTensor& h0, const ParameterList& parameters,
    const OptionalTensor& lengths, const Flags& reverse, bool relu) {
  LstmCall call(
      Cell::Rnn, input, h0, {}, parameters.vec(), lengths, {}, reverse, rnn_options(relu));
  auto r = forward(call, 0, false);
  return {r.output, r.h_n};
}

// Calls without options ---------------------------------------------------------------------------

// Returns whether only weights and biases are given, and all types and shapes fit.
bool is_plain(
    Cell cell, const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const Parameters& parameters, int64_t D) {
  const at::ScalarType dtype = input.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kBFloat16 && dtype != at::kHalf)
    return false;
  const at::ScalarType wide = accumulation_type(dtype);
  const bool one_step = input.dim() < 3;
  if (input.dim() < 1 || input.dim() > 3 || input.numel() == 0 || D < 1 || D > (one_step ? 1 : 2))
    return false;
  if (!parameters[WeightHh] || parameters[WeightHh]->dim() != 2) return false;

  const int64_t G = gates_of(cell), I = input.size(-1);
  const int64_t H = parameters[WeightHh]->size(0) / G, R = parameters[WeightHh]->size(1);
  if (H == 0 || R == 0) return false;
  const auto has = [&](const OptionalTensor& t, at::IntArrayRef sizes, at::ScalarType other) {
    return t && t->sizes() == sizes && (t->scalar_type() == dtype || t->scalar_type() == other);
  };
  const auto may_have = [&](const OptionalTensor& t, at::IntArrayRef sizes, at::ScalarType other) {
    return !t || has(t, sizes, other);
  };
  const int64_t slots = static_cast<int64_t>(parameters.size()) / D;
  for (int64_t d = 0; d < D; ++d) {
    const OptionalTensor* const given = parameters.data() + d * slots;
    if (!has(given[WeightIh], {G * H, I}, dtype) || !has(given[WeightHh], {G * H, R}, dtype) ||
        !may_have(given[BiasIh], {G * H}, wide) || !may_have(given[BiasHh], {G * H}, wide))
      return false;
    const bool projected = slots > WeightHr && given[WeightHr];
    if (projected ? !has(given[WeightHr], {R, H}, dtype) : R != H) return false;
    for (int64_t slot = 0; slot < slots; ++slot)
      if (given[slot].has_value() != (slot <= WeightHr && parameters[slot])) return false;
  }
  at::DimVector rows(input.sizes().slice(one_step ? 0 : 1));
  if (!one_step) rows.insert(rows.begin(), D);
  rows.back() = R;
  if (!may_have(h0, rows, dtype)) return false;
  rows.back() = H;
  return may_have(c0, rows, wide);
}

// Runs a layer, or one step, without lengths and without options, except those of a GRU and an RNN;
// `save` keeps results for a backward. Checking the arguments in Python takes as long as a step of
// a few hundred units, so they are checked here. A call that is not plain is refused, and its
// caller uses the ops above.
ForwardResults plain(
    Cell cell, const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const ParameterList& list, bool save, const LstmOptions& options = {}) {
  const Parameters parameters = list.vec();
  const size_t D = parameters.size() / slots_of(cell);
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_plain(cell, input, h0, c0, parameters, static_cast<int64_t>(D)), "not a plain call");
  Flags reverse({false});
  if (D == 2) reverse.push_back(true);
  LstmCall call(cell, input, h0, c0, parameters, {}, {}, reverse, options);
  return forward(call, save ? call.p.saved_gates() : 0, save && cell == Cell::Lstm);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> lstm_plain(
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const ParameterList& parameters, bool save) {
  auto r = plain(Cell::Lstm, input, h0, c0, parameters, save);
  return {r.output, r.h_n, r.c_n, r.gates, r.cells, or_empty(r.clipped, at::kShort)};
}

std::tuple<Tensor, Tensor, Tensor> gru_plain(
    const Tensor& input, const OptionalTensor& h0, const ParameterList& parameters,
    bool linear_before_reset, bool save) {
  auto r = plain(Cell::Gru, input, h0, {}, parameters, save, gru_options(linear_before_reset));
  return {r.output, r.h_n, r.gates};
}

std::tuple<Tensor, Tensor> rnn_plain(
    const Tensor& input, const OptionalTensor& h0, const ParameterList& parameters, bool relu) {
  auto r = plain(Cell::Rnn, input, h0, {}, parameters, /*save=*/false, rnn_options(relu));
  return {r.output, r.h_n};
}

// Backward ----------------------------------------------------------------------------------------

// The slots of a direction's parameters, and the destinations of their gradients.
struct GradientOf {
  Slot slot;
  void* LstmDirection::* target;
  bool matrix;
};
constexpr GradientOf kGradients[] = {
    {WeightIh, &LstmDirection::grad_weight_ih, true},
    {WeightHh, &LstmDirection::grad_weight_hh, true},
    {BiasIh, &LstmDirection::grad_bias, false},
    {BiasHh, &LstmDirection::grad_bias_hh, false},
    {WeightHr, &LstmDirection::grad_weight_hr, true},
    {WeightPeephole, &LstmDirection::grad_peephole, false},
    {NormIh, &LstmDirection::grad_norm_ih, false},
    {NormHh, &LstmDirection::grad_norm_hh, false},
    {NormCell, &LstmDirection::grad_norm_cell_weight, false},
    {NormCellBias, &LstmDirection::grad_norm_cell_bias, false}};

// Returns the gradients of the input, the states and the parameters, in the order of `given`; those
// that are not needed have no elements. LstmCall::take_saved must have been called.
std::vector<Tensor> backward(
    LstmCall& call, const Tensor& grad_output, const OptionalTensor& grad_h_n,
    const OptionalTensor& grad_c_n, const std::vector<OptionalTensor>& given,
    const Flags& needs_grad) {
  LstmProblem& p = call.p;
  const int states = p.cell == Cell::Lstm ? 2 : 1;
  const int slots = slots_of(p.cell);
  std::vector<Tensor> grads(given.size());
  const auto result = [&](size_t index, at::IntArrayRef sizes, at::ScalarType type) -> Tensor {
    if (needs_grad.get(index)) grads[index] = call.result(sizes, type);
    return grads[index];
  };
  check_shape("grad_output", grad_output, call.rows(p.T, p.directions * p.R));
  check_shape("grad_h_n", grad_h_n, call.rows(p.directions, p.R));
  check_shape("grad_c_n", grad_c_n, call.rows(p.directions, p.H));
  // A caller that passes the gradient of h on to an earlier call keeps it unrounded.
  p.wide_states = p.cell == Cell::Lstm && grad_h_n && grad_h_n->scalar_type() == call.wide;
  const at::ScalarType of_h = p.wide_states ? call.wide : call.stored;
  p.grad_output = call.data(grad_output, call.stored);
  if (const Tensor x = result(0, given[0]->sizes(), call.stored); x.defined())
    p.grad_input = x.mutable_data_ptr();
  const auto state = [&](size_t index) {
    return given[index] ? result(index, given[index]->sizes(), index == 1 ? of_h : call.wide)
                        : Tensor();
  };
  const Tensor h0 = state(1), c0 = states == 2 ? state(2) : Tensor();
  call.each_direction(&LstmDirection::grad_h_n, grad_h_n, of_h);
  call.each_direction(&LstmDirection::grad_c_n, grad_c_n, call.wide);
  if (h0.defined()) call.each_direction(&LstmDirection::grad_h0, h0, of_h);
  if (c0.defined()) call.each_direction(&LstmDirection::grad_c0, c0, call.wide);
  for (int64_t d = 0; d < p.directions; ++d) {
    LstmDirection& direction = p.direction[d];
    for (const auto& gradient : kGradients) {
      if (gradient.slot >= slots) break;
      const size_t index = 1 + states + d * slots + gradient.slot;
      if (!given[index]) continue;
      const Tensor grad =
          result(index, given[index]->sizes(), gradient.matrix ? call.stored : call.wide);
      if (grad.defined()) direction.*gradient.target = grad.mutable_data_ptr();
    }
  }
  if (p.B && p.steps) {
    call.run(kernels(p.dtype).lstm_backward);
  } else {  // no steps: the states' gradients pass through
    for (size_t i = 0; i < grads.size(); ++i)
      if (grads[i].defined()) grads[i].zero_();
    if (h0.defined() && grad_h_n) grads[1].copy_(*grad_h_n);
    if (c0.defined() && grad_c_n) grads[2].copy_(*grad_c_n);
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) grads[i] = at::empty({0}, given[0]->options());
    else if (i != 1 || !p.wide_states) grads[i] = grads[i].to(given[i]->scalar_type());
  }
  return grads;
}

// Returns the number of features of one direction's output.
int64_t features(const Tensor& output, const Flags& reverse) {
  return output.size(-1) / std::max<int64_t>(static_cast<int64_t>(reverse.size()), 1);
}

std::vector<OptionalTensor> all_of(
    std::initializer_list<OptionalTensor> first, const ParameterList& parameters) {
  std::vector<OptionalTensor> all(first);
  for (OptionalTensor t : parameters) all.push_back(std::move(t));
  return all;
}

std::vector<Tensor> lstm_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const OptionalTensor& grad_c_n,
    const Tensor& input, const OptionalTensor& h0, const OptionalTensor& c0,
    const ParameterList& parameters, const OptionalTensor& lengths, const OptionalTensor& seed,
    const Tensor& output, const Tensor& gates, const Tensor& cells, const Tensor& clipped,
    const Flags& reverse, bool coupled, double forget_bias, OptionalLimit cell_clip,
    OptionalLimit proj_clip, double eps, double zoneout_h, double zoneout_c,
    double recurrent_dropout, bool training, const Flags& needs_grad) {
  check_input(input, output);
  check_hidden(
      parameters.get(WeightHh), cells.size(-1) * (coupled ? 3 : 4), features(output, reverse));
  LstmCall call(
      Cell::Lstm, input, h0, c0, parameters.vec(), lengths, seed, reverse,
      {coupled, forget_bias, limit(cell_clip), limit(proj_clip), eps, zoneout_h, zoneout_c,
       recurrent_dropout, training});
  call.take_saved(output, gates, cells, clipped);
  return backward(
      call, grad_output, grad_h_n, grad_c_n, all_of({input, h0, c0}, parameters), needs_grad);
}

std::vector<Tensor> gru_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const Tensor& input,
    const OptionalTensor& h0, const ParameterList& parameters, const OptionalTensor& lengths,
    const Tensor& output, const Tensor& gates, const Flags& reverse, bool linear_before_reset,
    const Flags& needs_grad) {
  check_input(input, output);
  const int64_t R = features(output, reverse);
  check_hidden(parameters.get(WeightHh), 3 * R, R);
  LstmCall call(
      Cell::Gru, input, h0, {}, parameters.vec(), lengths, {}, reverse,
      gru_options(linear_before_reset));
  call.take_saved(output, gates, {}, {});
  return backward(call, grad_output, grad_h_n, {}, all_of({input, h0}, parameters), needs_grad);
}

std::vector<Tensor> rnn_backward(
    const Tensor& grad_output, const OptionalTensor& grad_h_n, const Tensor& input,
    const OptionalTensor& h0, const ParameterList& parameters, const OptionalTensor& lengths,
    const Tensor& output, const Flags& reverse, bool relu, const Flags& needs_grad) {
  check_input(input, output);
  const int64_t R = features(output, reverse);
  check_hidden(parameters.get(WeightHh), R, R);
  LstmCall call(
      Cell::Rnn, input, h0, {}, parameters.vec(), lengths, {}, reverse, rnn_options(relu));
  call.take_saved(output, {}, {}, {});
  return backward(call, grad_output, grad_h_n, {}, all_of({input, h0}, parameters), needs_grad);
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) {
  m.impl("lstm_forward.cpp", lstm_forward);
  m.impl("lstm_backward.cpp", lstm_backward);
  m.impl("lstm_plain.cpp", lstm_plain);
  m.impl("gru_forward.cpp", gru_forward);
  m.impl("gru_backward.cpp", gru_backward);
  m.impl("gru_plain.cpp", gru_plain);
  m.impl("rnn_forward.cpp", rnn_forward);
  m.impl("rnn_backward.cpp", rnn_backward);
  m.impl("rnn_plain.cpp", rnn_plain);
}

}  // namespace trifuse
