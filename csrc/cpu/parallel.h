// Tasks on torch's own threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/threads.h"

namespace trifuse {

// Calls run(task) for 0 .. count - 1, started in order, each in whichever thread is free. `related`
// is the length of a run of neighbouring tasks that read the same memory: if there are plenty of
// runs, a thread takes a whole run and finds that memory in its cache. `operations` is the cost of
// all tasks: below a few microseconds' worth, waking another thread would cost more. If a task
// throws, no others are started and the exception is rethrown.
template <class Run>
void parallel_tasks(int64_t count, int64_t related, double operations, const Run& run) {
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  if (threads <= 1 || operations < 2e6 || in_parallel_region()) {
    for (int64_t task = 0; task < count; ++task) run(task);
    return;
  }
  const int64_t step = count >= 4 * threads * related ? related : 1;
  std::atomic<int64_t> next{0};
  parallel_region(threads, [&](int64_t, int64_t) {
    try {
      for (int64_t first; (first = next.fetch_add(step, std::memory_order_relaxed)) < count;)
        for (int64_t task = first; task < std::min(first + step, count); ++task) run(task);
    } catch (...) {
      next.store(count);
      throw;
    }
  });
}

}  // namespace trifuse
