// The one way in which kernels and operators come by memory of their own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace trifuse {

// Uninitialised memory, which std::free takes back. `purpose` says what it is for.
//
// Where the system has none, the memory that is kept of freed results (memory.h) goes back to it and
// it is asked once more. Then this throws a c10::Error, which Python sees as a RuntimeError: what
// torch's own allocator raises.
void* allocate(int64_t bytes, int64_t alignment, const char* purpose);

// The same for containers.
template <class T>
struct Allocator {
  using value_type = T;
  const char* purpose;

  explicit constexpr Allocator(const char* purpose) : purpose(purpose) {}
  template <class U>
  Allocator(const Allocator<U>& other) : purpose(other.purpose) {}

  T* allocate(size_t count) {
    return static_cast<T*>(
        trifuse::allocate(static_cast<int64_t>(count * sizeof(T)), alignof(T), purpose));
  }
  void deallocate(T* data, size_t) { std::free(data); }
  bool operator==(const Allocator&) const { return true; }
};

template <class T>
using Vector = std::vector<T, Allocator<T>>;

struct Free {
  void operator()(void* data) const { std::free(data); }
};

// For tests. Of the allocations from now on, torch's own on a CPU included, `count` fail, beginning
// with number `first`, counted from 1; with a `first` of 0 none does, as in the beginning. An
// allocation that is asked for twice counts as two.
void fail_allocations(int64_t first, int64_t count);

// How many there have been since fail_allocations was last called with another `first` than 0.
int64_t counted_allocations();

}  // namespace trifuse
