// Scratch memory of a kernel.

#pragma once

#include <cstdint>
#include <memory>

#include "cpu/allocation.h"

namespace trifuse::TRIFUSE_CAPABILITY {

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// One thread's memory, allocated in pieces that live until the next reset. It grows to the largest
// need and is kept, so that later calls cause no page faults.
class Scratch {
 public:
  void reset(int64_t bytes, const char* purpose) {
    if (bytes > capacity_) {
      // Frees the old memory first, because there may be no room for both. If there is no room for
      // the new memory either, the scratch stays empty.
      capacity_ = 0;
      memory_.reset();
      memory_.reset(static_cast<char*>(allocate(round_up(bytes, 64), 64, purpose)));
      capacity_ = round_up(bytes, 64);
    }
    used_ = 0;
  }
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(memory_.get() + used_);
    used_ += bytes<T>(count);
    return piece;
  }
  template <class T>
  static int64_t bytes(int64_t count) {
    return round_up(count * static_cast<int64_t>(sizeof(T)), 64);
  }

 private:
  std::unique_ptr<char, Free> memory_;
  int64_t capacity_ = 0, used_ = 0;
};

}  // namespace trifuse::TRIFUSE_CAPABILITY
