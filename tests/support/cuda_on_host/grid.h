// CUDA's execution model: a grid of blocks of warps of threads, each thread a fiber.
//
// A thread runs until it waits for others. Then another thread runs: the next in order or, with a
// seed, a random one, so that operations not ordered by a barrier happen in any order.
//
// Functions that are only declared here are in grid.cpp. It is compiled once, and each kernel's
// source in less time.

#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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
  class Fiber* fiber;
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

// Records progress that a spinning thread may have waited for.
void made_progress();

void wake(std::vector<Thread*>& waiting);

// setmaxnreg by all threads of a warp, to more or fewer registers than at launch.
void set_registers(int count, bool more);

// Threads of a block.
inline unsigned threads() { return blockDim.x * blockDim.y * blockDim.z; }

// Lets other threads take their turns; called where a thread polls a flag in a loop.
void spin();

// Leaves a value for the others; returns whether all expected threads have come.
bool arrive(
    Rendezvous& r, unsigned expected, Site site, const void* value = nullptr, size_t bytes = 0,
    bool yes = false);

// Suspends the thread until another one wakes it.
void sleep(std::vector<Thread*>& among, Site site);

// Waits for the others, and returns all values, by lane.
const Rendezvous::Values& meet(
    Rendezvous& r, unsigned expected, Site site, const void* value = nullptr, size_t bytes = 0);

// Waits for the others, and returns whether any thread voted yes.
bool vote(Rendezvous& r, unsigned expected, Site site, bool yes);

// As meet, for the lanes of a warp that a mask names; `what` is the instruction.
const Rendezvous::Values& meet_lanes(
    const char* what, unsigned mask, const void* value, size_t bytes);

// The values that the lanes of a mask pass to an instruction that they all execute.
template <class T>
class Lanes {
 public:
  Lanes(const char* what, unsigned mask, const T& value)
      : values_(&meet_lanes(what, mask, &value, sizeof value)) {
    static_assert(sizeof(T) <= Rendezvous::kBytes && std::is_trivially_copyable_v<T>);
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
