// One kernel source, several instruction sets.
//
// setup.py compiles every csrc/cpu/*_kernel.cpp once per instruction set, with the macros that
// select ATen's vector types (CPU_CAPABILITY_AVX512 and so on) and TRIFUSE_CAPABILITY, the
// namespace of kernels that use instructions for bfloat16. Other kernels are in the namespace
// CPU_CAPABILITY. The rest of the program picks one at run time.
//
//   DEFAULT       what every CPU of the architecture has (SSE2 on x86-64, NEON on AArch64)
//   AVX2          with FMA and F16C
//   AVX512        F, BW, VL, DQ
//   AVX512_BF16   AVX512 with dot products of bfloat16 pairs, and conversions to bfloat16
//   AMX_BF16      AVX512_BF16 with bfloat16 products by the matrix unit (AMX); runs on a machine
//                 without one too, for tests, but ranks below AVX512_BF16 there
//
// The last two differ from AVX512 in bfloat16 alone. Their kernels are compiled for bfloat16
// problems only; AVX512's kernels compute the others.

#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "dtype.h"

#if defined(__x86_64__)
#define TRIFUSE_EACH_CAPABILITY(X) X(DEFAULT) X(AVX2) X(AVX512) X(AVX512_BF16) X(AMX_BF16)
#else
#define TRIFUSE_EACH_CAPABILITY(X) X(DEFAULT)
#endif

namespace trifuse {

#define TRIFUSE_NAME(capability) capability,
enum class Capability { TRIFUSE_EACH_CAPABILITY(TRIFUSE_NAME) };
#undef TRIFUSE_NAME

std::string name(Capability);

// Returns the compiled instruction sets that this machine can run, least capable first.
std::vector<Capability> capabilities();

// Returns the instruction set in use: by default the best, or that of TRIFUSE_CPU_CAPABILITY.
Capability capability();

// Returns the instruction set of a name. Throws std::invalid_argument if it isn't in
// capabilities().
Capability capability_named(const std::string& name);

// Returns the instruction set whose kernels compute problems of a type while `in_use` is selected.
Capability capability(DType dtype, Capability in_use = capability());

// Returns whether this machine has a matrix unit for bfloat16 (AMX) that this process may use.
// Requests permission from Linux.
bool has_matrix_unit();

// Set by tests: products run in software even if there is a matrix unit.
inline std::atomic<bool> matrix_unit_off{false};

// Returns the CPU's maker: "AMD", "Intel" or "other".
std::string cpu_maker();

bool is_intel() noexcept;

// Returns whether products of few rows prefetch the whole next part of a matrix that is stored by
// rows: the next tile of keys and values, or the next strip of a weight that they convert. This is
// faster on Zen 4, where one query of 8 key heads reads 4096 keys at 21 GB/s with it and at 16
// without, and on Zen 5. On Intel's CPUs it hinders the hardware prefetcher: on Emerald Rapids one
// such query reads at 26 GB/s with it, and at 32 GB/s without.
bool fetches_rows_ahead() noexcept;

// Whether a register block of AVX512_BF16 (tile_gemm.h) multiplies a pair of bfloat16 with two
// multiply-adds, which give the bits of the dot product. True on Intel's CPUs except Cooper Lake.
// Emerald Rapids starts a dot product every other cycle, but two multiply-adds in every cycle. Zen
// 4 and 5 start as many of either. Tests set it.
extern std::atomic<bool> splits_pairs;

// Selects an instruction set and returns the previous one. Throws as capability_named does.
Capability set_capability(const std::string& name);

}  // namespace trifuse
