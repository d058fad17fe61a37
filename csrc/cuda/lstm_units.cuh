// The units of each cell: the loads and stores of a thread for one unit of one row at one step, and
// the arithmetic. The kernels of whole sequences use these units for all cells. Those of single
// steps use them only for the GRU and the RNN, because an LSTM's step may need sums over a row.
//
// Loads are separate from the arithmetic, and do not convert values, so that a thread waits for a
// load only where it needs the value. A unit has
//
//   kGates                                   G: products with W_hh per unit
//   kProjects                                whether a projection may follow
//   load, load_backward(p, at, unit)         load what the forward, or the backward, needs
//   forward(p, at, unit, loaded, v)          returns h_t, or m, from v = W_hh h, and saves the
//                                            gates
//   gradient(p, at, column, loaded, dh)      returns the gradient of h_t; `dh` is its part through
//                                            the next step's product
//   backward(p, at, unit, loaded, grad, da)  writes the gradients of W_ih x and of W_hh h, the
//                                            latter also to `da`, (H, G), and leaves in grad_h the
//                                            part of the gradient that bypasses the product
//   prefetch(p, at, unit)                    fetches what the backward loads into the L2 cache

#pragma once

#include "cuda/lstm_cell.cuh"
#include "cuda/ptx.cuh"

namespace trifuse::cuda {

// Numbers of a unit that lie side by side; four of them are aligned for accesses of up to 16 bytes.
template <class Scalar, int count>
struct alignas(count == 4 ? alignof(Four<Scalar>) : alignof(Scalar)) Numbers {
  Scalar of[count];

  // Load and store those of unit `unit`, counted over the whole tensor.
  static __device__ __forceinline__ Numbers load(const void* tensor, int64_t unit) {
    return static_cast<const Numbers*>(tensor)[unit];
  }
  __device__ __forceinline__ void store(void* tensor, int64_t unit) const {
    static_cast<Numbers*>(tensor)[unit] = *this;
  }

  __device__ __forceinline__ Numbers<Accumulator<Scalar>, count> widened() const {
    Numbers<Accumulator<Scalar>, count> result;
#pragma unroll
    for (int i = 0; i < count; ++i) result.of[i] = widen(of[i]);
    return result;
  }
};

// Stores numbers of unit `unit`, rounded to Scalar.
template <class Scalar, class T, int count>
__device__ __forceinline__ void store_rounded(
    void* tensor, int64_t unit, const Numbers<T, count>& x) {
  Numbers<Scalar, count> result;
#pragma unroll
  for (int i = 0; i < count; ++i) result.of[i] = narrow<Scalar>(x.of[i]);
  result.store(tensor, unit);
}

// The LSTM ---------------------------------------------------------------------------------------

// A unit of an LSTM without layer norm, or a column of its h.
template <class Scalar_>
struct LstmUnit {
  using Scalar = Scalar_;
  using T = Accumulator<Scalar>;
  static constexpr int kGates = 4;
  static constexpr bool kProjects = true;

  struct Loaded {
    Packed<Scalar> x;  // W_ih x
    Packed<T> bias;
    T c;
  };
  static __device__ __forceinline__ Loaded load(const Lstm& p, const Step& at, int64_t unit) {
    Loaded loaded{};
    loaded.x = Packed<Scalar>::load(p.from_input, at.token_offset(p, p.H) + unit);
    if (p.bias) loaded.bias = Packed<T>::load(p.bias, at.d * p.H + unit);
    loaded.c = static_cast<const T*>(p.c)[at.state_offset(p, p.H) + unit];
    return loaded;
  }

  // Returns m, and replaces c.
  static __device__ __forceinline__ T
  forward(const Lstm& p, const Step& at, int64_t unit, const Loaded& loaded, const Gates<T>& v) {
    const Gates<T> a = v + loaded.x.widened() + loaded.bias.widened();
    const ComputedCell<T> computed = cell(p, at.d, unit, a, loaded.c);
    const T c_new = clip_cell(p, at, unit, computed.u);
    const T m_new = computed.gates.o * tanh(c_new);
    const T c = zoneout<State::C>(p, at, unit, c_new, &loaded.c);
    static_cast<T*>(p.c)[at.state_offset(p, p.H) + unit] = c;
    if (p.gates) store_saved<Scalar>(p, at.saved_offset(p, p.H) + unit, computed.gates);
    if (p.cells) static_cast<T*>(p.cells)[at.saved_offset(p, p.H) + unit] = c;
    return m_new;
  }

  struct LoadedCell {
    LoadedUnit<Scalar> unit;
    Packed<Scalar> a;  // preactivations without the bias, if gates were not saved
  };
  static __device__ __forceinline__ LoadedCell
  load_cell(const Lstm& p, const Step& at, int64_t unit) {
    LoadedCell loaded{load_unit<Scalar>(p, at, unit), {}};
    if (!p.gates) loaded.a = Packed<Scalar>::load(p.from_input, at.token_offset(p, p.H) + unit);
    return loaded;
  }

  struct LoadedBackward {
    LoadedColumn<Scalar> column;
    LoadedCell cell;  // if there is no projection
  };
  static __device__ __forceinline__ LoadedBackward
  load_backward(const Lstm& p, const Step& at, int64_t column) {
    return {
        load_column<Scalar>(p, at, column), p.projected ? LoadedCell{} : load_cell(p, at, column)};
  }
  static __device__ __forceinline__ T
  gradient(const Lstm& p, const Step& at, int64_t column, const LoadedBackward& loaded, T dh) {
    return hidden_backward(p, at, column, loaded.column, dh);
  }
  static __device__ __forceinline__ void backward(
      const Lstm& p, const Step& at, int64_t unit, const LoadedBackward& loaded, T grad,
      Scalar* da) {
    backward_cell(p, at, unit, loaded.cell, grad, da);
  }
  // The same from the gradient of m.
  static __device__ __forceinline__ void backward_cell(
      const Lstm& p, const Step& at, int64_t unit, const LoadedCell& loaded, T dm, Scalar* da) {
    Gates<T> a = loaded.a.widened();
    if (!p.gates && p.bias) a = a + load_gates<T>(p.bias, at.d * p.H + unit);
    const RestoredUnit<T> x = restore_unit<Scalar>(p, at, unit, loaded.unit, a);
    const T y = tanh(x.c_new);
    store_hidden<Scalar>(p, at, unit, x, y);
    const Gates<T> grad = cell_backward(p, at, unit, x, y, dm, dm * x.gates.o * (1 - y * y));
    store_gates<Scalar>(p.from_input, at.token_offset(p, p.H) + unit, grad);
    store_gates<Scalar>(da, unit, grad);
  }

  static __device__ __forceinline__ void prefetch(const Lstm& p, const Step& at, int64_t unit) {
    const int64_t saved = at.saved_offset(p, p.H) + unit;
    cuda::prefetch(static_cast<const T*>(p.cells) + saved);
    if (p.clips(p.cell_clip)) cuda::prefetch(&clipped_cell(p, at, unit));
    if (p.gates) cuda::prefetch(static_cast<const Scalar*>(p.gates) + saved * (p.coupled ? 3 : 4));
    else
      cuda::prefetch(
          static_cast<const Four<Scalar>*>(p.from_input) + at.token_offset(p, p.H) + unit);
  }
};

// The GRU and the RNN -----------------------------------------------------------------------------

// The gradient of h that reaches a unit at a step, without the part through the product of the next
// step.
template <class Scalar, class T = Accumulator<Scalar>>
struct LoadedGradient {
  T grad_h;  // as the next step left it
  Scalar grad_output;

  static __device__ __forceinline__ LoadedGradient
  load(const Lstm& p, const Step& at, int64_t unit) {
    return {
        static_cast<const T*>(p.grad_h)[at.state_offset(p, p.H) + unit],
        static_cast<const Scalar*>(p.grad_output)[at.token_offset(p, p.H) + unit]};
  }
  // Returns the gradient of h_t; `dh` is its part through the next step's product.
  __device__ __forceinline__ T total(T dh) const { return grad_h + dh + widen(grad_output); }
};

// A unit of a GRU. Its gates are r, z, n; k is W_hh h + b_hh of n.
template <class Scalar_>
struct GruUnit {
  using Scalar = Scalar_;
  using T = Accumulator<Scalar>;
  static constexpr int kGates = 3;
  static constexpr bool kProjects = false;

  struct Loaded {
    Numbers<Scalar, 3> x;  // W_ih x
    Numbers<T, 4> bias;
    Scalar h;  // before the step
  };
  static __device__ __forceinline__ Loaded load(const Lstm& p, const Step& at, int64_t unit) {
    Loaded loaded{};
    loaded.x = Numbers<Scalar, 3>::load(p.from_input, at.token_offset(p, p.H) + unit);
    if (p.bias) loaded.bias = Numbers<T, 4>::load(p.bias, at.d * p.H + unit);
    loaded.h = static_cast<const Scalar*>(p.h)[at.state_offset(p, p.H) + unit];
    return loaded;
  }

  static __device__ __forceinline__ T forward(
      const Lstm& p, const Step& at, int64_t unit, const Loaded& loaded, const Numbers<T, 3>& v) {
    const Numbers<T, 3> x = loaded.x.widened();
    const T(&bias)[4] = loaded.bias.of;
    const T r = sigmoid(x.of[0] + v.of[0] + bias[0]);
    const T z = sigmoid(x.of[1] + v.of[1] + bias[1]);
    const T k = v.of[2] + bias[3];
    const T n = tanh(x.of[2] + bias[2] + r * k);
    if (p.gates)
      store_rounded<Scalar>(p.gates, at.saved_offset(p, p.H) + unit, Numbers<T, 4>{{r, z, n, k}});
    return (1 - z) * n + z * widen(loaded.h);
  }

  struct LoadedBackward {
    LoadedGradient<Scalar> gradient;
    Numbers<Scalar, 4> gates;
    Scalar h;  // before the step
  };
  static __device__ __forceinline__ LoadedBackward
  load_backward(const Lstm& p, const Step& at, int64_t unit) {
    const int64_t saved = at.saved_offset(p, p.H) + unit;
    return {
        LoadedGradient<Scalar>::load(p, at, unit), Numbers<Scalar, 4>::load(p.gates, saved),
        static_cast<const Scalar*>(p.h_before)[saved]};
  }

  static __device__ __forceinline__ T
  gradient(const Lstm&, const Step&, int64_t, const LoadedBackward& loaded, T dh) {
    return loaded.gradient.total(dh);
  }
  static __device__ __forceinline__ void backward(
      const Lstm& p, const Step& at, int64_t unit, const LoadedBackward& loaded, T grad,
      Scalar* da) {
    const auto [r, z, n, k] = loaded.gates.widened().of;
    const T dn = grad * (1 - z) * (1 - n * n);
    const T dz = grad * (widen(loaded.h) - n) * z * (1 - z);
    const T dr = dn * k * r * (1 - r);
    const Numbers<T, 3> hidden{{dr, dz, dn * r}};
    const int64_t token = at.token_offset(p, p.H) + unit;
    store_rounded<Scalar>(p.from_input, token, Numbers<T, 3>{{dr, dz, dn}});
    store_rounded<Scalar>(p.from_hidden, token, hidden);
    store_rounded<Scalar>(da, unit, hidden);
    static_cast<T*>(p.grad_h)[at.state_offset(p, p.H) + unit] = grad * z;
  }

  static __device__ __forceinline__ void prefetch(const Lstm& p, const Step& at, int64_t unit) {
    const int64_t saved = at.saved_offset(p, p.H) + unit;
    cuda::prefetch(static_cast<const Numbers<Scalar, 4>*>(p.gates) + saved);
    cuda::prefetch(static_cast<const Scalar*>(p.h_before) + saved);
  }
};

// A unit of an RNN.
template <class Scalar_>
struct RnnUnit {
  using Scalar = Scalar_;
  using T = Accumulator<Scalar>;
  static constexpr int kGates = 1;
  static constexpr bool kProjects = false;

  struct Loaded {
    Scalar x;  // W_ih x
    T bias;
  };
  static __device__ __forceinline__ Loaded load(const Lstm& p, const Step& at, int64_t unit) {
    Loaded loaded{};
    loaded.x = static_cast<const Scalar*>(p.from_input)[at.token_offset(p, p.H) + unit];
    if (p.bias) loaded.bias = chain_vector<T>(p.bias, at.d, p.H)[unit];
    return loaded;
  }

  // A NaN passes relu.
  static __device__ __forceinline__ T
  forward(const Lstm& p, const Step&, int64_t, const Loaded& loaded, const Numbers<T, 1>& v) {
    const T a = widen(loaded.x) + v.of[0] + loaded.bias;
    return p.relu ? (a <= 0 ? T(0) : a) : tanh(a);
  }

  struct LoadedBackward {
    LoadedGradient<Scalar> gradient;
    Scalar y;  // h_t
  };
  static __device__ __forceinline__ LoadedBackward
  load_backward(const Lstm& p, const Step& at, int64_t unit) {
    const auto* output = static_cast<const Scalar*>(p.output);
    return {LoadedGradient<Scalar>::load(p, at, unit), output[at.token_offset(p, p.H) + unit]};
  }

  static __device__ __forceinline__ T
  gradient(const Lstm&, const Step&, int64_t, const LoadedBackward& loaded, T dh) {
    return loaded.gradient.total(dh);
  }
  // Both products have the same gradient, and nothing bypasses them.
  static __device__ __forceinline__ void backward(
      const Lstm& p, const Step& at, int64_t unit, const LoadedBackward& loaded, T grad,
      Scalar* da) {
    const T y = widen(loaded.y);
    const Scalar rounded = narrow<Scalar>(p.relu ? (y <= 0 ? T(0) : grad) : grad * (1 - y * y));
    static_cast<Scalar*>(p.from_input)[at.token_offset(p, p.H) + unit] = rounded;
    da[unit] = rounded;
    static_cast<T*>(p.grad_h)[at.state_offset(p, p.H) + unit] = 0;
  }

  static __device__ __forceinline__ void prefetch(const Lstm& p, const Step& at, int64_t unit) {
    cuda::prefetch(static_cast<const Scalar*>(p.output) + at.token_offset(p, p.H) + unit);
  }
};

}  // namespace trifuse::cuda
