// Stands in for csrc/cuda/launch.h: a launch runs to its end before it returns.

#pragma once

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>

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

template <class... Params>
int resident_blocks(const LaunchPlan& plan, void (*)(Params...)) {
  const auto& device = cuda_on_host::device;
  if (plan.shared > device.shared_memory || count(plan.block) > 1024) return 0;
  return device.multiprocessors * device.blocks_per_multiprocessor;
}

template <class... Params, class... Arguments>
void launch(
    const LaunchPlan& plan, cudaStream_t, void (*kernel)(Params...), Arguments&&... arguments) {
  const uint64_t threads = count(plan.block);
  const char* error = nullptr;
  if (count(plan.grid) == 0 || threads == 0) error = "nothing to launch";
  if (plan.grid.x > 0x7FFFFFFF || plan.grid.y > 65535 || plan.grid.z > 65535)
    error = "too many blocks";
  if (threads > 1024 || plan.block.z > 64) error = "too many threads";
  if (threads % 32) error = "a block of part of a warp, which isn't modelled";
  if (plan.shared > shared_memory_limit()) error = "too much shared memory";
  if (plan.cooperative && count(plan.grid) > uint64_t(resident_blocks(plan, kernel)))
    error = "a cooperative grid that isn't resident at once";
  if (error) throw std::runtime_error(describe(plan) + ": " + error);
  ++cuda_on_host::launches[plan.kernel];
  const std::tuple<Params...> parameters(std::forward<Arguments>(arguments)...);
  cuda_on_host::Grid grid(
      describe(plan), plan.grid, plan.block, plan.shared, [&] { std::apply(kernel, parameters); });
  grid.run(plan.cooperative);
}

inline void fill_with_zeros(const LaunchPlan&, cudaStream_t, void* data, size_t bytes) {
  std::memset(data, 0, bytes);
}

}  // namespace trifuse::cuda
