// The end of a linear layer: bias, activation, gate and rounding, applied to a tile of sums while
// it lies in a cache.

#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "cpu/activation_vector.h"
#include "cpu/linear.h"
#include "cpu/operand.h"
#include "cpu/vector.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// A tile of sums (rows, columns) of one product. The rows of sums hold whole vectors.
template <class T>
struct Sums {
  T* data = nullptr;
  int64_t ld = 0;
  FeatureVector bias;  // of the layer's columns; or null
  int64_t first = 0;   // the column of the layer at which the tile begins

  // The part of the tile from row m and column n on.
  Sums at(int64_t m, int64_t n) const { return {data + m * ld + n, ld, bias, first + n}; }

  // The bias of columns n, n + 1, ... of the tile, which has `columns`.
  template <class Scalar>
  Vectorized<T> bias_of(int64_t n, int64_t columns) const {
    using Vec = Vectorized<T>;
    if (!bias) return Vec(T(0));
    const int64_t count = std::min<int64_t>(columns - n, Vec::size());
    if constexpr (kReduced<Scalar>)
      if (!bias.wide) {
        const auto* data = static_cast<const Scalar*>(bias.data) + first + n;
        return std::get<0>(
            at::vec::convert_to_float<Scalar>(Vectorized<Scalar>::loadu(data, count)));
      }
    return Vec::loadu(static_cast<const T*>(bias.data) + first + n, count);
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
      const Vec b = sums.template bias_of<Scalar>(n, columns);
      if (!up.data) {
        for (int64_t m = 0; m < rows; ++m) {
          T* x = sums.data + m * sums.ld + n;
          f(Vec::loadu(x) + b).store(x);
        }
        continue;
      }
      const Vec c = up.template bias_of<Scalar>(n, columns);
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
    case Activation::QuickGelu:
      each([](Vec x) TRIFUSE_INLINE { return quick_gelu(x); });
      break;
    case Activation::Silu: each([](Vec x) TRIFUSE_INLINE { return silu(x); }); break;
  }
  if constexpr (!std::is_same_v<Scalar, T>)
    for (int64_t m = 0; m < rows; ++m) narrow(sums.data + m * sums.ld, columns, out + m * ld, 1);
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
