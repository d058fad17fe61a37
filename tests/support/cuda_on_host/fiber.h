// Fibers: stacks that take turns in one thread of the operating system.
//
// ucontext starts each fiber once; from then on _setjmp and _longjmp switch between fibers. They
// make no system call; swapcontext makes two.

#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <vector>

namespace cuda_on_host {

class Fiber {
 public:
  static constexpr size_t kStack = 128 << 10, kGuard = 4 << 10;

  Fiber() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    stack_ = static_cast<std::byte*>(memory);
    mprotect(stack_, kGuard, PROT_NONE);  // a stack overflow faults at once
  }
  ~Fiber() { munmap(stack_, kStack); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs `body` until it suspends itself or ends.
  __attribute__((noinline)) void resume() {
    running_ = this;
    if (_setjmp(resumer_) == 0) {
      if (started_) _longjmp(at_, 1);
      started_ = true;
      getcontext(&start_);
      start_.uc_stack.ss_sp = stack_;
      start_.uc_stack.ss_size = kStack;
      makecontext(&start_, run, 0);
      setcontext(&start_);
    }
  }

  // Called inside a body: returns to the caller of resume().
  static __attribute__((noinline)) void suspend() {
    if (_setjmp(running_->at_) == 0) _longjmp(resumer_, 1);
  }

  // Drops a body that has not ended; objects on its stack are not destroyed.
  void abandon() { started_ = false; }

  std::function<void()> body;  // must not throw

 private:
  static void run() {
    for (;;) {  // runs one body after the other
      running_->body();
      suspend();
    }
  }

  static inline Fiber* running_ = nullptr;
  static inline jmp_buf resumer_;
  std::byte* stack_;
  bool started_ = false;
  jmp_buf at_;
  ucontext_t start_;
};

// Returns fiber `index`. Fibers are kept for the next kernel.
inline Fiber& fiber(size_t index) {
  static std::vector<std::unique_ptr<Fiber>> fibers;
  while (fibers.size() <= index) fibers.push_back(std::make_unique<Fiber>());
  return *fibers[index];
}

}  // namespace cuda_on_host
