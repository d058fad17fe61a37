// The end of a linear layer: bias, activation, gate and rounding, applied to a tile of sums while
// it lies in a cache.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numbers>
#include <type_traits>

#include "cpu/linear.h"
#include "cpu/operand.h"
#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// x Phi(x), Phi the standard normal distribution function, computed as in torch's own GELU.
template <class T>
Vectorized<T> gelu_exact(Vectorized<T> x) {
  using Vec = Vectorized<T>;
  return x * Vec(T(0.5)) * (Vec(T(1)) + (x * Vec(T(1 / std::numbers::sqrt2))).erf());
}

// With z = |x| / sqrt 2, Phi(-|x|) = erfc(z) / 2 = exp(-z^2) t p(t), t = 1 / (1 + 0.3 z): the form
// of Abramowitz and Stegun, 7.1.26. The polynomial is the minimax one of degree 8 for the relative
// error on z <= 10, 2^-25.6 before rounding, so that Phi's lower tail keeps its digits.
template <>
inline Vectorized<float> gelu_exact(Vectorized<float> x) {
  using Vec = Vectorized<float>;
  const Vec one(1.0f);
  const Vec t = one / at::vec::fmadd(x.abs(), Vec(0.3f / std::numbers::sqrt2_v<float>), one);
  Vec p(-6.476136405e-2f);
  p = at::vec::fmadd(p, t, Vec(2.427812761e-1f));
  p = at::vec::fmadd(p, t, Vec(-2.561383719e-1f));
  p = at::vec::fmadd(p, t, Vec(2.738592539e-1f));
  p = at::vec::fmadd(p, t, Vec(-4.732478449e-2f));
  p = at::vec::fmadd(p, t, Vec(1.074628109e-1f));
  p = at::vec::fmadd(p, t, Vec(7.416963960e-2f));
  p = at::vec::fmadd(p, t, Vec(8.535760585e-2f));
  p = at::vec::fmadd(p, t, Vec(8.459400305e-2f));
  const Vec power = exp2(x * x * Vec(-0.5f * std::numbers::log2e_v<float>));
  const Vec tail = p * t * power;
  return x * Vec::blendv(tail, one - tail, x >= Vec(0.0f));
}

// x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class T>
Vectorized<T> gelu_tanh(Vectorized<T> x) {
  using Vec = Vectorized<T>;
  constexpr double factor =
      -2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi * std::numbers::log2e;
  const Vec cubic = at::vec::fmadd(x * x * x, Vec(T(0.044715)), x);
  return x / (Vec(T(1)) + exp2(cubic * Vec(T(factor))));
}

// x / (1 + exp(-x)).
template <class T>
Vectorized<T> silu(Vectorized<T> x) {
  using Vec = Vectorized<T>;
  return x / (Vec(T(1)) + exp2(x * Vec(T(-std::numbers::log2e))));
}

// A tile of sums (rows, columns) of one product, and the bias of its columns, or null. The rows of
// sums hold whole vectors.
template <class T>
struct Sums {
  T* data = nullptr;
  int64_t ld = 0;
  const T* bias = nullptr;

  // The part of the tile from row m and column n on.
  Sums at(int64_t m, int64_t n) const { return {data + m * ld + n, ld, bias ? bias + n : nullptr}; }

  Vectorized<T> bias_of(int64_t n, int64_t columns) const {
    using Vec = Vectorized<T>;
    if (!bias) return Vec(T(0));
    return Vec::loadu(bias + n, std::min<int64_t>(columns - n, Vec::size()));
  }
};

// The epilogue: applies bias, activation and the product with `up`, if it has data, to a tile of
// sums, which may be the result itself. A result of another type is rounded to `out`, whose rows
// are `ld` apart.
template <class Scalar, class T>
void apply_epilogue(
    const LinearProblem& p, Sums<T> sums, Sums<T> up, int64_t rows, int64_t columns, Scalar* out,
    int64_t ld) {
  using Vec = Vectorized<T>;
  const auto each = [&](auto f) TRIFUSE_INLINE {
    for (int64_t n = 0; n < columns; n += Vec::size()) {
      const Vec b = sums.bias_of(n, columns);
      if (!up.data) {
        for (int64_t m = 0; m < rows; ++m) {
          T* x = sums.data + m * sums.ld + n;
          f(Vec::loadu(x) + b).store(x);
        }
        continue;
      }
      const Vec c = up.bias_of(n, columns);
      for (int64_t m = 0; m < rows; ++m) {
        T* x = sums.data + m * sums.ld + n;
        (f(Vec::loadu(x) + b) * (Vec::loadu(up.data + m * up.ld + n) + c)).store(x);
      }
    }
  };
  switch (p.activation) {
    case Activation::None:
      if (sums.bias || up.data) each([](Vec x) TRIFUSE_INLINE { return x; });
      break;
    case Activation::Relu:  // at::vec::maximum keeps a NaN
      each([](Vec x) TRIFUSE_INLINE { return at::vec::maximum(x, Vec(T(0))); });
      break;
    case Activation::Gelu:
      each([](Vec x) TRIFUSE_INLINE { return gelu_exact(x); });
      break;
    case Activation::GeluTanh:
      each([](Vec x) TRIFUSE_INLINE { return gelu_tanh(x); });
      break;
    case Activation::Silu: each([](Vec x) TRIFUSE_INLINE { return silu(x); }); break;
  }
  if constexpr (!std::is_same_v<Scalar, T>)
    for (int64_t m = 0; m < rows; ++m) narrow(sums.data + m * sums.ld, columns, out + m * ld, 1);
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
