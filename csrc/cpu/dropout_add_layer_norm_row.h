// Shared by the dropout_add_layer_norm forward and backward: the sum of a row.

#pragma once

#include "cpu/operand.h"
#include "cpu/philox.h"
#include "cpu/row.h"
#include "cpu/scratch.h"
#include "dropout_add_layer_norm.h"

namespace trifuse::TRIFUSE_CAPABILITY {

template <class Scalar>
using Accumulator = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;

// The vectors of a problem in the accumulation type. Where one has the problem's dtype, each task
// converts it for itself: a copy that another thread wrote would have to be moved to this core.
template <class Scalar, class T = Accumulator<Scalar>>
struct Vectors {
  const T *weight, *bias, *x_bias;

  static int64_t bytes(const DropoutAddLayerNormProblem& p) { return 3 * Scratch::bytes<T>(p.N); }

  Vectors(const DropoutAddLayerNormProblem& p, Scratch& scratch)
      : weight(widened(p.weight, p.N, scratch)), bias(widened(p.bias, p.N, scratch)),
        x_bias(widened(p.x_bias, p.N, scratch)) {}

 private:
  static const T* widened(const FeatureVector& v, int64_t N, Scratch& scratch) {
    if (!v || v.wide) return static_cast<const T*>(v.data);
    T* wide = scratch.take<T>(N);
    widen(static_cast<const Scalar*>(v.data), 1, N, wide);
    return wide;
  }
};

// The sum of a row, s = residual + D (x + x_bias): computed, or read if the forward returned it.
template <class Scalar, class Sum, class T = Accumulator<Scalar>>
struct RowSum {
  const Scalar* x;
  const Sum* residual;
  const Sum* sum;  // read if x is null
  const T* x_bias;
  const Dropout* dropout;
  bool drops;         // stays in a register, unlike *dropout: stores might change that
  int64_t drawn_row;  // of Philox's plane

  RowSum(const DropoutAddLayerNormProblem& p, const T* x_bias, int64_t row)
      : x(p.x ? p.x.row<const Scalar>(row) : nullptr),
        residual(p.residual ? p.residual.row<const Sum>(row) : nullptr),
        sum(p.x ? nullptr : p.sum.row<const Sum>(row)), x_bias(x_bias), dropout(&p.dropout),
        drops(p.dropout.threshold != 0), drawn_row(p.dropout.place.unit(row)) {}

  // Returns the word of D for a strip, if there is dropout.
  TRIFUSE_INLINE uint64_t kept(int64_t c) const {
    if (!drops) return 0;
    return dropout_row(dropout->seed, 0, drawn_row, c, dropout->threshold);
  }

  TRIFUSE_INLINE Strip<T> drop(const Strip<T>& strip, uint64_t word) const {
    return (strip * Strip<T>::full(static_cast<T>(dropout->scale))).keep(word);
  }

  // Returns columns [c, c + 64); `word` is kept(c).
  template <class Count>
  TRIFUSE_INLINE Strip<T> strip(int64_t c, Count count, uint64_t word) const {
    if (!x) return Strip<T>::load(sum + c, count);
    auto s = Strip<T>::load(x + c, count);
    if (x_bias) s = s + Strip<T>::load(x_bias + c, count);
    if (drops) s = drop(s, word);
    if (residual) s = s + Strip<T>::load(residual + c, count);
    return s;
  }

  // Prefetches a strip of the next row, because the memory is otherwise idle during the passes over
  // a row.
  TRIFUSE_INLINE void prefetch(int64_t c) const {
    if (x) prefetch_strip(x + c);
    if (residual) prefetch_strip(residual + c);
    if (sum) prefetch_strip(sum + c);
  }
};

// Calls run<Scalar, Sum>() for the types of a problem. Instruction sets with conversions to
// bfloat16 are compiled only for bfloat16 (capability.h).
template <class Run>
inline void for_types(const DropoutAddLayerNormProblem& p, const Run& run) {
  const bool wide_sum = p.sum_dtype == DType::Float32;
#ifdef __AVX512BF16__
  if (wide_sum) run.template operator()<c10::BFloat16, float>();
  else run.template operator()<c10::BFloat16, c10::BFloat16>();
#else
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
#endif
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
