// torch.ops.trifuse.encoder_layer: a layer of a Transformer's encoder, for inference.
//
// The kernels of linear, attention and dropout_add_layer_norm run one after another on pointers
// into one workspace. A short sentence takes a layer less time than Python and torch's dispatcher
// need to call its parts. Results are those of the parts, bit for bit.
//
//   norm last:   h = norm1(x + attend(x));          out = norm2(h + feed_forward(h))
//   norm first:  h = x + attend(norm1(x));          out = h + feed_forward(norm2(h))
//
//   attend(x) = attention(x Wq + bq, x Wk + bk, x Wv + bv) Wo + bo
//   feed_forward(h) = activation(h W1 + b1) W2 + b2
//
// While decoding, the keys and values of earlier tokens come from a cache, to which those of x are
// appended.
//
// Floor: with few tokens the bytes of the weights over the copy rate, with many the operations of
// the products.

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "arguments.h"
#include "cpu/memory.h"
#include "cpu/run.h"

namespace trifuse {
namespace {

using OptionalTensors = c10::List<OptionalTensor>;

// The arguments of the op but x. Sizes as in Layer.
struct Arguments {
  const OptionalTensor& attn_mask;   // as in attention_forward
  const OptionalTensor& cu_seqlens;  // where packed sequences begin; then B is 1
  int64_t max_seqlen;                // beside cu_seqlens
  at::TensorList weights;            // packed: Wq, Wk, Wv or all three as one; Wo, W1, W2
  const OptionalTensors& biases;     // of each weight
  const OptionalTensors& norms;      // weight and bias of the first norm and of the second
  int64_t num_heads, head_dim, intermediate_size;
  double scale;
  Activation activation;
  bool norm_first, rms_norm;
  int64_t window_left, window_right;
  double eps[2];
  const OptionalTensor &key_cache, &value_cache;  // (B, H, S, E), written to
  int64_t past;                                   // tokens in the cache before the call
};

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
      (count == 4 || count == 6) && a.biases.size() == count && a.norms.size() == 4,
      "weights: expected 4 or 6, as many biases, and 4 vectors of norms; got ", count, ", ",
      a.biases.size(), " and ", a.norms.size());
  TORCH_CHECK_VALUE(
      a.num_heads > 0 && a.head_dim > 0 && a.intermediate_size > 0,
      "num_heads, head_dim, intermediate_size: expected at least 1; got ", a.num_heads, ", ",
      a.head_dim, ", ", a.intermediate_size);
  // Before the workspace is sized: weights that fit bound the sizes.
  const auto check_weight = [&](size_t index, int64_t N, int64_t K) {
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
  const int64_t HE = a.num_heads * a.head_dim;
  if (count == 4) {
    check_weight(0, 3 * HE, D);
  } else {
    for (size_t i = 0; i < 3; ++i) check_weight(i, HE, D);
  }
  check_weight(count - 3, D, HE);
  check_weight(count - 2, F, D);
  check_weight(count - 1, D, F);
  TORCH_CHECK_VALUE(
      a.key_cache.has_value() == a.value_cache.has_value() && !(a.key_cache && a.cu_seqlens),
      "key_cache: expected a value_cache beside it, and no cu_seqlens");
  if (!a.key_cache) return;
  const int64_t S = a.key_cache->dim() == 4 ? a.key_cache->size(2) : 0;
  for (const auto& [name, cache] :
       {std::pair("key_cache", a.key_cache), std::pair("value_cache", a.value_cache)}) {
    check_memory(name, *cache);
    check_shape(name, *cache, {x.size(0), a.num_heads, S, a.head_dim});
    check_type(name, *cache, x.scalar_type(), x);
    TORCH_CHECK_VALUE(
        a.head_dim == 1 || cache->stride(3) == 1, name,
        ": expected contiguous features; got strides ", cache->strides());
  }
  TORCH_CHECK_VALUE(
      a.past >= 0 && a.past <= S - x.size(1), "past: expected a cache with room for ", x.size(1),
      " more tokens after ", a.past, "; got room for ", S, " in all");
}

// Hands out pieces of a workspace, each aligned to a cache line.
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

// One call. Sizes: B sequences of L tokens make R rows; D features, H heads of E features, F
// features between the two products of the feed-forward network.
class Layer {
 public:
  Layer(const Tensor& x, const Arguments& a)
      : x_(x), a_(a), B_(x.size(0)), L_(x.size(1)), R_(B_ * L_), D_(x.size(2)),
        HE_(a.num_heads * a.head_dim), F_(a.intermediate_size),
        size_(static_cast<int64_t>(x.element_size())), joint_(a.weights.size() == 4),
        pieces_(
            Pieces::rounded(R_ * 3 * HE_ * size_) + Pieces::rounded(R_ * HE_ * size_) +
            3 * Pieces::rounded(R_ * D_ * size_) + Pieces::rounded(R_ * F_ * size_) +
            kStatistics * Pieces::rounded(R_ * kWideSize) +
            Pieces::rounded(R_ * a.num_heads * kWideSize)) {}

  Tensor run() {
    const bool first = a_.norm_first;
    void *qkv = rows(3 * HE_), *attended = rows(HE_), *wide = rows(F_);
    void *update = rows(D_), *hidden = rows(D_), *normed = rows(D_);
    const Tensor out = empty(x_.sizes(), x_.options());
    const void* x = x_.const_data_ptr();
    const size_t last = a_.weights.size() - 1;

    if (first) norm(0, x, nullptr, normed, nullptr);
    project_heads(first ? normed : x, qkv);
    attend(qkv, attended);
    linear(product(last - 2, attended, HE_, D_, update));
    if (first) {
      norm(1, update, x, normed, hidden);
    } else {
      norm(0, update, x, hidden, nullptr);
    }
    LinearProblem up = product(last - 1, first ? normed : hidden, D_, F_, wide);
    up.activation = a_.activation;
    linear(up);
    linear(product(last, wide, F_, D_, update));
    if (first) {
      Tensor sum = out;
      at::add_out(sum, tensor(hidden), tensor(update));
    } else {
      norm(1, update, hidden, out.mutable_data_ptr(), nullptr);
    }
    return out;
  }

 private:
  static constexpr at::ScalarType kWide = at::kFloat;  // in which sums are taken
  static constexpr int64_t kWideSize = 4, kStatistics = 4;

  void* rows(int64_t features) { return pieces_.take(R_ * features * size_); }
  Tensor tensor(void* data) const { return at::from_blob(data, x_.sizes(), x_.options()); }

  // Returns a vector (N,) in the type of sums, or null.
  const void* vector(const char* name, const OptionalTensor& t, int64_t N) {
    if (!t) return nullptr;
    check_shape(name, *t, {N});
    check_type(name, *t, t->scalar_type() == kWide ? kWide : x_.scalar_type(), x_);
    held_.push_back(t->to(kWide).contiguous());
    return held_.back().const_data_ptr();
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
    p.packed = const_cast<void*>(a_.weights[index].const_data_ptr());
    p.bias = vector("bias", a_.biases[index], N);
    p.out = out;
    return p;
  }

  static void linear(LinearProblem p) { run_linear(&p, 1); }

  // The projections to queries, keys and values: one product, or three that run at once.
  void project_heads(const void* x, void* qkv) {
    if (joint_) return linear(product(0, x, D_, 3 * HE_, qkv));
    LinearProblem problems[3];
    for (int64_t i = 0; i < 3; ++i) problems[i] = product(i, x, D_, HE_, part(qkv, i));
    run_linear(problems, 3);
  }

  // Queries, keys or values: columns of one matrix (R, 3 H E), or each a matrix (R, H E).
  void* part(void* qkv, int64_t i) const {
    return static_cast<char*>(qkv) + i * HE_ * (joint_ ? 1 : R_) * size_;
  }

  static std::optional<int64_t> bound(int64_t side) {
    return side < 0 ? std::nullopt : std::optional(side);
  }

  void attend(void* qkv, void* attended) {
    const int64_t B = B_, L = L_, H = a_.num_heads, E = a_.head_dim;
    const auto heads = [&](void* data, int64_t row) {
      return at::from_blob(data, {B, H, L, E}, {L * row, E, row, 1}, x_.options());
    };
    const int64_t row = joint_ ? 3 * HE_ : HE_;
    const Tensor query = heads(part(qkv, 0), row), out = heads(attended, HE_);
    Tensor key = heads(part(qkv, 1), row), value = heads(part(qkv, 2), row);
    if (a_.key_cache) {
      key = append(key, *a_.key_cache);
      value = append(value, *a_.value_cache);
    }
    const Tensor logsumexp =
        at::from_blob(pieces_.take(R_ * H * kWideSize), {B, H, L}, x_.options().dtype(kWide));
    const bool packed = a_.cu_seqlens.has_value();
    const int64_t longest = packed ? a_.max_seqlen : L, keys = packed ? longest : key.size(2);
    const bool lower_right = a_.key_cache.has_value();  // the last query sees all keys
    const OptionalTensor none;
    run_attention(
        {query, key, value, a_.attn_mask, none, none, none, a_.cu_seqlens, a_.cu_seqlens, none,
         longest, keys, a_.scale, std::nullopt, bound(a_.window_left), bound(a_.window_right),
         lower_right, 0},
        out, logsumexp);
  }

  // Appends keys or values (B, H, L, E) to a cache, and returns all tokens of it.
  Tensor append(const Tensor& fresh, const Tensor& cache) const {
    const auto bytes = static_cast<size_t>(a_.head_dim * size_);
    const auto row = [&](const Tensor& t, int64_t b, int64_t h, int64_t l) {
      const int64_t offset = b * t.stride(0) + h * t.stride(1) + l * t.stride(2);
      return static_cast<char*>(t.mutable_data_ptr()) + offset * size_;
    };
    for (int64_t b = 0; b < B_; ++b)
      for (int64_t h = 0; h < a_.num_heads; ++h)
        for (int64_t l = 0; l < L_; ++l)
          std::memcpy(row(cache, b, h, a_.past + l), row(fresh, b, h, l), bytes);
    cache.unsafeGetTensorImpl()->bump_version();
    return cache.narrow(2, 0, a_.past + L_);
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
    DropoutAddLayerNormProblem p{};
    p.dtype = p.sum_dtype = kernel_type(x_.scalar_type());
    p.rows = R_;
    p.N = D_;
    p.x = rows(x);
    p.residual = rows(residual);
    p.sum = rows(sum);
    p.out = rows(out);
    p.weight = vector("weight", a_.norms[2 * index], D_);
    p.bias = vector("bias", a_.norms[2 * index + 1], D_);
    p.mean = pieces_.take(R_ * kWideSize);
    p.rstd = pieces_.take(R_ * kWideSize);
    p.eps = a_.eps[index];
    p.rms_norm = a_.rms_norm;
    run_dropout_add_layer_norm(p, size_);
  }

  const Tensor& x_;
  const Arguments& a_;
  const int64_t B_, L_, R_, D_, HE_, F_;
  const int64_t size_;  // of an element, in bytes
  const bool joint_;    // whether Wq, Wk and Wv are one weight
  Pieces pieces_;
  std::vector<Tensor> held_;  // vectors that problems point into
};

Tensor encoder_layer(
    const Tensor& x, const OptionalTensor& attn_mask, const OptionalTensor& cu_seqlens,
    int64_t max_seqlen, at::TensorList weights, const OptionalTensors& biases,
    const OptionalTensors& norms, int64_t num_heads, int64_t head_dim, int64_t intermediate_size,
    double scale, std::optional<c10::string_view> activation, bool norm_first, bool rms_norm,
    int64_t window_left, int64_t window_right, double eps1, double eps2,
    const OptionalTensor& key_cache, const OptionalTensor& value_cache, int64_t past) {
  const Arguments a{
      attn_mask,
      cu_seqlens,
      max_seqlen,
      weights,
      biases,
      norms,
      num_heads,
      head_dim,
      intermediate_size,
      scale,
      activation_of(activation),
      norm_first,
      rms_norm,
      window_left,
      window_right,
      {eps1, eps2},
      key_cache,
      value_cache,
      past};
  check(x, a);
  if (x.numel() == 0) return empty(x.sizes(), x.options());
  return Layer(x, a).run();
}

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) { m.impl("encoder_layer", encoder_layer); }

}  // namespace trifuse
