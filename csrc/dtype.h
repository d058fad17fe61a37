// The floating-point types of tensors.

#pragma once

namespace trifuse {

enum class DType { Float32, BFloat16, Float16, Float64 };

}  // namespace trifuse
