// The options of a layer that runs as one op, in the order in which the op and plain calls get
// them: X(type, name) for each.
//
// trifuse.ops.encoder_layer.Options says what they mean. It has the same names in the same order;
// if not, its import fails. The op's schema is made from it, and all of C++ from this list. So a
// new option is one line here and one there.

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#define TRIFUSE_EACH_LAYER_OPTION(X)             \
  X(at::ArrayRef<double>, eps)                   \
  X(int64_t, num_heads)                          \
  X(int64_t, num_key_heads)                      \
  X(int64_t, head_dim)                           \
  X(int64_t, intermediate_size)                  \
  X(double, scale)                               \
  X(double, result_scale)                        \
  X(std::optional<double>, softcap)              \
  X(std::optional<c10::string_view>, activation) \
  X(bool, norm_first)                            \
  X(bool, rms_norm)                              \
  X(bool, norms_from_one)                        \
  X(bool, parallel)                              \
  X(bool, residual_first)                        \
  X(bool, by_head)                               \
  X(bool, heads_normed_together)                 \
  X(bool, rotary_in_float32)                     \
  X(bool, rotary_interleaved)                    \
  X(bool, rotary_per_pair)                       \
  X(int64_t, window_left)                        \
  X(int64_t, window_right)
