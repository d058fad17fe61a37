// The LSTM step by step: everything in a step except its products, which the caller computes.
//
// A block owns a row of one chain, or a part of one; each thread owns units of it. With layer
// norm a block owns a whole row, and sums over it are added up in shared memory. The scratch values
// of a thread's units are in shared memory too, or in global memory if a row has too many units.
// The states pass from launch to launch through global memory; the L2 cache holds them. There are
// no atomics, so results are reproducible bit for bit.
//
// Floor: the bytes that the kernels read and write, a few numbers per unit. The launches, of a few
// microseconds each, take longer.

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/lstm_cell.cuh"
#include "cuda/warp.cuh"

namespace trifuse::cuda {
namespace {

constexpr int kThreads = 256;

// The units, or columns of h, that a block owns.
struct BlockRange {
  int64_t row, first, last;
  int d;

  __device__ BlockRange(const Lstm& p, int64_t columns) {
    const int64_t blocks = blocks_per_row(p, columns);
    row = blockIdx.x / blocks;
    d = blockIdx.y;
    first = blockIdx.x % blocks * kThreads;
    last = blocks == 1 ? columns : min(first + kThreads, columns);
  }
  static __host__ __device__ int64_t blocks_per_row(const Lstm& p, int64_t columns) {
    return p.norm_hh ? 1 : (columns + kThreads - 1) / kThreads;
  }
};

// Scratch memory of a block, a few values per unit. A thread reads and writes only its own units.
template <class T>
struct Scratch {
  struct Unit {
    Gates<T> gates;
    T c;  // c̃
  };
  static constexpr int kSums = 4 * kThreads / 32;
  T* sums;  // (4, warps)
  Unit* units;

  __device__ Scratch(const Lstm& p, int64_t count) : sums(reinterpret_cast<T*>(shared_memory())) {
    const int64_t block = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
    units = p.workspace ? static_cast<Unit*>(p.workspace) + block * count
                        : reinterpret_cast<Unit*>(sums + kSums);
  }
  // Returns the bytes of shared memory with `count` units in it.
  static size_t bytes(int64_t count) { return kSums * sizeof(T) + count * sizeof(Unit); }
};

// Calls term(unit, sums) for each unit, and adds up the threads' sums.
template <int count, class T, class Term>
__device__ void sum_over_units(
    T (&sums)[count], const BlockRange& own, const Scratch<T>& scratch, const Term& term) {
  for (int64_t unit = own.first + threadIdx.x; unit < own.last; unit += kThreads) term(unit, sums);
  __syncthreads();  // an earlier sum has been read
  block_sum<kThreads>(sums, scratch.sums);
}

template <class T>
struct Moments {
  T mean, rstd;
};

// Returns the moments of value(unit) over a row's units, in two passes.
template <class T, class Value>
__device__ Moments<T> row_moments(
    const Lstm& p, const BlockRange& own, const Scratch<T>& scratch, const Value& value) {
  const T count = static_cast<T>(p.H);
  T sum[1] = {};
  sum_over_units(sum, own, scratch, [&](int64_t unit, T(&s)[1]) { s[0] += value(unit); });
  const T mean = sum[0] / count;
  T squares[1] = {};
  sum_over_units(squares, own, scratch, [&](int64_t unit, T(&s)[1]) {
    const T x = value(unit) - mean;
    s[0] += x * x;
  });
  return {mean, 1 / sqrt(squares[0] / count + static_cast<T>(p.eps))};
}

// Sums over a unit's gates. A coupled cell has no f.
template <class T>
__device__ __forceinline__ T sum_of(const Lstm& p, const Gates<T>& x) {
  return x.i + (p.coupled ? T(0) : x.f) + x.g + x.o;
}

// Layer norm of a row's product, over all units of all gates.
template <class T>
struct GateNorm {
  Moments<T> moments;
  const void* gain;

  __device__ Gates<T> normalised(const Gates<T>& x) const {
    return (x - moments.mean) * moments.rstd;
  }
};

template <class Scalar, class T = Accumulator<Scalar>>
__device__ GateNorm<T> gate_norm(
    const Lstm& p, const BlockRange& own, const Scratch<T>& scratch, const void* product,
    int64_t first, const void* gain) {
  const T count = static_cast<T>((p.coupled ? 3 : 4) * p.H);
  T sum[1] = {};
  sum_over_units(sum, own, scratch, [&](int64_t unit, T(&s)[1]) {
    s[0] += sum_of(p, load_gates<Scalar>(product, first + unit));
  });
  const T mean = sum[0] / count;
  T squares[1] = {};
  sum_over_units(squares, own, scratch, [&](int64_t unit, T(&s)[1]) {
    const Gates<T> x = load_gates<Scalar>(product, first + unit) - mean;
    s[0] += sum_of(p, x * x);
  });
  return {{mean, 1 / sqrt(squares[0] / count + static_cast<T>(p.eps))}, gain};
}

// A row's preactivations at a step, from W_ih x and W_hh h, which may already have been added up.
template <class Scalar>
struct Preactivations {
  using T = Accumulator<Scalar>;
  const Lstm& p;
  const int d;
  const void* from_input;
  const void* from_hidden;  // or null: from_input has the sum of both
  const int64_t input_first, hidden_first;
  GateNorm<T> input_norm, hidden_norm;

  __device__ Preactivations(
      const Lstm& p, const BlockRange& own, const Scratch<T>& scratch, const void* from_input,
      int64_t input_first, const void* from_hidden, int64_t hidden_first)
      : p(p), d(own.d), from_input(from_input), from_hidden(from_hidden), input_first(input_first),
        hidden_first(hidden_first) {
    if (!p.norm_hh) return;
    input_norm = gate_norm<Scalar>(p, own, scratch, from_input, input_first, p.norm_ih);
    hidden_norm = gate_norm<Scalar>(p, own, scratch, from_hidden, hidden_first, p.norm_hh);
  }

  __device__ Gates<T> normalised_input(int64_t unit) const {
    return input_norm.normalised(load_gates<Scalar>(from_input, input_first + unit));
  }
  __device__ Gates<T> normalised_hidden(int64_t unit) const {
    return hidden_norm.normalised(load_gates<Scalar>(from_hidden, hidden_first + unit));
  }
  __device__ Gates<T> gain(const GateNorm<T>& norm, int64_t unit) const {
    return load_gates<T>(norm.gain, d * p.H + unit);
  }

  __device__ Gates<T> at(int64_t unit) const {
    Gates<T> a;
    if (p.norm_hh) {
      a = normalised_input(unit) * gain(input_norm, unit) +
          normalised_hidden(unit) * gain(hidden_norm, unit);
    } else {
      a = load_gates<Scalar>(from_input, input_first + unit);
      if (from_hidden) a = a + load_gates<Scalar>(from_hidden, hidden_first + unit);
    }
    return p.bias ? a + load_gates<T>(p.bias, d * p.H + unit) : a;
  }
};

// The argument of the tanh in m: c̃, or its layer norm.
template <class T>
struct CellNorm {
  const Lstm& p;
  const int d;
  Moments<T> moments;

  // Reads c̃ of all units from `scratch`.
  __device__ CellNorm(const Lstm& p, const BlockRange& own, const Scratch<T>& scratch)
      : p(p), d(own.d) {
    if (!p.norm_hh) return;
    moments = row_moments(
        p, own, scratch, [&](int64_t unit) { return scratch.units[unit - own.first].c; });
  }
  __device__ T normalised(T c) const { return (c - moments.mean) * moments.rstd; }
  __device__ T gain(int64_t unit) const {
    return chain_vector<T>(p.norm_cell_weight, d, p.H)[unit];
  }
  __device__ T operator()(T c, int64_t unit) const {
    if (!p.norm_hh) return c;
    const T value = normalised(c) * gain(unit);
    return p.norm_cell_bias ? value + chain_vector<T>(p.norm_cell_bias, d, p.H)[unit] : value;
  }
};

// Forward -----------------------------------------------------------------------------------------

template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ void finish_step(
    const Lstm& p, const Step& at, int64_t column, T h_new) {
  const Scalar next = finish_h<Scalar>(p, at, column, h_new);
  if (p.dropout) static_cast<Scalar*>(p.h_dropped)[at.state_offset(p, p.R) + column] = next;
}

// Reads 8 numbers per unit, and c. Writes c, h twice, and the gates and c again if they are saved.
template <class Scalar>
__global__ __launch_bounds__(kThreads) void forward_step_kernel(
    const __grid_constant__ Lstm p, int64_t step, const void* from_hidden, Scalar* m) {
  using T = Accumulator<Scalar>;
  const BlockRange own(p, p.H);
  const Step at(p, step, own.row, own.d);
  if (!at.exists) return;
  const Scratch<T> scratch(p, own.last - own.first);
  const Preactivations<Scalar> preactivations(
      p, own, scratch, p.from_input, at.token_offset(p, p.H), from_hidden, at.state_offset(p, p.H));
  T* const c = static_cast<T*>(p.c) + at.state_offset(p, p.H);
  for (int64_t unit = own.first + threadIdx.x; unit < own.last; unit += kThreads) {
    const ComputedCell<T> computed = cell(p, at.d, unit, preactivations.at(unit), c[unit]);
    scratch.units[unit - own.first].gates = computed.gates;
    scratch.units[unit - own.first].c = clip_cell(p, at, unit, computed.u);
    if (p.gates) store_saved<Scalar>(p, at.saved_offset(p, p.H) + unit, computed.gates);
  }
  const CellNorm<T> norm(p, own, scratch);
  for (int64_t unit = own.first + threadIdx.x; unit < own.last; unit += kThreads) {
    const T c_new = scratch.units[unit - own.first].c;
    const T m_new = scratch.units[unit - own.first].gates.o * tanh(norm(c_new, unit));
    const T next = zoneout<State::C>(p, at, unit, c_new, c + unit);
    c[unit] = next;
    if (p.cells) static_cast<T*>(p.cells)[at.saved_offset(p, p.H) + unit] = next;
    if (m) m[at.state_offset(p, p.H) + unit] = narrow<Scalar>(m_new);
    else finish_step<Scalar>(p, at, unit, m_new);
  }
}

// A thread owns columns of h. Reads W_hr m, and h for zoneout; writes h twice.
template <class Scalar>
__global__ __launch_bounds__(kThreads) void forward_projection_kernel(
    const __grid_constant__ Lstm p, int64_t step, const Scalar* projected) {
  using T = Accumulator<Scalar>;
  const BlockRange own(p, p.R);
  const Step at(p, step, own.row, own.d);
  if (!at.exists) return;
  for (int64_t column = own.first + threadIdx.x; column < own.last; column += kThreads) {
    const T q = widen(projected[at.state_offset(p, p.R) + column]);
    finish_step<Scalar>(p, at, column, clip_projection(p, at, column, q));
  }
}

// A thread owns eight columns, which take one call of Philox. Floor: the bytes written.
template <class T>
__global__ __launch_bounds__(kThreads) void dropout_kernel(
    const __grid_constant__ Lstm p, T* multipliers, uint32_t threshold, double scale) {
  const int64_t groups = (p.R + 7) / 8, index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / groups, group = index % groups;
  if (row >= p.B) return;
  const uint32_t d = blockIdx.y;
  const uint32_t drawn_row = drawn_unit(p.seed, p.placed, static_cast<uint32_t>(row));
  const uint32_t keep =
      dropout_keep(*p.seed, d, drawn_row, static_cast<uint32_t>(group), threshold);
  for (int j = 0; j < 8 && 8 * group + j < p.R; ++j)
    multipliers[(d * p.B + row) * p.R + 8 * group + j] = T(keep >> j & 1 ? scale : 0);
}

// Backward ----------------------------------------------------------------------------------------

// The part of a row's backward that the block owns.
template <class Scalar, class T = Accumulator<Scalar>>
struct BackwardStep {
  const Lstm& p;
  const BlockRange& own;
  const Step& at;
  const Scratch<T>& scratch;
  const Preactivations<Scalar>& preactivations;
  const int64_t state, token;
  void* const da_out;  // (D, B, H, 4)

  __device__ RestoredUnit<T> restored(int64_t unit) const {
    return restore_unit<Scalar>(
        p, at, unit, load_unit<Scalar>(p, at, unit),
        p.gates ? Gates<T>{} : preactivations.at(unit));
  }

  __device__ CellNorm<T> cell_norm() const {
    if (p.norm_hh)
      for (int64_t unit = own.first + threadIdx.x; unit < own.last; unit += kThreads)
        scratch.units[unit - own.first].c = restored(unit).c_new;
    return {p, own, scratch};
  }

  // Writes the gradient of m to `scratch`. With layer norm, the gradient of c̃ also needs two means
  // over the row: those of g and of g n, where n is the normalised c̃ and g is its gradient.
  __device__ void compute_dm(const CellNorm<T>& norm, const Scalar* dh_or_dm, T (&means)[2]) const {
    for (int64_t unit = own.first + threadIdx.x; unit < own.last; unit += kThreads) {
      const T given = widen(dh_or_dm[state + unit]);
      const T dm = p.projected
          ? given
          : hidden_backward(p, at, unit, load_column<Scalar>(p, at, unit), given);
      scratch.units[unit - own.first].gates.i = dm;
      if (!p.norm_hh) continue;
      const RestoredUnit<T> x = restored(unit);
      const T y = tanh(norm(x.c_new, unit)), n = norm.normalised(x.c_new);
      const T dn = dm * x.gates.o * (1 - y * y), g = dn * norm.gain(unit);
      add_vector_grad(p, at, Lstm::kGradNormCell, unit, dn * n);
      add_vector_grad(p, at, Lstm::kGradNormCell + 1, unit, dn);
      means[0] += g;
      means[1] += g * n;
    }
    if (!p.norm_hh) return;
    sum_over_units(means, own, scratch, [](int64_t, T(&)[2]) {});
    means[0] /= static_cast<T>(p.H);
    means[1] /= static_cast<T>(p.H);
  }

  // Computes the preactivations' gradients from those of m in `scratch`. Writes them or, with layer
  // norm, leaves them in `scratch` and adds to `sums`, which are the sums of g and g n over all
  // gates, for W_ih x and for W_hh h.
  __device__ void compute_da(const CellNorm<T>& norm, const T (&means)[2], T (&sums)[4]) const {
    for (int64_t unit = own.first + threadIdx.x; unit < own.last; unit += kThreads) {
      const RestoredUnit<T> x = restored(unit);
      const T y = tanh(norm(x.c_new, unit));
      store_hidden<Scalar>(p, at, unit, x, y);
      const T dm = scratch.units[unit - own.first].gates.i;
      T du = dm * x.gates.o * (1 - y * y);
      if (p.norm_hh) {
        const T n = norm.normalised(x.c_new);
        du = norm.moments.rstd * (du * norm.gain(unit) - means[0] - n * means[1]);
      }
      const Gates<T> da = cell_backward(p, at, unit, x, y, dm, du);
      if (!p.norm_hh) {
        store_gates<Scalar>(p.from_input, token + unit, da);
        store_gates<Scalar>(da_out, state + unit, da);
        continue;
      }
      scratch.units[unit - own.first].gates = da;
      const Gates<T> nx = preactivations.normalised_input(unit);
      const Gates<T> nh = preactivations.normalised_hidden(unit);
      add_gate_grads(Lstm::kGradBias, unit, da);
      add_gate_grads(Lstm::kGradNormIh, unit, da * nx);
      add_gate_grads(Lstm::kGradNormHh, unit, da * nh);
      const Gates<T> gx = da * preactivations.gain(preactivations.input_norm, unit);
      const Gates<T> gh = da * preactivations.gain(preactivations.hidden_norm, unit);
      sums[0] += sum_of(p, gx);
      sums[1] += sum_of(p, gx * nx);
      sums[2] += sum_of(p, gh);
      sums[3] += sum_of(p, gh * nh);
    }
  }
  __device__ void add_gate_grads(int vector, int64_t unit, const Gates<T>& g) const {
    add_vector_grad(p, at, vector, unit, g.i);
    add_vector_grad(p, at, vector + 1, unit, g.f);
    add_vector_grad(p, at, vector + 2, unit, g.g);
    add_vector_grad(p, at, vector + 3, unit, g.o);
  }

  // With layer norm: writes the gradients of W_ih x and W_hh h, from those in `scratch` and from
  // the threads' sums.
  __device__ void compute_product_grads(T (&sums)[4]) const {
    sum_over_units(sums, own, scratch, [](int64_t, T(&)[4]) {});
    const T count = static_cast<T>((p.coupled ? 3 : 4) * p.H);
    for (int64_t unit = own.first + threadIdx.x; unit < own.last; unit += kThreads) {
      const Gates<T> da = scratch.units[unit - own.first].gates;
      const auto product_grad = [&](const GateNorm<T>& norm, const Gates<T>& n, const T* sum) {
        const Gates<T> g = da * preactivations.gain(norm, unit) - sum[0] / count;
        Gates<T> result = (g + n * (-sum[1] / count)) * norm.moments.rstd;
        if (p.coupled) result.f = 0;
        return result;
      };
      const Gates<T> dax =
          product_grad(preactivations.input_norm, preactivations.normalised_input(unit), sums);
      const Gates<T> dah = product_grad(
          preactivations.hidden_norm, preactivations.normalised_hidden(unit), sums + 2);
      store_gates<Scalar>(p.from_input, token + unit, dax);
      store_gates<Scalar>(p.from_hidden, token + unit, dah);
      store_gates<Scalar>(da_out, state + unit, dah);
    }
  }
};

// Reads 4 numbers per unit, or 8 with layer norm, c before and after the step, and the gradients of
// c and of h (or m). Writes the gates' gradients twice, or three times with layer norm, and the
// gradients of c and h before the step.
template <class Scalar>
__global__ __launch_bounds__(kThreads) void backward_step_kernel(
    const __grid_constant__ Lstm p, int64_t step, const Scalar* dh_or_dm, void* da_out) {
  using T = Accumulator<Scalar>;
  const BlockRange own(p, p.H);
  const Step at(p, step, own.row, own.d);
  const int64_t state = at.state_offset(p, p.H), token = at.token_offset(p, p.H);
  if (!at.exists) {
    for (int64_t unit = own.first + threadIdx.x; unit < own.last; unit += kThreads)
      store_gates<Scalar>(da_out, state + unit, {});
    return;
  }
  const Scratch<T> scratch(p, own.last - own.first);
  const Preactivations<Scalar> preactivations(
      p, own, scratch, p.from_input, token, p.norm_hh ? p.from_hidden : nullptr, token);
  const BackwardStep<Scalar> backward{p, own, at, scratch, preactivations, state, token, da_out};
  const CellNorm<T> norm = backward.cell_norm();
  T means[2] = {}, sums[4] = {};
  backward.compute_dm(norm, dh_or_dm, means);
  backward.compute_da(norm, means, sums);
  if (p.norm_hh) backward.compute_product_grads(sums);
}

// A thread owns columns of h. Reads grad_h, grad_output and dh_recurrent; writes grad_h and, twice,
// the gradient of W_hr m.
template <class Scalar>
__global__ __launch_bounds__(kThreads) void backward_projection_kernel(
    const __grid_constant__ Lstm p, int64_t step, const Scalar* dh_recurrent, Scalar* dq,
    Scalar* grad_projected) {
  using T = Accumulator<Scalar>;
  const BlockRange own(p, p.R);
  const Step at(p, step, own.row, own.d);
  const int64_t state = at.state_offset(p, p.R), saved = at.saved_offset(p, p.R);
  for (int64_t column = own.first + threadIdx.x; column < own.last; column += kThreads) {
    Scalar grad = narrow<Scalar>(0);
    if (at.exists) {
      const LoadedColumn<Scalar> x = load_column<Scalar>(p, at, column);
      const T grad_h_new = hidden_backward(p, at, column, x, widen(dh_recurrent[state + column]));
      if (!x.clipped) grad = narrow<Scalar>(grad_h_new);
      grad_projected[saved + column] = grad;
    }
    dq[state + column] = grad;
  }
}

// Launches ----------------------------------------------------------------------------------------

LaunchPlan plan_of(const char* kernel, const Lstm& p, int64_t blocks, size_t shared = 0) {
  return {
      .kernel = kernel,
      .sizes = {{"T", p.T}, {"B", p.B}, {"H", p.H}, {"R", p.R}},
      .grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.chains)),
      .block = kThreads,
      .shared = shared,
  };
}

// Returns the plan of a kernel over the units of all rows.
template <class T>
LaunchPlan plan_of_cell(const char* kernel, const Lstm& p) {
  const int64_t units = p.workspace ? 0 : p.norm_hh ? p.H : std::min<int64_t>(p.H, kThreads);
  return plan_of(kernel, p, p.B * BlockRange::blocks_per_row(p, p.H), Scratch<T>::bytes(units));
}

}  // namespace

int64_t lstm_workspace(const Lstm& p) {
  int64_t bytes = 0;
  for_type(p.dtype, [&]<class Scalar>() {
    using Scratch = Scratch<Accumulator<Scalar>>;
    if (p.norm_hh && Scratch::bytes(p.H) > shared_memory_limit())
      bytes = p.chains * p.B * p.H * sizeof(typename Scratch::Unit);
  });
  return bytes;
}

void lstm_dropout(
    const Lstm& p, void* multipliers, uint32_t threshold, double scale, void* stream) {
  const auto launch_for = [&]<class T>() {
    const int64_t groups = p.B * ((p.R + 7) / 8);
    launch(
        plan_of("lstm_dropout", p, (groups + kThreads - 1) / kThreads),
        static_cast<cudaStream_t>(stream), dropout_kernel<T>, p, static_cast<T*>(multipliers),
        threshold, scale);
  };
  if (p.dtype == DType::Float64) launch_for.template operator()<double>();
  else launch_for.template operator()<float>();
}

void lstm_forward_step(
    const Lstm& p, int64_t step, const void* from_hidden, void* m, void* stream) {
  for_type(p.dtype, [&]<class Scalar>() {
    launch(
        plan_of_cell<Accumulator<Scalar>>("lstm_forward_step", p),
        static_cast<cudaStream_t>(stream), forward_step_kernel<Scalar>, p, step, from_hidden,
        static_cast<Scalar*>(m));
  });
}

void lstm_forward_projection(const Lstm& p, int64_t step, const void* projected, void* stream) {
  for_type(p.dtype, [&]<class Scalar>() {
    launch(
        plan_of("lstm_forward_projection", p, p.B * BlockRange::blocks_per_row(p, p.R)),
        static_cast<cudaStream_t>(stream), forward_projection_kernel<Scalar>, p, step,
        static_cast<const Scalar*>(projected));
  });
}

void lstm_backward_step(const Lstm& p, int64_t step, const void* dh_or_dm, void* da, void* stream) {
  for_type(p.dtype, [&]<class Scalar>() {
    launch(
        plan_of_cell<Accumulator<Scalar>>("lstm_backward_step", p),
        static_cast<cudaStream_t>(stream), backward_step_kernel<Scalar>, p, step,
        static_cast<const Scalar*>(dh_or_dm), da);
  });
}

void lstm_backward_projection(
    const Lstm& p, int64_t step, const void* dh_recurrent, void* dq, void* grad_projected,
    void* stream) {
  for_type(p.dtype, [&]<class Scalar>() {
    launch(
        plan_of("lstm_backward_projection", p, p.B * BlockRange::blocks_per_row(p, p.R)),
        static_cast<cudaStream_t>(stream), backward_projection_kernel<Scalar>, p, step,
        static_cast<const Scalar*>(dh_recurrent), static_cast<Scalar*>(dq),
        static_cast<Scalar*>(grad_projected));
  });
}

}  // namespace trifuse::cuda
