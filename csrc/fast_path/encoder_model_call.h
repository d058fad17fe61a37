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
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(parts) && PyTuple_GET_SIZE(parts) == 8, "parts: expected a tuple of 8");
    const auto at = [&](int i) { return PyTuple_GET_ITEM(parts, i); };
    int64_t rows;
    bool masks;
    if (!read(at(5), rows) || !read(at(6), masks) || (rows != 0 && words_.numel() >= rows) ||
        !read_padding(masks) || !uses_all(at(7)))
      return false;
    // Checked before the parts are read, so that these exist.
    Planned& planned = from_capsule<Planned>(at(0), kPlanned);
    return planned.values_hold() && planned.modules_hold(idle, /*trained=*/false) &&
        read_embeddings(at(1)) && read_ids(at(2)) && read_layers(at(3), layers_) &&
        read_pooler(at(4));
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
    int64_t rows;  // of a weight that isn't packed, the number of sequences that are not few; or 0
  };

  // Reads the names of the instruction sets for which weights are packed.
  static bool uses_all(PyObject* names) {
    TORCH_CHECK_TYPE(PyTuple_CheckExact(names), "capabilities: expected a tuple");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      std::optional<c10::string_view> name;
      if (!read(PyTuple_GET_ITEM(names, i), name) || !name || !uses({name->data(), name->size()}))
        return false;
    }
    return true;
  }

  // (tables of words, types and positions, weight, bias and eps of the norm, whether the last sum
  // is the norm's residual)
  bool read_embeddings(PyObject* tuple) {
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == 5,
        "embeddings: expected a tuple of 5");
    const auto at = [&](int i) { return PyTuple_GET_ITEM(tuple, i); };
    EmbeddingCall& e = embeddings_;
    if (!read_tuple<Tensor>(at(0), e.tables) || e.tables.size() != 3 ||
        !read(at(1), e.norm.weight) || !read(at(2), e.norm.bias) || !read(at(3), e.norm.eps) ||
        !read(at(4), e.last_is_residual) || records(e.norm.weight, e.norm.bias))
      return false;
    const at::ScalarType dtype = e.tables[0].scalar_type();
    return dtype == at::kFloat || dtype == at::kBFloat16;  // those of encoder_layer
  }

  // The ids that a call may leave out: (one type for all tokens (1, 1) or None, the version at
  // which it was 0, positions (1, the most tokens) or None, the word of padding, from which
  // positions are counted otherwise)
  bool read_ids(PyObject* tuple) {
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == 4, "ids: expected a tuple of 4");
    const auto at = [&](int i) { return PyTuple_GET_ITEM(tuple, i); };
    OptionalTensor type, positions;
    int64_t version, padding;
    if (!read(at(0), type) || !read(at(1), version) || !read(at(2), positions) ||
        !read(at(3), padding))
      return false;
    if (!types_) {
      if (!type || type->is_inference() || static_cast<int64_t>(type->_version()) != version)
        return false;
      types_ = type;
    }
    if (!positions_) {
      if (positions && words_.size(1) > positions->size(1)) return false;
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

  // Turns the padding, 0 or false, into the attention's mask (B, 1, 1, L), if there is any.
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

  // None, or (weight, bias, features, `rows`)
  bool read_pooler(PyObject* object) {
    if (object == Py_None) return true;
    TORCH_CHECK_TYPE(
        PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 4,
        "pooler: expected a tuple of 4");
    const auto at = [&](int i) { return PyTuple_GET_ITEM(object, i); };
    auto& [linear, rows] = pooler_.emplace();
    if (!read(at(0), linear.weight) || !read(at(1), linear.bias) || !read(at(2), linear.N) ||
        !read(at(3), rows) || records(linear.weight, linear.bias))
      return false;
    linear.K = linear.N;
    return rows == 0 || words_.size(0) < rows;
  }

  // tanh of a linear layer of the first token.
  Tensor pool(const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto& [linear, rows] = *pooler_;
    linear.x = x.select(1, 0);
    TORCH_CHECK_VALUE(
        rows == 0 ? linear.fits() : linear.fits_unpacked(rows), "pooler: expected a weight for ",
        linear.x.sizes());
    return (rows == 0 ? linear.run_packed() : linear.run_unpacked()).tanh_();
  }

  Tensor words_;
  OptionalTensor padding_, types_, positions_;
  EmbeddingCall embeddings_;
  EncoderLayerInputs inputs_;
  std::vector<EncoderLayer> layers_;
  std::optional<Pooler> pooler_;
};

}  // namespace trifuse::fast_path
