// From what torch's dispatcher hands over to what kernels are told.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "dropout.h"
#include "dtype.h"

namespace trifuse {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalLimit = std::optional<double>;

// Infinity stands for no limit.
inline double limit(OptionalLimit value) {
  return value.value_or(std::numeric_limits<double>::infinity());
}

inline DType kernel_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return DType::Float32;
    case at::kBFloat16: return DType::BFloat16;
    case at::kHalf: return DType::Float16;
    case at::kDouble: return DType::Float64;
    default: TORCH_CHECK_TYPE(false, "no kernel for ", dtype);
  }
}

inline at::ScalarType accumulation_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// All but the seed.
inline Dropout kernel_dropout(double dropout_p) {
  Dropout dropout;
  // Python's round(p · 65536), which rounds halves to even, as nearbyint does.
  dropout.threshold = static_cast<uint32_t>(std::min(std::nearbyint(dropout_p * 65536), 65535.0));
  dropout.scale = dropout_p < 1 ? 65536.0 / (65536.0 - dropout.threshold) : 0.0;
  return dropout;
}

inline Dropout kernel_dropout(double dropout_p, const OptionalTensor& seed) {
  if (!seed) return {};
  Dropout dropout = kernel_dropout(dropout_p);
  if (dropout.threshold) dropout.seed = static_cast<uint64_t>(seed->item<int64_t>());
  return dropout;
}

}  // namespace trifuse
