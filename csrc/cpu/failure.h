// How threads wait for one another, and how they end if one of them throws.

#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace trifuse {

// Waits until another thread has made done() true. After about ten microseconds it yields the core,
// because there may be more threads than cores.
template <class Done>
inline void spin_until(const Done& done) {
  for (int turn = 0; !done(); ++turn) {
    if (turn < 1000) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    } else {
      std::this_thread::yield();
    }
  }
}

// The first exception among threads that wait for one another. If a thread throws, the others would
// wait for it forever, so they rethrow its exception.
class Failure {
 public:
  // Runs one thread's work.
  template <class Body>
  void watch(const Body& body) {
    try {
      body();
    } catch (...) {
      if (!claimed_.exchange(true)) {
        exception_ = std::current_exception();
        happened_.store(true, std::memory_order_release);
      }
      throw;
    }
  }

  template <class Done>
  void wait_until(const Done& done) const {
    bool failed = false;
    spin_until([&] { return done() || (failed = happened_.load(std::memory_order_acquire)); });
    if (failed) std::rethrow_exception(exception_);
  }

 private:
  std::atomic<bool> claimed_{false}, happened_{false};
  std::exception_ptr exception_;
};

}  // namespace trifuse
