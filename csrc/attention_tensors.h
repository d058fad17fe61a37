// Checks the tensors of an attention call and fills in an AttentionProblem from them.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "arguments.h"
#include "attention.h"

namespace trifuse {

inline Tensor4 strided(const Tensor& t) {
  Tensor4 result{t.data_ptr(), {}};
  for (int64_t d = 0; d < t.dim(); ++d) result.stride[d] = t.stride(d);
  return result;
}

// Like strided, but with stride 0 in dimensions of size 1.
inline Tensor4 broadcast(const Tensor& t) {
  Tensor4 result = strided(t);
  for (int64_t d = 0; d < t.dim(); ++d)
    if (t.size(d) == 1) result.stride[d] = 0;
  return result;
}

// Checks that tensors fit each other, before any is read: a saved tensor's data may have been
// replaced before the backward, and an op may be called without the public function's checks.
inline void check_arguments(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& attn_mask,
    const OptionalTensor& key_lengths, const OptionalTensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, const OptionalTensor& seed, int64_t max_seqlen_q,
    int64_t max_seqlen_k) {
  const auto check_dimensions = [](const char* name, const Tensor& t) {
    TORCH_CHECK_VALUE(t.dim() == 4, name, ": expected 4 dimensions; got shape ", t.sizes());
  };
  check_dimensions("query", query);
  check_dimensions("key", key);
  check_dimensions("value", value);
  const int64_t B = query.size(0), H = query.size(1), Hkv = key.size(1);
  check_memory("query", query);
  check_shape("key", key, {B, Hkv, key.size(2), query.size(3)});
  check_shape("value", value, {B, Hkv, key.size(2), value.size(3)});
  check_type("key", key, query.scalar_type(), query);
  check_type("value", value, query.scalar_type(), query);
  TORCH_CHECK_VALUE(
      H == Hkv || (Hkv > 0 && H % Hkv == 0),
      "key: expected a number of heads that divides query's ", H, "; got ", Hkv);
  check_integers("key_lengths", key_lengths, B, query);
  check_seed(seed, query);
  const bool packed = cu_seqlens_q.has_value();
  if (packed) {
    const int64_t count = cu_seqlens_q->numel();
    TORCH_CHECK_VALUE(
        count > 0 && cu_seqlens_k,
        "cu_seqlens_q: expected at least one boundary, and cu_seqlens_k");
    check_integers("cu_seqlens_q", cu_seqlens_q, count, query);
    check_integers("cu_seqlens_k", cu_seqlens_k, count, query);
  }
  if (!attn_mask) return;
  const int64_t sequences = packed ? cu_seqlens_q->numel() - 1 : B;
  const int64_t full[4] = {
      sequences, H, packed ? max_seqlen_q : query.size(2), packed ? max_seqlen_k : key.size(2)};
  bool fits = attn_mask->dim() == 4;
  for (int64_t d = 0; d < 4 && fits; ++d)
    fits = attn_mask->size(d) == 1 || attn_mask->size(d) == full[d];
  TORCH_CHECK_VALUE(
      fits, "attn_mask: expected a shape broadcastable to ", at::IntArrayRef(full), "; got ",
      attn_mask->sizes());
  check_memory("attn_mask", *attn_mask);
  const at::ScalarType type = attn_mask->scalar_type();
  check_type(
      "attn_mask", *attn_mask, type == at::kBool || type == at::kFloat ? type : query.scalar_type(),
      query);
}

// Checks the forward's saved results and the upstream gradients. Runs before check_arguments,
// because the shapes of query and value are checked against the saved output.
inline void check_backward_arguments(
    const Tensor& query, const Tensor& value, const Tensor& grad_out,
    const OptionalTensor& grad_logsumexp, const Tensor& out, const Tensor& logsumexp) {
  const auto rows = out.sizes().slice(0, 3);
  check_memory("out", out);
  check_shape("query", query, {rows[0], rows[1], rows[2], query.size(-1)});
  check_shape("value", value, {rows[0], value.size(1), value.size(2), out.size(-1)});
  check_shape("grad_out", grad_out, out.sizes());
  check_shape("logsumexp", logsumexp, rows);
  check_shape("grad_logsumexp", grad_logsumexp, rows);
  check_type("grad_out", grad_out, query.scalar_type(), query);
  check_type("out", out, query.scalar_type(), query);
  check_type("logsumexp", logsumexp, accumulation_type(query.scalar_type()), query);
}

// Sets sizes, mask, scale and window. Packed calls then replace batch, Lq and Lk.
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
  // Clamps windows that reach past the farthest pair. They mask the same pairs, and adding a
  // position to them cannot overflow.
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
