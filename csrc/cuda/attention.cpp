// torch.ops.trifuse.attention_{forward,backward}.cuda: tensors in, tensors out.
//
// Shapes, dtypes and devices have been checked in pytorch_ext/ops/_attention_arguments.py. The
// contents of key_lengths, cu_seqlens and relative_index are checked here, on the device.

#include "cuda/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>

#include "arguments.h"
#include "attention_tensors.h"
#include "cuda/tensors.h"

namespace trifuse::cuda {
namespace {

// Allocates the results.
Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

// Throws unless `ok`. Used on the CPU, when tests run the kernels on the host.
void require(const Tensor& ok, const std::string& argument, const std::string& expected) {
  TORCH_CHECK_VALUE(ok.item<bool>(), argument, ": expected ", expected);
}

void check_cu_seqlens(const char* name, const Tensor& cu, int64_t total, int64_t longest) {
  const Tensor steps = cu.diff();
  const Tensor ok =
      (cu[0] == 0) & (cu[-1] <= total) & (steps >= 0).all() & (steps <= longest).all();
  require(
      ok, name,
      "0 first, no decrease, no step over " + std::to_string(longest) + ", the last at most " +
          std::to_string(total));
}

// Kernels index positions with 32 bits, some of them past a sequence's end.
void check_length(const char* name, int64_t length) {
  constexpr int64_t kMost = int64_t(1) << 30;
  TORCH_CHECK_VALUE(
      length <= kMost, name, ": expected sequences of at most ", kMost, " tokens; got ", length);
}

struct AttentionCall {
  Attention attention{};
  ConvertedTensors converted;
};

AttentionCall make_call(const AttentionArguments& a) {
  AttentionCall call;
  Attention& p = call.attention;
  call.converted = fill_in(p, a);
  if (p.relative_bias.data && p.mask_kind == MaskKind::None && !p.relative_index) {
    p.mask = std::exchange(p.relative_bias, {});
    p.mask_kind = MaskKind::Float32;
    p.mask_by_distance = true;
  }
  p.total_q = p.Lq;
  p.total_k = p.Lk;
  p.query = broadcast(a.query);
  p.key = broadcast(a.key);
  p.value = broadcast(a.value);
  if (p.cu_seqlens_q) {
    // No sequence is longer than the total. But a mask that is laid out for longer sequences keeps
    // its size.
    const auto longest = [&](int64_t bound, int64_t total, int dimension) {
      const bool laid_out = a.attn_mask && a.attn_mask->size(dimension) != 1;
      // Tokens past the last sequence need blocks even if all sequences are empty.
      return std::max<int64_t>(laid_out ? bound : std::min(bound, total), 1);
    };
    p.Lq = longest(a.max_seqlen_q, p.total_q, 2);
    p.Lk = longest(a.max_seqlen_k, p.total_k, 3);
  }
  check_length("query", p.Lq);
  check_length("key", p.Lk);
  if (a.seed) {
    p.dropout = kernel_dropout(a.dropout_p);
    p.seed = a.seed->const_data_ptr<int64_t>();
    p.placed = a.seed->numel() == kSeedAndPlace;
  }
  return call;
}

// Checks the values of key_lengths and cu_seqlens. On a GPU the device asserts them.
void check_lengths_of(
    const AttentionCall& call, int64_t max_seqlen_q, int64_t max_seqlen_k, void* stream) {
  const Attention& p = call.attention;
  const ConvertedTensors& of = call.converted;
  if (!p.key_lengths && !p.cu_seqlens_q) return;
  if (p.key_lengths && of.key_lengths.is_cpu())
    require(
        ((of.key_lengths >= 0) & (of.key_lengths <= p.Lk)).all(), "key_lengths",
        "lengths in [0, " + std::to_string(p.Lk) + "]");
  if (p.cu_seqlens_q && of.cu_seqlens_q.is_cpu()) {
    check_cu_seqlens("cu_seqlens_q", of.cu_seqlens_q, p.total_q, max_seqlen_q);
    check_cu_seqlens("cu_seqlens_k", of.cu_seqlens_k, p.total_k, max_seqlen_k);
  }
  const int64_t keys = p.cu_seqlens_k ? max_seqlen_k : p.Lk;
  check_lengths(
      {max_seqlen_q, keys, p.total_q, p.total_k},
      {p.batch, p.key_lengths, p.cu_seqlens_q, p.cu_seqlens_k}, stream);
}

// Checks the numbers of a relative_index. On a GPU the device asserts them.
void check_index_of(const AttentionCall& call, const OptionalTensor& given, void* stream) {
  const int64_t n = call.attention.columns;
  if (!call.attention.relative_index) return;
  if (given->is_cpu())
    require(
        ((*given >= 0) & (*given < n)).all(), "relative_index",
        "numbers in [0, " + std::to_string(n - 1) + "]");
  const Tensor index = given->dim() == 1 ? given->unsqueeze(0) : *given;
  check_index(
      {index.const_data_ptr(),
       index.scalar_type() == at::kLong,
       {index.size(0), index.size(1)},
       {index.stride(0), index.stride(1)},
       n},
      stream);
}

std::tuple<Tensor, Tensor> forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
    const OptionalTensor& relative_bias, const OptionalTensor& query_bias,
    const OptionalTensor& key_bias, const OptionalTensor& relative_index,
    const OptionalTensor& key_lengths, const OptionalTensor& diagonal,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seed, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, std::optional<double> softcap, std::optional<int64_t> window_left,
    std::optional<int64_t> window_right, bool lower_right, double dropout_p) {
  const OnDeviceOf device(query);
  AttentionCall call =
      make_call({query,        key,          value,          attn_mask,    relative_bias,
                 query_bias,   key_bias,     relative_index, key_lengths,  diagonal,
                 cu_seqlens_q, cu_seqlens_k, seed,           max_seqlen_q, max_seqlen_k,
                 scale,        softcap,      window_left,    window_right, lower_right,
                 dropout_p});
  Attention& p = call.attention;
  check_lengths_of(call, max_seqlen_q, max_seqlen_k, device.stream());
  check_index_of(call, relative_index, device.stream());
  const Tensor out = empty_like_layout(query, p.Ev, query.scalar_type(), empty);
  const Tensor logsumexp =
      at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  p.out = broadcast(out);
  p.logsumexp = broadcast(logsumexp);
  Tensor workspace;  // most calls need none
  if (const int64_t bytes = attention_forward_workspace(p))
    workspace = at::empty({bytes}, query.options().dtype(at::kByte));
  attention_forward(p, workspace.defined() ? workspace.data_ptr() : nullptr, device.stream());
  return {out, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& grad_out, const OptionalTensor& grad_logsumexp, const Tensor& query,
    const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
    const OptionalTensor& relative_bias, const OptionalTensor& query_bias,
    const OptionalTensor& key_bias, const OptionalTensor& relative_index,
    const OptionalTensor& key_lengths, const OptionalTensor& diagonal,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seed, const Tensor& out, const Tensor& logsumexp, int64_t max_seqlen_q,
    int64_t max_seqlen_k, std::optional<double> scale, std::optional<double> softcap,
    std::optional<int64_t> window_left, std::optional<int64_t> window_right, bool lower_right,
    double dropout_p, std::array<bool, 7> needs_grad) {
  const bool mask_requires_grad = needs_grad[3];
  check_backward_arguments(query, value, grad_out, grad_logsumexp, out, logsumexp);
  const OnDeviceOf device(query);
  AttentionCall call =
      make_call({query,        key,          value,          attn_mask,    relative_bias,
                 query_bias,   key_bias,     relative_index, key_lengths,  diagonal,
                 cu_seqlens_q, cu_seqlens_k, seed,           max_seqlen_q, max_seqlen_k,
                 scale,        softcap,      window_left,    window_right, lower_right,
                 dropout_p});
  if (grad_logsumexp)
    check_type("grad_logsumexp", *grad_logsumexp, logsumexp.scalar_type(), logsumexp);
  Attention& p = call.attention;
  p.out = broadcast(out);
  p.logsumexp = broadcast(logsumexp);
  p.grad_out = broadcast(grad_out);
  if (grad_logsumexp) p.grad_logsumexp = broadcast(*grad_logsumexp);

  const Tensor grad_query = empty_like_layout(query, p.E, query.scalar_type(), empty);
  const Tensor grad_key = empty_like_layout(key, p.E, query.scalar_type(), empty);
  const Tensor grad_value = empty_like_layout(value, p.Ev, query.scalar_type(), empty);
  p.grad_query = broadcast(grad_query);
  p.grad_key = broadcast(grad_key);
  p.grad_value = broadcast(grad_value);
  Tensor grad_mask = at::empty({0}, query.options());
  if (mask_requires_grad) {
    const bool wide = p.mask_kind == MaskKind::Float32;
    grad_mask = at::empty(
        attn_mask->sizes(), attn_mask->options().dtype(wide ? at::kFloat : query.scalar_type()));
    if (grad_mask.numel() > 0) p.grad_mask = broadcast(grad_mask);
  }
  Tensor grad_relative_bias = at::empty({0}, query.options());
  if (needs_grad[4]) {
    grad_relative_bias = at::zeros(relative_bias->sizes(), query.options().dtype(at::kFloat));
    const bool read = !relative_index || p.relative_index;
    if (read && grad_relative_bias.numel() > 0 && p.batch * p.heads * p.Lq * p.Lk > 0)
      p.grad_relative_bias = {
          grad_relative_bias.mutable_data_ptr<float>(), relative_bias->size(0) != 1,
          relative_bias->size(1) != 1, relative_bias->size(2),
          zero_distance(
              cu_seqlens_q ? max_seqlen_q : p.Lq, cu_seqlens_k ? max_seqlen_k : p.Lk, lower_right)};
  }
  const auto start_table = [&](const OptionalTensor& table, bool wanted, Tensor4& grad) {
    if (!wanted) return at::empty({0}, query.options());
    const Tensor sums = at::zeros(table->sizes(), query.options().dtype(at::kFloat));
    if (p.relative_index && sums.numel() > 0) grad = strided(sums);
    return sums;
  };
  const Tensor grad_query_bias = start_table(query_bias, needs_grad[5], p.grad_query_bias);
  const Tensor grad_key_bias = start_table(key_bias, needs_grad[6], p.grad_key_bias);
  const Tensor workspace =
      at::empty({attention_backward_workspace(p)}, query.options().dtype(at::kByte));
  attention_backward(p, workspace.data_ptr(), device.stream());
  return {
      grad_query,
      grad_key,
      grad_value,
      mask_requires_grad ? grad_mask.to(attn_mask->scalar_type()) : grad_mask,
      needs_grad[4] ? grad_relative_bias.to(relative_bias->scalar_type()) : grad_relative_bias,
      needs_grad[5] ? grad_query_bias.to(query_bias->scalar_type()) : grad_query_bias,
      needs_grad[6] ? grad_key_bias.to(key_bias->scalar_type()) : grad_key_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, TRIFUSE_CUDA, m) {
  m.impl("attention_forward.cuda", forward);
  m.impl("attention_backward.cuda", backward);
}

}  // namespace trifuse::cuda
