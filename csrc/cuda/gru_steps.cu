// The GRU and the RNN step by step: everything in a step except its product, which the caller
// computes. In a GRU whose reset gate comes first, a step has two products: r and z from h, then n
// from r h.
//
// A thread owns a unit of one row. The states pass from launch to launch through global memory; the
// L2 cache holds them. There are no atomics, so results are reproducible bit for bit.
//
// Floor: the bytes that the kernels read and write, a few numbers per unit. The launches, of a few
// microseconds each, take longer.

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/lstm_units.cuh"

namespace trifuse::cuda {
namespace {

constexpr int kThreads = 256;

// Calls run(at, unit, state) for the thread's unit, or if its row doesn't have the step,
// absent(state). `state` is the unit's index in (D, B, H).
template <class Run, class Absent>
__device__ __forceinline__ void for_own_unit(
    const Lstm& p, int64_t step, const Run& run, const Absent& absent) {
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / p.H, unit = index % p.H;
  if (row >= p.B) return;
  const Step at(p, step, row, blockIdx.y);
  const int64_t state = at.state_offset(p, p.H) + unit;
  if (at.exists) run(at, unit, state);
  else absent(state);
}
template <class Run>
__device__ __forceinline__ void for_own_unit(const Lstm& p, int64_t step, const Run& run) {
  for_own_unit(p, step, run, [](int64_t) {});
}

// Reads W_ih x and W_hh h of each gate, and in a GRU h. Writes h twice, and a GRU's gates if they
// are saved.
template <class Unit>
__global__ __launch_bounds__(kThreads) void forward_step_kernel(
    const __grid_constant__ Lstm p, int64_t step, const void* from_hidden) {
  using Scalar = Unit::Scalar;
  for_own_unit(p, step, [&](const Step& at, int64_t unit, int64_t state) {
    const auto loaded = Unit::load(p, at, unit);
    const auto v = Numbers<Scalar, Unit::kGates>::load(from_hidden, state);
    finish_h<Scalar>(p, at, unit, Unit::forward(p, at, unit, loaded, v.widened()));
  });
}

// Reads the forward's results, 5 numbers per unit in a GRU and 1 in an RNN, and three parts of the
// gradient of h. Writes the gradients of the gates (in a GRU for both products), writes them once
// more for the next product, and writes the gradient of h before the step.
template <class Unit>
__global__ __launch_bounds__(kThreads) void backward_step_kernel(
    const __grid_constant__ Lstm p, int64_t step, const typename Unit::Scalar* dh_recurrent,
    typename Unit::Scalar* da) {
  using Scalar = Unit::Scalar;
  for_own_unit(
      p, step,
      [&](const Step& at, int64_t unit, int64_t state) {
        const auto loaded = Unit::load_backward(p, at, unit);
        const auto grad = Unit::gradient(p, at, unit, loaded, widen(dh_recurrent[state]));
        const int64_t first_of_row = state - unit;
        Unit::backward(p, at, unit, loaded, grad, da + first_of_row * Unit::kGates);
      },
      [&](int64_t state) { Numbers<Scalar, Unit::kGates>{}.store(da, state); });
}

// The reset gate first ----------------------------------------------------------------------------

// Returns the preactivation of gate `gate`; v is the product with W_hh.
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ T
preactivation(const Lstm& p, const Step& at, int64_t unit, int gate, Scalar v) {
  const int64_t token = 3 * (at.token_offset(p, p.H) + unit);
  T a = widen(static_cast<const Scalar*>(p.from_input)[token + gate]) + widen(v);
  if (!p.bias) return a;
  const T* const bias = chain_vector<T>(p.bias, at.d, 4 * p.H) + 4 * unit;
  a += bias[gate];
  return gate == 2 ? a + bias[3] : a;
}

// Returns where the gradients of a unit's three gates are written, over W_ih x.
template <class Scalar>
__device__ __forceinline__ Scalar* grad_of_input(const Lstm& p, const Step& at, int64_t unit) {
  return static_cast<Scalar*>(p.from_input) + 3 * (at.token_offset(p, p.H) + unit);
}

// Reads h, and W_ih x and W_hh h of r. Writes r h, (D, B, H), and r if the gates are saved.
// `from_hidden` is W_hh h of r and z, (D, B, H, 2).
template <class Scalar>
__global__ __launch_bounds__(kThreads) void forward_reset_kernel(
    const __grid_constant__ Lstm p, int64_t step, const Scalar* from_hidden, Scalar* reset_h) {
  for_own_unit(p, step, [&](const Step& at, int64_t unit, int64_t state) {
    const auto r = sigmoid(preactivation(p, at, unit, 0, from_hidden[2 * state]));
    reset_h[state] = narrow<Scalar>(r * widen(static_cast<const Scalar*>(p.h)[state]));
    if (p.gates)
      static_cast<Scalar*>(p.gates)[3 * (at.saved_offset(p, p.H) + unit)] = narrow<Scalar>(r);
  });
}

// Reads h, W_ih x and W_hh h of z, and W_hn (r h), `from_reset_h`, (D, B, H). Writes h twice, and z
// and n if the gates are saved.
template <class Scalar>
__global__ __launch_bounds__(kThreads) void forward_reset_first_kernel(
    const __grid_constant__ Lstm p, int64_t step, const Scalar* from_hidden,
    const Scalar* from_reset_h) {
  using T = Accumulator<Scalar>;
  for_own_unit(p, step, [&](const Step& at, int64_t unit, int64_t state) {
    const T z = sigmoid(preactivation(p, at, unit, 1, from_hidden[2 * state + 1]));
    const T n = tanh(preactivation(p, at, unit, 2, from_reset_h[state]));
    if (p.gates) {
      Scalar* const gates = static_cast<Scalar*>(p.gates) + 3 * (at.saved_offset(p, p.H) + unit);
      gates[1] = narrow<Scalar>(z);
      gates[2] = narrow<Scalar>(n);
    }
    const T h = widen(static_cast<const Scalar*>(p.h)[state]);
    finish_h<Scalar>(p, at, unit, (1 - z) * n + z * h);
  });
}

// Reads z, n, h before the step and the three parts of the gradient of h. Writes the gradients of z
// and n, the gradient of n once more for the next product, `dn`, (D, B, H), and the part of the
// gradient of h before the step that bypasses the gates.
template <class Scalar>
__global__ __launch_bounds__(kThreads) void backward_reset_first_kernel(
    const __grid_constant__ Lstm p, int64_t step, const Scalar* dh_recurrent, Scalar* dn_out) {
  using T = Accumulator<Scalar>;
  for_own_unit(p, step, [&](const Step& at, int64_t unit, int64_t state) {
    const int64_t saved = at.saved_offset(p, p.H) + unit;
    const auto [r, z, n] = Numbers<Scalar, 3>::load(p.gates, saved).widened().of;
    const T h = widen(static_cast<const Scalar*>(p.h_before)[saved]);
    const T dh = LoadedGradient<Scalar>::load(p, at, unit).total(widen(dh_recurrent[state]));
    const Scalar dn = narrow<Scalar>(dh * (1 - z) * (1 - n * n));
    Scalar* const grad = grad_of_input<Scalar>(p, at, unit);
    grad[1] = narrow<Scalar>(dh * (h - n) * z * (1 - z));
    grad[2] = dn;
    dn_out[state] = dn;
    static_cast<T*>(p.grad_h)[state] = dh * z;
  });
}

// Reads r, h before the step and the gradient of r h, `d_reset_h`, (D, B, H). Writes the gradient
// of r, and the gradients of r and z once more for the next product, `da`, (D, B, H, 2). Adds the
// part through r h to the gradient of h before the step.
template <class Scalar>
__global__ __launch_bounds__(kThreads) void backward_reset_kernel(
    const __grid_constant__ Lstm p, int64_t step, const Scalar* d_reset_h, Scalar* da) {
  using T = Accumulator<Scalar>;
  for_own_unit(
      p, step,
      [&](const Step& at, int64_t unit, int64_t state) {
        const int64_t saved = at.saved_offset(p, p.H) + unit;
        const T r = widen(static_cast<const Scalar*>(p.gates)[3 * saved]);
        const T h = widen(static_cast<const Scalar*>(p.h_before)[saved]);
        const T d = widen(d_reset_h[state]);
        const Scalar dr = narrow<Scalar>(d * h * r * (1 - r));
        Scalar* const grad = grad_of_input<Scalar>(p, at, unit);
        grad[0] = dr;
        Numbers<Scalar, 2>{{dr, grad[1]}}.store(da, state);
        static_cast<T*>(p.grad_h)[state] += d * r;
      },
      [&](int64_t state) { Numbers<Scalar, 2>{}.store(da, state); });
}

// Launches --------------------------------------------------------------------------------------

LaunchPlan plan_of(const char* kernel, const Lstm& p) {
  return {
      .kernel = kernel,
      .sizes = {{"T", p.T}, {"B", p.B}, {"H", p.H}},
      .grid = dim3(
          static_cast<unsigned>((p.B * p.H + kThreads - 1) / kThreads),
          static_cast<unsigned>(p.chains)),
      .block = kThreads,
  };
}

// Calls run<Unit>() with the unit of a call's cell.
template <class Run>
void with_unit(const Lstm& p, const Run& run) {
  for_type(p.dtype, [&]<class Scalar>() {
    if (p.cell == Cell::Gru) run.template operator()<GruUnit<Scalar>>();
    else run.template operator()<RnnUnit<Scalar>>();
  });
}

// Launches a kernel that takes two tensors of the call's type; it may write the second.
template <class Scalar, class Second>
void launch_step(
    const char* name, void (*kernel)(Lstm, int64_t, const Scalar*, Second*), const Lstm& p,
    int64_t step, const void* first,
    std::conditional_t<std::is_const_v<Second>, const void, void>* second, void* stream) {
  launch(
      plan_of(name, p), static_cast<cudaStream_t>(stream), kernel, p, step,
      static_cast<const Scalar*>(first), static_cast<Second*>(second));
}

}  // namespace

void gru_forward_step(const Lstm& p, int64_t step, const void* from_hidden, void* stream) {
  with_unit(p, [&]<class Unit>() {
    launch(
        plan_of(p.cell == Cell::Gru ? "gru_forward_step" : "rnn_forward_step", p),
        static_cast<cudaStream_t>(stream), forward_step_kernel<Unit>, p, step, from_hidden);
  });
}

void gru_backward_step(
    const Lstm& p, int64_t step, const void* dh_recurrent, void* da, void* stream) {
  const char* name = p.cell == Cell::Gru ? "gru_backward_step" : "rnn_backward_step";
  with_unit(p, [&]<class Unit>() {
    launch_step(name, backward_step_kernel<Unit>, p, step, dh_recurrent, da, stream);
  });
}

void gru_forward_reset(
    const Lstm& p, int64_t step, const void* from_hidden, void* reset_h, void* stream) {
  for_type(p.dtype, [&]<class Scalar>() {
    launch_step(
        "gru_forward_reset", forward_reset_kernel<Scalar>, p, step, from_hidden, reset_h, stream);
  });
}

void gru_forward_reset_first(
    const Lstm& p, int64_t step, const void* from_hidden, const void* from_reset_h, void* stream) {
  for_type(p.dtype, [&]<class Scalar>() {
    launch_step(
        "gru_forward_reset_first", forward_reset_first_kernel<Scalar>, p, step, from_hidden,
        from_reset_h, stream);
  });
}

void gru_backward_reset_first(
    const Lstm& p, int64_t step, const void* dh_recurrent, void* dn, void* stream) {
  for_type(p.dtype, [&]<class Scalar>() {
    launch_step(
        "gru_backward_reset_first", backward_reset_first_kernel<Scalar>, p, step, dh_recurrent, dn,
        stream);
  });
}

void gru_backward_reset(
    const Lstm& p, int64_t step, const void* d_reset_h, void* da, void* stream) {
  for_type(p.dtype, [&]<class Scalar>() {
    launch_step(
        "gru_backward_reset", backward_reset_kernel<Scalar>, p, step, d_reset_h, da, stream);
  });
}

}  // namespace trifuse::cuda
