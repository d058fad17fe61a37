// Tasks on torch's own threads.

#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/shares.h"
#include "cpu/threads.h"

namespace trifuse {

// Returns the number of threads that may share a call of that many operations. Below a few
// microseconds, waking another thread would cost more.
inline int64_t threads_for(double operations) {
  return operations < 2e6 || in_parallel_region() ? 1 : at::get_num_threads();
}

// Calls run(first, last) for runs of tasks, [first, last), which together are 0 .. count - 1. Each
// thread has a share of neighbouring tasks (shares.h). `related` is the number of neighbouring
// tasks that should run together, for example because they read the same memory. Related tasks are
// started in order and, if there are enough tasks, as one run. `operations` is the cost of all
// tasks. If a run throws, no others are started, and the exception is rethrown.
template <class Run>
void parallel_runs(int64_t count, int64_t related, double operations, const Run& run) {
  const int64_t threads = std::min(count, threads_for(operations));
  if (threads <= 1) {
    if (count > 0) run(0, count);
    return;
  }
  const Tasks tasks{count, related, count >= 4 * threads * related ? related : 1};
  Shares shares(threads);
  parallel_region(threads, [&](int64_t thread, int64_t) {
    try {
      shares.take(tasks, thread, threads, run);
    } catch (...) {
      shares.abandon();
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
