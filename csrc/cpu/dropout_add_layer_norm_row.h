// What the forward and the backward of dropout_add_layer_norm share: the sum of a row.

#pragma once

#include "cpu/philox.h"
#include "cpu/row.h"
#include "cpu/scratch.h"
#include "dropout_add_layer_norm.h"

namespace trifuse::TRIFUSE_CAPABILITY {

template <class Scalar>
using Accumulator = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;

// s = residual + D (x + x_bias) into `sum`, and the total of its strips, lane by lane. `kept` receives
// the words of D, one for each strip. Past N, `sum` is filled with zeros up to a whole strip. With
// `returned`, s goes there too, and is from then on what it is there, rounded.
template <class Scalar, class Sum, class T = Accumulator<Scalar>>
inline Strip<T> sum_row(
    const DropoutAddLayerNormProblem& p, int64_t row, T* sum, uint64_t* kept,
    Sum* returned = nullptr) {
  const Scalar* x = p.x.row<const Scalar>(row);
  const Sum* residual = p.residual ? p.residual.row<const Sum>(row) : nullptr;
  const T* x_bias = static_cast<const T*>(p.x_bias);
  const auto scale = Strip<T>::full(static_cast<T>(p.dropout.scale));
  auto total = Strip<T>::full(0);
  for (int64_t c = 0; c < p.N; c += kStrip) {
    const int64_t n = p.N - c;
    auto s = Strip<T>::load(x + c, n);
    if (x_bias) s = s + Strip<T>::load(x_bias + c, n);
    if (p.dropout.threshold) {
      kept[c / kStrip] = dropout_row(p.dropout.seed, 0, row, c, p.dropout.threshold);
      s = (s * scale).keep(kept[c / kStrip]);
    }
    if (residual) s = s + Strip<T>::load(residual + c, n);
    if (returned) {
      s.store(returned + c, n);
      if constexpr (!std::is_same_v<Sum, T>) s = Strip<T>::load(returned + c, n);
    }
    total = total + s;
    s.store(sum + c);
  }
  return total;
}

// Calls run<Scalar, Sum>() for the types of a problem.
template <class Run>
inline void for_types(const DropoutAddLayerNormProblem& p, const Run& run) {
  const bool wide_sum = p.sum_dtype == DType::Float32;
  switch (p.dtype) {
    case DType::Float32: return run.template operator()<float, float>();
    case DType::Float64: return run.template operator()<double, double>();
    case DType::BFloat16:
      if (wide_sum) return run.template operator()<c10::BFloat16, float>();
      return run.template operator()<c10::BFloat16, c10::BFloat16>();
    case DType::Float16:
      if (wide_sum) return run.template operator()<c10::Half, float>();
      return run.template operator()<c10::Half, c10::Half>();
  }
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
