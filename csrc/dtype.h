// The floating-point types of tensors.

#pragma once

#include <cstdint>

namespace trifuse {

enum class DType { Float32, BFloat16, Float16, Float64 };

constexpr int64_t element_size(DType dtype) {
  return dtype == DType::Float64 ? 8 : dtype == DType::Float32 ? 4 : 2;
}

}  // namespace trifuse
