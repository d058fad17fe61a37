#include "cpu/kernels.h"

namespace trifuse {

// Defined in table_kernel.cpp, once per instruction set.
#define TRIFUSE_DECLARE(set) \
  namespace set {            \
  const Kernels& table();    \
  }
TRIFUSE_EACH_CAPABILITY(TRIFUSE_DECLARE)
#undef TRIFUSE_DECLARE

const Kernels& kernels_of(Capability capability) {
  // In the order of Capability.
#define TRIFUSE_TABLE(set) set::table,
  static constexpr const Kernels& (*tables[])() = {TRIFUSE_EACH_CAPABILITY(TRIFUSE_TABLE)};
#undef TRIFUSE_TABLE
  return tables[static_cast<int>(capability)]();
}

}  // namespace trifuse
