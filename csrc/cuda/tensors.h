// The device and stream of a call, from torch. Includes no CUDA headers: torch may be a CPU build.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace trifuse::cuda {

// The dispatch key of the ops in this folder.
#define TRIFUSE_CUDA CUDA

// Makes a tensor's device current during its own lifetime. stream() returns that device's stream.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const at::Tensor& t) : guard_(t.device()), device_(t.device()) {}
  void* stream() const {
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).native_handle();
  }

 private:
  c10::DeviceGuard guard_;
  c10::Device device_;
};

}  // namespace trifuse::cuda
