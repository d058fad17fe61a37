// Kernel launches on the current device, and queries of its attributes.
//
// Every return code is checked; a failure throws std::runtime_error, which torch raises in Python
// as RuntimeError. Nothing here waits for the device, and all of it may be captured in a graph.

#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/launch_plan.h"

namespace trifuse::cuda {

inline void check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // otherwise the next call of the runtime would report it again
  throw std::runtime_error(
      what + ": CUDA error " + std::to_string(error) + ", " + cudaGetErrorString(error));
}

// As above, for a launch. Its text is formatted only on failure.
inline void check(cudaError_t error, const LaunchPlan& plan) {
  if (error != cudaSuccess) check(error, describe(plan));
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device, value;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

inline int compute_capability() {
  return wanted_capability(
      10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
      device_attribute(cudaDevAttrComputeCapabilityMinor));
}

// Returns whether a kernel may begin before the previous one has ended. Its code for this device
// must be compiled for compute capability 9.0, because older code does not wait.
template <class... Params>
bool can_overlap(const LaunchPlan& plan, void (*kernel)(Params...)) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), plan);
  return attributes.ptxVersion >= 90;
}

// Returns the most shared memory that one block may have, in bytes.
inline size_t shared_memory_limit() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

// Shared memory beyond 48 KiB has to be allowed on each device. Always allows the device's maximum,
// because another thread may be about to launch the same kernel with more than this launch needs.
template <class... Params>
void allow_shared_memory(const LaunchPlan& plan, void (*kernel)(Params...)) {
  if (plan.shared <= 48 << 10) return;
  const int all = static_cast<int>(shared_memory_limit());
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, all), plan);
}

// Returns how many blocks the device holds at a time, which is the most that a cooperative grid may
// have.
template <class... Params>
int resident_blocks(const LaunchPlan& plan, void (*kernel)(Params...)) {
  allow_shared_memory(plan, kernel);
  const int threads = static_cast<int>(plan.block.x * plan.block.y * plan.block.z);
  int blocks;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, plan.shared), plan);
  return blocks * multiprocessors();
}

template <class... Params, class... Arguments>
void launch(
    const LaunchPlan& plan, cudaStream_t stream, void (*kernel)(Params...),
    Arguments&&... arguments) {
  allow_shared_memory(plan, kernel);
  cudaLaunchAttribute attribute{};
  if (plan.cooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = plan.grid;
  config.blockDim = plan.block;
  config.dynamicSmemBytes = plan.shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs =
      plan.cooperative || (plan.overlaps_previous && can_overlap(plan, kernel)) ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), plan);
}

// Zeros memory that the launch of `plan` reads; failures are reported as failures of the launch.
inline void fill_with_zeros(const LaunchPlan& plan, cudaStream_t stream, void* data, size_t bytes) {
  check(cudaMemsetAsync(data, 0, bytes, stream), plan);
}

}  // namespace trifuse::cuda
