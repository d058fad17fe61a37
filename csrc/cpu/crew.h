// Threads that go through a sequence of steps together.
//
// A step of a recurrent network takes microseconds, which is too short to distribute tasks anew for
// each step. All threads enter one parallel region, and meet at a barrier wherever one needs the
// results of another.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu/allocation.h"
#include "cpu/failure.h"
#include "cpu/shares.h"
#include "cpu/threads.h"

namespace trifuse {

// A reusable barrier of `size` threads.
class Barrier {
 public:
  void wait(int64_t size, const Failure& failure) {
    if (size == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      failure.wait_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

 private:
  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

struct Range {
  int64_t first, last;
};

// One thread's view of a team of threads.
struct Team {
  Barrier* barrier;
  const Failure* failure;
  int64_t index, size;

  void wait() const { barrier->wait(size, *failure); }
  // Returns this thread's share of `count` items, a contiguous range.
  Range share(int64_t count) const { return {count * index / size, count * (index + 1) / size}; }
};

// All threads. They can be split into teams that run separate jobs.
class Crew {
 public:
  explicit Crew(int64_t threads)
      : barriers_(threads + 1, Allocator<Barrier>("barriers")), shares_(threads) {}

  Team all(int64_t index) const { return make_team(0, index, size_); }

  // Calls run(job, team) in every thread for its jobs among 0 .. count - 1. If threads divide
  // evenly among jobs, or jobs among threads, each job has its own team; otherwise all threads run
  // every job together.
  template <class Run>
  void share_jobs(int64_t index, int64_t count, const Run& run) const {
    if (size_ % count == 0) {
      const int64_t team = size_ / count;
      run(index / team, make_team(1 + index / team, index % team, team));
    } else if (count % size_ == 0) {
      for (int64_t job = index; job < count; job += size_) run(job, make_team(1, 0, 1));
    } else {
      for (int64_t job = 0; job < count; ++job) run(job, all(index));
    }
  }

  // Calls run(task) for 0 .. count - 1, each in one of the threads. May be called once per crew.
  template <class Run>
  void share_tasks(int64_t index, int64_t count, const Run& run) const {
    shares_.take({count}, index, size_, [&](int64_t task, int64_t) { run(task); });
  }

  // Runs body(index) in all threads at once: at most as many as the crew was made for, or this
  // thread alone inside another parallel region. Rethrows the first exception of any thread.
  template <class Body>
  void run(int64_t threads, const Body& body) {
    if (threads <= 1 || in_parallel_region()) {
      body(0);
      return;
    }
    // torch may start fewer threads than requested and give some of them several numbers, so the
    // threads count themselves before they begin.
    std::atomic<int64_t> members{0}, numbers{0};
    parallel_region(threads, [&](int64_t first, int64_t last) {
      const int64_t arrival = members.fetch_add(1);
      if (numbers.fetch_add(last - first) + last - first == threads) {
        size_ = members.load();
        numbers.store(-1, std::memory_order_release);
      }
      spin_until([&] { return numbers.load(std::memory_order_acquire) == -1; });
      failure_.watch([&] { body(size_ == threads ? first : arrival); });
    });
  }

 private:
  Team make_team(int64_t barrier, int64_t index, int64_t size) const {
    return {&barriers_[barrier], &failure_, index, size};
  }

  mutable Vector<Barrier> barriers_;
  Failure failure_;
  int64_t size_ = 1;
  mutable Shares shares_;
};

}  // namespace trifuse
