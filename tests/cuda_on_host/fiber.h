// Fibers: stacks that take turns in one thread of the operating system.
//
// ucontext starts each of them, once; from then on _setjmp and _longjmp switch, which make no system
// call where swapcontext makes two.

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
    mprotect(stack_, kGuard, PROT_NONE);  // an overflow stops at once
  }
  ~Fiber() { munmap(stack_, kStack); }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs `body` until it suspends itself or ends. Whoever calls has made it the current one.
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

  // From inside: back to whoever resumed it.
  static __attribute__((noinline)) void suspend() {
    if (_setjmp(running_->at_) == 0) _longjmp(resumer_, 1);
  }

  // Forgets a body that has not ended; what lies on its stack is not destroyed.
  void abandon() { started_ = false; }

  std::function<void()> body;  // must not throw

 private:
  static void run() {
    for (;;) {  // it serves one body after the other
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

// Fibers are kept for the next kernel.
inline Fiber& fiber(size_t index) {
  static std::vector<std::unique_ptr<Fiber>> fibers;
  while (fibers.size() <= index) fibers.push_back(std::make_unique<Fiber>());
  return *fibers[index];
}

}  // namespace cuda_on_host
