// How threads divide tasks among themselves.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/allocation.h"

namespace trifuse {

struct Tasks {
  int64_t count;
  int64_t related = 1;  // each run of this many tasks, from a multiple of it on, is in one share
  int64_t step = 1;     // how many tasks are taken at once; divides `related`
};

// Tasks 0 .. count - 1, of which each thread has a share: neighbouring tasks, in order. A thread
// that has finished its own share helps the others with theirs. If `related` leaves fewer shares
// than there are threads, several threads have one together.
//
// Shares keep memory in the caches of one core. If two calls divide rows in the same way, as
// torch's own functions do, a thread reads in the second call the rows that it wrote in the first.
// Writing gains most. A cache line that another core has read must be taken from that core before
// it is written, and where the two share no cache, as on AMD's CPUs of several chiplets, that takes
// tens of nanoseconds.
class Shares {
 public:
  // For up to `threads` threads.
  explicit Shares(int64_t threads) : taken_(threads, Allocator<Count>("shares of tasks")) {}

  // Calls run(first, last) in this one of `threads` threads for tasks [first, last), until all are
  // taken. Tasks of one share are taken in order.
  template <class Run>
  void take(const Tasks& tasks, int64_t thread, int64_t threads, const Run& run) {
    const int64_t groups = (tasks.count + tasks.related - 1) / tasks.related;
    const int64_t shares = std::min(threads, groups);
    for (int64_t i = 0; i < shares; ++i) {
      const int64_t share = (thread * shares / threads + i) % shares;
      const int64_t begin = groups * share / shares * tasks.related;
      const int64_t end = std::min(groups * (share + 1) / shares * tasks.related, tasks.count);
      const auto next = [&] {
        return begin + taken_[share].value.fetch_add(tasks.step, std::memory_order_relaxed);
      };
      for (int64_t first; (first = next()) < end;) run(first, std::min(first + tasks.step, end));
    }
  }

  // Leaves the tasks undone that no thread has taken yet.
  void abandon() {
    constexpr int64_t kMoreThanAll = int64_t(1) << 62;
    for (Count& count : taken_) count.value.store(kMoreThanAll, std::memory_order_relaxed);
  }

 private:
  struct alignas(64) Count {
    std::atomic<int64_t> value{0};
  };

  Vector<Count> taken_;
};

}  // namespace trifuse
