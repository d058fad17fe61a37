// torch.ops.trifuse.{linear,linear_packed,pack_linear,unpack_linear,checksum}: tensors in and out.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/run.h"

namespace trifuse {
namespace {

int64_t panels(const LinearKernel& kernel, int64_t N) {
  return (N + kernel.panel - 1) / kernel.panel;
}

int64_t tasks(const LinearProblem& p) {
  return ((p.M + p.rows_per_task - 1) / p.rows_per_task) *
      ((p.N + p.columns_per_task - 1) / p.columns_per_task);
}

}  // namespace

Activation activation_of(std::optional<c10::string_view> name) {
  if (!name) return Activation::None;
  if (*name == "relu") return Activation::Relu;
  if (*name == "gelu") return Activation::Gelu;
  TORCH_CHECK_VALUE(
      *name == "gelu_tanh", "activation: expected relu, gelu or gelu_tanh; got ", *name);
  return Activation::GeluTanh;
}

void check_packed(const LinearProblem& p, const Tensor& packed, at::ScalarType dtype) {
  const LinearKernel kernel = kernels(p.dtype).linear;
  check_memory("packed", packed);
  TORCH_CHECK_VALUE(
      packed.numel() == panels(kernel, p.N) * kernel.panel_bytes(p.dtype, p.K),
      "packed: not a weight of ", p.N, " by ", p.K, " ", dtype, " as ", name(capability()),
      " takes it");
}

void run_linear(LinearProblem* problems, int64_t count) {
  const LinearKernel kernel = kernels(problems->dtype).linear;
  LinearProblem* const end = problems + count;
  int64_t total;
  double operations;
  // A task's rows of x, a whole number of register blocks, stay in the L2 cache while the panels
  // stream through. There are so many tasks that threads do not wait for the last ones.
  for (int64_t columns = 8 * kernel.panel;; columns /= 2) {
    total = 0;
    operations = 0;
    for (LinearProblem* p = problems; p < end; ++p) {
      p->rows_per_task = p->x_row == 1 ? 2 * kernel.panel : 120;
      p->columns_per_task = columns;
      total += tasks(*p);
      operations += 2.0 * static_cast<double>(p->M * p->N) * static_cast<double>(p->K);
    }
    if (columns == kernel.panel || total >= int64_t{8} * at::get_num_threads()) break;
  }
  parallel_tasks(total, 1, operations, [&](int64_t task) {
    const LinearProblem* p = problems;
    for (int64_t of_this; p + 1 < end && task >= (of_this = tasks(*p)); ++p) task -= of_this;
    kernel.run(*p, task);
  });
}

namespace {

// Packs a weight (N, K) into panels. Returns opaque bytes.
Tensor pack_linear(const Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: expected 2 dimensions; got shape ", weight.sizes());
  check_memory("weight", weight);
  LinearProblem p{};
  p.dtype = kernel_type(weight.scalar_type());
  const LinearKernel kernel = kernels(p.dtype).linear;
  p.N = weight.size(0);
  p.K = weight.size(1);
  p.weight = weight.const_data_ptr();
  p.weight_row = weight.stride(0);
  p.weight_column = weight.stride(1);
  const int64_t count = panels(kernel, p.N);
  Tensor packed =
      empty({count * kernel.panel_bytes(p.dtype, p.K)}, weight.options().dtype(at::kByte));
  p.packed = packed.mutable_data_ptr();
  parallel_tasks(
      count, 1, 8.0 * static_cast<double>(p.N) * static_cast<double>(p.K),
      [&](int64_t panel) { kernel.pack(p, panel); });
  return packed;
}

// Returns the weight (N, K) of `dtype` that pack_linear packed.
Tensor unpack_linear(
    const Tensor& packed, int64_t out_features, int64_t in_features, at::ScalarType dtype) {
  LinearProblem p{};
  p.dtype = kernel_type(dtype);
  const LinearKernel kernel = kernels(p.dtype).linear;
  p.N = out_features;
  p.K = in_features;
  check_packed(p, packed, dtype);
  Tensor weight = empty({p.N, p.K}, packed.options().dtype(dtype));
  p.packed = const_cast<void*>(packed.const_data_ptr());
  p.out = weight.mutable_data_ptr();
  parallel_tasks(
      panels(kernel, p.N), 1, 8.0 * static_cast<double>(p.N) * static_cast<double>(p.K),
      [&](int64_t panel) { kernel.unpack(p, panel); });
  return weight;
}

// Returns checksums of a contiguous tensor of whole 32-bit words, one for each 64 KiB.
Tensor checksum(const Tensor& weight) {
  constexpr int64_t kWords = 1 << 14;
  const int64_t words = static_cast<int64_t>(weight.nbytes() / 4),
                count = (words + kWords - 1) / kWords;
  TORCH_CHECK_VALUE(
      weight.is_contiguous() && weight.nbytes() % 4 == 0,
      "weight: expected contiguous rows of a whole number of 32-bit words; got ", weight.sizes(),
      " ", weight.scalar_type());
  check_memory("weight", weight);
  Tensor sums = empty({count}, weight.options().dtype(at::kLong));
  const auto* data = static_cast<const uint32_t*>(weight.const_data_ptr());
  int64_t* sum = sums.mutable_data_ptr<int64_t>();
  const auto checksum = kernels().linear.checksum;
  parallel_tasks(count, 1, 8.0 * static_cast<double>(words), [&](int64_t i) {
    sum[i] =
        static_cast<int64_t>(checksum(data + i * kWords, std::min(kWords, words - i * kWords)));
  });
  return sums;
}

// Returns the linear layer of x (M, K) with `packed`, a packed weight (N, K).
Tensor linear_packed(
    const Tensor& x, const Tensor& packed, int64_t out_features, const OptionalTensor& bias,
    std::optional<c10::string_view> activation) {
  LinearProblem p{};
  p.dtype = kernel_type(x.scalar_type());
  TORCH_CHECK_VALUE(x.dim() == 2, "x: expected 2 dimensions; got shape ", x.sizes());
  check_memory("x", x);
  check_shape("bias", bias, {out_features});
  p.M = x.size(0);
  p.N = out_features;
  p.K = x.size(1);
  check_packed(p, packed, x.scalar_type());
  p.x = x.const_data_ptr();
  p.x_row = x.stride(0);
  p.x_column = x.stride(1);
  p.packed = const_cast<void*>(packed.const_data_ptr());
  const Tensor wide_bias =
      bias ? bias->to(accumulation_type(x.scalar_type())).contiguous() : Tensor();
  if (bias) p.bias = wide_bias.const_data_ptr();
  p.activation = activation_of(activation);
  Tensor out = empty({p.M, p.N}, x.options());
  if (p.M == 0 || p.N == 0) return out;
  p.out = out.mutable_data_ptr();
  run_linear(&p, 1);
  return out;
}

Tensor linear(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
    std::optional<c10::string_view> activation) {
  check_type("weight", weight, x.scalar_type(), x);
  TORCH_CHECK_VALUE(
      x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
      "weight: expected shape (out_features, in_features) for x of shape ", x.sizes(), "; got ",
      weight.sizes(), " (was its data exchanged between forward and backward?)");
  return linear_packed(x, pack_linear(weight), weight.size(0), bias, activation);
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) {
  m.impl("linear", linear);
  m.impl("pack_linear", pack_linear);
  m.impl("unpack_linear", unpack_linear);
  m.impl("linear_packed", linear_packed);
  m.impl("checksum", checksum);
}

}  // namespace trifuse
