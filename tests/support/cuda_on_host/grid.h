// CUDA's execution model: a grid of blocks of warps of threads, each thread a fiber.
//
// A thread runs until it waits for others. Then another thread runs: the next in order or, with a
// seed, a random one, so that operations not ordered by a barrier happen in any order.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fiber.h"

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_on_host {

// The modelled device. Tests may change it.
struct Device {
  int multiprocessors = 4;
  int blocks_per_multiprocessor = 2;  // a real device holds as many as registers allow
  size_t shared_memory = 227 << 10;   // the most that a block may have
  uint64_t seed = 0;                  // of the order in which threads run; 0: in order
  int compute_capability = 80;
};
inline Device device;
inline std::map<std::string, int> launches;  // number of launches of each kernel so far

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Bytes that fill uninitialised memory, NaN in every floating-point type, and its guards.
constexpr int kPoison = 0xFF, kGuardByte = 0xFB;
constexpr size_t kGuardBytes = 1024;

// An instruction that threads execute together, identified by its name and line.
struct Site {
  const char* what = "";
  int line = 0;
  std::string text() const {
    return line ? what + (" of line " + std::to_string(line)) : std::string(what);
  }
  bool operator!=(const Site& other) const {
    return line != other.line || std::strcmp(what, other.what) != 0;
  }
};

// Threads that wait until all expected ones have come. Each brings a value and gets all values.
struct Rendezvous {
  static constexpr size_t kBytes = 32;
  struct Values {
    alignas(16) std::byte of[32][kBytes];
  };
  Site site;
  unsigned arrived = 0;
  uint64_t generation = 0;
  std::vector<struct Thread*> waiting;
  Values values[2];  // of this generation and the last, which some threads may not have read yet
  bool votes[2];     // whether any thread voted yes, likewise
};

// A barrier in shared memory (mbarrier). A phase ends after all arrivals for which it was
// initialised, and all bytes that they expect.
struct SharedBarrierState {
  unsigned expected, pending;
  int64_t bytes = 0;
  uint64_t phase = 0;
  std::vector<struct Thread*> waiting;
};

// A warp's part in one asynchronous product of its warpgroup.
struct Product {
  bool by_rows;  // b is read by rows
  bool half;     // float16, else bfloat16
  bool add;      // adds to d instead of overwriting it
  unsigned columns;
  uint64_t a, b;  // descriptors; a's only if a is in shared memory
  unsigned lanes = 0;
  float* d[32];
  const uint32_t* a_registers[32];
  uint32_t a_values[32][4];  // contents of a_registers when the product started
  bool operator==(const Product& other) const {
    return by_rows == other.by_rows && half == other.half && add == other.add &&
        columns == other.columns && a == other.a && b == other.b;
  }
};

struct Warp {
  std::deque<std::pair<unsigned, Rendezvous>> by_mask;  // only a few
  std::vector<Product> products;                        // all that it has started
  size_t computed = 0;                                  // number of these that are done
  int registers = 0;                                    // per thread, once setmaxnreg has set them

  Rendezvous& of(unsigned mask) {
    for (auto& [of, rendezvous] : by_mask)
      if (of == mask) return rendezvous;
    return by_mask.emplace_back(mask, Rendezvous{}).second;
  }
};

struct Block {
  uint3 index;
  size_t size;                    // of its shared memory
  std::vector<std::byte> memory;  // shared memory between guards
  std::vector<Warp> warps;
  Rendezvous barriers[16];  // __syncthreads() is number 0
  std::map<const void*, SharedBarrierState> shared_barriers;
  std::vector<std::function<void()>> deliveries;  // the copy engine's copies in flight

  // Aligned as strictly as any instruction requires.
  std::byte* shared() {
    const auto address = reinterpret_cast<uintptr_t>(memory.data()) + kGuardBytes;
    return reinterpret_cast<std::byte*>((address + 1023) / 1024 * 1024);
  }
};

// A cp.async in flight.
struct Copy {
  void* to;
  const void* from;
  size_t bytes, valid;  // zeros follow the valid bytes
};

// Registers that products may use, or are using.
struct Registers {
  std::vector<float> values;  // contents at wgmma_begin; for a sum in flight, its result so far
  unsigned products = 0;      // in flight
};

struct Thread {
  enum class State { Ready, Waiting, Spinning, Done };
  Fiber* fiber;
  Block* block;
  uint3 index;
  unsigned number;  // in its block
  State state = State::Ready;
  Site waits_for;
  std::vector<Copy> copies;                // cp.async since the last commit
  std::vector<std::vector<Copy>> groups;   // committed, oldest first
  std::map<const void*, Registers> begun;  // register arrays passed to wgmma_begin
  std::map<float*, Registers> sums;        // of products in flight
  size_t products = 0;                     // number that it took part in
  std::deque<size_t> product_groups;       // committed, oldest first: `products` at the commit

  unsigned lane() const { return number % 32; }
  Warp& warp() const { return block->warps[number / 32]; }
};

inline Thread* current = nullptr;

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
      if (thread.state == State::Waiting) ++counts["wait at " + thread.waits_for.text()];
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

inline Grid& grid() { return *Grid::running_; }

// Records progress that a spinning thread may have waited for.
inline void made_progress() { grid().idle_turns_ = 0; }

inline void wake(std::vector<Thread*>& waiting) {
  for (Thread* thread : waiting) grid().ready_.push_back(thread);
  waiting.clear();
  made_progress();
}

// setmaxnreg by all threads of a warp, to more or fewer registers than at launch.
inline void set_registers(int count, bool more) {
  const int before = grid().registers_at_launch();
  if (count % 8 || count < 24 || count > 256 || (more ? count < before : count > before))
    throw Error(
        "setmaxnreg from " + std::to_string(before) + " to " + std::to_string(count) +
        " registers.");
  current->warp().registers = count;
}

// Threads of a block.
inline unsigned threads() { return blockDim.x * blockDim.y * blockDim.z; }

// Lets other threads take their turns; called where a thread polls a flag in a loop.
inline void spin() {
  current->state = Thread::State::Spinning;
  Fiber::suspend();
}

// Leaves a value for the others; returns whether all expected threads have come.
inline bool arrive(
    Rendezvous& r, unsigned expected, Site site, const void* value = nullptr, size_t bytes = 0,
    bool yes = false) {
  if (r.arrived && r.site != site)
    throw Error("divergent: some are at " + r.site.text() + ", another at " + site.text() + ".");
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

// Suspends the thread until another one wakes it.
inline void sleep(std::vector<Thread*>& among, Site site) {
  current->state = Thread::State::Waiting;
  current->waits_for = site;
  among.push_back(current);
  Fiber::suspend();
}

// Waits for the others, and returns all values, by lane.
inline const Rendezvous::Values& meet(
    Rendezvous& r, unsigned expected, Site site, const void* value = nullptr, size_t bytes = 0) {
  const Rendezvous::Values& values = r.values[r.generation % 2];
  if (!arrive(r, expected, site, value, bytes)) sleep(r.waiting, site);
  return values;
}

// Waits for the others, and returns whether any thread voted yes.
inline bool vote(Rendezvous& r, unsigned expected, Site site, bool yes) {
  const bool& any = r.votes[r.generation % 2];
  if (!arrive(r, expected, site, nullptr, 0, yes)) sleep(r.waiting, site);
  return any;
}

// The values that the lanes of a mask pass to an instruction that they all execute.
template <class T>
class Lanes {
 public:
  Lanes(const char* what, unsigned mask, const T& value) {
    static_assert(sizeof(T) <= Rendezvous::kBytes && std::is_trivially_copyable_v<T>);
    if (!(mask >> current->lane() & 1))
      throw Error(std::string(what) + " by a lane that its mask does not name.");
    Rendezvous& r = current->warp().of(mask);
    values_ = &meet(r, std::popcount(mask), {what}, &value, sizeof value);
  }
  T operator[](unsigned lane) const {
    T value;
    std::memcpy(&value, values_->of[lane], sizeof value);
    return value;
  }

 private:
  const Rendezvous::Values* values_;
};

}  // namespace cuda_on_host
