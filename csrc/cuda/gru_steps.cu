// The GRU and the RNN step by step: all of a step except its product, which the caller computes.
//
// A thread owns a unit of one row. The states pass from launch to launch through global memory; the
// L2 cache holds them. There are no atomics: results repeat bit for bit.
//
// Floor: the bytes that the kernels read and write, a few numbers a unit. The launches, some
// microseconds each, outweigh them.

#include "cuda/launch.h"
#include "cuda/lstm_units.cuh"

namespace trifuse::cuda {
namespace {

constexpr int kThreads = 256;

// A thread's unit at a step.
struct OwnUnit {
  int64_t row, unit;
  int d;

  __device__ explicit OwnUnit(const Lstm& p) {
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    row = index / p.H;
    unit = index % p.H;
    d = blockIdx.y;
  }
};

// Reads W_ih x and W_hh h of each gate, and in a GRU h. Writes h twice, and a GRU's gates if they
// are saved.
template <class Unit>
__global__ __launch_bounds__(kThreads) void forward_step_kernel(
    const __grid_constant__ Lstm p, int64_t step, const void* from_hidden) {
  using Scalar = Unit::Scalar;
  const OwnUnit own(p);
  if (own.row >= p.B) return;
  const Step at(p, step, own.row, own.d);
  if (!at.exists) return;
  const auto loaded = Unit::load(p, at, own.unit);
  const auto v =
      Numbers<Scalar, Unit::kGates>::load(from_hidden, at.state_offset(p, p.H) + own.unit);
  finish_h<Scalar>(p, at, own.unit, Unit::forward(p, at, own.unit, loaded, v.widened()));
}

// Reads what the forward left, 5 numbers a unit in a GRU and 1 in an RNN, and three parts of the
// gradient of h. Writes the gradients of the gates, in a GRU for both products, and once more for
// the next product, and the gradient of h before the step.
template <class Unit>
__global__ __launch_bounds__(kThreads) void backward_step_kernel(
    const __grid_constant__ Lstm p, int64_t step, const typename Unit::Scalar* dh_recurrent,
    typename Unit::Scalar* da) {
  using Scalar = Unit::Scalar;
  const OwnUnit own(p);
  if (own.row >= p.B) return;
  const Step at(p, step, own.row, own.d);
  const int64_t state = at.state_offset(p, p.H);
  da += state * Unit::kGates;
  if (!at.exists) return Numbers<Scalar, Unit::kGates>{}.store(da, own.unit);
  const auto loaded = Unit::load_backward(p, at, own.unit);
  const auto dh = widen(dh_recurrent[state + own.unit]);
  Unit::backward(p, at, own.unit, loaded, Unit::gradient(p, at, own.unit, loaded, dh), da);
}

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
  with_unit(p, [&]<class Unit>() {
    using Scalar = Unit::Scalar;
    launch(
        plan_of(p.cell == Cell::Gru ? "gru_backward_step" : "rnn_backward_step", p),
        static_cast<cudaStream_t>(stream), backward_step_kernel<Unit>, p, step,
        static_cast<const Scalar*>(dh_recurrent), static_cast<Scalar*>(da));
  });
}

}  // namespace trifuse::cuda
