// A launch's shape, its text in error messages, and the compute capability for which kernels are
// chosen.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace trifuse::cuda {

struct Size {
  const char* name = nullptr;
  int64_t value = 0;
};

struct LaunchPlan {
  const char* kernel;
  Size sizes[8];  // sizes of the call, for messages; trailing entries may be omitted
  dim3 grid, block;
  size_t shared = 0;         // bytes per block
  bool cooperative = false;  // all blocks resident at once, so that they may wait for one another
  // May begin before the stream's previous kernel has ended; calls wait_for_previous_kernel.
  bool overlaps_previous = false;
};

inline std::string describe(const LaunchPlan& plan) {
  std::string text = std::string(plan.kernel) + " (";
  for (const Size& size : plan.sizes)
    if (size.name) text += std::string(size.name) + " " + std::to_string(size.value) + ", ";
  const auto shape = [](dim3 d) {
    return std::to_string(d.x) + "x" + std::to_string(d.y) + "x" + std::to_string(d.z);
  };
  return text + "grid " + shape(plan.grid) + ", block " + shape(plan.block) + ", shared " +
      std::to_string(plan.shared) + " bytes)";
}

// Returns the compute capability for which kernels are chosen, such as 90 for 9.0. It is the lower
// of that of the device and that of the environment variable TRIFUSE_CUDA_CAPABILITY, written as
// 8.0.
inline int wanted_capability(int device) {
  const char* wanted = std::getenv("TRIFUSE_CUDA_CAPABILITY");
  if (!wanted || !*wanted) return device;
  int major, minor, end = 0;
  if (std::sscanf(wanted, "%d.%d%n", &major, &minor, &end) != 2 || wanted[end])
    throw std::runtime_error(
        std::string("TRIFUSE_CUDA_CAPABILITY: expected a number such as 8.0; got '") + wanted +
        "'");
  return std::min(device, 10 * major + minor);
}

}  // namespace trifuse::cuda
