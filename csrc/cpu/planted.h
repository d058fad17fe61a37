// Deliberate errors, only in sanitized builds. tests/support/sanitize.py first triggers each of
// them, because a build that does not report them would not report real ones.

#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu/crew.h"
#include "cpu/parallel.h"

namespace trifuse {

inline int64_t planted(const std::string& error) {
  // Volatile, so that the compiler keeps accesses without a defined result. ThreadSanitizer can
  // miss two threads' first accesses to a number if they happen at exactly the same time, and then
  // skips all later ones as known. So racing threads go through many numbers, in opposite order.
  constexpr int count = 64;
  volatile int64_t numbers[count] = {};
  if (error == "race between tasks") {
    std::atomic<int> begun{0};
    parallel_tasks(2, 1, 1e9, [&](int64_t task) {
      for (int n = 0; n < count; ++n) numbers[task == 0 ? n : count - 1 - n] = task;
      begun.fetch_add(1, std::memory_order_relaxed);
      spin_until([&] { return begun.load(std::memory_order_relaxed) == 2; });
    });
    return numbers[0];
  }
  if (error == "race in a crew") {  // a barrier is missing
    volatile int64_t read = 0;
    Crew crew(2);
    crew.run(2, [&](int64_t index) {
      for (int n = 0; n < count; ++n)
        if (index == 0) numbers[n] = n;
        else read = numbers[count - 1 - n];
    });
    return read;
  }
  if (error == "relaxed hand-over") {  // correct on x86, but not in C++
    volatile int64_t value = 0, read = 0;
    std::atomic<bool> ready{false};
    Crew crew(2);
    crew.run(2, [&](int64_t index) {
      if (index == 0) {
        value = 1;
        ready.store(true, std::memory_order_relaxed);
      } else {
        spin_until([&] { return ready.load(std::memory_order_relaxed); });
        read = value;
      }
    });
    return read;
  }
  volatile int64_t size = 8;
  if (error == "read past the end") {
    const std::unique_ptr<volatile int64_t[]> memory(new volatile int64_t[size]{});
    return memory[size];
  }
  if (error == "misaligned load") {
    alignas(8) const char memory[16] = {};
    return *reinterpret_cast<const volatile int64_t*>(memory + size / 8);
  }
  if (error == "overflow") {
    const volatile int64_t most = std::numeric_limits<int64_t>::max();
    return most + size;
  }
  throw std::invalid_argument("no such error is planted: " + error);
}

}  // namespace trifuse
