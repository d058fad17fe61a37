// Activations of vectors, and their derivatives.

#pragma once

#include <numbers>
#include <type_traits>
#include <utility>

#include "cpu/activation.h"
#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// A function at x and its derivative there.
template <class T>
struct Slope {
  Vectorized<T> value, derivative;
};

// Phi(x), the standard normal distribution function, and exp(-x^2 / 2).
template <class T>
struct Normal {
  Vectorized<T> below, power;
};

template <class T>
Normal<T> normal(Vectorized<T> x) {
  using Vec = Vectorized<T>;
  return {
      Vec(T(0.5)) * (Vec(T(1)) + (x * Vec(T(1 / std::numbers::sqrt2))).erf()),
      exp2(x * x * Vec(T(-0.5 * std::numbers::log2e)))};
}

// With z = |x| / sqrt 2, Phi(-|x|) = erfc(z) / 2 = exp(-z^2) t p(t), t = 1 / (1 + 0.3 z): the form
// of Abramowitz and Stegun, 7.1.26. The polynomial is the minimax one of degree 8 for the relative
// error on z <= 10, 2^-25.6 before rounding, so that Phi's lower tail keeps its digits.
template <>
inline Normal<float> normal(Vectorized<float> x) {
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
  return {Vec::blendv(tail, one - tail, x >= Vec(0.0f)), power};
}

// x Phi(x). In float64 computed as in torch's own GELU.
template <class T>
Vectorized<T> gelu_exact(Vectorized<T> x) {
  using Vec = Vectorized<T>;
  if constexpr (std::is_same_v<T, float>) return x * normal(x).below;
  else return x * Vec(T(0.5)) * (Vec(T(1)) + (x * Vec(T(1 / std::numbers::sqrt2))).erf());
}

// The derivative is Phi(x) + x phi(x), phi the density exp(-x^2 / 2) / sqrt(2 pi).
template <class T>
Slope<T> gelu_exact_slope(Vectorized<T> x) {
  using Vec = Vectorized<T>;
  const Normal<T> at = normal(x);
  const Vec scaled = x * Vec(T(std::numbers::inv_sqrtpi / std::numbers::sqrt2));
  return {x * at.below, at::vec::fmadd(scaled, at.power, at.below)};
}

// x s and its derivative s + x s (1 - s) z', with s = 1 / (1 + exp(-z)) for a function z of x. Near
// s = 1, 1 - s would lose its digits, but exp(-z) s, which equals it, does not.
// `exponent_and_slope` returns -z log2(e), the exponent of exp(-z) as a power of 2, and z'. They
// are computed at a bounded x, and the exponent is bounded too, so that nothing overflows; beyond
// the bounds s is 0 or 1 within rounding.
template <class T, class F>
TRIFUSE_INLINE inline Slope<T> sigmoid_slope(
    Vectorized<T> x, const F& exponent_and_slope) {
  using Vec = Vectorized<T>;
  const Vec above = at::vec::maximum(x, Vec(T(-1000)));
  const Vec bounded = at::vec::minimum(above, Vec(T(1000)));
  const auto [exponent, slope] = exponent_and_slope(bounded);
  const Vec power = exp2(at::vec::minimum(exponent, Vec(T(126))));
  const Vec s = Vec(T(1)) / (Vec(T(1)) + power);
  return {above * s, at::vec::fmadd(bounded * slope, power * s * s, s)};
}

// x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr double kGeluTanh =
    -2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi * std::numbers::log2e;

template <class T>
Vectorized<T> gelu_tanh(Vectorized<T> x) {
  using Vec = Vectorized<T>;
  const Vec cubic = at::vec::fmadd(x * x * x, Vec(T(0.044715)), x);
  return x / (Vec(T(1)) + exp2(cubic * Vec(T(kGeluTanh))));
}

template <class T>
Slope<T> gelu_tanh_slope(Vectorized<T> x) {
  using Vec = Vectorized<T>;
  constexpr double twice = 2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi;  // 2 sqrt(2 / pi)
  return sigmoid_slope(x, [](Vec x) TRIFUSE_INLINE {
    const Vec square = x * x, cubic = at::vec::fmadd(square * x, Vec(T(0.044715)), x);
    const Vec slope = at::vec::fmadd(square, Vec(T(3 * 0.044715 * twice)), Vec(T(twice)));
    return std::pair(cubic * Vec(T(kGeluTanh)), slope);
  });
}

// x / (1 + exp(-steepness x)).
template <class T>
Vectorized<T> swish(Vectorized<T> x, double steepness) {
  using Vec = Vectorized<T>;
  return x / (Vec(T(1)) + exp2(x * Vec(static_cast<T>(-std::numbers::log2e * steepness))));
}

template <class T>
Slope<T> swish_slope(Vectorized<T> x, double steepness) {
  using Vec = Vectorized<T>;
  return sigmoid_slope(x, [=](Vec x) TRIFUSE_INLINE {
    return std::pair(
        x * Vec(static_cast<T>(-std::numbers::log2e * steepness)), Vec(static_cast<T>(steepness)));
  });
}

template <class T>
Vectorized<T> silu(Vectorized<T> x) {
  return swish(x, 1);
}

template <class T>
Slope<T> silu_slope(Vectorized<T> x) {
  return swish_slope(x, 1);
}

template <class T>
Vectorized<T> quick_gelu(Vectorized<T> x) {
  return swish(x, kQuickGelu);
}

template <class T>
Slope<T> quick_gelu_slope(Vectorized<T> x) {
  return swish_slope(x, kQuickGelu);
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
