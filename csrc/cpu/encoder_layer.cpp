// torch.ops.trifuse.encoder_layer: a layer of a Transformer's encoder, or of a decoder without
// cross attention, for inference.
//
// The kernels of linear, attention and dropout_add_layer_norm run one after another on pointers
// into one workspace. For a short sentence, a layer takes less time than Python and torch's
// dispatcher need to call its parts. Results are those of the parts, bit for bit.
//
//   norm last:   h = norm1(x + attend(x));          out = norm2(h + feed_forward(h))
//   norm first:  h = x + attend(norm1(x));          out = h + feed_forward(norm2(h))
//
//   attend(x) = attention(x Wq + bq, x Wk + bk, x Wv + bv) Wo + bo
//   feed_forward(h) = activation(h W1 + b1) W2 + b2, or (activation(h W1 + b1) * (h V + c)) W2 + b2
//
// Several query heads may share one key head. Queries and keys may be normalised, head by head,
// and then rotated by their positions (Su et al., "RoFormer", 2021). Scores may have a bias that
// depends on the distance between query and key (Raffel et al., "T5", 2020). While decoding, the
// keys and values of earlier tokens come from a cache, to which those of x are appended.
//
// Floor: with few tokens, the bytes of the weights at the copy rate; with many, the operations of
// the products.

#include <ATen/MemoryOverlap.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cpu/kernels.h"
#include "cpu/memory.h"
#include "cpu/parallel.h"
#include "cpu/run.h"
#include "cpu/streaming.h"

namespace trifuse {
namespace {

using OptionalTensors = c10::List<OptionalTensor>;

// The arguments of the op except x. Sizes as in Layer.
struct Arguments {
  const OptionalTensor& attn_mask;   // as in attention_forward
  const OptionalTensor& cu_seqlens;  // where packed sequences begin; then B is 1
  int64_t max_seqlen;                // beside cu_seqlens
  // Wq, Wk, Wv or all three as one; Wo, W1, perhaps V, W2. Packed, or (N, K) with contiguous rows
  // or, without a V, contiguous columns.
  at::TensorList weights;
  const OptionalTensors& biases;  // of each weight
  // Weight and bias of the first norm and of the second; perhaps the weights of RMSNorm for the
  // heads of queries and for those of keys.
  const OptionalTensors& norms;
  int64_t num_heads, num_key_heads, head_dim, intermediate_size;
  double scale;
  Activation activation;
  bool norm_first, rms_norm;
  bool first_norm;  // whether there is one; with norm_first it may be missing
  int64_t window_left, window_right;
  double eps[2], head_eps;
  const OptionalTensor &key_cache, &value_cache;  // (B, G, S, E), written to
  int64_t past;                                   // tokens in the cache before the call
  // (1 or B, L, an even number of features of a head, the first ones, which are rotated) or null
  const OptionalTensor &cos, &sin;
  bool rotary_in_float32;  // whether only the rotation's result is rounded to the type of x
  const OptionalTensor& relative_bias;  // as in attention_forward, by distance

  bool joint() const { return weights.size() < 6; }       // Wq, Wk and Wv are one weight
  bool gated() const { return weights.size() % 2 == 1; }  // there is a V
  bool packed() const { return weights[0].scalar_type() == at::kByte; }
  bool normalises_heads() const { return norms.size() > 4; }
  // Features of queries, of keys, and of queries, keys and values together.
  int64_t query_features() const { return num_heads * head_dim; }
  int64_t key_features() const { return num_key_heads * head_dim; }
  int64_t all_features() const { return query_features() + 2 * key_features(); }

  // The number of keys that queries attend to: all of the cache so far and of x, or as many as the
  // mask has.
  int64_t keys_seen(int64_t L) const {
    const int64_t masked = attn_mask && attn_mask->dim() == 4 ? attn_mask->size(3) : 0;
    return std::max(past + L, masked);
  }
};

void check_rotary(const Tensor& x, const Arguments& a) {
  TORCH_CHECK_VALUE(
      a.cos.has_value() == a.sin.has_value(), "cos: expected a sin beside it, or neither");
  if (!a.cos) return;
  for (const auto& [name, t] : {std::pair("cos", a.cos), std::pair("sin", a.sin)}) {
    const int64_t features = t->dim() == 3 ? t->size(2) : 0;
    TORCH_CHECK_VALUE(
        features > 0 && features <= a.head_dim && features % 2 == 0, name,
        ": expected 3 dimensions, the last an even number up to ", a.head_dim, "; got shape ",
        t->sizes());
    check_shape(name, *t, {t->size(0) == 1 ? 1 : x.size(0), x.size(1), a.cos->size(2)});
    check_type(name, *t, x.scalar_type(), x);
    TORCH_CHECK_VALUE(
        t->stride(2) == 1, name, ": expected contiguous features; got strides ", t->strides());
  }
}

void check_cache(const Tensor& x, const Arguments& a) {
  TORCH_CHECK_VALUE(
      a.key_cache.has_value() == a.value_cache.has_value() && !(a.key_cache && a.cu_seqlens),
      "key_cache: expected a value_cache beside it, and no cu_seqlens");
  if (!a.key_cache) return;
  const int64_t S = a.key_cache->dim() == 4 ? a.key_cache->size(2) : 0;
  for (const auto& [name, cache] :
       {std::pair("key_cache", a.key_cache), std::pair("value_cache", a.value_cache)}) {
    check_memory(name, *cache);
    check_shape(name, *cache, {x.size(0), a.num_key_heads, S, a.head_dim});
    check_type(name, *cache, x.scalar_type(), x);
    TORCH_CHECK_VALUE(
        a.head_dim == 1 || cache->stride(3) == 1, name,
        ": expected contiguous features; got strides ", cache->strides());
    TORCH_CHECK_VALUE(
        at::has_internal_overlap(*cache) != at::MemOverlap::Yes, name,
        ": expected memory of its own for each sequence, head and token; got strides ",
        cache->strides());
  }
  TORCH_CHECK_VALUE(
      a.past >= 0 && a.past <= S - x.size(1), "past: expected a cache with room for ", x.size(1),
      " more tokens after ", a.past, "; got room for ", S, " in all");
  TORCH_CHECK_VALUE(
      a.keys_seen(x.size(1)) <= S, "attn_mask: expected no more keys than the cache has room for, ",
      S, "; got shape ", a.attn_mask->sizes());
}

void check(const Tensor& x, const Arguments& a) {
  TORCH_CHECK_VALUE(
      x.dim() == 3 && x.is_contiguous(),
      "x: expected a contiguous tensor of 3 dimensions; got shape ", x.sizes(), " and strides ",
      x.strides());
  check_memory("x", x);
  TORCH_CHECK_TYPE(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
      "x: expected float32 or bfloat16; got ", x.scalar_type());
  const auto count = a.weights.size();
  TORCH_CHECK_VALUE(
      count >= 4 && count <= 7 && a.biases.size() == count &&
          (a.norms.size() == 4 || a.norms.size() == 6),
      "weights: expected 4 to 7, as many biases, and 4 or 6 vectors of norms; got ", count, ", ",
      a.biases.size(), " and ", a.norms.size());
  TORCH_CHECK_VALUE(
      a.num_heads > 0 && a.head_dim > 0 && a.intermediate_size > 0,
      "num_heads, head_dim, intermediate_size: expected at least 1; got ", a.num_heads, ", ",
      a.head_dim, ", ", a.intermediate_size);
  TORCH_CHECK_VALUE(
      a.num_key_heads > 0 && a.num_heads % a.num_key_heads == 0,
      "num_key_heads: expected a divisor of ", a.num_heads, "; got ", a.num_key_heads);
  TORCH_CHECK_VALUE(
      a.first_norm || a.norm_first, "first_norm: expected True, because the norms come last");
  // Checked before the workspace is sized, because weights with the right shapes bound the sizes.
  const auto check_weight = [&](size_t index, int64_t N, int64_t K) {
    if (!a.packed()) {
      const Tensor& weight = a.weights[index];
      check_memory("weight", weight);
      check_type("weight", weight, x.scalar_type(), x);
      check_shape("weight", weight, {N, K});
      TORCH_CHECK_VALUE(
          weight.stride(1) == 1 || (weight.stride(0) == 1 && !a.gated()),
          "weight: expected contiguous rows", a.gated() ? "" : " or columns", "; got strides ",
          weight.strides());
      return;
    }
    LinearProblem p{};
    p.dtype = kernel_type(x.scalar_type());
    p.N = N;
    p.K = K;
    check_packed(p, a.weights[index], x.scalar_type());
  };
  const int64_t D = x.size(2), F = a.intermediate_size;
  constexpr int64_t kMostFeatures = 1 << 24;  // the bytes of a weight then cannot overflow
  TORCH_CHECK_VALUE(
      a.num_heads <= kMostFeatures / a.head_dim && F <= kMostFeatures,
      "num_heads, head_dim, intermediate_size: expected fewer features; got ", a.num_heads, ", ",
      a.head_dim, ", ", F);
  const int64_t HE = a.query_features(), GE = a.key_features();
  size_t index = 0;
  if (a.joint()) {
    check_weight(index++, a.all_features(), D);
  } else {
    for (int64_t N : {HE, GE, GE}) check_weight(index++, N, D);
  }
  check_weight(index++, D, HE);
  check_weight(index++, F, D);
  if (a.gated()) check_weight(index++, F, D);
  check_weight(index, D, F);
  check_rotary(x, a);
  // A wider weight would make the result as wide.
  for (size_t i = 0; a.rms_norm && i < a.norms.size(); ++i)
    if (const OptionalTensor weight = a.norms[i]) check_type("weight", *weight, x.scalar_type(), x);
  check_cache(x, a);
}

// Allocates pieces of a workspace, each aligned to a cache line.
class Pieces {
 public:
  static int64_t rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

  explicit Pieces(int64_t bytes)
      : memory_(workspace(bytes)), next_(memory_.mutable_data_ptr<uint8_t>()) {}

  void* take(int64_t bytes) {
    void* piece = next_;
    next_ += rounded(bytes);
    return piece;
  }

 private:
  Tensor memory_;
  uint8_t* next_;
};

// One call. Sizes: B sequences of L tokens make R rows; D features, H query heads and G key heads
// with E features each, F features between the two products of the feed-forward network.
class Layer {
 public:
  Layer(const Tensor& x, const Arguments& a)
      : x_(x), a_(a), B_(x.size(0)), L_(x.size(1)), R_(B_ * L_), D_(x.size(2)),
        HE_(a.query_features()), F_(a.intermediate_size),
        size_(static_cast<int64_t>(x.element_size())),
        normed_rows_(R_ * (a.normalises_heads() ? a.num_heads : 1)),
        pieces_(
            Pieces::rounded(R_ * a.all_features() * size_) + Pieces::rounded(R_ * HE_ * size_) +
            3 * Pieces::rounded(R_ * D_ * size_) + Pieces::rounded(R_ * F_ * size_) +
            2 * Pieces::rounded(normed_rows_ * kWideSize) +
            Pieces::rounded(R_ * a.num_heads * kWideSize)),
        mean_(pieces_.take(normed_rows_ * kWideSize)),
        rstd_(pieces_.take(normed_rows_ * kWideSize)) {}

  Tensor run() {
    const bool first = a_.norm_first;
    void *qkv = rows(a_.all_features()), *attended = rows(HE_), *wide = rows(F_);
    void *update = rows(D_), *hidden = rows(D_), *normed = rows(D_);
    const Tensor out = empty(x_.sizes(), x_.options());
    const void* x = x_.const_data_ptr();
    size_t weight = a_.joint() ? 1 : 3;

    const bool normalise = first && a_.first_norm;
    if (normalise) norm(0, x, nullptr, normed, nullptr);
    project_heads(normalise ? normed : x, qkv);
    if (a_.normalises_heads()) normalise_heads(qkv);
    if (a_.cos) rotate_heads(qkv);
    attend(qkv, attended);
    linear(product(weight++, attended, HE_, D_, update));
    if (first) {
      norm(1, update, x, normed, hidden);
    } else {
      norm(0, update, x, hidden, nullptr);
    }
    LinearProblem up = product(weight++, first ? normed : hidden, D_, F_, wide);
    up.activation = a_.activation;
    if (a_.gated()) {
      up.gated = true;
      up.up = a_.weights[weight].const_data_ptr();
      if (!a_.packed()) {
        up.up_row = a_.weights[weight].stride(0);
        up.up_column = 1;
      }
      up.up_bias = vector("bias", a_.biases[weight++], F_);
    }
    linear(up);
    linear(product(weight, wide, F_, D_, update));
    if (first) {
      Tensor sum = out;
      at::add_out(sum, tensor(hidden), tensor(update));
    } else {
      norm(1, update, hidden, out.mutable_data_ptr(), nullptr);
    }
    return out;
  }

 private:
  static constexpr at::ScalarType kWide = at::kFloat;  // the type of sums
  static constexpr int64_t kWideSize = 4;

  void* rows(int64_t features) { return pieces_.take(R_ * features * size_); }
  Tensor tensor(void* data) const { return at::from_blob(data, x_.sizes(), x_.options()); }

  // Checks and describes a vector (N,).
  FeatureVector vector(const char* name, const OptionalTensor& t, int64_t N) {
    if (!t) return {};
    check_shape(name, *t, {N});
    check_type(name, *t, t->scalar_type() == kWide ? kWide : x_.scalar_type(), x_);
    return feature_vector(t, x_.scalar_type(), held_);
  }

  // The product with one of the weights, from K to N features.
  LinearProblem product(size_t index, const void* x, int64_t K, int64_t N, void* out) {
    LinearProblem p{};
    p.dtype = kernel_type(x_.scalar_type());
    p.M = R_;
    p.N = N;
    p.K = K;
    p.x = x;
    p.x_row = K;
    p.x_column = 1;
    if (a_.packed()) {
      p.packed = const_cast<void*>(a_.weights[index].const_data_ptr());
    } else {
      p.weight = a_.weights[index].const_data_ptr();
      p.weight_row = a_.weights[index].stride(0);
      p.weight_column = a_.weights[index].stride(1);
    }
    p.bias = vector("bias", a_.biases[index], N);
    p.out = out;
    return p;
  }

  static void linear(LinearProblem p) { linear(&p, 1); }
  static void linear(LinearProblem* problems, int64_t count) {
    if (problems->packed) run_linear(problems, count);
    else run_linear_unpacked(problems, count);
  }

  // The projections to queries, keys and values: one product, or three that run at once.
  void project_heads(const void* x, void* qkv) {
    if (a_.joint()) return linear(product(0, x, D_, a_.all_features(), qkv));
    LinearProblem problems[3];
    for (int64_t i = 0; i < 3; ++i)
      problems[i] = product(i, x, D_, heads_of(i) * a_.head_dim, part(qkv, i));
    linear(problems, 3);
  }

  // Queries (0), keys (1) or values (2): columns of one matrix, or a separate matrix each.
  int64_t heads_of(int64_t i) const { return i == 0 ? a_.num_heads : a_.num_key_heads; }
  void* part(void* qkv, int64_t i) const {
    const int64_t before = i == 0 ? 0 : HE_ + (i - 1) * a_.key_features();
    return static_cast<char*>(qkv) + before * (a_.joint() ? 1 : R_) * size_;
  }
  // From one token to the next, in elements.
  int64_t row_of(int64_t i) const {
    return a_.joint() ? a_.all_features() : heads_of(i) * a_.head_dim;
  }

  // RMSNorm of each head of the queries and of the keys, in place.
  void normalise_heads(void* qkv) {
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t heads = heads_of(i), E = a_.head_dim;
      RowTensor rows;
      rows.data = part(qkv, i);
      rows.dims = 2;
      rows.size[0] = R_;
      rows.stride[0] = row_of(i);
      rows.size[1] = heads;
      rows.stride[1] = E;
      DropoutAddLayerNormProblem p = norm_problem(R_ * heads, E, 4 + i, a_.head_eps);
      p.x = p.out = rows;
      p.rms_norm = true;
      run_dropout_add_layer_norm(p);
    }
  }

  // Rotates the queries and the keys, in place.
  void rotate_heads(void* qkv) {
    RotaryProblem p{};
    p.dtype = kernel_type(x_.scalar_type());
    p.products_rounded = !a_.rotary_in_float32;
    p.E = a_.head_dim;
    p.R = a_.cos->size(2);
    const auto positions = [](const Tensor& t, int64_t* stride) {
      stride[0] = t.size(0) == 1 ? 0 : t.stride(0);
      stride[1] = t.stride(1);
      return t.const_data_ptr();
    };
    p.cos = positions(*a_.cos, p.cos_stride);
    p.sin = positions(*a_.sin, p.sin_stride);
    const auto run = kernels().rotary.run;
    for (int64_t i = 0; i < 2; ++i) {
      p.x = p.out = part(qkv, i);
      const int64_t sizes[] = {B_, L_, heads_of(i)}, row = row_of(i),
                    strides[] = {L_ * row, row, p.E};
      for (int64_t d = 0; d < RotaryProblem::kDims; ++d) {
        p.size[d] = sizes[d];
        p.x_stride[d] = p.out_stride[d] = strides[d];
      }
      parallel_tasks(p.tasks(), 1, p.operations(), [&](int64_t task) { run(p, task); });
    }
  }

  static std::optional<int64_t> bound(int64_t side) {
    return side < 0 ? std::nullopt : std::optional(side);
  }

  void attend(void* qkv, void* attended) {
    const int64_t B = B_, L = L_, H = a_.num_heads, E = a_.head_dim;
    const auto heads = [&](void* data, int64_t count, int64_t row) {
      return at::from_blob(data, {B, count, L, E}, {L * row, E, row, 1}, x_.options());
    };
    const auto projected = [&](int64_t i) { return heads(part(qkv, i), heads_of(i), row_of(i)); };
    const Tensor query = projected(0), out = heads(attended, H, HE_);
    Tensor key = projected(1), value = projected(2);
    if (a_.key_cache) {
      key = append(key, *a_.key_cache);
      value = append(value, *a_.value_cache);
    }
    const Tensor logsumexp =
        at::from_blob(pieces_.take(R_ * H * kWideSize), {B, H, L}, x_.options().dtype(kWide));
    const bool packed = a_.cu_seqlens.has_value();
    const int64_t longest = packed ? a_.max_seqlen : L, keys = packed ? longest : key.size(2);
    const bool lower_right = a_.key_cache.has_value();  // the last query attends to all keys
    const OptionalTensor none;
    run_attention(
        {query,
         key,
         value,
         a_.attn_mask,
         a_.relative_bias,
         none,
         none,
         none,
         none,
         none,
         a_.cu_seqlens,
         a_.cu_seqlens,
         none,
         longest,
         keys,
         a_.scale,
         std::nullopt,
         bound(a_.window_left),
         bound(a_.window_right),
         lower_right,
         0},
        out, logsumexp);
  }

  // Appends keys or values (B, G, L, E) to a cache, and returns the tokens that queries attend to.
  Tensor append(const Tensor& fresh, const Tensor& cache) const {
    const auto bytes = static_cast<size_t>(a_.head_dim * size_);
    const auto row = [&](const Tensor& t, int64_t b, int64_t h, int64_t l) {
      const int64_t offset = b * t.stride(0) + h * t.stride(1) + l * t.stride(2);
      return static_cast<char*>(t.mutable_data_ptr()) + offset * size_;
    };
    for (int64_t b = 0; b < B_; ++b)
      for (int64_t h = 0; h < a_.num_key_heads; ++h)
        for (int64_t l = 0; l < L_; ++l)
          std::memcpy(row(cache, b, h, a_.past + l), row(fresh, b, h, l), bytes);
    cache.unsafeGetTensorImpl()->bump_version();
    return cache.narrow(2, 0, a_.keys_seen(L_));
  }

  // out = norm(x + residual); the sum goes to `sum` unless that is null.
  void norm(size_t index, const void* x, const void* residual, void* out, void* sum) {
    const auto rows = [&](const void* data) {
      RowTensor result;
      if (!data) return result;
      result.data = const_cast<void*>(data);
      result.dims = 1;
      result.size[0] = R_;
      result.stride[0] = D_;
      return result;
    };
    DropoutAddLayerNormProblem p = norm_problem(R_, D_, 2 * index, a_.eps[index]);
    p.x = rows(x);
    p.residual = rows(residual);
    p.sum = rows(sum);
    p.out = rows(out);
    p.bias = vector("bias", a_.norms[2 * index + 1], D_);
    p.rms_norm = a_.rms_norm;
    p.stream =
        fills_lines(D_ * size_) && is_read_by_all_cores(R_ * D_ * size_, at::get_num_threads());
    run_dropout_add_layer_norm(p);
  }

  DropoutAddLayerNormProblem norm_problem(int64_t rows, int64_t N, size_t weight, double eps) {
    DropoutAddLayerNormProblem p{};
    p.dtype = p.sum_dtype = kernel_type(x_.scalar_type());
    p.rows = rows;
    p.N = N;
    p.weight = vector("weight", a_.norms[weight], N);
    p.mean = mean_;
    p.rstd = rstd_;
    p.eps = eps;
    return p;
  }

  const Tensor& x_;
  const Arguments& a_;
  const int64_t B_, L_, R_, D_, HE_, F_;
  const int64_t size_;         // of an element, in bytes
  const int64_t normed_rows_;  // at most, by one norm
  Pieces pieces_;
  void *mean_, *rstd_;  // results of a norm that are never read
  Held held_;           // vectors that problems point into
};

Tensor encoder_layer(
    const Tensor& x, const OptionalTensor& attn_mask, const OptionalTensor& cu_seqlens,
    int64_t max_seqlen, at::TensorList weights, const OptionalTensors& biases,
    const OptionalTensors& norms, int64_t num_heads, int64_t head_dim, int64_t intermediate_size,
    double scale, std::optional<c10::string_view> activation, bool norm_first, bool rms_norm,
    int64_t window_left, int64_t window_right, double eps1, double eps2,
    const OptionalTensor& key_cache, const OptionalTensor& value_cache, int64_t past,
    const OptionalTensor& cos, const OptionalTensor& sin, std::optional<int64_t> num_key_heads,
    bool first_norm, bool rotary_in_float32, double head_eps, const OptionalTensor& relative_bias) {
  const Arguments a{
      attn_mask,
      cu_seqlens,
      max_seqlen,
      weights,
      biases,
      norms,
      num_heads,
      num_key_heads.value_or(num_heads),
      head_dim,
      intermediate_size,
      scale,
      activation_of(activation),
      norm_first,
      rms_norm,
      first_norm,
      window_left,
      window_right,
      {eps1, eps2},
      head_eps,
      key_cache,
      value_cache,
      past,
      cos,
      sin,
      rotary_in_float32,
      relative_bias};
  check(x, a);
  if (x.numel() == 0) return empty(x.sizes(), x.options());
  return Layer(x, a).run();
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) { m.impl("encoder_layer", encoder_layer); }

}  // namespace trifuse
