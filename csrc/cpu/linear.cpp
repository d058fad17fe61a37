// torch.ops.trifuse.{linear,linear_packed,linear_unpacked,pack_linear,pack_linears,unpack_linear,
// checksum}: tensors in and out.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/run.h"
#include "cpu/streaming.h"

namespace trifuse {
namespace {

int64_t panels(const LinearKernel& kernel, int64_t N) {
  return (N + kernel.panel - 1) / kernel.panel;
}

int64_t packed_bytes(const LinearProblem& p, Capability in_use = capability()) {
  const LinearKernel kernel = kernels_of(capability(p.dtype, in_use)).linear;
  return panels(kernel, p.N) * kernel.panel_bytes(p.dtype, p.K);
}

int64_t tasks(const LinearProblem& p) {
  return ((p.M + p.rows_per_task - 1) / p.rows_per_task) *
      ((p.N + p.columns_per_task - 1) / p.columns_per_task);
}

// Returns the rows of a task: about `about`, a multiple of `block`, nearly equal for all tasks. A
// short last task would still read its whole part of the weight.
int64_t even_rows(int64_t M, int64_t about, int64_t block) {
  const int64_t tasks = std::max<int64_t>((M + about / 2) / about, 1);
  return (M + tasks * block - 1) / (tasks * block) * block;
}

// Returns about how many rows a task has that transposes them. There are as many tasks as threads,
// or a multiple: each reads the whole weight, which for a weight's gradient may be larger than a
// cache.
int64_t transposed_rows(int64_t M, int64_t threads) {
  constexpr int64_t about = 192, least = 48;
  const int64_t tasks = threads * std::max<int64_t>(1, M / (about * threads));
  return std::max(least, (M + tasks - 1) / tasks);
}

// Runs `total` tasks, those of the first problem first.
template <class Run>
void run_tasks(
    const LinearProblem* problems, int64_t count, int64_t total, double operations,
    const Run& run) {
  parallel_tasks(total, 1, operations, [&](int64_t task) {
    const LinearProblem *p = problems, *const end = problems + count;
    for (int64_t of_this; p + 1 < end && task >= (of_this = tasks(*p)); ++p) task -= of_this;
    run(*p, task);
  });
}

// Returns the operations of a problem, on which the number of threads depends. With few rows the
// time is that of reading the weight.
double operations_of(const LinearProblem& p) {
  const auto rows = static_cast<double>(std::max<int64_t>(p.M, 8));
  return 2.0 * rows * static_cast<double>((p.gated ? 2 : 1) * p.N) * static_cast<double>(p.K);
}

bool worth_streaming(const LinearProblem& p, int64_t threads) {
  const int64_t row = p.N * element_size(p.dtype);
  return p.activation != Activation::None && is_read_by_all_cores(p.M * row, threads) &&
      fills_lines(row) && reinterpret_cast<uintptr_t>(p.out) % 64 == 0;
}

}  // namespace

Activation activation_of(std::optional<c10::string_view> name) {
  if (!name) return Activation::None;
  if (*name == "relu") return Activation::Relu;
  if (*name == "gelu") return Activation::Gelu;
  if (*name == "gelu_tanh") return Activation::GeluTanh;
  if (*name == "quick_gelu") return Activation::QuickGelu;
  TORCH_CHECK_VALUE(
      *name == "silu", "activation: expected relu, gelu, gelu_tanh, quick_gelu or silu; got ",
      *name);
  return Activation::Silu;
}

void check_packed(
    const LinearProblem& p, const Tensor& packed, at::ScalarType dtype, Capability in_use) {
  check_memory("packed", packed);
  TORCH_CHECK_VALUE(
      packed.numel() == packed_bytes(p, in_use), "packed: not a weight of ", p.N, " by ", p.K, " ",
      dtype, " as ", name(in_use), " takes it");
}

void run_linear(LinearProblem* problems, int64_t count) {
  const LinearKernel kernel = kernels(problems->dtype).linear;
  LinearProblem* const end = problems + count;
  const int64_t threads = at::get_num_threads();
  // A task of a gated layer has the same number of sums, from two products.
  const int64_t weights = problems->gated ? 2 : 1;
  // A task that packs has one panel of each weight, and so many rows that each thread gets two
  // tasks.
  const bool packs = problems->packed == nullptr;
  const bool tall = packs && panels(kernel, problems->N) >= 2 * threads;
  // Without a matrix unit, a task whose x has contiguous columns, as in the gradient of a weight,
  // transposes a block of its rows at a time. It computes all columns, so that it does so only
  // once.
  const bool transposes =
      !packs && kernel.row_block < kernel.panel && problems->x_row == 1 && problems->x_column != 1;
  int64_t total;
  double operations;
  // A task's rows of x, a whole number of register blocks, stay in the L2 cache while the panels
  // stream through it. There are enough tasks that threads do not wait for the last ones.
  int64_t columns = packs ? kernel.panel : 8 / weights * kernel.panel;
  if (transposes) columns = panels(kernel, problems->N) * kernel.panel;
  const int64_t enough = transposes ? threads : 8 * threads;
  for (;; columns = (panels(kernel, columns) + 1) / 2 * kernel.panel) {
    total = 0;
    operations = 0;
    for (LinearProblem* p = problems; p < end; ++p) {
      int64_t about = tall ? 512 : kernel.task_rows;
      if (transposes) about = transposed_rows(p->M, threads);
      else if (p->x_row == 1) about = std::min(about, 2 * kernel.panel);  // a task copies its rows
      p->rows_per_task = even_rows(p->M, about, kernel.row_block);
      p->columns_per_task = columns;
      total += tasks(*p);
      operations += operations_of(*p);
    }
    if (columns == kernel.panel || total >= enough) break;
  }
  for (LinearProblem* p = problems; p < end; ++p)
    p->streams = total > 1 && worth_streaming(*p, threads);
  run_tasks(problems, count, total, operations, kernel.run);
}

void run_linear_unpacked(LinearProblem* problems, int64_t count) {
  const LinearKernel kernel = kernels(problems->dtype).linear;
  if (problems->M >= kernel.few_rows) return run_linear(problems, count);
  int64_t total = 0;
  double operations = 0;
  for (LinearProblem* p = problems; p < problems + count; ++p) {
    // Enough tasks that threads do not wait for the last ones.
    p->columns_per_task = (p->gated ? 2 : 4) * kernel.panel;
    while (p->columns_per_task > kernel.panel &&
           p->N < int64_t{8} * at::get_num_threads() * p->columns_per_task)
      p->columns_per_task /= 2;
    p->rows_per_task = p->M;
    total += tasks(*p);
    operations += operations_of(*p);
  }
  run_tasks(problems, count, total, operations, kernel.run_unpacked);
}

namespace {

// Describes a weight (N, K) that is to be packed.
LinearProblem packing(const Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() == 2, "weight: expected 2 dimensions; got shape ", weight.sizes());
  check_memory("weight", weight);
  LinearProblem p{};
  p.dtype = kernel_type(weight.scalar_type());
  p.N = weight.size(0);
  p.K = weight.size(1);
  p.weight = weight.const_data_ptr();
  p.weight_row = weight.stride(0);
  p.weight_column = weight.stride(1);
  return p;
}

void pack(LinearProblem& p, const Tensor& packed) {
  const LinearKernel kernel = kernels(p.dtype).linear;
  p.packed = packed.mutable_data_ptr();
  parallel_tasks(
      panels(kernel, p.N), 1, 8.0 * static_cast<double>(p.N) * static_cast<double>(p.K),
      [&](int64_t panel) { kernel.pack(p, panel); });
}

// Packs a weight (N, K) into panels. Returns opaque bytes.
Tensor pack_linear(const Tensor& weight) {
  LinearProblem p = packing(weight);
  Tensor packed = empty({packed_bytes(p)}, weight.options().dtype(at::kByte));
  pack(p, packed);
  return packed;
}

// Packs several weights into one allocation, and returns them as views of it. Together they lie in
// pages of 2 MiB, even if each is small: with few rows of x, reading a weight from pages of 4 KiB
// takes a third longer. The weights must not be written to.
std::vector<Tensor> pack_linears(at::TensorList weights) {
  constexpr int64_t kLine = 64;
  std::vector<LinearProblem> problems;
  int64_t total = 0;
  for (const Tensor& weight : weights) {
    problems.push_back(packing(weight));
    total += (packed_bytes(problems.back()) + kLine - 1) / kLine * kLine;
  }
  if (problems.empty()) return {};
  const Tensor memory = empty({total}, weights[0].options().dtype(at::kByte));
  std::vector<Tensor> packed;
  int64_t at = 0;
  for (LinearProblem& p : problems) {
    const int64_t bytes = packed_bytes(p);
    packed.push_back(memory.narrow(0, at, bytes));
    pack(p, packed.back());
    at += (bytes + kLine - 1) / kLine * kLine;
  }
  return packed;
}

// Returns the weight (N, K) of `dtype` that pack_linear packed while the named instruction set was
// in use. Default: the one in use now.
Tensor unpack_linear(
    const Tensor& packed, int64_t out_features, int64_t in_features, at::ScalarType dtype,
    std::optional<c10::string_view> instruction_set) {
  LinearProblem p{};
  p.dtype = kernel_type(dtype);
  const Capability in_use =
      instruction_set ? capability_named(std::string(*instruction_set)) : capability();
  const LinearKernel kernel = kernels_of(capability(p.dtype, in_use)).linear;
  p.N = out_features;
  p.K = in_features;
  check_packed(p, packed, dtype, in_use);
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

// One call of a linear layer of x (M, K): everything except the weights.
class LinearCall {
 public:
  LinearCall(
      const Tensor& x, int64_t out_features, const OptionalTensor& bias,
      std::optional<c10::string_view> activation, const OptionalTensor& up_bias) {
    problem.dtype = kernel_type(x.scalar_type());
    TORCH_CHECK_VALUE(x.dim() == 2, "x: expected 2 dimensions; got shape ", x.sizes());
    check_memory("x", x);
    problem.M = x.size(0);
    problem.N = out_features;
    problem.K = x.size(1);
    problem.x = x.const_data_ptr();
    problem.x_row = x.stride(0);
    problem.x_column = x.stride(1);
    problem.bias = vector("bias", bias, x);
    problem.up_bias = vector("up_bias", up_bias, x);
    problem.activation = activation_of(activation);
    out_ = empty({problem.M, problem.N}, x.options());
    problem.out = out_.mutable_data_ptr();
  }

  // Runs f(problem), unless the result is empty, and returns the result.
  template <class F>
  Tensor run(const F& f) {
    if (problem.M > 0 && problem.N > 0) f(problem);
    return out_;
  }

  LinearProblem problem{};

 private:
  FeatureVector vector(const char* name, const OptionalTensor& bias, const Tensor& x) {
    check_shape(name, bias, {problem.N});
    return feature_vector(bias, x.scalar_type(), held_);
  }

  Held held_;
  Tensor out_;
};

void check_up_bias(const OptionalTensor& up, const OptionalTensor& up_bias) {
  TORCH_CHECK_VALUE(up || !up_bias, "up_bias: expected none without up");
}

// Returns the linear layer of x (M, K) with `packed`, a packed weight (N, K). With `up`, another
// packed weight, it is gated: multiplied by the linear layer of x with `up` and up_bias.
Tensor linear_packed(
    const Tensor& x, const Tensor& packed, int64_t out_features, const OptionalTensor& bias,
    std::optional<c10::string_view> activation, const OptionalTensor& up,
    const OptionalTensor& up_bias) {
  check_up_bias(up, up_bias);
  LinearCall call(x, out_features, bias, activation, up_bias);
  check_packed(call.problem, packed, x.scalar_type());
  call.problem.packed = const_cast<void*>(packed.const_data_ptr());
  if (up) {
    check_packed(call.problem, *up, x.scalar_type());
    call.problem.gated = true;
    call.problem.up = up->const_data_ptr();
  }
  return call.run([](LinearProblem& p) { run_linear(&p, 1); });
}

void check_weight(const Tensor& x, const Tensor& weight) {
  check_type("weight", weight, x.scalar_type(), x);
  TORCH_CHECK_VALUE(
      x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1),
      "weight: expected shape (out_features, in_features) for x of shape ", x.sizes(), "; got ",
      weight.sizes(), " (was its data exchanged between forward and backward?)");
}

// Returns what linear_packed returns, with the same bits, without a packed copy of the weight. It
// is faster unless there are many rows, because each task packs what it reads. With `up`, a weight
// of the same shape, it is gated, as in linear_packed.
Tensor linear_unpacked(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
    std::optional<c10::string_view> activation, const OptionalTensor& up,
    const OptionalTensor& up_bias) {
  check_up_bias(up, up_bias);
  check_weight(x, weight);
  check_memory("weight", weight);
  const LinearKernel kernel = kernels(kernel_type(x.scalar_type())).linear;
  const bool few = x.size(0) < kernel.few_rows;
  bool fits =
      weight.size(1) > 0 && (!few || weight.stride(1) == 1 || (weight.stride(0) == 1 && !up));
  if (up) {
    check_weight(x, *up);
    check_memory("up", *up);
    check_shape("up", *up, {weight.size(0), weight.size(1)});
    fits = fits && (!few || up->stride(1) == 1);
  }
  if (!fits)
    return linear_packed(
        x, pack_linear(weight), weight.size(0), bias, activation,
        up ? OptionalTensor(pack_linear(*up)) : std::nullopt, up_bias);
  LinearCall call(x, weight.size(0), bias, activation, up_bias);
  call.problem.weight = weight.const_data_ptr();
  call.problem.weight_row = weight.stride(0);
  call.problem.weight_column = weight.stride(1);
  if (up) {
    call.problem.gated = true;
    call.problem.up = up->const_data_ptr();
    call.problem.up_row = up->stride(0);
    call.problem.up_column = up->stride(1);
  }
  return call.run([](LinearProblem& p) { run_linear_unpacked(&p, 1); });
}

// Returns whether packing the weight first is faster than leaving that to the tasks.
bool worth_packing(const Tensor& x) {
  // A task takes up to 512 rows of x, and packs its part of the weight for them. If x has
  // contiguous columns, as in the gradient of a weight, it takes few rows, which it copies.
  const bool by_columns = x.dim() == 2 && x.stride(0) == 1 && x.stride(1) != 1;
  return x.dim() != 2 || x.size(0) > (by_columns ? 128 : 3 * 512);
}

// Returns the linear layer of x (M, K) with a weight (N, K).
Tensor linear(
    const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
    std::optional<c10::string_view> activation) {
  if (!worth_packing(x)) return linear_unpacked(x, weight, bias, activation, {}, {});
  check_weight(x, weight);
  return linear_packed(x, pack_linear(weight), weight.size(0), bias, activation, {}, {});
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) {
  m.impl("linear", linear);
  m.impl("pack_linear", pack_linear);
  m.impl("pack_linears", pack_linears);
  m.impl("unpack_linear", unpack_linear);
  m.impl("linear_packed", linear_packed);
  m.impl("linear_unpacked", linear_unpacked);
  m.impl("checksum", checksum);
}

}  // namespace trifuse
