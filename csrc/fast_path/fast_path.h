// Calls of operators that skip the checks in Python, because they are plain and valid.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string_view>

namespace trifuse {

// Adds them to the module. uses(name) returns whether a CPU's kernels use this instruction set.
void add_fast_paths(pybind11::module_& m, bool (*uses)(std::string_view));

}  // namespace trifuse
