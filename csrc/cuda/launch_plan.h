// How a kernel is launched, and how a launch that fails is described.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace trifuse::cuda {

struct Size {
  const char* name = nullptr;
  int64_t value = 0;
};

struct LaunchPlan {
  const char* kernel;
  Size sizes[8];  // of the call, for messages; the last ones may be left out
  dim3 grid, block;
  size_t shared = 0;  // bytes for each block
  bool cooperative = false;  // all blocks resident at once, so that they may wait for one another
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

}  // namespace trifuse::cuda
