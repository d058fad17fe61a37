// Dispatch of ops to their derivatives, which are written in Python.

#pragma once

#include <string>

namespace trifuse {

// Runs the op `companion`, which has the same schema, in place of `op` if a derivative is needed.
// Both names are "name.overload", without the namespace.
void register_autograd(const std::string& op, const std::string& companion);

}  // namespace trifuse
