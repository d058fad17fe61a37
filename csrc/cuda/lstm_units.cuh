// Units of the cells without c, the GRU and the RNN: what a thread loads and stores for one unit of
// one row at one step, and its arithmetic.
//
// Loads are separate from the arithmetic, and leave values as stored: a thread waits for a load
// only where it needs the value.

#pragma once

#include "cuda/lstm_cell.cuh"

namespace trifuse::cuda {

// Numbers of a unit that lie side by side; four are aligned for accesses of up to 16 bytes.
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

// The gradient of h that reaches a unit at a step, but for the part through the next step's
// product.
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
  // Returns the gradient of h_t.
  __device__ __forceinline__ T total(T dh_recurrent) const {
    return grad_h + dh_recurrent + widen(grad_output);
  }
};

// A unit of a GRU. Its gates are r, z, n; k is W_hh h + b_hh of n.
template <class Scalar>
struct GruUnit {
  using T = Accumulator<Scalar>;
  static constexpr int kGates = 3;

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

  // Returns h_t from `v`, W_hh h. Saves the gates.
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

  // Writes the gradients of W_ih x and of W_hh h, the latter also to `da`, (H, 3), and leaves in
  // grad_h the part of h's gradient that bypasses the product.
  static __device__ __forceinline__ void backward(
      const Lstm& p, const Step& at, int64_t unit, const LoadedBackward& loaded, T dh_recurrent,
      Scalar* da) {
    const T total = loaded.gradient.total(dh_recurrent);
    const auto [r, z, n, k] = loaded.gates.widened().of;
    const T dn = total * (1 - z) * (1 - n * n);
    const T dz = total * (widen(loaded.h) - n) * z * (1 - z);
    const T dr = dn * k * r * (1 - r);
    const Numbers<T, 3> hidden{{dr, dz, dn * r}};
    const int64_t token = at.token_offset(p, p.H) + unit;
    store_rounded<Scalar>(p.from_input, token, Numbers<T, 3>{{dr, dz, dn}});
    store_rounded<Scalar>(p.from_hidden, token, hidden);
    store_rounded<Scalar>(da, unit, hidden);
    static_cast<T*>(p.grad_h)[at.state_offset(p, p.H) + unit] = total * z;
  }
};

// A unit of an RNN.
template <class Scalar>
struct RnnUnit {
  using T = Accumulator<Scalar>;
  static constexpr int kGates = 1;

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

  // Returns h_t from `v`, W_hh h. A NaN passes relu.
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

  // Writes the gradient of the preactivation, also to `da`, (H,). All of h's gradient goes through
  // the product.
  static __device__ __forceinline__ void backward(
      const Lstm& p, const Step& at, int64_t unit, const LoadedBackward& loaded, T dh_recurrent,
      Scalar* da) {
    const T total = loaded.gradient.total(dh_recurrent), y = widen(loaded.y);
    const T grad = p.relu ? (y <= 0 ? T(0) : total) : total * (1 - y * y);
    const Scalar rounded = narrow<Scalar>(grad);
    static_cast<Scalar*>(p.from_input)[at.token_offset(p, p.H) + unit] = rounded;
    da[unit] = rounded;
    static_cast<T*>(p.grad_h)[at.state_offset(p, p.H) + unit] = 0;
  }
};

// Calls run<Unit>() with the unit of a call's cell, which has no c.
template <class Scalar, class Run>
void with_unit(const Lstm& p, const Run& run) {
  if (p.cell == Cell::Gru) run.template operator()<GruUnit<Scalar>>();
  else run.template operator()<RnnUnit<Scalar>>();
}

}  // namespace trifuse::cuda
