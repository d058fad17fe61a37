// Calls of whole post-norm layers whose weights may change. Each layer is one node of autograd.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "fast_path/activation_call.h"
#include "fast_path/attention_call.h"
#include "fast_path/dropout_add_layer_norm_call.h"

namespace trifuse::fast_path {

// The activations of a feed-forward network, by their names in Python.
enum class ActivationKind : int64_t { Gelu, GeluTanh, QuickGelu, Relu, Silu };

constexpr c10::string_view kActivations[] = {"gelu", "gelu_tanh", "quick_gelu", "relu", "silu"};

inline std::optional<ActivationKind> activation_of(std::optional<c10::string_view> name) {
  for (size_t i = 0; i < std::size(kActivations); ++i)
    if (name == kActivations[i]) return static_cast<ActivationKind>(i);
  return {};
}

inline c10::string_view name_of(ActivationKind activation) {
  return kActivations[static_cast<int64_t>(activation)];
}

inline Tensor activate(const Tensor& x, ActivationKind activation) {
  if (activation == ActivationKind::Relu) return at::relu(x);
  const c10::string_view name = name_of(activation);
  return x.is_cpu() ? run(ActivationCall{x, {}, name, -1}) : activate_by_torch(x, name);
}

// `x` is the input of the activation.
inline Tensor activate_backward(const Tensor& grad, const Tensor& x, ActivationKind activation) {
  if (activation == ActivationKind::Relu) return at::threshold_backward(grad, x, 0);
  const c10::string_view name = name_of(activation);
  return x.is_cpu() ? Activate::run_backward(grad, x, name)
                    : activate_backward_by_torch(grad, x, name);
}

// A layer of an encoder whose weights may change and whose products are torch's:
//   h = norm1(x + dropout(attention(x) Woᵀ + bo))
//   out = norm2(h + dropout(f(h Wuᵀ + bu) Wdᵀ + bd))
//
// On a GPU, if Python and autograd call the parts of such a layer one by one, the GPU waits for the
// host: there are about forty launches for each layer and step. Here they follow one another in
// C++. The whole layer is one node, which adds up the gradients of h and of x within the products
// that compute them.
struct PostNormLayer {
  // The indices of the tensors that may have gradients. Each weight's bias is 6 places after it.
  enum { kX, kQuery, kKey, kValue, kOutput, kUp, kDown, kNorms = 13, kTensors = 17 };
  static constexpr int kBias = 6;

  std::array<Tensor, kTensors> tensors;  // undefined if there is none
  OptionalTensor mask, cu_seqlens;
  int64_t longest, heads;
  double scale;
  ActivationKind activation;
  std::array<double, 2> eps;
  std::array<double, 3> dropout_p;  // of the attention's weights, and before each norm
  std::array<OptionalTensor, 3> seeds;

  // Everything that the backward reads besides the arguments. Products and norms have one row for
  // each token; the attention's tensors have four dimensions.
  struct Values {
    Tensor query, key, value, attended, logsumexp, projected, mean1, rstd1, normed, up, activated,
        down, mean2, rstd2;

    std::array<Tensor*, 14> all() {
      return {&query, &key,    &value, &attended,  &logsumexp, &projected, &mean1,
              &rstd1, &normed, &up,    &activated, &down,      &mean2,     &rstd2};
    }
  };

  const Tensor& x() const { return tensors[kX]; }
  int64_t features() const { return x().size(2); }

  Tensor rows_of(const Tensor& t) const { return t.reshape({x().size(0) * x().size(1), -1}); }

  // Views rows as (B, H, L, E), or the reverse.
  Tensor heads_of(const Tensor& rows) const {
    return rows.view({x().size(0), x().size(1), heads, -1}).transpose(1, 2);
  }
  Tensor join_heads(const Tensor& t) const { return rows_of(t.transpose(1, 2)); }

  // Returns a transposed view of a matrix; t() would take three calls of the dispatcher.
  static Tensor transposed(const Tensor& t) {
    return t.as_strided({t.size(1), t.size(0)}, {t.stride(1), t.stride(0)}, t.storage_offset());
  }

  // at::linear would make several other calls before these.
  Tensor product(const Tensor& rows, int weight) const {
    const Tensor &bias = tensors[weight + kBias], w = transposed(tensors[weight]);
    return bias.defined() ? at::addmm(bias, rows, w) : at::mm(rows, w);
  }

  AttentionCall attention_call(const Tensor& query, const Tensor& key, const Tensor& value) const {
    AttentionCall call;
    call.query = query;
    call.key = key;
    call.value = value;
    call.mask = mask;
    call.cu_seqlens_q = call.cu_seqlens_k = cu_seqlens;
    call.max_seqlen_q = call.max_seqlen_k = longest;
    call.dropout_p = dropout_p[0];
    call.scale = scale;
    call.is_causal = call.enable_gqa = call.return_lse = false;
    call.seed = seeds[0];
    return call;
  }

  // `which`: 0 or 1.
  NormCall norm_call(const Tensor& rows, const Tensor& residual, int which) const {
    NormCall call;
    call.x = rows;
    call.residual = residual;
    call.weight = optional(tensors[kNorms + 2 * which]);
    call.bias = optional(tensors[kNorms + 2 * which + 1]);
    call.seed = seeds[1 + which];
    call.dropout_p = dropout_p[1 + which];
    call.eps = eps[which];
    call.rms_norm = call.prenorm = false;
    return call;
  }

  bool fits() const {
    const at::ScalarType dtype = x().scalar_type();
    if (x().dim() != 3 || x().numel() == 0 || !x().is_contiguous() || heads <= 0) return false;
    const auto fits_linear = [&](int weight, int64_t out, int64_t in) {
      const Tensor &w = tensors[weight], &b = tensors[weight + kBias];
      return w.dim() == 2 && w.size(0) == out && w.size(1) == in && w.scalar_type() == dtype &&
          (!b.defined() || (b.dim() == 1 && b.size(0) == out && b.scalar_type() == dtype));
    };
    if (tensors[kQuery].dim() != 2 || tensors[kUp].dim() != 2) return false;
    const int64_t N = features(), attended = tensors[kQuery].size(0), wide = tensors[kUp].size(0);
    if (attended % heads || !fits_linear(kQuery, attended, N) || !fits_linear(kKey, attended, N) ||
        !fits_linear(kValue, attended, N) || !fits_linear(kOutput, N, attended) ||
        !fits_linear(kUp, wide, N) || !fits_linear(kDown, N, wide))
      return false;
    for (int which : {0, 1})
      if (!norm_call(x(), x(), which).fits() || !is_probability(dropout_p[1 + which])) return false;
    const int64_t B = x().size(0), L = x().size(1);
    return is_probability(dropout_p[0]) && (!mask || mask_fits(*mask, dtype, {B, heads, L, L})) &&
        (!cu_seqlens ||
         (B == 1 && longest >= 0 && cu_seqlens->numel() > 0 &&
          integers_fit(*cu_seqlens, cu_seqlens->numel())));
  }

  // Computes the output without a graph. The caller has disabled autograd and autocast. Values that
  // no backward reads are released as soon as they have been used, unless `all_kept`.
  Tensor compute(Values& v, bool all_kept) const {
    const Tensor rows = rows_of(x());
    v.query = heads_of(product(rows, kQuery));
    v.key = heads_of(product(rows, kKey));
    v.value = heads_of(product(rows, kValue));
    std::tie(v.attended, v.logsumexp) = attention_call(v.query, v.key, v.value).run();
    v.projected = product(join_heads(v.attended), kOutput);
    std::tie(v.normed, std::ignore, v.mean1, v.rstd1) = norm_call(v.projected, rows, 0).run();
    if (!all_kept) v = Values{.normed = v.normed};
    v.up = product(v.normed, kUp);
    v.activated = activate(v.up, activation);
    if (!all_kept) v.up.reset();
    v.down = product(v.activated, kDown);
    Tensor out;
    std::tie(out, std::ignore, v.mean2, v.rstd2) = norm_call(v.down, v.normed, 1).run();
    return out.view(x().sizes());
  }

  // Computes the same with a graph, for derivatives of the backward.
  Tensor record() const {
    const Tensor rows = rows_of(x());
    const auto norm = [&](const Tensor& t, const Tensor& residual, int which) {
      NormCall call = norm_call(t, residual, which);
      return fast_path::run(call)[0];
    };
    const auto linear = [&](const Tensor& t, int weight) {
      return at::linear(t, tensors[weight], optional(tensors[weight + kBias]));
    };
    AttentionCall call = attention_call(
        heads_of(linear(rows, kQuery)), heads_of(linear(rows, kKey)),
        heads_of(linear(rows, kValue)));
    const Tensor attended = join_heads(fast_path::run(call)[0]);
    const Tensor normed = norm(linear(attended, kOutput), rows, 0);
    const Tensor activated = activate(linear(normed, kUp), activation);
    return norm(linear(activated, kDown), normed, 1).view(x().sizes());
  }
};

class PostNorm : public torch::autograd::Function<PostNorm> {
  using Layer = PostNormLayer;
  using Found = std::array<Tensor, Layer::kTensors>;  // gradients of the layer's tensors
  using Needed = std::array<bool, Layer::kTensors>;

 public:
  // `given` holds the layer's tensors that are defined.
  static variable_list forward(
      AutogradContext* context, at::TensorList /*given*/, const Layer& layer) {
    Layer::Values v;
    Tensor out;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      out = layer.compute(v, true);
    }
    variable_list saved(layer.tensors.begin(), layer.tensors.end());
    for (const Tensor* each : v.all()) saved.push_back(*each);
    for (const OptionalTensor* each :
         {&layer.mask, &layer.cu_seqlens, &layer.seeds[0], &layer.seeds[1], &layer.seeds[2]})
      saved.push_back(or_undefined(*each));
    int64_t given = 0;
    for (int i = 0; i < Layer::kTensors; ++i) given |= int64_t(layer.tensors[i].defined()) << i;
    context->save_for_backward(std::move(saved));
    keep(
        *context, given, layer.longest, layer.heads, layer.scale,
        static_cast<int64_t>(layer.activation), layer.eps[0], layer.eps[1], layer.dropout_p[0],
        layer.dropout_p[1], layer.dropout_p[2], broadcast_dims(layer.mask));
    context->set_materialize_grads(false);
    return {out};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto options = kept(*context);
    const int64_t given = options[0].toInt();
    const Needed needed = needed_gradients<Layer::kTensors>(*context, given);
    Found found;
    if (grads[0].defined()) {
      const variable_list saved = context->get_saved_variables();
      Layer layer;
      Layer::Values v;
      read_saved(saved, options, layer, v);
      found = kernels_suffice(all_plain(grads) && all_plain(saved))
          ? differentiate(layer, v, grads[0], needed)
          : differentiate_recorded(layer, grads[0], needed);
    }
    variable_list results;  // one for each tensor that was given, and one for the layer
    for (int i = 0; i < Layer::kTensors; ++i)
      if (given >> i & 1) results.push_back(needed[i] ? found[i] : Tensor());
    results.emplace_back();
    return results;
  }

 private:
  static void read_saved(
      const variable_list& saved, c10::ArrayRef<c10::IValue> options, Layer& layer,
      Layer::Values& v) {
    const Tensor* next = saved.data();
    for (Tensor& each : layer.tensors) each = *next++;
    for (Tensor* each : v.all()) *each = *next++;
    for (OptionalTensor* each :
         {&layer.mask, &layer.cu_seqlens, &layer.seeds[0], &layer.seeds[1], &layer.seeds[2]})
      *each = optional(*next++);
    layer.longest = options[1].toInt();
    layer.heads = options[2].toInt();
    layer.scale = options[3].toDouble();
    layer.activation = static_cast<ActivationKind>(options[4].toInt());
    layer.eps = {options[5].toDouble(), options[6].toDouble()};
    layer.dropout_p = {options[7].toDouble(), options[8].toDouble(), options[9].toDouble()};
    TORCH_CHECK_VALUE(
        broadcast_dims(layer.mask) == options[10].toInt(),
        "attn_mask: expected the shape that it had in the forward; got ", layer.mask->sizes());
  }

  // Computes the gradients with kernels only. Products add their result to the gradient that flows
  // through the residual. So that gradient is rounded only once. No other code holds its tensor.
  static Found differentiate(
      const Layer& layer, const Layer::Values& v, const Tensor& grad_out, const Needed& needed) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
    Found found;
    const auto& t = layer.tensors;
    const auto find_weight = [&](int weight, const Tensor& grad, const Tensor& rows) {
      if (needed[weight]) found[weight] = at::mm(Layer::transposed(grad), rows);
      if (needed[weight + Layer::kBias]) found[weight + Layer::kBias] = grad.sum(0);
    };
    // Whether gradients are needed below each value of the forward, from the first to the last.
    const auto of_linear = [&](int weight) {
      return needed[weight] || needed[weight + Layer::kBias];
    };
    const bool below_attended = needed[Layer::kX] || of_linear(Layer::kQuery) ||
        of_linear(Layer::kKey) || of_linear(Layer::kValue);
    const bool below_projected = below_attended || of_linear(Layer::kOutput);
    const bool below_normed = below_projected || needed[Layer::kNorms] || needed[Layer::kNorms + 1];
    const bool below_up = below_normed || of_linear(Layer::kUp);
    const bool below_down = below_up || of_linear(Layer::kDown);

    const Tensor rows = layer.rows_of(layer.x());
    const auto [grad_down, grad_normed] = differentiate_norm(
        layer.norm_call(v.down, v.normed, 1), v.mean2, v.rstd2, layer.rows_of(grad_out),
        {below_down, below_normed, needed[Layer::kNorms + 2], needed[Layer::kNorms + 3], false},
        &found[Layer::kNorms + 2]);
    if (!below_down) return found;
    find_weight(Layer::kDown, grad_down, v.activated);
    if (!below_up) return found;
    const Tensor grad_up =
        activate_backward(at::mm(grad_down, t[Layer::kDown]), v.up, layer.activation);
    find_weight(Layer::kUp, grad_up, v.normed);
    if (!below_normed) return found;
    grad_normed.addmm_(grad_up, t[Layer::kUp]);

    const auto [grad_projected, grad_rows] = differentiate_norm(
        layer.norm_call(v.projected, rows, 0), v.mean1, v.rstd1, grad_normed,
        {below_projected, needed[Layer::kX], needed[Layer::kNorms], needed[Layer::kNorms + 1],
         false},
        &found[Layer::kNorms]);
    if (!below_projected) return found;
    find_weight(Layer::kOutput, grad_projected, layer.join_heads(v.attended));
    if (!below_attended) return found;
    const Tensor grad_attended = layer.heads_of(at::mm(grad_projected, t[Layer::kOutput]));
    const OptionalTensor absent;
    const AttentionCall call = layer.attention_call(v.query, v.key, v.value);
    const auto grads = run_kernel(
        attention_backward_op().of(rows), grad_attended, absent, call.query, call.key, call.value,
        call.mask, absent, absent, absent, absent, call.key_lengths, absent, call.cu_seqlens_q,
        call.cu_seqlens_k, call.seed, v.attended, v.logsumexp, c10::SymInt(call.longest_queries()),
        c10::SymInt(call.longest_keys()), call.scale, std::optional<double>(), Bound(), Bound(),
        false, call.dropout_p, std::array<bool, 7>{true, true, true});
    // Query, key and value side by side, (rows, 3 · attended features), which takes one launch
    // instead of three.
    const Tensor grad_heads = at::cat(
        {layer.join_heads(std::get<0>(grads)), layer.join_heads(std::get<1>(grads)),
         layer.join_heads(std::get<2>(grads))},
        1);
    const auto find_three = [&](int first, const auto& compute) {
      const bool together = needed[first] && needed[first + 1] && needed[first + 2];
      const Tensor all = together ? compute(grad_heads) : Tensor();
      const int64_t each = grad_heads.size(1) / 3;
      for (int i = 0; i < 3; ++i)
        if (needed[first + i])
          found[first + i] = together ? all.narrow(0, i * each, each)
                                      : compute(grad_heads.narrow(1, i * each, each));
    };
    find_three(
        Layer::kQuery, [&](const Tensor& grad) { return at::mm(Layer::transposed(grad), rows); });
    find_three(Layer::kQuery + Layer::kBias, [](const Tensor& grad) { return grad.sum(0); });
    if (needed[Layer::kX])
      grad_rows.addmm_(
          grad_heads, at::cat({t[Layer::kQuery], t[Layer::kKey], t[Layer::kValue]}, 0));
    if (needed[Layer::kX]) found[Layer::kX] = grad_rows.view(layer.x().sizes());
    return found;
  }

  // Returns the gradients of a norm's x and residual; stores those of its weight and its bias.
  static std::pair<Tensor, Tensor> differentiate_norm(
      const NormCall& call, const Tensor& mean, const Tensor& rstd, const Tensor& grad,
      std::array<bool, 5> needed, Tensor* of_vectors) {
    // x and residual have one gradient if nothing is dropped between them.
    const bool shared = !call.seed && (needed[0] || needed[1]);
    if (shared) {
      needed[0] = true;
      needed[1] = false;
    }
    auto [of_x, of_residual, of_weight, of_bias, of_x_bias] = run_kernel(
        norm_backward_op().of(call.x), grad, OptionalTensor(), call.x, call.residual, call.weight,
        call.bias, call.x_bias, call.seed, mean, rstd, call.dropout_p, call.eps, call.rms_norm,
        call.prenorm, call.sum_dtype(), needed);
    if (needed[2]) of_vectors[0] = of_weight;
    if (needed[3]) of_vectors[1] = of_bias;
    // Both may be the same tensor. The caller adds to the second after it has read the first.
    return {of_x, shared ? of_x : of_residual};
  }

  // Computes the gradients in a way that can itself be differentiated or batched: through the
  // gradients of the parts, which are computed once more.
  static Found differentiate_recorded(
      const Layer& layer, const Tensor& grad_out, const Needed& needed) {
    const bool create_graph = at::GradMode::is_enabled();
    Found found;
    const at::AutoGradMode recording(true);
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
    // Uses aliases, so that a tensor that the layer holds twice, or from which x was computed, has
    // a separate gradient in each place, and so that its hooks do not run here.
    Layer aliased = layer;
    variable_list inputs;
    for (int i = 0; i < Layer::kTensors; ++i) {
      if (!needed[i]) continue;
      aliased.tensors[i] = layer.tensors[i].view_as(layer.tensors[i]);
      inputs.push_back(aliased.tensors[i]);
    }
    variable_list grads = torch::autograd::grad(
        {aliased.record()}, inputs, {grad_out}, /*retain_graph=*/true, create_graph,
        /*allow_unused=*/true);
    auto next = grads.begin();
    for (int i = 0; i < Layer::kTensors; ++i)
      if (needed[i]) found[i] = std::move(*next++);
    return found;
  }
};

inline Tensor run(const PostNormLayer& layer) {
  variable_list given;
  bool recorded = false;
  for (const Tensor& each : layer.tensors) {
    if (!each.defined()) continue;
    recorded = recorded || each.requires_grad();
    given.push_back(each);
  }
  if (recorded && at::GradMode::is_enabled())
    return PostNorm::apply(at::TensorList(given), layer)[0];
  const at::AutoDispatchBelowADInplaceOrView guard;
  PostNormLayer::Values values;
  return layer.compute(values, false);
}

// Draws the seeds of all dropouts in the layers at once.
inline void draw_seeds(std::vector<PostNormLayer>& layers, const Tensor& like) {
  int64_t count = 0;
  for (const PostNormLayer& layer : layers)
    for (double p : layer.dropout_p) count += p != 0;
  if (count == 0) return;
  const at::AutoDispatchBelowADInplaceOrView guard;
  const Tensor drawn = random_seeds(count, like);
  int64_t next = 0;
  for (PostNormLayer& layer : layers)
    for (int i = 0; i < 3; ++i)
      if (layer.dropout_p[i] != 0) layer.seeds[i] = drawn.narrow(0, next++, 1);
}

}  // namespace trifuse::fast_path
