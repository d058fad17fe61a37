// Tasks on torch's own threads.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace trifuse {

// Runs task 0 .. count - 1, each started in order by whichever thread is free. `operations` is what
// all of them cost: below a few microseconds' worth, waking another thread would cost more.
template <class Run>
void parallel_tasks(int64_t count, double operations, const Run& run) {
  const int64_t threads = std::min<int64_t>(count, at::get_num_threads());
  if (threads <= 1 || operations < 2e6 || at::in_parallel_region()) {
    for (int64_t task = 0; task < count; ++task) run(task);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < count;) run(task);
  });
}

}  // namespace trifuse
