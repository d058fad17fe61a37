// dropout_add_layer_norm on a GPU: a call as plain pointers, sizes and strides, and its launchers.
//
// Names and rules are those of pytorch_ext/reference/dropout_add_layer_norm.py. The accumulation
// type is float, or double for Float64. All pointers are device pointers.

#pragma once

#include <cstdint>

#include "../dtype.h"

namespace trifuse::cuda {

// Tensors have the dtype of the call. If that has 16 bits they may be wide, that is, float32.
struct Vector {  // (N,)
  void* data = nullptr;
  bool wide = false;
  constexpr explicit operator bool() const { return data != nullptr; }
};

// (rows, N), contiguous within a row. Strides are in bytes; there are fewer than 2^32 rows.
struct Matrix {
  void* data = nullptr;
  bool wide = false;
  uint32_t inner = 0;  // rows per outer stride; 0: stride alone separates rows
  int64_t stride = 0, outer_stride = 0;
  constexpr explicit operator bool() const { return data != nullptr; }
  constexpr void* row(uint32_t r) const {
    int64_t offset = r * stride;
    if (inner) offset = r / inner * outer_stride + r % inner * stride;
    return static_cast<char*>(data) + offset;
  }
};

// If N is a multiple of 8, rows must begin at multiples of 16 bytes.
struct DropoutAddLayerNorm {
  DType dtype;  // of x, out and their gradients
  int64_t rows, N;

  Matrix x;              // null in the backward if sum is given instead
  Matrix residual, sum;  // or null
  Matrix out;
  Vector weight, bias, x_bias;  // or null
  void* mean = nullptr;         // (rows,) in the accumulation type
  void* rstd = nullptr;

  double eps;
  bool rms_norm;
  const int64_t* seed = nullptr;  // on the device, so that a CUDA graph can draw a new one
  bool placed = false;            // whether a Place follows the seed
  uint32_t threshold = 0;         // as in Dropout; 0 for none
  double scale = 1;

  // Backward only; null if there is none, or if it is not needed.
  Matrix grad_out, grad_sum, grad_x, grad_residual;
  Vector grad_weight, grad_bias, grad_x_bias;
};

// `stream` is a cudaStream_t. Throws std::runtime_error if a kernel can't be launched.
void dropout_add_layer_norm_forward(const DropoutAddLayerNorm& call, void* stream);

// `workspace` is that many bytes of device memory, aligned to 16; it need not be initialised.
int64_t dropout_add_layer_norm_backward_workspace(const DropoutAddLayerNorm& call);
void dropout_add_layer_norm_backward(
    const DropoutAddLayerNorm& call, void* workspace, void* stream);

}  // namespace trifuse::cuda
