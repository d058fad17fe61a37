#include "cpu/capability.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace trifuse {
namespace {

bool machine_has(Capability c) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq");
  switch (c) {
    case Capability::DEFAULT: return true;
    case Capability::AVX2: return avx2;
    case Capability::AVX512: return avx512;
    case Capability::AVX512_BF16:
    case Capability::AMX_BF16: return avx512 && __builtin_cpu_supports("avx512bf16");
  }
  return false;
#else
  return c == Capability::DEFAULT;
#endif
}

}  // namespace

Capability capability_named(const std::string& wanted) {
  std::string known;
  for (Capability c : capabilities()) {
    if (name(c) == wanted) return c;
    known += (known.empty() ? "" : ", ") + name(c);
  }
  throw std::invalid_argument(
      "TRIFUSE_CPU_CAPABILITY: expected one this machine can run (" + known + "); got '" + wanted +
      "'");
}

namespace {

std::atomic<Capability>& current() {
  static std::atomic<Capability> chosen = [] {
    const char* wanted = std::getenv("TRIFUSE_CPU_CAPABILITY");
    return wanted && *wanted ? capability_named(wanted) : capabilities().back();
  }();
  return chosen;
}

}  // namespace

std::string name(Capability c) {
#define TRIFUSE_CASE(capability) \
  case Capability::capability: return #capability;
  switch (c) { TRIFUSE_EACH_CAPABILITY(TRIFUSE_CASE) }
#undef TRIFUSE_CASE
  return "";
}

std::vector<Capability> capabilities() {
  std::vector<Capability> list;
#define TRIFUSE_ADD(capability) \
  if (machine_has(Capability::capability)) list.push_back(Capability::capability);
  TRIFUSE_EACH_CAPABILITY(TRIFUSE_ADD)
#undef TRIFUSE_ADD
#if defined(__x86_64__)
  if (list.back() == Capability::AMX_BF16 && !has_matrix_unit())
    std::swap(list.back(), list[list.size() - 2]);
#endif
  return list;
}

Capability capability() { return current().load(std::memory_order_relaxed); }

Capability capability([[maybe_unused]] DType dtype, Capability in_use) {
#if defined(__x86_64__)
  if (dtype != DType::BFloat16) return std::min(in_use, Capability::AVX512);
#endif
  return in_use;
}

bool has_matrix_unit() {
#if defined(__x86_64__) && defined(__linux__) && !defined(TRIFUSE_SANITIZE)
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned bfloat16 = 1u << 22, tiles = 1u << 24;  // of register EDX
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & bfloat16) == 0 || (d & tiles) == 0) return false;
  // Linux saves the unit's registers only for a process that has requested it: arch_prctl(2),
  // ARCH_REQ_XCOMP_PERM for the state XTILEDATA.
  constexpr int request = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}

bool is_intel() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

namespace {

// Cooper Lake, the only Intel CPU with the dot product before AMX, is said to run it at full speed.
bool is_cooper_lake() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_is("cooperlake");
#else
  return false;
#endif
}

}  // namespace

std::string cpu_maker() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_is("amd")) return "AMD";
  if (is_intel()) return "Intel";
#endif
  return "other";
}

bool fetches_rows_ahead() noexcept {
#ifdef TRIFUSE_SANITIZE
  return true;  // so that the sanitizers see these lines on every machine
#else
  return !is_intel();
#endif
}

std::atomic<bool> splits_pairs{is_intel() && !is_cooper_lake()};

Capability set_capability(const std::string& wanted) {
  return current().exchange(capability_named(wanted));
}

}  // namespace trifuse
