// Stands in for csrc/cuda/tensors.h: the CUDA backend's ops, for CPU tensors.

#pragma once

#include <ATen/core/Tensor.h>

namespace trifuse::cuda {

#define TRIFUSE_CUDA CPU

class OnDeviceOf {
 public:
  explicit OnDeviceOf(const at::Tensor&) {}
  void* stream() const { return nullptr; }
};

}  // namespace trifuse::cuda
