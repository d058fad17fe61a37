// The source of threads: torch's own or, with TRIFUSE_STD_THREADS, std::thread.
//
// torch's threads are OpenMP's. No sanitizer can follow how they pass work to one another, because
// their runtime is not compiled with it. ThreadSanitizer follows the start and end of a
// std::thread, so any race that it reports is ours.

#pragma once

#include <ATen/Parallel.h>

#include <cstdint>
#ifdef TRIFUSE_STD_THREADS
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>
#endif

namespace trifuse {

#ifdef TRIFUSE_STD_THREADS

inline thread_local bool in_std_threads = false;

inline bool in_parallel_region() { return in_std_threads || at::in_parallel_region(); }

template <class Body>
void parallel_region(int64_t threads, const Body& body) {
  std::mutex mutex;
  std::exception_ptr error;
  const auto run = [&](int64_t index) {
    const bool outer = std::exchange(in_std_threads, true);
    try {
      body(index, index + 1);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
    in_std_threads = outer;
  };
  std::vector<std::thread> others;
  for (int64_t index = 1; index < threads; ++index) others.emplace_back(run, index);
  run(0);
  for (std::thread& other : others) other.join();
  if (error) std::rethrow_exception(error);
}

#else

using at::in_parallel_region;

// Calls body(first, last) in `threads` threads at once, for one index each. torch may start fewer
// threads and give some of them several indices. Rethrows the first exception.
template <class Body>
void parallel_region(int64_t threads, const Body& body) {
  at::parallel_for(0, threads, 1, body);
}

#endif

}  // namespace trifuse
