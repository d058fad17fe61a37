// Tensors between guards. While the allocator below is installed, every new CPU tensor is
// surrounded by bytes that no code may write.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <utility>

namespace {

constexpr size_t kGuard = 256;
constexpr int kGuardByte = 0xFB;

std::unordered_map<void*, size_t>& sizes() {
  static auto* all = new std::unordered_map<void*, size_t>;  // tensors may outlive static objects
  return *all;
}
int damaged = 0;
size_t largest = 0;

bool intact(const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < kGuard; ++i)
    if (bytes[-1 - static_cast<std::ptrdiff_t>(i)] != kGuardByte || bytes[size + i] != kGuardByte)
      return false;
  return true;
}

struct GuardedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* memory = static_cast<unsigned char*>(
        std::aligned_alloc(kGuard, (size + 3 * kGuard - 1) / kGuard * kGuard));
    if (!memory) throw std::bad_alloc();
    std::memset(memory, kGuardByte, size + 2 * kGuard);
    sizes()[memory + kGuard] = size;
    largest = std::max(largest, size);
    return {memory + kGuard, memory + kGuard, release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
  static void release(void* data) {
    if (!data) return;
    damaged += !intact(data, sizes().at(data));
    sizes().erase(data);
    std::free(static_cast<unsigned char*>(data) - kGuard);
  }
} guarded;

c10::Allocator* before = nullptr;

}  // namespace

extern "C" __attribute__((visibility("default"))) void guard_memory(bool on) {
  if (on) before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(on ? &guarded : before, 255);
}

// Returns the bytes of the largest tensor that was made since the last call.
extern "C" __attribute__((visibility("default"))) size_t largest_tensor() {
  return std::exchange(largest, 0);
}

// Counts tensors with overwritten guards, among those alive or freed since the last call.
extern "C" __attribute__((visibility("default"))) int damaged_tensors() {
  int result = damaged;
  for (const auto& [data, size] : sizes()) result += !intact(data, size);
  damaged = 0;
  return result;
}
