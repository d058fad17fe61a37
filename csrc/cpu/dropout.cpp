// torch.ops.trifuse.dropout.cpp: tensors in, tensors out.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"

namespace trifuse {
namespace {

Tensor dropout(const Tensor& x, const Tensor& seed, double dropout_p) {
  check_memory("x", x);
  check_seed(seed, x);
  const Tensor source = x.contiguous();
  Tensor out = empty(x.sizes(), x.options());
  DropoutProblem p{};
  p.dtype = kernel_type(x.scalar_type());
  p.count = x.numel();
  p.x = source.const_data_ptr();
  p.out = out.data_ptr();
  p.dropout = kernel_dropout(dropout_p, seed);
  const auto run = kernels().dropout.run;
  parallel_tasks(
      (p.count + kDropoutBlock - 1) / kDropoutBlock, 1, 20.0 * static_cast<double>(p.count),
      [&](int64_t block) { run(p, block); });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) { m.impl("dropout.cpp", dropout); }

}  // namespace trifuse
