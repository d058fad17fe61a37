// The rows of a tensor as kernels of dropout_add_layer_norm are told of them.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "dropout_add_layer_norm.h"

namespace trifuse {

// Tensors that a problem points into.
using Held = std::vector<at::Tensor>;

// The rows of a tensor where they lie; of a copy, if they are not made of neighbours or lie about in
// more ways than a RowTensor can say.
inline RowTensor rows_of(const at::Tensor& t, Held& held) {
  const int64_t last = t.dim() - 1;
  RowTensor rows;
  if (t.numel() == 0) return rows;  // without a copy: one would have the same strides
  bool fits = t.stride(last) == 1 || t.size(last) <= 1;
  for (int64_t d = 0; d < last && fits; ++d) {
    if (t.size(d) == 1) continue;
    int64_t& inner = rows.stride[std::max(rows.dims - 1, 0)];
    if (rows.dims && inner == t.size(d) * t.stride(d)) {
      rows.size[rows.dims - 1] *= t.size(d);
      inner = t.stride(d);
    } else if (rows.dims < RowTensor::kMaxDims) {
      rows.size[rows.dims] = t.size(d);
      rows.stride[rows.dims++] = t.stride(d);
    } else {
      fits = false;
    }
  }
  if (!fits) return rows_of(t.contiguous(), held);
  held.push_back(t);
  rows.data = t.data_ptr();
  return rows;
}

}  // namespace trifuse
