// Allocates the memory that kernels and operators need for themselves.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace trifuse {

// Returns uninitialised memory, to be freed with std::free. An error names its `purpose`.
//
// If the system has no memory left, this frees the cached blocks of earlier results (memory.h) and
// tries once more. If that fails too, it throws a c10::Error, as torch's own allocator does: a
// RuntimeError in Python.
void* allocate(int64_t bytes, int64_t alignment, const char* purpose);

// The same in the form of a standard allocator, for containers.
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

// For tests. Makes `count` of the following allocations fail, from the one numbered `first`
// (from 1) on. torch's own CPU allocations count too, and a retry counts as another allocation.
// With `first` = 0, the initial state, none fails.
void fail_allocations(int64_t first, int64_t count);

// Returns the number of allocations counted since the last fail_allocations call with `first` > 0.
int64_t counted_allocations();

}  // namespace trifuse
