// Plain calls, without gradients, of a whole encoder with BERT's code: from ids to hidden states.
//
// For one sentence such a call computes for a millisecond. Between two calls the weights have
// passed through the caches, so whatever else a call reads, its own code included, comes from
// memory: Python and torch's functions around the layers then take as long as a layer or two.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/tanh.h>

#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "fast_path/embeddings_call.h"
#include "fast_path/encoder_layer_call.h"
#include "fast_path/linear_call.h"
#include "fast_path/plans.h"

namespace trifuse::fast_path {

// Returns the items of a tuple.
inline PyObject* const* items_of(PyObject* tuple, Py_ssize_t count, const char* name) {
  TORCH_CHECK_TYPE(
      PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == count, name, ": expected a tuple of ",
      count);
  return PySequence_Fast_ITEMS(tuple);
}

// Reads a tuple of layers, each a tuple (weights, biases, norms, options).
inline bool read_layers(PyObject* tuple, std::vector<EncoderLayer>& layers) {
  TORCH_CHECK_TYPE(PyTuple_CheckExact(tuple), "layers: expected a tuple");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
    PyObject* parts = PyTuple_GET_ITEM(tuple, i);
    if (!layers.emplace_back().read_layer(items_of(parts, 4, "layers"))) return false;
  }
  return true;
}

// The parts of a model are those of trifuse.ops.encoder_model.Parts, and its inputs are ids and a
// mask of padding.
class EncoderModelCall {
 public:
  // Reads what differs from call to call: (words (B, L), padding (B, L) or None, types and
  // positions that broadcast to (B, L) or None).
  bool read_inputs(PyObject* const* inputs) {
    return read(inputs[0], words_) && read(inputs[1], padding_) && read(inputs[2], types_) &&
        read(inputs[3], positions_) && words_.dim() == 2 && words_.scalar_type() == at::kLong &&
        words_.numel() > 0 && (!padding_ || padding_->sizes() == words_.sizes());
  }

  // Reads the model's parts, after its inputs. Returns false if it has changed since it was
  // planned, or doesn't serve these inputs.
  bool read_model(PyObject* parts, PyObject* idle) {
    PyObject* const* part = items_of(parts, 8, "parts");
    int64_t tokens;
    bool masks;
    if (!read(part[5], tokens) || !read(part[6], masks) ||
        (tokens != 0 && words_.numel() >= tokens) || !read_padding(masks) || !uses_all(part[7]))
      return false;
    // Checked before the parts are read, so that these exist.
    Planned& planned = from_capsule<Planned>(part[0], kPlanned);
    return planned.values_hold() && planned.modules_hold(idle, /*trained=*/false) &&
        read_embeddings(part[1]) && read_ids(part[2]) && read_layers(part[3], layers_) &&
        read_pooler(part[4]);
  }

  // Returns whether the kernels use an instruction set.
  static inline bool (*uses)(std::string_view) = nullptr;

  // Returns the last hidden states (B, L, features), and the pooled output (B, features) or an
  // undefined tensor.
  variable_list run() {
    Tensor x = embeddings_.run();
    for (const EncoderLayer& layer : layers_) x = fast_path::run(layer, x, inputs_);
    return {x, pooler_ ? pool(x) : Tensor()};
  }

 private:
  struct Pooler {
    LinearCall linear;
    int64_t sequences;  // an unpacked weight serves fewer than this; 0: it is packed
  };

  // Returns whether the kernels use all these instruction sets, for which weights are packed.
  static bool uses_all(PyObject* names) {
    TORCH_CHECK_TYPE(PyTuple_CheckExact(names), "capabilities: expected a tuple");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      std::optional<c10::string_view> name;
      if (!read(PyTuple_GET_ITEM(names, i), name) || !name || !uses({name->data(), name->size()}))
        return false;
    }
    return true;
  }

  bool read_embeddings(PyObject* tuple) {
    EmbeddingCall& e = embeddings_;
    if (!e.read_parts(items_of(tuple, 5, "embeddings")) || e.tables.size() != 3) return false;
    const at::ScalarType dtype = e.tables[0].scalar_type();
    return dtype == at::kFloat || dtype == at::kBFloat16;  // those of encoder_layer
  }

  // Reads the ids that a call may leave out: (one type for all tokens (1, 1), the buffer that it
  // was read from, and its version then, or None, None and 0; positions (1, the most tokens) or
  // None; the id of padding, from which positions are counted otherwise).
  bool read_ids(PyObject* tuple) {
    PyObject* const* id = items_of(tuple, 5, "ids");
    OptionalTensor type, buffer, positions;
    int64_t version, padding;
    if (!read(id[0], type) || !read(id[1], buffer) || !read(id[2], version) ||
        !read(id[3], positions) || !read(id[4], padding))
      return false;
    if (!types_) {
      if (!type || !buffer || buffer->is_inference() ||
          static_cast<int64_t>(buffer->_version()) != version ||
          buffer->const_data_ptr() != type->const_data_ptr())
        return false;
      types_ = type;
    }
    if (!positions_) {
      if (positions && (positions->dim() != 2 || positions->size(1) < words_.size(1))) return false;
      const at::AutoDispatchBelowADInplaceOrView guard;
      positions_ = positions ? positions->narrow(1, 0, words_.size(1)) : counted_positions(padding);
    }
    embeddings_.ids = {words_, *types_, *positions_};
    return true;
  }

  // RoBERTa's positions: tokens are counted from padding + 1 on, and padding itself has `padding`.
  Tensor counted_positions(int64_t padding) const {
    Tensor counted = at::empty(words_.sizes(), words_.options());
    const auto* word = words_.const_data_ptr<int64_t>();
    auto* out = counted.mutable_data_ptr<int64_t>();
    for (int64_t b = 0; b < words_.size(0); ++b) {
      int64_t count = 0;
      for (int64_t l = 0; l < words_.size(1); ++l) {
        const bool real = word[b * words_.stride(0) + l * words_.stride(1)] != padding;
        count += real;
        *out++ = padding + (real ? count : 0);
      }
    }
    return counted;
  }

  // Turns a mask (B, L), 0 or false at padding, into the attention's (B, 1, 1, L), if there is any
  // padding.
  bool read_padding(bool masks) {
    if (!padding_) return true;
    const Tensor& keep = *padding_;
    const at::ScalarType type = keep.scalar_type();
    if (type != at::kBool && type != at::kLong && type != at::kFloat) return false;
    const bool none = type == at::kBool ? all_nonzero<bool>(keep)
        : type == at::kLong             ? all_nonzero<int64_t>(keep)
                                        : all_nonzero<float>(keep);
    if (none) return true;
    if (!masks) return false;
    const at::AutoDispatchBelowADInplaceOrView guard;
    inputs_.attn_mask = keep.to(at::kBool).unsqueeze(1).unsqueeze(1);
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

  // Reads None, or (weight, bias, features, `sequences`).
  bool read_pooler(PyObject* object) {
    if (object == Py_None) return true;
    PyObject* const* part = items_of(object, 4, "pooler");
    auto& [linear, sequences] = pooler_.emplace();
    if (!read(part[0], linear.weight) || !read(part[1], linear.bias) || !read(part[2], linear.N) ||
        !read(part[3], sequences) || records(linear.weight, linear.bias))
      return false;
    linear.K = linear.N;
    return sequences == 0 || words_.size(0) < sequences;
  }

  // tanh of a linear layer of the first token.
  Tensor pool(const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto& [linear, sequences] = *pooler_;
    linear.x = x.select(1, 0);
    TORCH_CHECK_VALUE(
        sequences == 0 ? linear.fits() : linear.fits_unpacked(), "pooler: expected a weight for ",
        linear.x.sizes());
    return (sequences == 0 ? linear.run_packed() : linear.run_unpacked()).tanh_();
  }

  Tensor words_;
  OptionalTensor padding_, types_, positions_;
  EmbeddingCall embeddings_;
  EncoderLayerInputs inputs_;
  std::vector<EncoderLayer> layers_;
  std::optional<Pooler> pooler_;
};

}  // namespace trifuse::fast_path
