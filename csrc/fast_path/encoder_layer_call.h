// Plain calls of a whole encoder layer without gradients.

#pragma once

#include <optional>
#include <vector>

#include "fast_path/ops.h"

namespace trifuse::fast_path {

// The tensors and options of a layer, which calls share.
struct EncoderLayer {
  std::vector<Tensor> weights;
  c10::List<OptionalTensor> biases, norms;
  int64_t num_heads, head_dim, intermediate_size;
  double scale;
  std::optional<c10::string_view> activation;
  bool norm_first, rms_norm;
  int64_t window_left, window_right;
  double eps1, eps2;
  int64_t num_key_heads;
  bool first_norm, rotary_in_float32;
  double head_eps;

  // Reads the parts of a layer: weights, biases, norms and options.
  bool read_layer(PyObject* const* parts) {
    return read_tuple<Tensor>(parts[0], weights) && read_tuple<OptionalTensor>(parts[1], biases) &&
        read_tuple<OptionalTensor>(parts[2], norms) && read_options(parts[3]);
  }

  bool read_options(PyObject* tuple) {
    if (!PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) != 15) return false;
    const auto at = [&](int i) { return PyTuple_GET_ITEM(tuple, i); };
    return read(at(0), num_heads) && read(at(1), head_dim) && read(at(2), intermediate_size) &&
        read(at(3), scale) && read(at(4), activation) && read(at(5), norm_first) &&
        read(at(6), rms_norm) && read(at(7), window_left) && read(at(8), window_right) &&
        read(at(9), eps1) && read(at(10), eps2) && read(at(11), num_key_heads) &&
        read(at(12), first_norm) && read(at(13), rotary_in_float32) && read(at(14), head_eps);
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
};

inline Tensor run(const EncoderLayer& layer, const Tensor& x, const EncoderLayerInputs& inputs) {
  static const auto op = find<Tensor(
      const Tensor&, const OptionalTensor&, const OptionalTensor&, int64_t, at::TensorList,
      const c10::List<OptionalTensor>&, const c10::List<OptionalTensor>&, int64_t, int64_t, int64_t,
      double, std::optional<c10::string_view>, bool, bool, int64_t, int64_t, double, double,
      const OptionalTensor&, const OptionalTensor&, int64_t, const OptionalTensor&,
      const OptionalTensor&, std::optional<int64_t>, bool, bool, double, const OptionalTensor&)>(
      "trifuse::encoder_layer", "");
  const EncoderLayer& l = layer;
  return run_kernel(
      op, x, inputs.attn_mask, inputs.cu_seqlens, inputs.max_seqlen, at::TensorList(l.weights),
      l.biases, l.norms, l.num_heads, l.head_dim, l.intermediate_size, l.scale, l.activation,
      l.norm_first, l.rms_norm, l.window_left, l.window_right, l.eps1, l.eps2, inputs.key_cache,
      inputs.value_cache, inputs.past, inputs.cos, inputs.sin,
      std::optional<int64_t>(l.num_key_heads), l.first_norm, l.rotary_in_float32, l.head_eps,
      inputs.relative_bias);
}

}  // namespace trifuse::fast_path
