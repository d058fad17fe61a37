// torch.ops.trifuse.encoder_layer: a layer of a Transformer's encoder or decoder, for inference.
//
// The kernels of linear, attention and dropout_add_layer_norm run one after another on pointers
// into one workspace. For a short sentence, a layer takes less time than Python and torch's
// dispatcher need to call its parts. Results are those of the parts, bit for bit.
//
//   norm last:   h = norm1(x + attend(x));          out = norm2(h + feed_forward(h))
//   norm first:  h = x + attend(norm1(x));          out = h + feed_forward(norm2(h))
//   parallel:    out = (attend(norm1(x)) + feed_forward(norm2(x))) + x
//                or, with x first, (x + attend(norm1(x))) + feed_forward(norm2(x))
//
//   attend(x) = attention(x Wq + bq, x Wk + bk, x Wv + bv) Wo + bo
//   feed_forward(h) = activation(h W1 + b1) W2 + b2, or (activation(h W1 + b1) * (h V + c)) W2 + b2
//
// With a memory, the layer of a decoder attends to the keys and values of an encoder's output in a
// third sublayer, between the two. The result of a sublayer may be normalised before it is added
// to its input (Gemma Team, "Gemma 2", 2024), or multiplied by a vector (Touvron et al., "Going
// deeper with Image Transformers", 2021), and all results by a number, as in Granite.
//
// Several query heads may share one key head. Queries and keys may be normalised, head by head or
// over all heads of a token (Team OLMo, "2 OLMo 2 Furious", 2024), and then rotated by their
// positions (Su et al., "RoFormer", 2021). Scores may have a bias that
// depends on the distance between query and key (Raffel et al., "T5", 2020). While decoding, the
// keys and values of earlier tokens come from a cache, to which those of x are appended.
//
// Floor: with few tokens, the bytes of the weights at the copy rate; with many, the operations of
// the products.

#include <ATen/MemoryOverlap.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
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
#include "encoder_layer_options.h"

namespace trifuse {
namespace {

using OptionalTensors = c10::List<OptionalTensor>;

// The places of a layer's norms in the op's lists. Each has a weight and a bias.
enum Norm : size_t {
  kAttentionNorm,  // before the attention or, with the norm last, after its residual
  kNetworkNorm,    // the same of the feed-forward network
  kMemoryNorm,     // the same of the attention to a memory
  kQueryNorm,      // of query heads
  kKeyNorm,        // of key heads
  kAttendedNorm,   // of the attention's result
  kOutputNorm,     // of the network's result
  kNorms,
};

// The vectors after the biases, by the sublayer whose result they multiply.
enum Factor : size_t { kAttendedFactor, kOutputFactor, kFactors };

struct Options {
#define TRIFUSE_FIELD(type, name) type name;
  TRIFUSE_EACH_LAYER_OPTION(TRIFUSE_FIELD)
#undef TRIFUSE_FIELD
};

// The arguments of the op except x. Sizes as in Layer.
struct Arguments : Options {
  const OptionalTensor& attn_mask;   // as in attention_forward
  const OptionalTensor& cu_seqlens;  // where packed sequences begin; then B is 1
  int64_t max_seqlen;                // beside cu_seqlens
  // Wq, Wk, Wv or all three as one; Wo; with a memory, Wq and Wo of the attention to it; W1,
  // perhaps V, W2. Packed, or (N, K) with contiguous rows or, without a V, contiguous columns.
  at::TensorList weights;
  // There is one bias, or none, for each weight. Two more vectors may follow: see Factor.
  const OptionalTensors& biases;
  const OptionalTensors& norms;  // weight and bias of each Norm, as far as there are more
  const OptionalTensor &key_cache, &value_cache;  // (B, G, S, E), written to
  int64_t past;                                   // tokens in the cache before the call
  // (1 or B, the number of tokens that are rotated, the last ones, R or R/2 per pair) or null. The
  // first R features of a head are rotated, R is even.
  const OptionalTensor &cos, &sin;
  const OptionalTensor& relative_bias;              // as in attention_forward, by distance
  const OptionalTensor &memory_key, &memory_value;  // (B, G, tokens of the memory, E) or null
  const OptionalTensor& memory_mask;                // as attn_mask

  bool has_memory() const { return memory_key.has_value(); }
  size_t weights_without_memory() const { return weights.size() - (has_memory() ? 2 : 0); }
  bool joint() const { return weights_without_memory() < 6; }       // Wq, Wk and Wv are one weight
  bool gated() const { return weights_without_memory() % 2 == 1; }  // there is a V
  bool packed() const { return weights[0].scalar_type() == at::kByte; }
  bool has(Norm norm) const { return norm < eps.size() && eps[norm] >= 0; }
  bool has_factors() const { return biases.size() > weights.size(); }
  OptionalTensor factor(Factor of) const {
    return has_factors() ? biases[weights.size() + of] : OptionalTensor();
  }
  bool normalises_heads() const { return has(kQueryNorm) || has(kKeyNorm); }
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
    const int64_t features = t->dim() == 3 ? t->size(2) : 0, L = x.size(1);
    if (a.rotary_per_pair) {
      TORCH_CHECK_VALUE(
          features > 0 && features <= a.head_dim / 2, name,
          ": expected 3 dimensions, the last from 1 to ", a.head_dim / 2, " pairs; got shape ",
          t->sizes());
    } else {
      TORCH_CHECK_VALUE(
          features > 0 && features <= a.head_dim && features % 2 == 0, name,
          ": expected 3 dimensions, the last an even number from 2 to ", a.head_dim, "; got shape ",
          t->sizes());
    }
    const bool fewer = !a.cu_seqlens && a.cos->size(1) < L;
    const int64_t tokens = fewer ? a.cos->size(1) : L;
    check_shape(name, *t, {t->size(0) == 1 ? 1 : x.size(0), tokens, a.cos->size(2)});
    const bool wide = x.scalar_type() == at::kBFloat16 && a.cos->scalar_type() == at::kFloat;
    check_type(name, *t, wide ? at::kFloat : x.scalar_type(), x);
    TORCH_CHECK_VALUE(
        t->stride(2) == 1, name, ": expected contiguous features; got strides ", t->strides());
  }
}

// Checks keys or values of tokens that x attends to.
void check_cached(const char* name, const Tensor& t, const Tensor& x, const Arguments& a) {
  const int64_t S = t.dim() == 4 ? t.size(2) : 0;
  check_shape(name, t, {x.size(0), a.num_key_heads, S, a.head_dim});
  check_type(name, t, x.scalar_type(), x);
  TORCH_CHECK_VALUE(
      a.head_dim == 1 || t.stride(3) == 1, name, ": expected contiguous features; got strides ",
      t.strides());
}

void check_cache(const Tensor& x, const Arguments& a) {
  TORCH_CHECK_VALUE(
      a.key_cache.has_value() == a.value_cache.has_value() && !(a.key_cache && a.cu_seqlens),
      "key_cache: expected a value_cache beside it, and no cu_seqlens");
  if (!a.key_cache) return;
  for (const auto& [name, cache] :
       {std::pair("key_cache", a.key_cache), std::pair("value_cache", a.value_cache)}) {
    check_cached(name, *cache, x, a);
    TORCH_CHECK_VALUE(
        at::has_internal_overlap(*cache) != at::MemOverlap::Yes, name,
        ": expected memory of its own for each sequence, head and token; got strides ",
        cache->strides());
  }
  const int64_t S = a.key_cache->size(2);
  check_shape("value_cache", *a.value_cache, a.key_cache->sizes());
  TORCH_CHECK_VALUE(
      a.past >= 0 && a.past <= S - x.size(1), "past: expected a cache with room for ", x.size(1),
      " more tokens after ", a.past, "; got room for ", S, " in all");
  TORCH_CHECK_VALUE(
      a.keys_seen(x.size(1)) <= S, "attn_mask: expected no more keys than the cache has room for, ",
      S, "; got shape ", a.attn_mask->sizes());
}

void check_memory_of_encoder(const Tensor& x, const Arguments& a) {
  TORCH_CHECK_VALUE(
      a.memory_key.has_value() == a.memory_value.has_value() &&
          (a.memory_key || (!a.memory_mask && !a.has(kMemoryNorm))),
      "memory_key: expected a memory_value beside it, and a mask and a norm only with both");
  if (!a.memory_key) return;
  TORCH_CHECK_VALUE(
      !a.cu_seqlens && !a.parallel && (a.norm_first || a.has(kMemoryNorm)),
      "memory_key: expected neither cu_seqlens nor parallel, and a norm if the norms come last");
  check_cached("memory_key", *a.memory_key, x, a);
  check_cached("memory_value", *a.memory_value, x, a);
}

void check_norms(const Tensor& x, const Arguments& a) {
  TORCH_CHECK_VALUE(
      a.eps.size() >= 2 && a.eps.size() <= kNorms && a.norms.size() == 2 * a.eps.size(),
      "norms: expected a weight and a bias for each of 2 to ", static_cast<int>(kNorms),
      " values of eps; got ", a.norms.size(), " and ", a.eps.size());
  for (double eps : a.eps)
    TORCH_CHECK_VALUE(eps >= 0 || eps == -1, "eps: expected at least 0, or -1; got ", eps);
  if (a.norm_first) {
    TORCH_CHECK_VALUE(
        !a.parallel || a.has(kAttentionNorm), "parallel: expected a norm of the attention");
  } else {
    TORCH_CHECK_VALUE(
        a.has(kAttentionNorm) && a.has(kNetworkNorm),
        "eps: expected a norm of each sublayer, because the norms come last");
    TORCH_CHECK_VALUE(
        !a.has(kAttendedNorm) && !a.has(kOutputNorm),
        "eps: expected no norm of a result, because the norms come last");
    TORCH_CHECK_VALUE(!a.parallel, "parallel: expected False, because the norms come last");
  }
  TORCH_CHECK_VALUE(
      a.parallel || !a.residual_first, "residual_first: expected False without parallel");
  TORCH_CHECK_VALUE(
      !a.heads_normed_together || !a.by_head, "heads_normed_together: expected False with by_head");
  // A wider weight would make the result as wide.
  for (size_t i = 0; a.rms_norm && !a.norms_from_one && i < a.norms.size(); ++i)
    if (const OptionalTensor weight = a.norms[i]) check_type("weight", *weight, x.scalar_type(), x);
}

void check_factors(const Tensor& x, const Arguments& a) {
  for (const Factor each : {kAttendedFactor, kOutputFactor}) {
    const OptionalTensor factor = a.factor(each);
    if (!factor) continue;
    check_memory("factor", *factor);
    check_shape("factor", *factor, {x.size(2)});
    check_type("factor", *factor, x.scalar_type(), x);
    TORCH_CHECK_VALUE(
        !a.has(each == kAttendedFactor ? kAttendedNorm : kOutputNorm),
        "factor: expected None for a result that has a norm");
  }
}

void check(const Tensor& x, const Arguments& a) {
  activation_of(a.activation);  // which checks it
  TORCH_CHECK_VALUE(
      x.dim() == 3 && x.is_contiguous(),
      "x: expected a contiguous tensor of 3 dimensions; got shape ", x.sizes(), " and strides ",
      x.strides());
  check_memory("x", x);
  TORCH_CHECK_TYPE(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
      "x: expected float32 or bfloat16; got ", x.scalar_type());
  const size_t count = a.weights.size(), most = a.has_memory() ? 9 : 7, least = most - 3;
  TORCH_CHECK_VALUE(
      count >= least && count <= most &&
          (a.biases.size() == count || a.biases.size() == count + kFactors),
      "weights: expected ", least, " to ", most,
      ", and as many biases, or two more for the factors; got ", count, " and ", a.biases.size());
  TORCH_CHECK_VALUE(
      a.num_heads > 0 && a.head_dim > 0 && a.intermediate_size > 0,
      "num_heads, head_dim, intermediate_size: expected at least 1; got ", a.num_heads, ", ",
      a.head_dim, ", ", a.intermediate_size);
  TORCH_CHECK_VALUE(
      a.num_key_heads > 0 && a.num_heads % a.num_key_heads == 0,
      "num_key_heads: expected a divisor of ", a.num_heads, "; got ", a.num_key_heads);
  TORCH_CHECK_VALUE(
      !a.softcap || (*a.softcap >= 0x1p-126 && *a.softcap <= 0x1p126),
      "softcap: expected a number in [2^-126, 2^126]; got ", *a.softcap);
  TORCH_CHECK_VALUE(
      !a.by_head || (a.joint() && a.num_key_heads == a.num_heads),
      "by_head: expected one weight for queries, keys and values, and as many key heads as query "
      "heads");
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
  if (a.has_memory()) {
    check_weight(index++, HE, D);
    check_weight(index++, D, HE);
  }
  check_weight(index++, F, D);
  if (a.gated()) check_weight(index++, F, D);
  check_weight(index, D, F);
  check_norms(x, a);
  check_factors(x, a);
  check_rotary(x, a);
  check_cache(x, a);
  check_memory_of_encoder(x, a);
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
            (a.has_memory() ? 4 : 3) * Pieces::rounded(R_ * D_ * size_) +
            Pieces::rounded(R_ * F_ * size_) + 2 * Pieces::rounded(normed_rows_ * kWideSize) +
            Pieces::rounded(R_ * a.num_heads * kWideSize)),
        mean_(pieces_.take(normed_rows_ * kWideSize)),
        rstd_(pieces_.take(normed_rows_ * kWideSize)),
        logsumexp_(pieces_.take(R_ * a.num_heads * kWideSize)), qkv_(rows(a.all_features())),
        attended_(rows(HE_)), wide_(rows(F_)) {}

  Tensor run() {
    const Tensor out = empty(x_.sizes(), x_.options());
    void *update = rows(D_), *hidden = rows(D_), *normed = rows(D_);
    const void* x = x_.const_data_ptr();
    size_t weight = 0;

    const void* input = x;  // of the next sublayer
    if (a_.norm_first && a_.has(kAttentionNorm)) {
      norm(kAttentionNorm, x, nullptr, normed, nullptr);
      input = normed;
    }
    attend(weight, input, update);
    if (a_.parallel) {
      if (a_.has(kNetworkNorm)) norm(kNetworkNorm, x, nullptr, normed, nullptr);
      transform(weight, normed, hidden);
      add(update, a_.residual_first ? x : hidden, update);
      add(update, a_.residual_first ? hidden : x, out.mutable_data_ptr());
      return out;
    }
    const Norm next = a_.has_memory() ? kMemoryNorm : kNetworkNorm;
    input = end(kAttentionNorm, next, update, x, hidden, normed);
    const void* residual = hidden;
    if (a_.has_memory()) {
      attend_to_memory(weight, input, update);
      void* sum = rows(D_);
      input = end(kMemoryNorm, kNetworkNorm, update, hidden, sum, normed);
      residual = sum;
    }
    transform(weight, input, update);
    if (a_.norm_first) {
      add(residual, update, out.mutable_data_ptr());
    } else {
      norm(kNetworkNorm, update, residual, out.mutable_data_ptr(), nullptr);
    }
    return out;
  }

 private:
  static constexpr at::ScalarType kWide = at::kFloat;  // the type of sums
  static constexpr int64_t kWideSize = 4;

  void* rows(int64_t features) { return pieces_.take(R_ * features * size_); }

  // Adds the result of a sublayer, `update`, to the residual. The norm of the sum is the sublayer's
  // own, or that of the next with norm_first, which gets `normed`. Returns the next one's input.
  const void* end(
      Norm own, Norm next, const void* update, const void* residual, void* sum, void* normed) {
    if (!a_.norm_first) {
      norm(own, update, residual, sum, nullptr);
      return sum;
    }
    if (!a_.has(next)) {
      add(residual, update, sum);
      return sum;
    }
    norm(next, update, residual, normed, sum);
    return normed;
  }

  // The sublayers, from x to out. Each advances `weight`, the index of its first weight.

  void attend(size_t& weight, const void* x, void* out) {
    project_heads(weight, x);
    if (a_.has(kQueryNorm)) normalise_heads(0, kQueryNorm);
    if (a_.has(kKeyNorm)) normalise_heads(1, kKeyNorm);
    if (a_.cos) rotate_heads();
    Tensor key = heads(1), value = heads(2);
    if (a_.key_cache) {
      key = append(key, *a_.key_cache);
      value = append(value, *a_.value_cache);
    }
    attention(
        heads(0), key, value, a_.attn_mask, a_.relative_bias, a_.window_left, a_.window_right);
    linear(product(weight++, attended_, HE_, D_, out));
    if (a_.has(kAttendedNorm)) norm(kAttendedNorm, out, nullptr, out, nullptr);
    multiply(kAttendedFactor, out);
    scale(out);
  }

  void attend_to_memory(size_t& weight, const void* x, void* out) {
    linear(product(weight++, x, D_, HE_, qkv_));
    const OptionalTensor no_bias;
    const Tensor query = rows_of_heads(qkv_, a_.num_heads, HE_, a_.head_dim);
    attention(query, *a_.memory_key, *a_.memory_value, a_.memory_mask, no_bias, -1, -1);
    linear(product(weight++, attended_, HE_, D_, out));
    scale(out);
  }

  void transform(size_t& weight, const void* x, void* out) {
    LinearProblem up = product(weight++, x, D_, F_, wide_);
    up.activation = activation_of(a_.activation);
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
    linear(product(weight++, wide_, F_, D_, out));
    if (a_.has(kOutputNorm)) norm(kOutputNorm, out, nullptr, out, nullptr);
    multiply(kOutputFactor, out);
    scale(out);
  }

  // Returns a view of data with the shape of x.
  Tensor like_x(const void* data) const {
    return at::from_blob(const_cast<void*>(data), x_.sizes(), x_.options());
  }

  void add(const void* a, const void* b, void* sum) const {
    Tensor out = like_x(sum);
    at::add_out(out, like_x(a), like_x(b));
  }

  // Multiplies the result of a sublayer, in place, if it has a factor.
  void multiply(Factor of, void* result) const {
    const OptionalTensor factor = a_.factor(of);
    if (!factor) return;
    const at::AutoDispatchBelowADInplaceOrView guard;
    Tensor out = like_x(result);
    at::mul_out(out, out, *factor);
  }

  // Multiplies the result of a sublayer, in place, by the number for all of them.
  void scale(void* result) const {
    if (a_.result_scale == 1) return;
    Tensor out = like_x(result);
    // A tensor, because mul_ would round a Scalar first.
    at::mul_out(out, out, c10::scalar_to_tensor(a_.result_scale));
  }

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
  void project_heads(size_t& weight, const void* x) {
    if (a_.joint()) return linear(product(weight++, x, D_, a_.all_features(), qkv_));
    LinearProblem problems[3];
    for (int64_t i = 0; i < 3; ++i)
      problems[i] = product(weight++, x, D_, heads_of(i) * a_.head_dim, part(i));
    linear(problems, 3);
  }

  // Queries (0), keys (1) or values (2): columns of one matrix, or a separate matrix each.
  int64_t heads_of(int64_t i) const { return i == 0 ? a_.num_heads : a_.num_key_heads; }
  void* part(int64_t i) const {
    const int64_t before = a_.by_head ? i * a_.head_dim
        : i == 0                      ? 0
                                      : HE_ + (i - 1) * a_.key_features();
    return static_cast<char*>(qkv_) + before * (a_.joint() ? 1 : R_) * size_;
  }
  // From one token to the next, and from one head to the next, in elements.
  int64_t row_of(int64_t i) const {
    return a_.joint() ? a_.all_features() : heads_of(i) * a_.head_dim;
  }
  int64_t head_stride() const { return (a_.by_head ? 3 : 1) * a_.head_dim; }

  // A view (B, count, L, E) of heads that lie in rows, one for each token.
  Tensor rows_of_heads(void* data, int64_t count, int64_t row, int64_t head) const {
    return at::from_blob(
        data, {B_, count, L_, a_.head_dim}, {L_ * row, head, row, 1}, x_.options());
  }
  Tensor heads(int64_t i) const {
    return rows_of_heads(part(i), heads_of(i), row_of(i), head_stride());
  }

  // Normalises each head of the queries or of the keys, or all heads of a token at once, in place.
  void normalise_heads(int64_t i, Norm norm) {
    const bool together = a_.heads_normed_together;
    const int64_t normed = together ? 1 : heads_of(i), N = a_.head_dim * heads_of(i) / normed;
    RowTensor rows;
    rows.data = part(i);
    rows.dims = 2;
    rows.size[0] = R_;
    rows.stride[0] = row_of(i);
    rows.size[1] = normed;
    rows.stride[1] = head_stride();
    DropoutAddLayerNormProblem p = norm_problem(norm, R_ * normed, N);
    p.x = p.out = rows;
    run_dropout_add_layer_norm(p);
  }

  // Rotates the queries and the keys, in place.
  void rotate_heads() {
    RotaryProblem p{};
    p.dtype = kernel_type(x_.scalar_type());
    p.wide_positions = a_.cos->scalar_type() != x_.scalar_type();
    p.products_rounded = !a_.rotary_in_float32;
    p.interleaved = a_.rotary_interleaved;
    p.per_pair = a_.rotary_per_pair;
    p.E = a_.head_dim;
    p.R = a_.cos->size(2) * (p.per_pair ? 2 : 1);
    const auto positions = [](const Tensor& t, int64_t* stride) {
      stride[0] = t.size(0) == 1 ? 0 : t.stride(0);
      stride[1] = t.stride(1);
      return t.const_data_ptr();
    };
    p.cos = positions(*a_.cos, p.cos_stride);
    p.sin = positions(*a_.sin, p.sin_stride);
    const auto run = kernels().rotary.run;
    const int64_t tokens = a_.cos->size(1);
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t sizes[] = {B_, tokens, heads_of(i)}, row = row_of(i),
                    strides[] = {L_ * row, row, head_stride()};
      p.x = p.out = static_cast<char*>(part(i)) + (L_ - tokens) * row * size_;
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

  // Writes the result for queries (B, H, L, E) to `attended_`.
  void attention(
      const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
      const OptionalTensor& relative_bias, int64_t window_left, int64_t window_right) const {
    const int64_t H = a_.num_heads;
    const Tensor out = rows_of_heads(attended_, H, HE_, a_.head_dim);
    const Tensor logsumexp = at::from_blob(logsumexp_, {B_, H, L_}, x_.options().dtype(kWide));
    const bool packed = a_.cu_seqlens.has_value();
    const int64_t longest = packed ? a_.max_seqlen : L_, keys = packed ? longest : key.size(2);
    const bool lower_right = a_.key_cache.has_value();  // the last query attends to all keys
    const OptionalTensor none;
    run_attention(
        {query,
         key,
         value,
         mask,
         relative_bias,
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
         a_.softcap,
         bound(window_left),
         bound(window_right),
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
  void norm(Norm norm, const void* x, const void* residual, void* out, void* sum) {
    const auto rows = [&](const void* data) {
      RowTensor result;
      if (!data) return result;
      result.data = const_cast<void*>(data);
      result.dims = 1;
      result.size[0] = R_;
      result.stride[0] = D_;
      return result;
    };
    DropoutAddLayerNormProblem p = norm_problem(norm, R_, D_);
    p.x = rows(x);
    p.residual = rows(residual);
    p.sum = rows(sum);
    p.out = rows(out);
    p.stream =
        fills_lines(D_ * size_) && is_read_by_all_cores(R_ * D_ * size_, at::get_num_threads());
    run_dropout_add_layer_norm(p);
  }

  DropoutAddLayerNormProblem norm_problem(Norm norm, int64_t rows, int64_t N) {
    DropoutAddLayerNormProblem p{};
    p.dtype = p.sum_dtype = kernel_type(x_.scalar_type());
    p.rows = rows;
    p.N = N;
    p.weight = norm_weight(a_.norms[2 * norm], N);
    p.bias = vector("bias", a_.norms[2 * norm + 1], N);
    p.rms_norm = a_.rms_norm;
    p.mean = mean_;
    p.rstd = rstd_;
    p.eps = a_.eps[norm];
    return p;
  }

  FeatureVector norm_weight(const OptionalTensor& t, int64_t N) {
    if (!t || !a_.norms_from_one) return vector("weight", t, N);
    FeatureVector weight = vector("weight", t->to(kWide), N);
    const float* stored = static_cast<const float*>(weight.data);
    held_.push_back(empty({N}, t->options().dtype(kWide)));
    auto* sum = held_.back().mutable_data_ptr<float>();
    for (int64_t i = 0; i < N; ++i) sum[i] = 1 + stored[i];
    weight.data = sum;
    return weight;
  }

  const Tensor& x_;
  const Arguments& a_;
  const int64_t B_, L_, R_, D_, HE_, F_;
  const int64_t size_;         // of an element, in bytes
  const int64_t normed_rows_;  // at most, by one norm
  Pieces pieces_;
  void *mean_, *rstd_, *logsumexp_;  // results that are never read
  void *qkv_, *attended_, *wide_;    // (R, ...): heads, the attention's result, F features
  Held held_;                        // vectors that problems point into
};

#define TRIFUSE_PARAMETER(type, name) type name,
#define TRIFUSE_ARGUMENT(type, name) name,

Tensor encoder_layer(
    const Tensor& x, const OptionalTensor& attn_mask, const OptionalTensor& cu_seqlens,
    int64_t max_seqlen, at::TensorList weights, const OptionalTensors& biases,
    const OptionalTensors& norms,
    TRIFUSE_EACH_LAYER_OPTION(TRIFUSE_PARAMETER) const OptionalTensor& key_cache,
    const OptionalTensor& value_cache, int64_t past, const OptionalTensor& cos,
    const OptionalTensor& sin, const OptionalTensor& relative_bias,
    const OptionalTensor& memory_key, const OptionalTensor& memory_value,
    const OptionalTensor& memory_mask) {
  const Arguments a{
      {TRIFUSE_EACH_LAYER_OPTION(TRIFUSE_ARGUMENT)},
      attn_mask,
      cu_seqlens,
      max_seqlen,
      weights,
      biases,
      norms,
      key_cache,
      value_cache,
      past,
      cos,
      sin,
      relative_bias,
      memory_key,
      memory_value,
      memory_mask};
  check(x, a);
  if (x.numel() == 0) return empty(x.sizes(), x.options());
  return Layer(x, a).run();
}

#undef TRIFUSE_PARAMETER
#undef TRIFUSE_ARGUMENT

}  // namespace

TORCH_LIBRARY_IMPL(trifuse, CPU, m) { m.impl("encoder_layer", encoder_layer); }

}  // namespace trifuse
