// Plain calls, without gradients, of a whole encoder with BERT's code: from ids to hidden states.
//
// For one sentence such a call computes for a millisecond. Between two calls the weights have
// passed through the caches, so whatever else a call reads, its own code included, comes from
// memory: Python and torch's functions around the layers then take as long as a layer or two. This
// call reads little. Tensors and options are read once, when a plan is made.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/tanh.h>

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "fast_path/embeddings_call.h"
#include "fast_path/encoder_layer_call.h"
#include "fast_path/linear_call.h"
#include "fast_path/plans.h"

namespace trifuse::fast_path {

// Reads a tuple of layers, each a tuple (weights, biases, norms, options).
inline bool read_layers(PyObject* tuple, std::vector<EncoderLayer>& layers) {
  TORCH_CHECK_TYPE(PyTuple_CheckExact(tuple), "layers: expected a tuple");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject* parts = PyTuple_GET_ITEM(tuple, i);
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(parts) && PyTuple_GET_SIZE(parts) == 4,
        "layers: expected tuples (weights, biases, norms, options)");
    if (!layers.emplace_back().read_layer(PySequence_Fast_ITEMS(parts))) return false;
  }
  return true;
}

// The ids of a call, (B, L) or, but for words, broadcast to it.
struct EncoderModelInputs {
  Tensor words;
  OptionalTensor padding, types, positions;  // padding: (B, L), 0 or false at padding
  EncoderLayerInputs layers;
};

class EncoderModel {
 public:
  // Reads the tensors and options of a model:
  // - embeddings: (tables of words, types and positions, weight, bias and eps of the norm, whether
  //   the last sum is the norm's residual)
  // - ids that a call may leave out: (one type for all tokens (1, 1) or None, positions (1, the
  //   most tokens) or None, the id of padding from which positions are counted otherwise)
  // - layers: as read_layers takes them
  // - pooler: None or (weight, bias, features, limit of sequences if the weight isn't packed, or 0)
  // - limit: the number of tokens from which on the model's parts are faster; 0 if there is none
  // - masks: whether padding is computed and masked; otherwise padded calls aren't served
  bool read_parts(PyObject* const* parts) {
    PyObject *embeddings = parts[1], *ids = parts[2], *pooler = parts[4];
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(embeddings) && PyTuple_GET_SIZE(embeddings) == 5 &&
            PyTuple_CheckExact(ids) && PyTuple_GET_SIZE(ids) == 3,
        "embeddings, ids: expected tuples of 5 and 3");
    planned_ = &from_capsule<Planned>(parts[0], kPlanned);
    for (int i = 0; i < kParts; ++i) held_[i] = THPObjectPtr::dup(parts[i]);
    const auto of_embeddings = [&](int i) { return PyTuple_GET_ITEM(embeddings, i); };
    const auto of_ids = [&](int i) { return PyTuple_GET_ITEM(ids, i); };
    return read_tuple<Tensor>(of_embeddings(0), tables_) && tables_.size() == 3 &&
        read(of_embeddings(1), norm_.weight) && read(of_embeddings(2), norm_.bias) &&
        read(of_embeddings(3), norm_.eps) && read(of_embeddings(4), last_is_residual_) &&
        read(of_ids(0), type_) && read(of_ids(1), positions_) && read(of_ids(2), padding_id_) &&
        read_layers(parts[3], layers_) && (pooler == Py_None || read_pooler(pooler)) &&
        read(parts[5], limit_) && read(parts[6], masks_) && read_version();
  }

  // Returns whether the model still consists of these parts, and nothing watches them.
  bool holds() const {
    return planned_->values_hold() && planned_->modules_hold(Py_None, /*trained=*/false);
  }

  // Completes a call's inputs. Returns false if this call doesn't serve them.
  bool complete(EncoderModelInputs& inputs) {
    const Tensor& words = inputs.words;
    if (words.dim() != 2 || words.scalar_type() != at::kLong || words.numel() == 0) return false;
    if (limit_ && words.numel() >= limit_) return false;
    if (inputs.padding && inputs.padding->sizes() != words.sizes()) return false;
    if (at::GradMode::is_enabled() && any_records()) return false;
    if (!inputs.types) {
      if (!type_ || static_cast<int64_t>(type_->_version()) != type_version_) return false;
      inputs.types = type_;
    }
    if (!inputs.positions && !(inputs.positions = default_positions(words))) return false;
    return !inputs.padding || read_padding(inputs);
  }

  // Returns the last hidden states (B, L, features), and the pooled output (B, features) or an
  // undefined tensor.
  variable_list run(const EncoderModelInputs& inputs) const {
    EmbeddingCall call;
    call.ids = {inputs.words, *inputs.types, *inputs.positions};
    call.tables = tables_;
    call.last_is_residual = last_is_residual_;
    call.norm = norm_;
    Tensor x = call.run();
    for (const EncoderLayer& layer : layers_) {
      // The parameters may have moved since they were read.
      TORCH_CHECK_VALUE(are_on_cpu(layer.weights), "weights: expected tensors on the CPU");
      x = fast_path::run(layer, x, inputs.layers);
    }
    return {x, pooler_ ? pool(x) : Tensor()};
  }

  static constexpr int kParts = 7;

 private:
  struct Pooler {
    LinearCall linear;
    int64_t limit;
  };

  bool read_pooler(PyObject* tuple) {
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == 4, "pooler: expected a tuple of 4");
    Pooler& p = pooler_.emplace();
    const auto at = [&](int i) { return PyTuple_GET_ITEM(tuple, i); };
    if (!read(at(0), p.linear.weight) || !read(at(1), p.linear.bias) || !read(at(2), p.linear.N) ||
        !read(at(3), p.limit))
      return false;
    p.linear.K = p.linear.N;
    return true;
  }

  bool read_version() {
    if (!type_) return true;
    if (type_->is_inference()) return false;
    type_version_ = static_cast<int64_t>(type_->_version());
    return true;
  }

  static bool are_on_cpu(at::TensorList tensors) {
    constexpr DispatchKeySet on_cpu(
        {DispatchKey::CPU, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU,
         DispatchKey::AutocastCPU});
    for (const Tensor& t : tensors)
      if (!on_cpu.isSupersetOf(t.key_set())) return false;
    return true;
  }

  bool any_records() const {
    const auto any = [](const auto& tensors) {
      for (const auto& each : tensors)
        if (records(OptionalTensor(each))) return true;
      return false;
    };
    if (any(tables_) || records(norm_.weight, norm_.bias)) return true;
    for (const EncoderLayer& layer : layers_)
      if (any(layer.weights) || any(layer.biases) || any(layer.norms)) return true;
    return pooler_ && records(pooler_->linear.weight, pooler_->linear.bias);
  }

  // The positions of tokens if a call leaves them out.
  OptionalTensor default_positions(const Tensor& words) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (!positions_) return counted_positions(words);
    const int64_t L = words.size(1);
    if (L > positions_->size(1)) return {};
    // The view for the last number of tokens is kept.
    if (!view_.defined() || view_.size(1) != L || !view_.is_alias_of(*positions_))
      view_ = positions_->narrow(1, 0, L);
    return view_;
  }

  // RoBERTa's positions: tokens are counted from padding_id_ + 1 on, and padding has padding_id_.
  Tensor counted_positions(const Tensor& words) const {
    Tensor counted = at::empty(words.sizes(), words.options());
    const auto* word = words.const_data_ptr<int64_t>();
    auto* out = counted.mutable_data_ptr<int64_t>();
    for (int64_t b = 0; b < words.size(0); ++b) {
      int64_t count = 0;
      for (int64_t l = 0; l < words.size(1); ++l) {
        const bool real = word[b * words.stride(0) + l * words.stride(1)] != padding_id_;
        count += real;
        *out++ = padding_id_ + (real ? count : 0);
      }
    }
    return counted;
  }

  // Turns the padding into the mask of attention, (B, 1, 1, L), if there is any.
  bool read_padding(EncoderModelInputs& inputs) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    Tensor keep = *inputs.padding;
    switch (keep.scalar_type()) {
      case at::kBool:
        if (all_nonzero<bool>(keep)) return true;
        break;
      case at::kLong:
        if (all_nonzero<int64_t>(keep)) return true;
        break;
      case at::kFloat:
        if (all_nonzero<float>(keep)) return true;
        break;
      default: return false;
    }
    if (!masks_) return false;
    inputs.layers.attn_mask = keep.to(at::kBool).unsqueeze(1).unsqueeze(1);
    return true;
  }

  template <class T>
  static bool all_nonzero(const Tensor& t) {
    const T* data = t.const_data_ptr<T>();
    for (int64_t b = 0; b < t.size(0); ++b)
      for (int64_t l = 0; l < t.size(1); ++l)
        if (data[b * t.stride(0) + l * t.stride(1)] == T(0)) return false;
    return true;
  }

  // tanh of a linear layer of the first token.
  Tensor pool(const Tensor& x) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    LinearCall call = pooler_->linear;
    call.x = x.select(1, 0);
    const int64_t limit = pooler_->limit;
    TORCH_CHECK_VALUE(
        limit == 0 ? call.fits() : call.fits_unpacked(limit), "pooler: expected a weight for ",
        call.x.sizes());
    return (limit == 0 ? call.run_packed() : call.run_unpacked()).tanh_();
  }

  THPObjectPtr held_[kParts];  // own what was planned, and the names of activations
  Planned* planned_ = nullptr;
  std::vector<Tensor> tables_;
  NormCall norm_{};
  bool last_is_residual_;
  OptionalTensor type_, positions_;
  int64_t type_version_ = 0, padding_id_;
  Tensor view_;
  std::vector<EncoderLayer> layers_;
  std::optional<Pooler> pooler_;
  int64_t limit_;
  bool masks_;
};

}  // namespace trifuse::fast_path
