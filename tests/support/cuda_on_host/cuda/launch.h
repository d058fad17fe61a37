// Stands in for csrc/cuda/launch.h: a launch runs to its end before it returns.

#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <functional>
#include <stdexcept>

#include "cuda/launch_plan.h"

namespace trifuse::cuda {

inline void check(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess)
    throw std::runtime_error(what + ": CUDA error " + std::to_string(error));
}

inline int compute_capability() {
  return wanted_capability(cuda_on_host::device.compute_capability);
}

inline int multiprocessors() { return cuda_on_host::device.multiprocessors; }

inline size_t shared_memory_limit() { return cuda_on_host::device.shared_memory; }

inline uint64_t count(dim3 d) { return uint64_t(d.x) * d.y * d.z; }

// How many blocks can be resident at once.
int resident_blocks(const LaunchPlan& plan);

template <class... Params>
int resident_blocks(const LaunchPlan& plan, void (*)(Params...)) {
  return resident_blocks(plan);
}

// Calls a kernel in each thread of a grid.
void run(const LaunchPlan& plan, std::function<void()> kernel);

template <class... Params, class... Arguments>
void launch(
    const LaunchPlan& plan, cudaStream_t, void (*kernel)(Params...), Arguments&&... arguments) {
  run(plan, [&] { kernel(arguments...); });
}

inline void fill_with_zeros(const LaunchPlan&, cudaStream_t, void* data, size_t bytes) {
  std::memset(data, 0, bytes);
}

}  // namespace trifuse::cuda
