// Derivatives of ops that are written in Python.

#pragma once

#include <string>

namespace trifuse {

// Has the op `companion`, of the same schema, run in place of `op` where a derivative is wanted. Both
// are named as "name.overload", without the namespace.
void register_autograd(const std::string& op, const std::string& companion);

}  // namespace trifuse
