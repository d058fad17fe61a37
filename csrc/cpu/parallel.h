// Tasks on torch's own threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/threads.h"

namespace trifuse {

// Calls run(first, last) for runs of tasks, [first, last), which together are 0 .. count - 1. Runs
// are started in order, each in any free thread. `related` is the number of neighbouring tasks that
// should run together, for example because they read the same memory; if there are enough tasks, a
// run has that many. `operations` is the cost of all tasks. If it is below a few microseconds,
// waking another thread would cost more. If a run throws, no others are started and the exception
// is rethrown.
template <class Run>
void parallel_runs(int64_t count, int64_t related, double operations, const Run& run) {
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  if (threads <= 1 || operations < 2e6 || in_parallel_region()) {
    if (count > 0) run(0, count);
    return;
  }
  const int64_t step = count >= 4 * threads * related ? related : 1;
  std::atomic<int64_t> next{0};
  parallel_region(threads, [&](int64_t, int64_t) {
    try {
      for (int64_t first; (first = next.fetch_add(step, std::memory_order_relaxed)) < count;)
        run(first, std::min(first + step, count));
    } catch (...) {
      next.store(count);
      throw;
    }
  });
}

// As parallel_runs, for a function of one task.
template <class Run>
void parallel_tasks(int64_t count, int64_t related, double operations, const Run& run) {
  parallel_runs(count, related, operations, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) run(task);
  });
}

}  // namespace trifuse
