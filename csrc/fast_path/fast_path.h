// Calls of operators that skip the checks in Python, because they are plain and valid.

#pragma once

#include <torch/csrc/utils/pybind.h>

namespace trifuse {

// Adds them to the module.
void add_fast_paths(pybind11::module_& m);

}  // namespace trifuse
