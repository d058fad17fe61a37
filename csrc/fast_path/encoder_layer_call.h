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
  std::vector<double> eps;
  int64_t num_heads, num_key_heads, head_dim, intermediate_size;
  double scale, result_scale;
  std::optional<double> softcap;
  std::optional<c10::string_view> activation;
  bool norm_first, rms_norm, norms_from_one, parallel, residual_first, by_head;
  bool heads_normed_together, rotary_in_float32, rotary_interleaved, rotary_per_pair;
  int64_t window_left, window_right;

  // Reads the parts of a layer: weights, biases, norms and options.
  bool read_layer(PyObject* const* parts) {
    return read_tuple<Tensor>(parts[0], weights) && read_tuple<OptionalTensor>(parts[1], biases) &&
        read_tuple<OptionalTensor>(parts[2], norms) && read_options(parts[3]);
  }

  bool read_options(PyObject* tuple) {
    if (!PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) != 21) return false;
    const auto at = [&](int i) { return PyTuple_GET_ITEM(tuple, i); };
    return read(at(0), eps) && read(at(1), num_heads) && read(at(2), num_key_heads) &&
        read(at(3), head_dim) && read(at(4), intermediate_size) && read(at(5), scale) &&
        read(at(6), result_scale) && read(at(7), softcap) && read(at(8), activation) &&
        read(at(9), norm_first) && read(at(10), rms_norm) && read(at(11), norms_from_one) &&
        read(at(12), parallel) && read(at(13), residual_first) && read(at(14), by_head) &&
        read(at(15), heads_normed_together) && read(at(16), rotary_in_float32) &&
        read(at(17), rotary_interleaved) && read(at(18), rotary_per_pair) &&
        read(at(19), window_left) && read(at(20), window_right);
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
  static const auto op = find<Tensor(
      const Tensor&, Optional, Optional, int64_t, at::TensorList, OptionalTensors, OptionalTensors,
      at::ArrayRef<double>, int64_t, int64_t, int64_t, int64_t, double, double,
      std::optional<double>, std::optional<c10::string_view>, bool, bool, bool, bool, bool, bool,
      bool, bool, bool, bool, int64_t, int64_t, Optional, Optional, int64_t, Optional, Optional,
      Optional, Optional, Optional, Optional)>("trifuse::encoder_layer", "");
  const EncoderLayer& l = layer;
  return run_kernel(
      op, x, inputs.attn_mask, inputs.cu_seqlens, inputs.max_seqlen, at::TensorList(l.weights),
      l.biases, l.norms, at::ArrayRef<double>(l.eps), l.num_heads, l.num_key_heads, l.head_dim,
      l.intermediate_size, l.scale, l.result_scale, l.softcap, l.activation, l.norm_first,
      l.rms_norm, l.norms_from_one, l.parallel, l.residual_first, l.by_head,
      l.heads_normed_together, l.rotary_in_float32, l.rotary_interleaved, l.rotary_per_pair,
      l.window_left, l.window_right, inputs.key_cache, inputs.value_cache, inputs.past, inputs.cos,
      inputs.sin, inputs.relative_bias, inputs.memory_key, inputs.memory_value, inputs.memory_mask);
}

}  // namespace trifuse::fast_path
