// Checks the tensors of an attention call and fills in an AttentionProblem from them.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
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

// Returns an uninitialised (B, H, L, last), made by empty(sizes, options), in memory order (B, L,
// H) if `like` has that order. empty_like_layout in pytorch_ext/reference/results.py must agree.
// Autograd must not record the transpose as a view, because a view that is returned together with
// other results cannot be changed in place.
template <class Empty>
Tensor empty_like_layout(
    const Tensor& like, int64_t last, at::ScalarType dtype, const Empty& empty) {
  const at::AutoDispatchBelowADInplaceOrView no_view;
  const int64_t B = like.size(0), H = like.size(1), L = like.size(2);
  const auto options = like.options().dtype(dtype);
  if (like.stride(1) < like.stride(2)) return empty({B, L, H, last}, options).transpose(1, 2);
  return empty({B, H, L, last}, options);
}

// The arguments that the forward and the backward share.
struct AttentionArguments {
  const Tensor &query, &key, &value;
  const OptionalTensor &attn_mask, &relative_bias, &query_bias, &key_bias, &relative_index,
      &key_lengths, &diagonal, &cu_seqlens_q, &cu_seqlens_k, &seed;
  int64_t max_seqlen_q, max_seqlen_k;
  std::optional<double> scale, softcap;
  std::optional<int64_t> window_left, window_right;
  bool lower_right;
  double dropout_p;
};

// Checks the memory and the type of biases.
inline void check_biases(const char* name, const Tensor& t, const Tensor& query) {
  check_memory(name, t);
  const at::ScalarType type = t.scalar_type();
  check_type(name, t, type == at::kFloat ? type : query.scalar_type(), query);
}

// Checks a tensor of biases of shape (B, H, n), B and H full or 1.
inline void check_relative_bias(
    const Tensor& t, int64_t B, int64_t H, int64_t n, const Tensor& query) {
  TORCH_CHECK_VALUE(
      t.dim() == 3 && (t.size(0) == 1 || t.size(0) == B) && (t.size(1) == 1 || t.size(1) == H) &&
          t.size(2) == n,
      "relative_bias: expected shape (", B, " or 1, ", H, " or 1, ", n, "); got ", t.sizes());
  check_biases("relative_bias", t, query);
}

// Returns the number of distances of Lq queries from Lk keys.
inline int64_t distances(int64_t Lq, int64_t Lk) { return std::max<int64_t>(Lq + Lk - 1, 0); }

// Checks an index for Lq queries and Lk keys, except for its numbers, and the tables that it
// indexes.
inline void check_indexed(
    const AttentionArguments& a, int64_t B, int64_t H, int64_t Lq, int64_t Lk) {
  const Tensor &index = *a.relative_index, &query = a.query;
  const bool by_distance = index.dim() == 1 && index.size(0) == distances(Lq, Lk);
  TORCH_CHECK_VALUE(
      by_distance || (index.dim() == 2 && index.size(0) == Lq && index.size(1) == Lk),
      "relative_index: expected shape (", Lq, ", ", Lk, ") or (", distances(Lq, Lk), "); got ",
      index.sizes());
  check_memory("relative_index", index);
  const at::ScalarType type = index.scalar_type();
  check_type("relative_index", index, type == at::kInt ? type : at::kLong, query);
  const OptionalTensor& given = a.relative_bias ? a.relative_bias
      : a.query_bias                            ? a.query_bias
                                                : a.key_bias;
  TORCH_CHECK_VALUE(
      given && given->size(-1) > 0, "relative_index: expected a table with a column at least");
  const int64_t n = given->size(-1);
  if (a.relative_bias) check_relative_bias(*a.relative_bias, B, H, n, query);
  const auto check_rows = [&](const char* name, const OptionalTensor& t, const Tensor& rows) {
    if (!t) return;
    check_shape(name, *t, {rows.size(0), H, rows.size(2), n});
    check_biases(name, *t, query);
  };
  check_rows("query_bias", a.query_bias, query);
  check_rows("key_bias", a.key_bias, a.key);
}

// Checks that tensors fit each other, before any is read. A saved tensor's data may have been
// replaced before the backward, and an op may be called without the public function's checks.
inline void check_arguments(const AttentionArguments& a) {
  const Tensor &query = a.query, &key = a.key, &value = a.value;
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
  check_integers("key_lengths", a.key_lengths, B, query);
  check_seed(a.seed, query);
  const bool packed = a.cu_seqlens_q.has_value();
  if (packed) {
    const int64_t count = a.cu_seqlens_q->numel();
    TORCH_CHECK_VALUE(
        count > 0 && a.cu_seqlens_k,
        "cu_seqlens_q: expected at least one boundary, and cu_seqlens_k");
    TORCH_CHECK_VALUE(B == 1, "query: expected batch size 1 beside cu_seqlens_q; got ", B);
    TORCH_CHECK_VALUE(
        !a.key_lengths, "key_lengths: expected None beside cu_seqlens_q; got a tensor");
    check_integers("cu_seqlens_q", a.cu_seqlens_q, count, query);
    check_integers("cu_seqlens_k", a.cu_seqlens_k, count, query);
  }
  const int64_t sequences = packed ? a.cu_seqlens_q->numel() - 1 : B;
  check_integers("diagonal", a.diagonal, sequences, query);
  const int64_t full[4] = {
      sequences, H, packed ? a.max_seqlen_q : query.size(2), packed ? a.max_seqlen_k : key.size(2)};
  if (a.relative_index) {
    check_indexed(a, sequences, H, full[2], full[3]);
  } else {
    TORCH_CHECK_VALUE(
        !a.query_bias && !a.key_bias, "relative_index: expected a tensor beside query_bias");
    if (a.relative_bias)
      check_relative_bias(*a.relative_bias, sequences, H, distances(full[2], full[3]), query);
  }
  if (!a.attn_mask) return;
  bool fits = a.attn_mask->dim() == 4;
  for (int64_t d = 0; d < 4 && fits; ++d)
    fits = a.attn_mask->size(d) == 1 || a.attn_mask->size(d) == full[d];
  TORCH_CHECK_VALUE(
      fits, "attn_mask: expected a shape broadcastable to ", at::IntArrayRef(full), "; got ",
      a.attn_mask->sizes());
  check_memory("attn_mask", *a.attn_mask);
  const at::ScalarType type = a.attn_mask->scalar_type();
  check_type(
      "attn_mask", *a.attn_mask,
      type == at::kBool || type == at::kFloat ? type : query.scalar_type(), query);
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

// The converted tensors that a problem points into; undefined if there is none.
struct ConvertedTensors {
  Tensor key_lengths, diagonal, cu_seqlens_q, cu_seqlens_k;
  Tensor relative_bias, query_bias, key_bias, relative_index;
};

// Returns the place of distance 0 in a table of the biases of Lq queries by Lk keys.
inline int64_t zero_distance(int64_t Lq, int64_t Lk, bool lower_right) {
  return (lower_right ? Lk : Lq) - 1;
}

inline int64_t window_bound(std::optional<int64_t> bound) {
  return bound ? std::clamp(*bound, -kMostBound, kMostBound) : kNoBound;
}

// Sets the index and its tables. `zero` is the place of distance 0 in an index by distance.
inline void fill_in_indexed(
    AttentionProblem& p, ConvertedTensors& converted, const AttentionArguments& a, int64_t zero) {
  const Tensor& given = *a.relative_index;
  p.index_by_distance = given.dim() == 1;
  // One key's numbers for neighbouring queries lie in order.
  Tensor& index = converted.relative_index;
  index = given.to(at::kInt);
  index = p.index_by_distance ? index.flip(0) : index.t().contiguous();
  p.relative_index = index.const_data_ptr<int32_t>();
  p.index_stride[0] = 1;
  p.index_stride[1] = p.index_by_distance ? -1 : index.size(1);
  if (p.index_by_distance) p.relative_index += index.size(0) - 1 - zero;
  const at::ScalarType wide = accumulation_type(a.query.scalar_type());
  const auto convert = [&](const OptionalTensor& table, Tensor& kept) {
    if (!table) return;
    kept = table->to(wide);
    if (kept.stride(-1) != 1) kept = kept.contiguous();
    p.columns = kept.size(-1);
  };
  convert(a.relative_bias, converted.relative_bias);
  convert(a.query_bias, converted.query_bias);
  convert(a.key_bias, converted.key_bias);
  if (a.relative_bias) p.relative_bias = broadcast(converted.relative_bias.unsqueeze(2));
  if (a.query_bias) p.query_bias = strided(converted.query_bias);
  if (a.key_bias) p.key_bias = strided(converted.key_bias);
}

// Checks the arguments, and sets sizes, mask, scale, cap, window and sequences from them. Lq and Lk
// are those of the tensors; packed calls then replace them.
inline ConvertedTensors fill_in(AttentionProblem& p, const AttentionArguments& a) {
  check_arguments(a);
  p.dtype = kernel_type(a.query.scalar_type());
  p.batch = a.query.size(0);
  p.heads = a.query.size(1);
  p.kv_heads = a.key.size(1);
  p.Lq = a.query.size(2);
  p.Lk = a.key.size(2);
  p.E = a.query.size(3);
  p.Ev = a.value.size(3);
  p.scale = a.scale.value_or(1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(p.E, 1))));
  p.softcap = a.softcap.value_or(0);
  p.window_left = window_bound(a.window_left);
  p.window_right = window_bound(a.window_right);
  p.lower_right = a.lower_right;
  if (a.attn_mask) {
    p.mask = broadcast(*a.attn_mask);
    p.mask_kind = a.attn_mask->scalar_type() == at::kBool ? MaskKind::Bool
        : a.attn_mask->scalar_type() == at::kFloat        ? MaskKind::Float32
                                                          : MaskKind::QueryType;
  }
  ConvertedTensors converted;
  if (a.key_lengths) {
    converted.key_lengths = a.key_lengths->to(at::kLong).contiguous();
    p.key_lengths = converted.key_lengths.const_data_ptr<int64_t>();
  }
  if (a.diagonal) {
    converted.diagonal = a.diagonal->to(at::kLong).contiguous();
    p.diagonal = converted.diagonal.const_data_ptr<int64_t>();
  }
  if (a.cu_seqlens_q) {
    converted.cu_seqlens_q = a.cu_seqlens_q->to(at::kLong).contiguous();
    converted.cu_seqlens_k = a.cu_seqlens_k->to(at::kLong).contiguous();
    p.cu_seqlens_q = converted.cu_seqlens_q.const_data_ptr<int64_t>();
    p.cu_seqlens_k = converted.cu_seqlens_k.const_data_ptr<int64_t>();
    p.batch = converted.cu_seqlens_q.numel() - 1;
  }
  const bool packed = a.cu_seqlens_q.has_value();
  const int64_t zero =
      zero_distance(packed ? a.max_seqlen_q : p.Lq, packed ? a.max_seqlen_k : p.Lk, a.lower_right);
  if (a.relative_index && a.relative_index->numel() > 0) {
    fill_in_indexed(p, converted, a, zero);
  } else if (!a.relative_index && a.relative_bias && a.relative_bias->numel() > 0) {
    // In reverse, so that one key's biases for neighbouring queries lie in order.
    converted.relative_bias =
        a.relative_bias->to(accumulation_type(a.query.scalar_type())).flip(2).contiguous();
    p.relative_bias = broadcast(converted.relative_bias);
    p.relative_bias.data = static_cast<char*>(p.relative_bias.data) +
        (converted.relative_bias.size(2) - 1 - zero) * converted.relative_bias.element_size();
    p.relative_bias.stride[2] = 1;
    p.relative_bias.stride[3] = -1;
  }
  return converted;
}

}  // namespace trifuse
