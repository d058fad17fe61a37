// From the tensors of an attention call to what kernels are told of it.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "attention.h"
#include "cpu/arguments.h"

namespace trifuse {

inline Tensor4 strided(const Tensor& t) {
  Tensor4 result{t.data_ptr(), {}};
  for (int64_t d = 0; d < t.dim(); ++d) result.stride[d] = t.stride(d);
  return result;
}

// Strides that repeat the one element of a dimension of size 1.
inline Tensor4 broadcast(const Tensor& t) {
  Tensor4 result = strided(t);
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) == 1) result.stride[d] = 0;
  return result;
}

// Sizes, mask, scale and window, as they are where sequences are not packed.
inline void describe(
    AttentionProblem& p, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& attn_mask, std::optional<double> scale, int64_t window_left,
    int64_t window_right, bool lower_right) {
  p.dtype = kernel_type(query.scalar_type());
  p.batch = query.size(0);
  p.heads = query.size(1);
  p.kv_heads = key.size(1);
  p.Lq = query.size(2);
  p.Lk = key.size(2);
  p.E = query.size(3);
  p.Ev = value.size(3);
  p.scale = scale.value_or(1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(p.E, 1))));
  // A window beyond the farthest pair is no tighter than one as far. Positions can be added to that one.
  p.window_left = std::min(window_left, p.Lq + p.Lk);
  p.window_right = std::min(window_right, p.Lq + p.Lk);
  p.lower_right = lower_right;
  if (attn_mask) {
    p.mask = broadcast(*attn_mask);
    p.mask_kind = attn_mask->scalar_type() == at::kBool ? MaskKind::Bool
        : attn_mask->scalar_type() == at::kFloat        ? MaskKind::Float32
                                                        : MaskKind::QueryType;
  }
}

}  // namespace trifuse
