// Plain calls of attention, padded and packed, with and without gradients.

#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "fast_path/ops.h"
#include "fast_path/split_heads_call.h"

namespace trifuse::fast_path {

// A bound of the window.
using Bound = std::optional<c10::SymInt>;

inline Bound right_bound(bool is_causal) { return is_causal ? Bound(0) : Bound(); }

// Returns whether a mask needs no conversion; `full` is the shape of the scores.
inline bool mask_fits(
    const Tensor& mask, at::ScalarType dtype, const std::array<int64_t, 4>& full) {
  const at::ScalarType type = mask.scalar_type();
  if (mask.dim() != 4 || (type != at::kBool && type != at::kFloat && type != dtype)) return false;
  for (int64_t d = 0; d < 4; ++d)
    if (mask.size(d) != 1 && mask.size(d) != full[d]) return false;
  return true;
}

inline bool integers_fit(const Tensor& t, int64_t count) {
  return t.dim() == 1 && t.size(0) == count &&
      (t.scalar_type() == at::kInt || t.scalar_type() == at::kLong);
}

// With cu_seqlens, sequences are packed: query, key and value have B = 1.
struct AttentionCall {
  Tensor query, key, value;
  OptionalTensor mask, key_lengths, cu_seqlens_q, cu_seqlens_k, seed;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // read with cu_seqlens
  double dropout_p;
  std::optional<double> scale;
  bool is_causal, enable_gqa, return_lse;
  // Whether the caller's tensors are (B, L, E), and the results (B, Lq, Ev) and (B, Lq).
  bool one_head = false;

  // Views tensors of three dimensions, and a mask of up to three, with four.
  void complete_dims() {
    one_head = query.dim() == 3 && key.dim() == 3 && value.dim() == 3 && query.is_cpu() &&
        !enable_gqa && !key_lengths;
    if (one_head)
      for (Tensor* t : {&query, &key, &value}) *t = t->unsqueeze(1);
    if (!mask || mask->dim() >= 4) return;
    if (one_head && mask->dim() == 3) {
      mask = mask->unsqueeze(1);
      return;
    }
    std::array<int64_t, 4> sizes = {1, 1, 1, 1};
    std::copy_n(mask->sizes().begin(), mask->dim(), sizes.end() - mask->dim());
    mask = mask->view(sizes);
  }

  // Some valid calls don't fit, because they need a broadcast or a conversion, which Python does.
  bool fits() const {
    const at::ScalarType dtype = query.scalar_type();
    if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4 || !is_floating(dtype) ||
        key.scalar_type() != dtype || value.scalar_type() != dtype || !is_probability(dropout_p))
      return false;
    const int64_t B = query.size(0), H = query.size(1), Hkv = key.size(1), Lk = key.size(2);
    if (key.size(0) != B || key.size(3) != query.size(3) || value.size(0) != B ||
        value.size(1) != Hkv || value.size(2) != Lk ||
        (H != Hkv && (!enable_gqa || Hkv == 0 || H % Hkv != 0)))
      return false;
    if (mask && !mask_fits(*mask, dtype, {B, H, query.size(2), Lk})) return false;
    if (cu_seqlens_q) {
      const int64_t boundaries = cu_seqlens_q->numel();
      return B == 1 && boundaries > 0 && integers_fit(*cu_seqlens_q, boundaries) &&
          integers_fit(*cu_seqlens_k, boundaries) && max_seqlen_q >= 0 && max_seqlen_k >= 0;
    }
    return !key_lengths || integers_fit(*key_lengths, B);
  }

  // Casts the tensors as autocast does for torch's own attention, except those in float64 and a
  // float32 mask, which the op takes unchanged.
  void autocast() {
    const c10::DeviceType device = query.device().type();
    if (!at::autocast::is_autocast_enabled(device)) return;
    const at::ScalarType dtype = at::autocast::get_autocast_dtype(device);
    const auto cast = [&](const Tensor& t) {
      return t.is_floating_point() && t.scalar_type() != at::kDouble ? t.to(dtype) : t;
    };
    query = cast(query);
    key = cast(key);
    value = cast(value);
    if (mask && mask->scalar_type() != at::kFloat) mask = cast(*mask);
  }

  int64_t longest_queries() const { return cu_seqlens_q ? max_seqlen_q : query.size(2); }
  int64_t longest_keys() const { return cu_seqlens_k ? max_seqlen_k : key.size(2); }

  std::tuple<Tensor, Tensor> run() const {
    static const Overloads<std::tuple<Tensor, Tensor>(
        const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        c10::SymInt, c10::SymInt, std::optional<double>, std::optional<double>, Bound, Bound, bool,
        double)>
        op("trifuse::attention_forward");
    const OptionalTensor absent;
    return run_kernel(
        op.of(query), query, key, value, mask, /*relative_bias=*/absent, /*query_bias=*/absent,
        /*key_bias=*/absent, /*relative_index=*/absent, key_lengths, /*diagonal=*/absent,
        cu_seqlens_q, cu_seqlens_k, seed, longest_queries(), longest_keys(), scale,
        /*softcap=*/std::nullopt, /*window_left=*/Bound(), right_bound(is_causal),
        /*lower_right=*/false, dropout_p);
  }
};

// Returns a bit for each dimension over which a mask is broadcast. The mask may be replaced between
// the passes, and the op can't detect that if both shapes fit.
inline int64_t broadcast_dims(const OptionalTensor& mask) {
  int64_t bits = 0;
  for (int64_t d = 0; mask && d < mask->dim(); ++d)
    if (mask->size(d) == 1) bits |= int64_t(1) << d;
  return bits;
}

using AttentionBackward =
    Overloads<std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(
        const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
        const OptionalTensor&, const OptionalTensor&, const Tensor&, const Tensor&, c10::SymInt,
        c10::SymInt, std::optional<double>, std::optional<double>, Bound, Bound, bool, double,
        std::array<bool, 7>)>;

inline const AttentionBackward& attention_backward_op() {
  static const AttentionBackward op("trifuse::attention_backward");
  return op;
}

// This backward serves calls whose key and value, or query too, lie side by side, as a joint
// projection computes them. Their gradients lie side by side too, so that no copy joins them.
using SideBySideBackward = std::tuple<Tensor, Tensor>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const Tensor&, const Tensor&, int64_t, int64_t, std::optional<double>, std::optional<int64_t>,
    double, bool);

class Attention : public torch::autograd::Function<Attention> {
 public:
  // Returns out, and the logsumexp if it is requested.
  static variable_list forward(
      AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
      const OptionalTensor& mask, const AttentionCall& call) {
    auto [out, logsumexp] = call.run();
    context->save_for_backward(
        {query, key, value, or_undefined(mask), or_undefined(call.key_lengths),
         or_undefined(call.seed), out, logsumexp, or_undefined(call.cu_seqlens_q),
         or_undefined(call.cu_seqlens_k)});
    keep(
        *context, given_bits({true, true, true, mask.has_value()}), call.scale, call.is_causal,
        call.dropout_p, broadcast_dims(mask), call.longest_queries(), call.longest_keys());
    context->set_materialize_grads(false);
    if (call.return_lse) return {out, logsumexp};
    return {out};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list found(5);  // one for each argument of forward
    if (none_defined(grads)) return found;
    const variable_list saved = context->get_saved_variables();
    const Tensor &query = saved[0], &key = saved[1], &value = saved[2], &out = saved[6],
                 &logsumexp = saved[7];
    const auto options = kept(*context);
    const Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros(out.sizes(), out.options());
    const OptionalTensor mask = optional(saved[3]);
    TORCH_CHECK_VALUE(
        broadcast_dims(mask) == options[4].toInt(),
        "attn_mask: expected the shape that it had in the forward; got ", mask->sizes());
    const auto given = needed_gradients<4>(*context, options[0].toInt());
    const bool plain = all_plain(grads) && all_plain(saved);
    const bool together = side_by_side({query, key, value});
    if (kernels_suffice(plain) && query.is_cpu() && (together || side_by_side({key, value})) &&
        given == std::array{true, true, true, false} &&
        (grads.size() == 1 || !grads[1].defined())) {
      static const auto op =
          find<SideBySideBackward>("trifuse::attention_backward_side_by_side", "");
      const auto [of_query, joint] = run_kernel(
          op, grad_out, query, key, value, mask, optional(saved[4]), optional(saved[8]),
          optional(saved[9]), optional(saved[5]), out, logsumexp, options[5].toInt(),
          options[6].toInt(), options[1].toOptional<double>(),
          options[2].toBool() ? std::optional<int64_t>(0) : std::nullopt, options[3].toDouble(),
          together);
      const at::AutoDispatchBelowADInplaceOrView guard;
      for (int64_t i = 0; i < joint.size(0); ++i) found[3 - joint.size(0) + i] = joint.select(0, i);
      if (!together) found[0] = of_query;
      return found;
    }
    const std::array<bool, 7> needed = {given[0], given[1], given[2], given[3]};
    const OptionalTensor absent;
    std::tie(found[0], found[1], found[2], found[3], std::ignore, std::ignore, std::ignore) =
        run_backward(
            plain, attention_backward_op().of(query), grad_out,
            grads.size() > 1 ? optional(grads[1]) : std::nullopt, query, key, value, mask,
            /*relative_bias=*/absent, /*query_bias=*/absent, /*key_bias=*/absent,
            /*relative_index=*/absent, /*key_lengths=*/optional(saved[4]), /*diagonal=*/absent,
            /*cu_seqlens_q=*/optional(saved[8]), /*cu_seqlens_k=*/optional(saved[9]),
            /*seed=*/optional(saved[5]), out, logsumexp, c10::SymInt(options[5].toInt()),
            c10::SymInt(options[6].toInt()), /*scale=*/options[1].toOptional<double>(),
            /*softcap=*/std::nullopt, /*window_left=*/Bound(), right_bound(options[2].toBool()),
            /*lower_right=*/false, /*dropout_p=*/options[3].toDouble(), needed);
    for (size_t i = 0; i < given.size(); ++i)
      if (!given[i]) found[i] = Tensor();
    return found;
  }
};

// Returns out or, with return_lse, (out, logsumexp).
inline variable_list run(AttentionCall& call) {
  variable_list results;
  if (records(call.query, call.key, call.value, call.mask)) {
    results = Attention::apply(call.query, call.key, call.value, call.mask, call);
  } else {
    auto [out, logsumexp] = call.run();
    results.push_back(out);
    if (call.return_lse) results.push_back(logsumexp);
  }
  if (call.one_head)
    for (Tensor& result : results) result = result.squeeze(1);
  return results;
}

}  // namespace trifuse::fast_path
