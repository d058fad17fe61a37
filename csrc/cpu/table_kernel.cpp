// The table of an instruction set's kernels.

#include "cpu/kernels.h"

namespace trifuse::TRIFUSE_CAPABILITY {

const Kernels& table() {
  static const Kernels kernels{
      .attention_forward = attention_forward(),
      .attention_backward = attention_backward(),
      .dropout_add_layer_norm_forward = dropout_add_layer_norm_forward(),
      .dropout_add_layer_norm_backward = dropout_add_layer_norm_backward(),
      .dropout = CPU_CAPABILITY::dropout(),
      .embedding_sum = CPU_CAPABILITY::embedding_sum(),
      .rotary = CPU_CAPABILITY::rotary(),
      .activation = CPU_CAPABILITY::activation(),
      .bias_gradient = CPU_CAPABILITY::bias_gradient(),
      .linear = linear(),
      .lstm_forward = lstm_forward(),
      .lstm_backward = lstm_backward(),
      .probe = probe()};
  return kernels;
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
