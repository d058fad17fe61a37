// Shared by the LSTM's kernels: offsets of elements, and the arithmetic of one unit of one row.

#pragma once

#include <cmath>

#include "cuda/dtype.cuh"
#include "cuda/lstm.h"
#include "cuda/philox.cuh"

namespace trifuse::cuda {

// Arithmetic --------------------------------------------------------------------------------------

using std::exp, std::sqrt, std::tanh;  // overloads: float for float, double for double

// Does not overflow, and has a small relative error at both ends.
template <class T>
__device__ __forceinline__ T sigmoid(T x) {
  const T e = exp(x < 0 ? x : -x);
  return (x < 0 ? e : T(1)) / (1 + e);
}

// Keeps NaN.
template <class T>
__device__ __forceinline__ T clip(T x, double limit) {
  const T most = static_cast<T>(limit);
  return x > most ? most : x < -most ? -most : x;
}

// One value for each of a unit's gates.
template <class T>
struct Gates {
  T i, f, g, o;
};

template <class T>
__device__ __forceinline__ Gates<T> operator+(const Gates<T>& x, const Gates<T>& y) {
  return {x.i + y.i, x.f + y.f, x.g + y.g, x.o + y.o};
}
template <class T>
__device__ __forceinline__ Gates<T> operator-(const Gates<T>& x, T y) {
  return {x.i - y, x.f - y, x.g - y, x.o - y};
}
template <class T>
__device__ __forceinline__ Gates<T> operator*(const Gates<T>& x, const Gates<T>& y) {
  return {x.i * y.i, x.f * y.f, x.g * y.g, x.o * y.o};
}
template <class T>
__device__ __forceinline__ Gates<T> operator*(const Gates<T>& x, T y) {
  return {x.i * y, x.f * y, x.g * y, x.o * y};
}

// Memory ------------------------------------------------------------------------------------------

// A unit's gates as stored, aligned for accesses of up to 16 bytes.
template <class Scalar>
struct alignas(4 * sizeof(Scalar) < 16 ? 4 * sizeof(Scalar) : 16) Four {
  Scalar i, f, g, o;
};
// The same as raw words, so that a thread waits for a load only when it unpacks the words.
template <class Scalar>
struct alignas(sizeof(Four<Scalar>) < 16 ? sizeof(Four<Scalar>) : 16) Packed {
  uint2 words[sizeof(Four<Scalar>) / 8];

  static __device__ __forceinline__ Packed of(Four<Scalar> x) {
    Packed result;
    memcpy(result.words, &x, sizeof(x));
    return result;
  }
  // Loads the gates of unit `unit`, counted over the whole tensor.
  static __device__ __forceinline__ Packed load(const void* tensor, int64_t unit) {
    return static_cast<const Packed*>(tensor)[unit];
  }
  template <class T = Accumulator<Scalar>>
  __device__ __forceinline__ Gates<T> widened() const {
    Four<Scalar> x;
    memcpy(&x, words, sizeof(x));
    return {widen(x.i), widen(x.f), widen(x.g), widen(x.o)};
  }
};

// Load and store the gates of unit `unit`, counted over the whole tensor.
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ Gates<T> load_gates(const void* tensor, int64_t unit) {
  const Four<Scalar> four = static_cast<const Four<Scalar>*>(tensor)[unit];
  return {widen(four.i), widen(four.f), widen(four.g), widen(four.o)};
}
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ void store_gates(void* tensor, int64_t unit, const Gates<T>& x) {
  static_cast<Four<Scalar>*>(tensor)[unit] = {
      narrow<Scalar>(x.i), narrow<Scalar>(x.f), narrow<Scalar>(x.g), narrow<Scalar>(x.o)};
}

// Load and store saved gates. A coupled cell saves three: i, g, o.
template <class Scalar>
__device__ __forceinline__ Packed<Scalar> load_saved(const Lstm& p, int64_t unit) {
  if (!p.coupled) return Packed<Scalar>::load(p.gates, unit);
  const Scalar* from = static_cast<const Scalar*>(p.gates) + 3 * unit;
  return Packed<Scalar>::of({from[0], {}, from[1], from[2]});
}
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ void store_saved(const Lstm& p, int64_t unit, const Gates<T>& x) {
  if (!p.coupled) return store_gates<Scalar>(p.gates, unit, x);
  Scalar* to = static_cast<Scalar*>(p.gates) + 3 * unit;
  to[0] = narrow<Scalar>(x.i);
  to[1] = narrow<Scalar>(x.g);
  to[2] = narrow<Scalar>(x.o);
}

// Places ------------------------------------------------------------------------------------------

// A step of a row in chain d.
struct Step {
  int64_t row;
  int d;
  int64_t t;       // position of the step
  int64_t t_prev;  // position of the step before
  bool exists;     // whether the row has the step; if not, the positions are meaningless
  bool has_prev;   // whether it is not the first step

  __device__ __forceinline__ Step(const Lstm& p, int64_t step, int64_t row, int d)
      : Step(p, step, row, d, p.lengths ? p.lengths[row] : p.T) {}
  __device__ __forceinline__ Step(const Lstm& p, int64_t step, int64_t row, int d, int64_t length)
      : row(row), d(d) {
    exists = step < length;
    has_prev = step > 0;
    t = p.reverse[d] ? length - 1 - step : step;
    t_prev = p.reverse[d] ? t + 1 : t - 1;
  }

  // Offsets of the row in tensors of N columns.
  __device__ __forceinline__ int64_t state_offset(const Lstm& p, int64_t N) const {  // (D, B, N)
    return (d * p.B + row) * N;
  }
  __device__ __forceinline__ int64_t token_offset(const Lstm& p, int64_t N) const {  // (T, B, D, N)
    return p.layers ? saved_offset(p, N) : ((t * p.B + row) * p.chains + d) * N;
  }
  __device__ __forceinline__ int64_t saved_offset(const Lstm& p, int64_t N) const {  // (D, T, B, N)
    return ((d * p.T + t) * p.B + row) * N;
  }
  __device__ __forceinline__ int64_t saved_offset_prev(const Lstm& p, int64_t N) const {
    return ((d * p.T + t_prev) * p.B + row) * N;
  }
};

// Returns one chain's vector of (D, N).
template <class T>
__device__ __forceinline__ const T* chain_vector(const void* vectors, int d, int64_t N) {
  return static_cast<const T*>(vectors) + d * N;
}

// Clips -------------------------------------------------------------------------------------------

// Flags that a unit of c, or a column of W_hr m, was clipped.
__device__ __forceinline__ bool& clipped_cell(const Lstm& p, const Step& at, int64_t unit) {
  return p.clipped[at.saved_offset(p, p.clipped_columns()) + unit];
}
__device__ __forceinline__ bool& clipped_projection(const Lstm& p, const Step& at, int64_t column) {
  const int64_t columns = p.clipped_columns();
  return p.clipped[at.saved_offset(p, columns) + columns - p.R + column];
}

// Return c̃ and h̃, from u and from q = W_hr m, and save whether they were clipped.
template <class T>
__device__ __forceinline__ T clip_cell(const Lstm& p, const Step& at, int64_t unit, T u) {
  const T clipped = clip(u, p.cell_clip);
  if (p.clipped && p.clips(p.cell_clip)) clipped_cell(p, at, unit) = clipped != u && u == u;
  return clipped;
}
template <class T>
__device__ __forceinline__ T clip_projection(const Lstm& p, const Step& at, int64_t column, T q) {
  const T clipped = clip(q, p.proj_clip);
  if (p.clipped && p.clips(p.proj_clip)) clipped_projection(p, at, column) = clipped != q && q == q;
  return clipped;
}

// Zoneout -----------------------------------------------------------------------------------------

enum class State { H = 1, C = 2 };  // offsets in the numbers of Philox's planes

// Returns the weight of the new state: 0 or 1 in training, where zoneout draws it.
template <State state, class T>
__device__ __forceinline__ T weight_of_new(const Lstm& p, const Step& at, int64_t column) {
  const bool is_h = state == State::H;
  if (!p.training) return 1 - static_cast<T>(is_h ? p.zoneout_h : p.zoneout_c);
  const uint32_t threshold = is_h ? p.threshold_h : p.threshold_c;
  if (!threshold) return 1;
  const auto plane = static_cast<uint32_t>((at.t * 3 + static_cast<int>(state)) * 2 + at.d);
  const uint32_t row = drawn_unit(p.seed, p.placed, static_cast<uint32_t>(at.row));
  const uint32_t keep =
      dropout_keep(*p.seed, plane, row, static_cast<uint32_t>(column / 8), threshold);
  return keep >> column % 8 & 1;
}

// Returns the state after a step: a weighted mean of `computed` (c̃ or h̃) and the state before the
// step. Reads the state before the step only if its weight is not 0.
template <State state, class T, class Scalar>
__device__ __forceinline__ T
zoneout(const Lstm& p, const Step& at, int64_t column, T computed, const Scalar* before) {
  const T weight = weight_of_new<state, T>(p, at, column);
  if (weight == 1) return computed;
  const T old = widen(*before);
  return weight == 0 ? old : (1 - weight) * old + weight * computed;
}

// The cell ----------------------------------------------------------------------------------------

template <class T>
struct ComputedCell {
  Gates<T> gates;
  T u;  // c̃ before its clip
};

// Computes a cell from its preactivations, which include the bias, and the previous c.
template <class T>
__device__ __forceinline__ ComputedCell<T> cell(
    const Lstm& p, int d, int64_t unit, Gates<T> a, T c) {
  const T* peephole = p.peephole ? chain_vector<T>(p.peephole, d, 3 * p.H) + unit : nullptr;
  if (peephole) {
    a.i += peephole[0] * c;
    a.f += peephole[p.H] * c;
  }
  ComputedCell<T> result;
  Gates<T>& gates = result.gates;
  gates.i = sigmoid(a.i);
  gates.f = p.coupled ? 1 - gates.i : sigmoid(a.f);
  gates.g = tanh(a.g);
  result.u = gates.f * c + gates.i * gates.g;
  if (peephole) a.o += peephole[2 * p.H] * clip(result.u, p.cell_clip);
  gates.o = sigmoid(a.o);
  return result;
}

// Writes a column of the next h, and returns it after dropout, for the product of the next step.
// `h_new` is h̃.
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ Scalar finish_h(const Lstm& p, const Step& at, int64_t column, T h_new) {
  const int64_t index = at.state_offset(p, p.R) + column;
  Scalar* const h = static_cast<Scalar*>(p.h) + index;
  const Scalar next = narrow<Scalar>(zoneout<State::H>(p, at, column, h_new, h));
  *h = next;
  static_cast<Scalar*>(p.output)[at.token_offset(p, p.R) + column] = next;
  return p.dropout ? narrow<Scalar>(widen(next) * static_cast<const T*>(p.dropout)[index]) : next;
}

// Backward ----------------------------------------------------------------------------------------

// The loads of a column of h and of a unit are separate from the arithmetic, and do not convert
// values, so that a thread waits for a load only where it needs the value.

// A column's values that the backward loads: the gradient of h, without the part through the
// product of the next step.
template <class Scalar, class T = Accumulator<Scalar>>
struct LoadedColumn {
  T grad_h;  // as written by the next step
  Scalar grad_output;
  uint8_t clipped;  // whether the column of W_hr m was clipped
};
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ LoadedColumn<Scalar> load_column(
    const Lstm& p, const Step& at, int64_t column) {
  LoadedColumn<Scalar> result{};
  result.grad_h = static_cast<const T*>(p.grad_h)[at.state_offset(p, p.R) + column];
  result.grad_output = static_cast<const Scalar*>(p.grad_output)[at.token_offset(p, p.R) + column];
  if (p.clips(p.proj_clip))
    result.clipped = reinterpret_cast<const uint8_t&>(clipped_projection(p, at, column));
  return result;
}

// Returns the gradient of h̃. Leaves in grad_h the part that bypasses h̃, to the previous h.
// `dh_recurrent` is the gradient through the next step's product.
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ T hidden_backward(
    const Lstm& p, const Step& at, int64_t column, const LoadedColumn<Scalar>& x, T dh_recurrent) {
  const int64_t index = at.state_offset(p, p.R) + column;
  if (p.dropout) dh_recurrent *= static_cast<const T*>(p.dropout)[index];
  const T total = x.grad_h + dh_recurrent + widen(x.grad_output);
  const T weight = weight_of_new<State::H, T>(p, at, column);
  static_cast<T*>(p.grad_h)[index] = weight == 1 ? T(0) : (1 - weight) * total;
  return weight == 0 ? T(0) : weight * total;
}

// A unit's values that the backward loads.
template <class Scalar, class T = Accumulator<Scalar>>
struct LoadedUnit {
  Packed<Scalar> gates;  // if they were saved
  T c_prev, c;           // c_{t-1} and c_t
  T grad_c;              // of c_t, from the next step
  uint8_t clipped;       // whether c̃ was clipped
};
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ LoadedUnit<Scalar> load_unit(
    const Lstm& p, const Step& at, int64_t unit) {
  const int64_t state = at.state_offset(p, p.H) + unit, saved = at.saved_offset(p, p.H) + unit;
  const T* cells = static_cast<const T*>(p.cells);
  LoadedUnit<Scalar> result{};
  if (p.gates) result.gates = load_saved<Scalar>(p, saved);
  result.c_prev =
      at.has_prev ? cells[at.saved_offset_prev(p, p.H) + unit] : static_cast<const T*>(p.c0)[state];
  result.c = cells[saved];
  result.grad_c = static_cast<const T*>(p.grad_c)[state];
  if (p.clips(p.cell_clip))
    result.clipped = reinterpret_cast<const uint8_t&>(clipped_cell(p, at, unit));
  return result;
}

// A unit's values for the backward, restored from the forward's saved results.
template <class T>
struct RestoredUnit {
  Gates<T> gates;
  T c_prev, c_new;  // c_{t-1} and c̃
  T grad_c;         // of c_t, from the next step
  bool clipped;     // whether c̃ was clipped
};

// `a`: the preactivations, which include the bias; read only if gates were not saved.
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ RestoredUnit<T> restore_unit(
    const Lstm& p, const Step& at, int64_t unit, const LoadedUnit<Scalar>& x, const Gates<T>& a) {
  RestoredUnit<T> result;
  T u;
  if (p.gates) {
    result.gates = x.gates.widened();
    if (p.coupled) result.gates.f = 1 - result.gates.i;
    u = result.gates.f * x.c_prev + result.gates.i * result.gates.g;
  } else {
    const ComputedCell<T> computed = cell(p, at.d, unit, a, x.c_prev);
    result.gates = computed.gates;
    u = computed.u;
  }
  result.c_prev = x.c_prev;
  // Without zoneout c̃ is c_t, which was saved unrounded.
  result.c_new = p.zoneout_c > 0 ? clip(u, p.cell_clip) : x.c;
  result.grad_c = x.grad_c;
  result.clipped = x.clipped;
  return result;
}

// With a projection, writes m for the gradient of W_hr. `y` is the tanh in m.
template <class Scalar, class T = Accumulator<Scalar>>
__device__ __forceinline__ void store_hidden(
    const Lstm& p, const Step& at, int64_t unit, const RestoredUnit<T>& x, T y) {
  if (p.m)
    static_cast<Scalar*>(p.m)[at.saved_offset(p, p.H) + unit] = narrow<Scalar>(x.gates.o * y);
}

// Adds to the gradient of vector `vector` (a VectorGradient), in the part of a row and a run of
// steps.
template <class T>
__device__ __forceinline__ void add_vector_grad(
    const Lstm& p, const Step& at, int vector, int64_t unit, T value) {
  if (!p.vector_grads) return;
  const int64_t run = at.d * p.vector_grad_runs() + at.t / Lstm::kVectorGradRun;
  const int64_t index = (run * p.B + at.row) * p.vector_grad_count() + vector;
  static_cast<T*>(p.vector_grads)[index * p.H + unit] += value;
}

// Returns the gradients of the preactivations, from the gradient of m (`dm`) and the part of c̃'s
// gradient that comes through m (`du`). Leaves the gradient of the previous c in grad_c. `y` is the
// tanh in m.
template <class T>
__device__ __forceinline__ Gates<T> cell_backward(
    const Lstm& p, const Step& at, int64_t unit, const RestoredUnit<T>& x, T y, T dm, T du) {
  const auto& [i, f, g, o] = x.gates;
  const T* peephole = p.peephole ? chain_vector<T>(p.peephole, at.d, 3 * p.H) + unit : nullptr;
  const T weight = weight_of_new<State::C, T>(p, at, unit);
  Gates<T> da;
  da.o = dm * y * o * (1 - o);
  if (weight != 0) du += weight * x.grad_c;
  if (peephole) du += da.o * peephole[2 * p.H];
  if (x.clipped) du = 0;
  da.g = du * i * (1 - g * g);
  da.i = du * (p.coupled ? g - x.c_prev : g) * i * (1 - i);
  da.f = p.coupled ? T(0) : du * x.c_prev * f * (1 - f);
  T dc = du * f;
  if (weight != 1) dc += (1 - weight) * x.grad_c;
  if (peephole) {
    dc += da.i * peephole[0] + da.f * peephole[p.H];
    add_vector_grad(p, at, Lstm::kGradPeephole, unit, da.i * x.c_prev);
    add_vector_grad(p, at, Lstm::kGradPeephole + 1, unit, da.f * x.c_prev);
    add_vector_grad(p, at, Lstm::kGradPeephole + 2, unit, da.o * x.c_new);
  }
  static_cast<T*>(p.grad_c)[at.state_offset(p, p.H) + unit] = dc;
  return da;
}

}  // namespace trifuse::cuda
