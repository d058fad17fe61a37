// One kernel source, several instruction sets.
//
// setup.py compiles every csrc/cpu/*_kernel.cpp once per instruction set, with the macros that
// ATen's vector types look at (CPU_CAPABILITY_AVX512 and so on) and TRIFUSE_CAPABILITY, which names
// the namespace the code lands in. The rest of the program picks one when it runs.
//
//   DEFAULT       what every CPU of the architecture has (SSE2 on x86-64, NEON on AArch64)
//   AVX2          with FMA and F16C
//   AVX512        F, BW, VL, DQ
//   AVX512_BF16   AVX512 with dot products of bfloat16 pairs
//   AMX_BF16      AVX512_BF16 whose bfloat16 products go through torch's brgemm, which uses the matrix
//                 unit (AMX); on a machine without one it runs too, but is not the best
//
// The last two have nothing of their own but products of bfloat16: their kernels are compiled for
// problems of that type alone, and AVX512's compute the others.

#pragma once

#include <string>
#include <vector>

#include "dtype.h"

#if defined(__x86_64__)
#define TRIFUSE_EACH_VECTOR(X) X(DEFAULT) X(AVX2) X(AVX512)
#define TRIFUSE_EACH_CAPABILITY(X) TRIFUSE_EACH_VECTOR(X) X(AVX512_BF16) X(AMX_BF16)
#else
#define TRIFUSE_EACH_VECTOR(X) X(DEFAULT)
#define TRIFUSE_EACH_CAPABILITY(X) TRIFUSE_EACH_VECTOR(X)
#endif

namespace trifuse {

#define TRIFUSE_NAME(capability) capability,
enum class Capability { TRIFUSE_EACH_CAPABILITY(TRIFUSE_NAME) };
#undef TRIFUSE_NAME

std::string name(Capability);

// Those compiled in that this machine can run, worst first.
std::vector<Capability> capabilities();

// The one in use: the best, or what TRIFUSE_CPU_CAPABILITY asks for.
Capability capability();

// The one whose kernels compute problems of a type.
Capability capability(DType dtype);

// Use another, and return the one before. Throws std::invalid_argument for one not in the list.
Capability set_capability(const std::string& name);

}  // namespace trifuse
