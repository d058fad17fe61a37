// Activations by themselves on a CPU, and their gradients: those of a training step, whose products
// return the input of the activation too.
//
// A task owns rows_per_task rows. It reads each input and writes each result once.
//
// Floor: the bytes of inputs and results at the machine's copy rate.

#include "cpu/activation_vector.h"
#include "cpu/kernels.h"
#include "cpu/row.h"

namespace trifuse::CPU_CAPABILITY {
namespace {

// These functions compute an activation's value, and its value with its derivative.
template <Activation activation>
struct Function {
  template <class Vec>
  TRIFUSE_INLINE static Vec value(Vec x) {
    if constexpr (activation == Activation::Gelu) return gelu_exact(x);
    else if constexpr (activation == Activation::GeluTanh) return gelu_tanh(x);
    else if constexpr (activation == Activation::QuickGelu) return quick_gelu(x);
    else if constexpr (activation == Activation::Silu) return silu(x);
  }

  template <class T>
  TRIFUSE_INLINE static Slope<T> slope(Vectorized<T> x) {
    if constexpr (activation == Activation::Gelu) return gelu_exact_slope(x);
    else if constexpr (activation == Activation::GeluTanh) return gelu_tanh_slope(x);
    else if constexpr (activation == Activation::QuickGelu) return quick_gelu_slope(x);
    else if constexpr (activation == Activation::Silu) return silu_slope(x);
  }
};

template <class Scalar, Activation activation>
void forward_rows(const ActivationProblem& p, int64_t first, int64_t last) {
  using S = Strip<std::conditional_t<std::is_same_v<Scalar, double>, double, float>>;
  for (int64_t m = first; m < last; ++m) {
    const Scalar* x = static_cast<const Scalar*>(p.x) + m * p.x_row;
    const Scalar* up = static_cast<const Scalar*>(p.up) + m * p.up_row;
    Scalar* out = static_cast<Scalar*>(p.out) + m * p.out_row;
    for_strips(p.N, [&](int64_t c, auto count) TRIFUSE_INLINE {
      S s = S::load(x + c, count);
      for (int i = 0; i < S::kVecs; ++i) s.v[i] = Function<activation>::value(s.v[i]);
      if (p.up) s = s * S::load(up + c, count);
      s.store(out + c, count, p.stream);
    });
  }
  if (p.stream) fence_streams();
}

template <class Scalar, Activation activation>
void backward_rows(const ActivationProblem& p, int64_t first, int64_t last) {
  using S = Strip<std::conditional_t<std::is_same_v<Scalar, double>, double, float>>;
  for (int64_t m = first; m < last; ++m) {
    const Scalar* x = static_cast<const Scalar*>(p.x) + m * p.x_row;
    const Scalar* up = static_cast<const Scalar*>(p.up) + m * p.up_row;
    const Scalar* grad = static_cast<const Scalar*>(p.grad) + m * p.grad_row;
    Scalar* out = static_cast<Scalar*>(p.out) + m * p.out_row;
    Scalar* grad_up = static_cast<Scalar*>(p.grad_up) + m * p.grad_up_row;
    for_strips(p.N, [&](int64_t c, auto count) TRIFUSE_INLINE {
      S value = S::load(x + c, count), derivative;
      for (int i = 0; i < S::kVecs; ++i) {
        const auto at = Function<activation>::slope(value.v[i]);
        value.v[i] = at.value;
        derivative.v[i] = at.derivative;
      }
      S g = S::load(grad + c, count);
      if (p.up) {
        (g * value).store(grad_up + c, count, p.stream);
        g = g * S::load(up + c, count);
      }
      (g * derivative).store(out + c, count, p.stream);
    });
  }
  if (p.stream) fence_streams();
}

// Calls f with the types of a problem's elements and of its activation, and a task's rows.
template <class F>
void run_task(const ActivationProblem& p, int64_t task, const F& f) {
  const int64_t first = task * p.rows_per_task, last = std::min(p.M, first + p.rows_per_task);
  const auto with_type = [&](auto scalar) {
    const auto with = [&]<Activation activation>() {
      f(scalar, std::integral_constant<Activation, activation>(), first, last);
    };
    switch (p.activation) {
      case Activation::Gelu: return with.template operator()<Activation::Gelu>();
      case Activation::GeluTanh: return with.template operator()<Activation::GeluTanh>();
      case Activation::QuickGelu: return with.template operator()<Activation::QuickGelu>();
      case Activation::Silu: return with.template operator()<Activation::Silu>();
      case Activation::None:
      case Activation::Relu: return;  // the callers pass neither
    }
  };
  switch (p.dtype) {
    case DType::Float32: return with_type(float());
    case DType::BFloat16: return with_type(c10::BFloat16());
    case DType::Float16: return with_type(c10::Half());
    case DType::Float64: return with_type(double());
  }
}

void forward(const ActivationProblem& p, int64_t task) {
  run_task(p, task, [&](auto scalar, auto activation, int64_t first, int64_t last) {
    forward_rows<decltype(scalar), activation.value>(p, first, last);
  });
}

void backward(const ActivationProblem& p, int64_t task) {
  run_task(p, task, [&](auto scalar, auto activation, int64_t first, int64_t last) {
    backward_rows<decltype(scalar), activation.value>(p, first, last);
  });
}

}  // namespace

ActivationKernel activation() { return {forward, backward}; }

}  // namespace trifuse::CPU_CAPABILITY
