// torch.ops.trifuse.rotate: tensors in, tensors out.

#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"

namespace trifuse {
namespace {

constexpr int64_t kDims = RotaryProblem::kDims;

void check_rotation(
    const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t unsqueeze_dim, bool per_pair) {
  const at::ScalarType dtype = x.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kDouble,
      "x: expected float32, bfloat16 or float64; got ", dtype);
  TORCH_CHECK_VALUE(
      x.dim() >= 1 && x.dim() <= kDims + 1, "x: expected 1 to ", kDims + 1,
      " dimensions; got shape ", x.sizes());
  check_memory("x", x);
  for (const auto& [name, t] : {std::pair("cos", cos), std::pair("sin", sin)}) {
    check_memory(name, t);
    const bool wide = dtype == at::kBFloat16 && t.scalar_type() == at::kFloat;
    check_type(name, t, wide ? at::kFloat : dtype, x);
    TORCH_CHECK_TYPE(t.scalar_type() == cos.scalar_type(), "sin: expected the type of cos");
    const int64_t positions = t.dim() ? t.size(-1) : 0, R = per_pair ? 2 * positions : positions;
    TORCH_CHECK_VALUE(
        R > 0 && R % 2 == 0 && R <= x.size(-1) && positions == cos.size(-1), name,
        ": expected an even number of features, up to the ", x.size(-1),
        " of x, or half as many per pair; got shape ", t.sizes());
    // After the unsqueeze, t has a dimension more.
    const int64_t dims = t.dim() + 1, at = unsqueeze_dim < 0 ? unsqueeze_dim + dims : unsqueeze_dim;
    bool fits = dims <= x.dim() && at >= 0 && at < dims - 1;
    for (int64_t d = 0; fits && d < dims - 1; ++d) {
      const int64_t size = d == at ? 1 : t.size(d < at ? d : d - 1);
      fits = size == 1 || size == x.size(x.dim() - dims + d);
    }
    TORCH_CHECK_VALUE(
        fits, name, ": expected a shape that broadcasts to that of x, ", x.sizes(),
        ", after unsqueeze(", unsqueeze_dim, "); got ", t.sizes());
  }
}

// Returns uninitialised memory in x's order, as the results of torch's elementwise operations have
// it, but with contiguous features.
Tensor empty_in_order_of(const Tensor& x) {
  const Tensor flat = empty({x.numel()}, x.options());
  const std::vector<int64_t> strides = at::infer_dense_strides(x.sizes(), x.strides());
  if (x.size(-1) > 1 && strides.back() != 1) return flat.view(x.sizes());
  return flat.as_strided(x.sizes(), strides);
}

// Returns the strides of the dimensions before a tensor's features, as three: 0 for absent ones and
// those of size 1.
std::array<int64_t, kDims> leading_strides(const Tensor& t) {
  std::array<int64_t, kDims> strides{};
  const int64_t absent = kDims + 1 - t.dim();
  for (int64_t d = absent; d < kDims; ++d)
    if (t.size(d - absent) != 1) strides[d] = t.stride(d - absent);
  return strides;
}

// Rotates x, with cos and sin broadcast to it after unsqueeze(unsqueeze_dim). In float32 (bfloat16
// x), products are not rounded before they are added.
Tensor rotate(
    const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t unsqueeze_dim, bool in_float32,
    bool interleaved, bool per_pair, bool transposed) {
  check_rotation(x, cos, sin, unsqueeze_dim, per_pair);
  const Tensor source = with_contiguous_last(x),
               cosines = with_contiguous_last(cos).unsqueeze(unsqueeze_dim),
               sines = with_contiguous_last(sin).unsqueeze(unsqueeze_dim),
               out = empty_in_order_of(x);
  RotaryProblem p{};
  p.dtype = kernel_type(x.scalar_type());
  p.wide_positions = cos.scalar_type() != x.scalar_type();
  p.products_rounded = !in_float32;
  p.interleaved = interleaved;
  p.per_pair = per_pair;
  p.transposed = transposed;
  p.E = x.size(-1);
  p.R = per_pair ? 2 * cos.size(-1) : cos.size(-1);
  p.x = source.const_data_ptr();
  p.cos = cosines.const_data_ptr();
  p.sin = sines.const_data_ptr();
  p.out = out.mutable_data_ptr();
  const auto of_out = leading_strides(out), of_x = leading_strides(source),
             of_cos = leading_strides(cosines), of_sin = leading_strides(sines);
  std::array<int64_t, kDims> order{0, 1, 2};  // from the outermost in memory; size 1 comes first
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    const auto rank = [&](int64_t d) { return of_out[d] ? of_out[d] : kMostElements; };
    return rank(a) > rank(b);
  });
  const int64_t absent = kDims + 1 - x.dim();
  for (int64_t i = 0; i < kDims; ++i) {
    const int64_t d = order[i];
    p.size[i] = d < absent ? 1 : x.size(d - absent);
    p.out_stride[i] = of_out[d];
    p.x_stride[i] = of_x[d];
    p.cos_stride[i] = of_cos[d];
    p.sin_stride[i] = of_sin[d];
  }
  const auto run = kernels().rotary.run;
  parallel_tasks(p.tasks(), 1, p.operations(), [&](int64_t task) { run(p, task); });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) { m.impl("rotate", rotate); }

}  // namespace trifuse
