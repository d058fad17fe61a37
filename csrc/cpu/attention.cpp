// torch.ops.trifuse.attention_{forward,backward}.cpp: tensors in, tensors out.
//
// Shapes, dtypes and devices have been checked in pytorch_ext/ops/_attention_arguments.py. The
// contents of key_lengths, cu_seqlens and relative_index are checked here, where they are read.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "arguments.h"
#include "attention_tensors.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/run.h"

namespace trifuse {
namespace {

struct AttentionCall {
  AttentionProblem problem{};
  ConvertedTensors converted;
  int64_t used_q, used_k;  // tokens that belong to a sequence

  double operations() const {
    const auto& p = problem;
    return 2.0 * static_cast<double>(p.batch * p.heads * p.Lq) * static_cast<double>(p.Lk) *
        static_cast<double>(p.E + p.Ev);
  }
};

void check_cu_seqlens(const char* name, const Tensor& cu, int64_t total, int64_t longest) {
  const int64_t* starts = cu.const_data_ptr<int64_t>();
  bool ok = starts[0] == 0 && starts[cu.numel() - 1] <= total;
  for (int64_t b = 1; b < cu.numel(); ++b)
    ok &= starts[b] >= starts[b - 1] && starts[b] - starts[b - 1] <= longest;
  TORCH_CHECK_VALUE(
      ok, name, ": expected 0 first, no decrease, no step over ", longest, ", the last at most ",
      total, "; got ", at::IntArrayRef(starts, cu.numel()));
}

void check_index(const Tensor& index, int64_t columns) {
  const Tensor wide = index.to(at::kLong).contiguous();
  const int64_t* number = wide.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < wide.numel(); ++i)
    TORCH_CHECK_VALUE(
        number[i] >= 0 && number[i] < columns, "relative_index: expected numbers in [0, ",
        columns - 1, "]; got ", number[i]);
}

AttentionCall make_call(const AttentionArguments& a) {
  AttentionCall call;
  AttentionProblem& p = call.problem;
  call.converted = fill_in(p, a);
  call.used_q = p.Lq;
  call.used_k = p.Lk;
  p.query = strided(a.query);
  p.key = strided(a.key);
  p.value = strided(a.value);
  if (p.relative_index) check_index(*a.relative_index, p.columns);
  if (p.key_lengths) {
    const at::IntArrayRef lengths(p.key_lengths, call.converted.key_lengths.numel());
    for (int64_t length : lengths)
      TORCH_CHECK_VALUE(
          length >= 0 && length <= p.Lk, "key_lengths: expected lengths in [0, ", p.Lk, "]; got ",
          lengths);
  }
  if (p.cu_seqlens_q) {
    check_cu_seqlens("cu_seqlens_q", call.converted.cu_seqlens_q, p.Lq, a.max_seqlen_q);
    check_cu_seqlens("cu_seqlens_k", call.converted.cu_seqlens_k, p.Lk, a.max_seqlen_k);
    call.used_q = p.cu_seqlens_q[p.batch];
    call.used_k = p.cu_seqlens_k[p.batch];
    // The lengths of the longest sequences; max_seqlen_q and max_seqlen_k may be far larger.
    p.Lq = p.Lk = 0;
    for (int64_t b = 0; b < p.batch; ++b) {
      p.Lq = std::max(p.Lq, p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b]);
      p.Lk = std::max(p.Lk, p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]);
    }
  }
  p.dropout = kernel_dropout(a.dropout_p, a.seed);
  return call;
}

void run_forward(AttentionCall& call, const Tensor& out, const Tensor& logsumexp) {
  call.problem.out = strided(out);
  call.problem.logsumexp = strided(logsumexp);
  if (call.used_q < out.size(2)) {
    out.slice(2, call.used_q).zero_();
    logsumexp.slice(2, call.used_q).fill_(-std::numeric_limits<double>::infinity());
  }
  const AttentionForward kernel = kernels(call.problem.dtype).attention_forward;
  // With few queries, reading keys and values takes longer than the operations, and short sequences
  // fill tiles poorly. Both take about 8 times as long for an operation as a large call.
  const double operations = 8 * call.operations();
  const int64_t threads = call.problem.threads = threads_for(operations);
  AttentionTasks tasks = kernel.tasks(call.problem);
  Tensor chunk_sums, chunks_done;
  if (tasks.chunks > 1 && threads > 1 && tasks.count < 4 * threads) {
    chunk_sums =
        empty({tasks.count * tasks.chunks * tasks.chunk_bytes}, out.options().dtype(at::kByte));
    chunks_done = empty({tasks.count}, out.options().dtype(at::kInt)).zero_();
    call.problem.key_chunks = tasks.chunks;
    call.problem.chunk_sums = static_cast<char*>(chunk_sums.mutable_data_ptr());
    call.problem.chunks_done = chunks_done.mutable_data_ptr<int32_t>();
    tasks = {tasks.count * tasks.chunks, 1};
  }
  parallel_runs(tasks.count, tasks.related, operations, [&](int64_t first, int64_t last) {
    kernel.run(call.problem, first, last);
  });
}

}  // namespace

void run_attention(const AttentionArguments& a, const Tensor& out, const Tensor& logsumexp) {
  AttentionCall call = make_call(a);
  run_forward(call, out, logsumexp);
}

namespace {

std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
    const OptionalTensor& relative_bias, const OptionalTensor& query_bias,
    const OptionalTensor& key_bias, const OptionalTensor& relative_index,
    const OptionalTensor& key_lengths, const OptionalTensor& diagonal,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seed, int64_t max_seqlen_q, int64_t max_seqlen_k,
    std::optional<double> scale, std::optional<double> softcap, std::optional<int64_t> window_left,
    std::optional<int64_t> window_right, bool lower_right, double dropout_p) {
  AttentionCall call =
      make_call({query,        key,          value,          attn_mask,    relative_bias,
                 query_bias,   key_bias,     relative_index, key_lengths,  diagonal,
                 cu_seqlens_q, cu_seqlens_k, seed,           max_seqlen_q, max_seqlen_k,
                 scale,        softcap,      window_left,    window_right, lower_right,
                 dropout_p});
  Tensor out = empty_like_layout(query, value.size(3), query.scalar_type(), empty);
  Tensor logsumexp = empty(
      {query.size(0), query.size(1), query.size(2)},
      query.options().dtype(accumulation_type(query.scalar_type())));
  run_forward(call, out, logsumexp);
  return {out, logsumexp};
}

// Adds up the sums from the tasks of a backward: the gradients of the biases of one head, or of all
// heads and sequences that share one table. `zero` is the place of distance 0 in `grad` (B, H, n).
// A group is one sequence, or some that share a table and have their corners in one place.
void sum_relative_bias_gradient(
    const AttentionProblem& p, int64_t chunk, int64_t chunks, int64_t groups, int64_t zero,
    const Tensor& grad, int64_t task) {
  const int64_t heads = grad.size(1), distances = grad.size(2), length = p.Lq + chunk;
  double* total = grad.mutable_data_ptr<double>() + task * distances;
  for (int64_t g = 0; g < groups; ++g) {
    if (grad.size(0) != 1 && g != task / heads) continue;
    const bool packed = p.cu_seqlens_q != nullptr;
    const int64_t Lq = packed ? p.cu_seqlens_q[g + 1] - p.cu_seqlens_q[g] : p.Lq;
    const int64_t Lk = packed ? p.cu_seqlens_k[g + 1] - p.cu_seqlens_k[g] : p.Lk;
    const int64_t corner = p.lower_right ? Lk - Lq : 0;
    for (int64_t h = 0; h < p.heads; ++h) {
      if (heads != 1 && h != task % heads) continue;
      for (int64_t c = 0; c < chunks; ++c) {
        const double* sums = p.relative_bias_sums + ((g * p.heads + h) * chunks + c) * length;
        const int64_t first = c * chunk - (p.Lq - 1) - corner + zero;  // the place of sums[0]
        const int64_t end = std::min(length, distances - first);
        for (int64_t x = std::max<int64_t>(-first, 0); x < end; ++x) total[first + x] += sums[x];
      }
    }
  }
}

// Adds up such sums by column, for one table, or for all heads and sequences that share one.
void sum_table_gradient(
    const AttentionProblem& p, int64_t chunks, int64_t groups, const Tensor& grad, int64_t task) {
  const int64_t heads = grad.size(1), n = grad.size(2);
  double* total = grad.mutable_data_ptr<double>() + task * n;
  for (int64_t g = 0; g < groups; ++g) {
    if (grad.size(0) != 1 && g != task / heads) continue;
    for (int64_t h = 0; h < p.heads; ++h) {
      if (heads != 1 && h != task % heads) continue;
      const double* sums = p.relative_bias_sums + (g * p.heads + h) * chunks * n;
      for (int64_t c = 0; c < chunks; ++c, sums += n)
        for (int64_t x = 0; x < n; ++x) total[x] += sums[x];
    }
  }
}

// AttentionUpstream holds what a backward reads besides the forward's arguments.
struct AttentionUpstream {
  const Tensor& grad_out;
  const OptionalTensor& grad_logsumexp;
  const Tensor &out, &logsumexp;
};

// AttentionGradients are the tensors in which a backward stores the gradients of query, key and
// value.
struct AttentionGradients {
  Tensor query, key, value;
};

// BiasGradients are those of mask, relative_bias, query_bias and key_bias. A gradient that isn't
// needed is empty.
using BiasGradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Stores the gradients of query, key and value in `grads`, and returns those of the biases.
// `needs_grad` is in the order of the structs above.
BiasGradients run_backward(
    AttentionCall call, const AttentionArguments& a, const AttentionUpstream& upstream,
    const AttentionGradients& grads, std::array<bool, 7> needs_grad) {
  const bool mask_requires_grad = needs_grad[3], relative_bias_requires_grad = needs_grad[4];
  const Tensor& query = a.query;
  AttentionProblem& p = call.problem;
  const at::ScalarType dtype = query.scalar_type(), wide = accumulation_type(dtype);

  p.grad_out = strided(upstream.grad_out);
  // A compiler may have chosen another layout for out.
  const Tensor out_rows = upstream.out.stride(3) == 1 ? upstream.out : upstream.out.contiguous();
  p.out = strided(out_rows);
  p.logsumexp = strided(upstream.logsumexp);
  Tensor grad_lse;
  if (upstream.grad_logsumexp) {
    grad_lse = upstream.grad_logsumexp->to(wide);
    p.grad_logsumexp = strided(grad_lse);
  }
  p.grad_query = strided(grads.query);
  p.grad_key = strided(grads.key);
  p.grad_value = strided(grads.value);

  Tensor grad_mask = at::empty({0}, query.options());
  if (mask_requires_grad) {
    // Sums of many terms are computed in float64. With few terms, the loss of precision is too
    // small to justify the memory traffic.
    const double terms = static_cast<double>(p.batch * p.heads) * static_cast<double>(p.Lq * p.Lk);
    p.grad_mask_in_double = terms > 64.0 * static_cast<double>(a.attn_mask->numel());
    const auto sum_dtype = p.grad_mask_in_double ? at::kDouble : wide;
    grad_mask = empty(a.attn_mask->sizes(), query.options().dtype(sum_dtype)).zero_();
    p.grad_mask = broadcast(grad_mask);
  }

  if (call.used_q < query.size(2)) grads.query.slice(2, call.used_q).zero_();
  if (call.used_k < a.key.size(2)) {
    grads.key.slice(2, call.used_k).zero_();
    grads.value.slice(2, call.used_k).zero_();
  }
  const AttentionBackward kernel = kernels(p.dtype).attention_backward;
  Tensor grad_query_sum = grads.query;
  if (dtype != wide && kernel.key_chunks(p) > 1)
    grad_query_sum = empty_like_layout(query, p.E, wide, empty);
  p.grad_query_sum = strided(grad_query_sum);
  const int64_t chunk = kernel.chunk_keys(p), chunks = kernel.key_chunks(p);
  p.one_table = a.relative_bias && a.relative_bias->size(0) == 1 &&
      (a.relative_index || !(a.cu_seqlens_q && p.lower_right));
  Tensor relative_bias_sums;
  const int64_t groups = kernel.table_groups(p);
  if (relative_bias_requires_grad) {
    const int64_t length = a.relative_index ? a.relative_bias->size(2) : p.Lq + chunk;
    relative_bias_sums =
        empty({groups, p.heads, chunks, length}, query.options().dtype(at::kDouble)).zero_();
    p.relative_bias_sums = relative_bias_sums.mutable_data_ptr<double>();
  }
  const auto start_table = [&](const OptionalTensor& table, bool wanted, Tensor4& sums) {
    if (!wanted) return at::empty({0}, query.options());
    const Tensor grad = empty(table->sizes(), query.options().dtype(wide)).zero_();
    sums = strided(grad);
    return grad;
  };
  const Tensor grad_query_bias = start_table(a.query_bias, needs_grad[5], p.grad_query_bias);
  const Tensor grad_key_bias = start_table(a.key_bias, needs_grad[6], p.grad_key_bias);
  const Tensor progress =
      empty({p.batch * p.heads * kernel.query_blocks(p)}, query.options().dtype(at::kInt))
          .fill_(-1);

  Failure failure;
  parallel_tasks(kernel.tasks(p), chunks, 2.5 * call.operations(), [&](int64_t task) {
    failure.watch([&] { kernel.run(p, task, progress.mutable_data_ptr<int32_t>(), failure); });
  });
  Tensor grad_relative_bias = at::empty({0}, query.options());
  if (relative_bias_requires_grad) {
    const Tensor total =
        empty(a.relative_bias->sizes(), query.options().dtype(at::kDouble)).zero_();
    const int64_t zero = zero_distance(
        a.cu_seqlens_q ? a.max_seqlen_q : p.Lq, a.cu_seqlens_k ? a.max_seqlen_k : p.Lk,
        a.lower_right);
    const double additions = static_cast<double>(relative_bias_sums.numel());
    parallel_tasks(total.size(0) * total.size(1), 1, additions, [&](int64_t task) {
      if (a.relative_index) sum_table_gradient(p, chunks, groups, total, task);
      else sum_relative_bias_gradient(p, chunk, chunks, groups, zero, total, task);
    });
    grad_relative_bias = total.to(a.relative_bias->scalar_type());
  }
  return {
      mask_requires_grad ? grad_mask.to(a.attn_mask->scalar_type()) : grad_mask, grad_relative_bias,
      needs_grad[5] ? grad_query_bias.to(a.query_bias->scalar_type()) : grad_query_bias,
      needs_grad[6] ? grad_key_bias.to(a.key_bias->scalar_type()) : grad_key_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
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
  check_backward_arguments(query, value, grad_out, grad_logsumexp, out, logsumexp);
  const AttentionArguments arguments = {
      query,          key,         value,    attn_mask,    relative_bias, query_bias,  key_bias,
      relative_index, key_lengths, diagonal, cu_seqlens_q, cu_seqlens_k,  seed,        max_seqlen_q,
      max_seqlen_k,   scale,       softcap,  window_left,  window_right,  lower_right, dropout_p};
  AttentionCall call = make_call(arguments);
  const at::ScalarType dtype = query.scalar_type();
  const AttentionGradients grads = {
      empty_like_layout(query, query.size(3), dtype, empty),
      empty_like_layout(key, query.size(3), dtype, empty),
      empty_like_layout(value, value.size(3), dtype, empty)};
  return std::tuple_cat(
      std::tuple(grads.query, grads.key, grads.value),
      run_backward(
          std::move(call), arguments, {grad_out, grad_logsumexp, out, logsumexp}, grads,
          needs_grad));
}

// Computes the gradients for key and value, or query too, that lie side by side in one tensor.
// Returns the gradient of query, empty if it is among the others, and a tensor of the others,
// (n, B, H, L, E). Like the inputs, it has the memory order (B, L, n, H, E) or (L, B, n, H, E).
std::tuple<Tensor, Tensor> attention_backward_side_by_side(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& attn_mask, const OptionalTensor& key_lengths,
    const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seed, const Tensor& out, const Tensor& logsumexp, int64_t max_seqlen_q,
    int64_t max_seqlen_k, std::optional<double> scale, std::optional<int64_t> window_right,
    double dropout_p, bool query_too) {
  const OptionalTensor absent;
  check_backward_arguments(query, value, grad_out, absent, out, logsumexp);
  const AttentionArguments arguments = {
      query,
      key,
      value,
      attn_mask,
      /*relative_bias=*/absent,
      /*query_bias=*/absent,
      /*key_bias=*/absent,
      /*relative_index=*/absent,
      key_lengths,
      /*diagonal=*/absent,
      cu_seqlens_q,
      cu_seqlens_k,
      seed,
      max_seqlen_q,
      max_seqlen_k,
      scale,
      /*softcap=*/{},
      /*window_left=*/{},
      window_right,
      /*lower_right=*/false,
      dropout_p};
  AttentionCall call = make_call(arguments);
  check_shape("value", value, key.sizes());
  if (query_too) check_shape("query", query, key.sizes());
  const int64_t B = key.size(0), H = key.size(1), L = key.size(2), E = key.size(3);
  const int64_t n = query_too ? 3 : 2;
  const Tensor together = key.stride(2) == n * H * E
      ? empty({B, L, n, H, E}, key.options()).permute({2, 0, 3, 1, 4})
      : empty({L, B, n, H, E}, key.options()).permute({2, 1, 3, 0, 4});
  const Tensor grad_query =
      query_too ? together[0] : empty_like_layout(query, query.size(3), query.scalar_type(), empty);
  run_backward(
      std::move(call), arguments, {grad_out, absent, out, logsumexp},
      {grad_query, together[n - 2], together[n - 1]}, {});
  return {query_too ? at::empty({0}, query.options()) : grad_query, together};
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) {
  m.impl("attention_forward.cpp", attention_forward);
  m.impl("attention_backward.cpp", attention_backward);
  m.impl("attention_backward_side_by_side", attention_backward_side_by_side);
}

}  // namespace trifuse
