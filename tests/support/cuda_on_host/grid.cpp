// The scheduler of a grid's threads, and launches: what is compiled once for all kernels. Then the
// model's settings and counters, as C functions. Each library that tests build has a copy.

#include "grid.h"

#include <algorithm>
#include <bit>
#include <exception>
#include <random>

#include "cuda/launch.h"
#include "fiber.h"

namespace cuda_on_host {
namespace {

std::map<std::string, int> launches;  // number of launches of each kernel so far

std::string text_of(const Site& site) {
  return site.line ? site.what + (" of line " + std::to_string(site.line)) : site.what;
}

}  // namespace

class Grid {
 public:
  Grid(std::string kernel, dim3 grid, dim3 block, size_t shared, std::function<void()> body)
      : kernel_(std::move(kernel)), grid_(grid), block_(block), shared_(shared),
        body_(std::move(body)), random_(device.seed) {}

  // Runs one block after the other or, in a cooperative launch, all of them at once.
  void run(bool cooperative) {
    std::vector<uint3> indices;
    for (unsigned z = 0; z < grid_.z; ++z)
      for (unsigned y = 0; y < grid_.y; ++y)
        for (unsigned x = 0; x < grid_.x; ++x) indices.push_back({x, y, z});
    if (device.seed) std::shuffle(indices.begin(), indices.end(), random_);
    ::gridDim = grid_;
    ::blockDim = block_;
    if (cooperative) return run_together(indices);
    for (const uint3& index : indices) run_together({index});
  }

 private:
  friend Grid& grid();
  friend void made_progress();
  friend void set_registers(int, bool);
  friend void wake(std::vector<Thread*>&);

  void run_together(const std::vector<uint3>& indices) {
    const unsigned threads = block_.x * block_.y * block_.z;
    std::deque<Block> blocks;
    threads_.clear();
    threads_.reserve(indices.size() * threads);  // pointers to them are kept
    for (const uint3& index : indices) {
      Block& block = blocks.emplace_back();
      block.index = index;
      block.size = shared_;
      block.warps.resize((threads + 31) / 32);
      block.memory.resize(shared_ + 2 * kGuardBytes + 1024, std::byte(kGuardByte));
      std::memset(block.shared(), kPoison, shared_);
      for (unsigned t = 0; t < threads; ++t) {
        const uint3 at = {t % block_.x, t / block_.x % block_.y, t / block_.x / block_.y};
        Fiber& own = fiber(threads_.size());
        Thread& thread = threads_.emplace_back();
        thread.fiber = &own;
        thread.block = &block;
        thread.index = at;
        thread.number = t;
        own.body = [this] {
          try {
            body_();
          } catch (...) {
            error_ = std::current_exception();
          }
          current->state = Thread::State::Done;
        };
      }
    }
    ready_.clear();
    for (Thread& thread : threads_) ready_.push_back(&thread);
    running_ = this;
    idle_turns_ = 0;
    unfinished_ = threads_.size();
    blocks_ = &blocks;
    while (!error_) {
      // In order, copies arrive as late as possible; in a random order, some arrive earlier.
      if (device.seed && random_() % 16 == 0) deliver();
      if (!ready_.empty()) take_turn();
      else if (!deliver()) break;
    }
    running_ = nullptr;
    current = nullptr;
    if (error_ || unfinished_) {
      for (Thread& thread : threads_) thread.fiber->abandon();
      if (!error_) throw Error(kernel_ + ": " + waiting());
      try {
        std::rethrow_exception(error_);
      } catch (const std::exception& error) {
        throw Error(kernel_ + ": " + error.what());
      }
    }
    for (Block& block : blocks) {
      check_guards(block);
      check_what_is_left(block);
    }
  }

  // Finishes one copy of the copy engine; returns whether there was one.
  bool deliver() {
    for (Block& block : *blocks_) {
      auto& waiting = block.deliveries;
      if (waiting.empty() || unfinished_ == 0) continue;
      const size_t which = device.seed ? random_() % waiting.size() : 0;
      const auto copy = std::move(waiting[which]);
      waiting.erase(waiting.begin() + which);
      copy();
      return true;
    }
    return false;
  }

  void take_turn() {
    if (device.seed) std::swap(ready_.front(), ready_[random_() % ready_.size()]);
    Thread& thread = *ready_.front();
    ready_.pop_front();
    thread.state = Thread::State::Ready;
    current = &thread;
    ::threadIdx = thread.index;
    ::blockIdx = thread.block->index;
    thread.fiber->resume();
    if (thread.state == Thread::State::Done) {
      --unfinished_;
      idle_turns_ = 0;
    } else if (thread.state == Thread::State::Spinning) {
      ready_.push_back(&thread);
      if (++idle_turns_ > 64 * threads_.size()) error_ = std::make_exception_ptr(Error(waiting()));
    }
  }

  // Describes what the threads wait for when none can continue.
  std::string waiting() const {
    std::map<std::string, unsigned> counts;
    for (const Thread& thread : threads_) {
      using State = Thread::State;
      if (thread.state == State::Done) ++counts["have returned"];
      if (thread.state == State::Waiting) ++counts["wait at " + text_of(thread.waits_for)];
      if (thread.state == State::Spinning) ++counts["wait for a flag"];
    }
    std::string result = "a barrier that not all threads reach:";
    for (const auto& [what, count] : counts)
      result += " " + std::to_string(count) + " " + what + ";";
    result.back() = '.';
    return result;
  }

  void check_guards(Block& block) const {
    std::byte* const first = block.shared();
    for (std::byte* p = block.memory.data(); p != block.memory.data() + block.memory.size(); ++p) {
      if (p == first) p += shared_;
      if (*p == std::byte(kGuardByte)) continue;
      throw Error(
          kernel_ + ": written outside of its shared memory of " + std::to_string(shared_) +
          " bytes, at offset " + std::to_string(p - first));
    }
  }

  void check_what_is_left(const Block& block) const {
    const auto fail = [&](const std::string& what) { throw Error(kernel_ + ": " + what); };
    if (!block.deliveries.empty()) fail("it ended before a copy had come.");
    for (int number = 1; number < 16; ++number)
      if (block.barriers[number].arrived)
        fail("it ended with threads arrived at named barrier " + std::to_string(number) + ".");
    const int at_launch = registers_at_launch();
    int more = 0;  // registers per thread beyond those at launch, summed over warps
    for (size_t w = 0; w < block.warps.size(); ++w) {
      const Warp &warp = block.warps[w], &first = block.warps[w / 4 * 4];
      if (warp.computed < warp.products.size()) fail("it ended before a product was done.");
      if (warp.products != first.products)
        fail("warps of a warpgroup took part in different products.");
      if (warp.registers != first.registers)
        fail("warps of a warpgroup differ in their registers.");
      if (warp.registers) more += warp.registers - at_launch;
    }
    if (more > 0) fail("setmaxnreg hands out more registers than were given back.");
  }

  // Registers per thread of a kernel whose launch bounds are its number of threads.
  int registers_at_launch() const {
    return std::min(255u, 65536 / (block_.x * block_.y * block_.z) / 8 * 8);
  }

  const std::string kernel_;
  const dim3 grid_, block_;
  const size_t shared_;
  const std::function<void()> body_;
  std::mt19937_64 random_;
  std::vector<Thread> threads_;
  std::deque<Block>* blocks_ = nullptr;
  std::deque<Thread*> ready_;
  std::exception_ptr error_;
  size_t unfinished_ = 0, idle_turns_ = 0;
  static inline Grid* running_ = nullptr;
};

Grid& grid() { return *Grid::running_; }

void made_progress() { grid().idle_turns_ = 0; }

void wake(std::vector<Thread*>& waiting) {
  for (Thread* thread : waiting) grid().ready_.push_back(thread);
  waiting.clear();
  made_progress();
}

void set_registers(int count, bool more) {
  const int before = grid().registers_at_launch();
  if (count % 8 || count < 24 || count > 256 || (more ? count < before : count > before))
    throw Error(
        "setmaxnreg from " + std::to_string(before) + " to " + std::to_string(count) +
        " registers.");
  current->warp().registers = count;
}

void spin() {
  current->state = Thread::State::Spinning;
  Fiber::suspend();
}

bool arrive(
    Rendezvous& r, unsigned expected, Site site, const void* value, size_t bytes, bool yes) {
  if (r.arrived && r.site != site)
    throw Error(
        "divergent: some are at " + text_of(r.site) + ", another at " + text_of(site) + ".");
  r.site = site;
  if (bytes) std::memcpy(r.values[r.generation % 2].of[current->lane()], value, bytes);
  bool& vote = r.votes[r.generation % 2];
  vote = (r.arrived && vote) || yes;
  if (++r.arrived < expected) return false;
  r.arrived = 0;
  ++r.generation;
  wake(r.waiting);
  return true;
}

void sleep(std::vector<Thread*>& among, Site site) {
  current->state = Thread::State::Waiting;
  current->waits_for = site;
  among.push_back(current);
  Fiber::suspend();
}

const Rendezvous::Values& meet(
    Rendezvous& r, unsigned expected, Site site, const void* value, size_t bytes) {
  const Rendezvous::Values& values = r.values[r.generation % 2];
  if (!arrive(r, expected, site, value, bytes)) sleep(r.waiting, site);
  return values;
}

bool vote(Rendezvous& r, unsigned expected, Site site, bool yes) {
  const bool& any = r.votes[r.generation % 2];
  if (!arrive(r, expected, site, nullptr, 0, yes)) sleep(r.waiting, site);
  return any;
}

const Rendezvous::Values& meet_lanes(
    const char* what, unsigned mask, const void* value, size_t bytes) {
  if (!(mask >> current->lane() & 1))
    throw Error(std::string(what) + " by a lane that its mask does not name.");
  const auto rendezvous = [mask]() -> Rendezvous& {
    auto& by_mask = current->warp().by_mask;
    for (auto& [of, known] : by_mask)
      if (of == mask) return known;
    return by_mask.emplace_back(mask, Rendezvous{}).second;
  };
  return meet(rendezvous(), std::popcount(mask), {what}, value, bytes);
}

void misaligned(size_t bytes) {
  throw Error("an access of " + std::to_string(bytes) + " bytes that isn't aligned.");
}

}  // namespace cuda_on_host

namespace trifuse::cuda {

int resident_blocks(const LaunchPlan& plan) {
  const auto& device = cuda_on_host::device;
  if (plan.shared > device.shared_memory || count(plan.block) > 1024) return 0;
  return device.multiprocessors * device.blocks_per_multiprocessor;
}

void run(const LaunchPlan& plan, std::function<void()> kernel) {
  const uint64_t threads = count(plan.block);
  const char* error = nullptr;
  if (count(plan.grid) == 0 || threads == 0) error = "nothing to launch";
  if (plan.grid.x > 0x7FFFFFFF || plan.grid.y > 65535 || plan.grid.z > 65535)
    error = "too many blocks";
  if (threads > 1024 || plan.block.z > 64) error = "too many threads";
  if (threads % 32) error = "a block of part of a warp, which isn't modelled";
  if (plan.shared > shared_memory_limit()) error = "too much shared memory";
  if (plan.cooperative && count(plan.grid) > uint64_t(resident_blocks(plan)))
    error = "a cooperative grid that isn't resident at once";
  if (error) throw std::runtime_error(describe(plan) + ": " + error);
  ++cuda_on_host::launches[plan.kernel];
  cuda_on_host::Grid grid(describe(plan), plan.grid, plan.block, plan.shared, std::move(kernel));
  grid.run(plan.cooperative);
}

}  // namespace trifuse::cuda

extern "C" __attribute__((visibility("default"))) void set_device(
    int multiprocessors, int blocks_per_multiprocessor, size_t shared_memory, uint64_t seed,
    int compute_capability) {
  cuda_on_host::device = {
      multiprocessors, blocks_per_multiprocessor, shared_memory, seed, compute_capability};
}

extern "C" __attribute__((visibility("default"))) int launches(const char* kernel) {
  return cuda_on_host::launches[kernel];
}
