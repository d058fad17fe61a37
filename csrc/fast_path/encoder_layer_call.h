// Plain calls of a whole encoder layer without gradients.

#pragma once

#include <iterator>
#include <optional>
#include <type_traits>
#include <vector>

#include "encoder_layer_options.h"
#include "fast_path/ops.h"

namespace trifuse::fast_path {

// An option as it is kept for a call: with its own numbers, if it refers to some.
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, at::ArrayRef<double>>, std::vector<double>, T>;

// The names of the options, in order.
#define TRIFUSE_NAME(type, name) #name,
constexpr const char* kLayerOptions[] = {TRIFUSE_EACH_LAYER_OPTION(TRIFUSE_NAME)};
#undef TRIFUSE_NAME

// The tensors and options of a layer, which calls share.
struct EncoderLayer {
  std::vector<Tensor> weights;
  c10::List<OptionalTensor> biases, norms;
#define TRIFUSE_STORED(type, name) Stored<type> name;
  TRIFUSE_EACH_LAYER_OPTION(TRIFUSE_STORED)
#undef TRIFUSE_STORED

  // Reads the parts of a layer: weights, biases, norms and options.
  bool read_layer(PyObject* const* parts) {
    return read_tuple<Tensor>(parts[0], weights) && read_tuple<OptionalTensor>(parts[1], biases) &&
        read_tuple<OptionalTensor>(parts[2], norms) && read_options(parts[3]);
  }

  bool read_options(PyObject* tuple) {
    constexpr Py_ssize_t count = std::size(kLayerOptions);
    if (!PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) != count) return false;
    Py_ssize_t at = 0;
#define TRIFUSE_READ(type, name) \
  if (!read(PyTuple_GET_ITEM(tuple, at++), name)) return false;
    TRIFUSE_EACH_LAYER_OPTION(TRIFUSE_READ)
#undef TRIFUSE_READ
    return true;
  }
};

// These inputs differ from call to call. The hidden states x are passed beside them.
struct EncoderLayerInputs {
  OptionalTensor attn_mask, cu_seqlens;
  int64_t max_seqlen = 0;
  OptionalTensor key_cache, value_cache;
  int64_t past = 0;
  OptionalTensor cos, sin;
  OptionalTensor relative_bias;
  OptionalTensor memory_key, memory_value, memory_mask;
};

inline Tensor run(const EncoderLayer& layer, const Tensor& x, const EncoderLayerInputs& inputs) {
  using Optional = const OptionalTensor&;
  using OptionalTensors = const c10::List<OptionalTensor>&;
#define TRIFUSE_TYPE(type, name) type,
#define TRIFUSE_OF_LAYER(type, name) layer.name,
  static const auto op = find<Tensor(
      const Tensor&, Optional, Optional, int64_t, at::TensorList, OptionalTensors, OptionalTensors,
      TRIFUSE_EACH_LAYER_OPTION(TRIFUSE_TYPE) Optional, Optional, int64_t, Optional, Optional,
      Optional, Optional, Optional, Optional)>("trifuse::encoder_layer", "");
  return run_kernel(
      op, x, inputs.attn_mask, inputs.cu_seqlens, inputs.max_seqlen, at::TensorList(layer.weights),
      layer.biases, layer.norms, TRIFUSE_EACH_LAYER_OPTION(TRIFUSE_OF_LAYER) inputs.key_cache,
      inputs.value_cache, inputs.past, inputs.cos, inputs.sin, inputs.relative_bias,
      inputs.memory_key, inputs.memory_value, inputs.memory_mask);
#undef TRIFUSE_TYPE
#undef TRIFUSE_OF_LAYER
}

}  // namespace trifuse::fast_path
