// Plain calls of rotary embeddings, with and without gradients.

#pragma once

#include "fast_path/ops.h"

namespace trifuse::fast_path {

struct RotaryCall {
  Tensor x, cos, sin;
  int64_t unsqueeze_dim;
  bool in_float32, interleaved, per_pair;

  bool fits() const {
    const at::ScalarType type = x.scalar_type();
    if (type != at::kFloat && type != at::kBFloat16 && type != at::kDouble) return false;
    const bool wide = type == at::kBFloat16 && cos.scalar_type() == at::kFloat;
    return (wide || cos.scalar_type() == type) && sin.scalar_type() == cos.scalar_type();
  }

  // The op checks the shapes, and has its derivative in Python.
  Tensor run() const {
    static const auto op =
        find<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, bool, bool, bool, bool)>(
            "trifuse::rotate", "");
    return op.call(x, cos, sin, unsqueeze_dim, in_float32, interleaved, per_pair, false);
  }
};

}  // namespace trifuse::fast_path
