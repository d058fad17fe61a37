// The floating-point types that tensors come in.

#pragma once

namespace trifuse {

enum class DType { Float32, BFloat16, Float16, Float64 };

}  // namespace trifuse
