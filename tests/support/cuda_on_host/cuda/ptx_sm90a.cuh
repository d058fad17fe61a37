// Stands in for csrc/cuda/ptx_sm90a.cuh: a model of each of its instructions.

#pragma once

#include <cuda.h>

#include <vector>

#include "cuda/ptx.cuh"

namespace trifuse::cuda {

// Base of 32-bit shared-memory addresses: code must not assume that they begin at 0.
constexpr uint32_t kSharedBase = 1024;

inline uint32_t shared_address(const void* p) {
  return kSharedBase +
      static_cast<uint32_t>(static_cast<const std::byte*>(p) - current->block->shared());
}

inline std::byte* at_shared_address(uint32_t address, size_t bytes, const char* what) {
  if (address < kSharedBase || address - kSharedBase + bytes > current->block->size)
    throw Error(
        std::string(what) + " at offset " + std::to_string(int64_t(address) - kSharedBase) +
        " of " + std::to_string(current->block->size) + " of shared memory.");
  return current->block->shared() + (address - kSharedBase);
}

// Returns an address as the hardware swizzles it: chunks of 16 bytes are permuted within `width`
// bytes by the index of their 128-byte row. 0: not at all.
inline uint32_t swizzled(uint32_t address, uint32_t width) {
  return width ? address ^ ((address >> 7 & (width / 16 - 1)) << 4) : address;
}

// Barriers in shared memory -----------------------------------------------------------------------

using SharedBarrier = uint64_t;

inline cuda_on_host::SharedBarrierState& state_of(const SharedBarrier* barrier) {
  auto& all = current->block->shared_barriers;
  const auto found = all.find(barrier);
  if (found == all.end()) throw Error("a barrier in shared memory that nobody has made.");
  return found->second;
}

inline void end_phase_if_complete(cuda_on_host::SharedBarrierState& state) {
  if (state.pending || state.bytes) return;
  state.pending = state.expected;
  ++state.phase;
  cuda_on_host::wake(state.waiting);
}

inline void init_barrier(SharedBarrier* barrier, int arrivals) {
  at_shared_address(shared_address(barrier), sizeof *barrier, "init_barrier");
  if (reinterpret_cast<uintptr_t>(barrier) % 8 || arrivals < 1)
    throw Error("init_barrier for " + std::to_string(arrivals) + ", or not aligned.");
  const auto count = static_cast<unsigned>(arrivals);
  current->block->shared_barriers[barrier] = {.expected = count, .pending = count, .waiting = {}};
}

inline void expect(SharedBarrier* barrier, int bytes) {
  auto& state = state_of(barrier);
  state.bytes += bytes;
  if (state.bytes >= 1 << 20) throw Error("a barrier expects 2^20 bytes.");
}

inline void arrive_and_expect(SharedBarrier* barrier, int bytes) {
  auto& state = state_of(barrier);
  if (state.pending == 0) throw Error("more threads arrive at a barrier than it was made for.");
  --state.pending;
  expect(barrier, bytes);
  end_phase_if_complete(state);
}

inline void arrive(SharedBarrier* barrier) { arrive_and_expect(barrier, 0); }

inline void wait(SharedBarrier* barrier, uint32_t parity) {
  auto& state = state_of(barrier);
  while (state.phase % 2 == parity)
    cuda_on_host::sleep(state.waiting, {"a barrier in shared memory"});
}

// Threads take turns only where they wait, so memory is always in order.
inline void fence_for_async() {}

// Copies of tiles ---------------------------------------------------------------------------------

// Copies as late as possible, when no thread can continue without it. Until then `to` is poisoned.
inline void copy_box(
    void* to, const CUtensorMap* map, SharedBarrier* barrier, int c0, int c1, int c2, int c3) {
  if (map->rank != 4) throw Error("copy_box by a map of another rank.");
  uint32_t bytes = 2;
  for (int d = 0; d < 4; ++d) bytes *= map->box[d];
  const uint32_t first = shared_address(to);
  at_shared_address(first, bytes, "copy_box");
  if (first % 128) throw Error("copy_box to where isn't aligned to 128 bytes.");
  std::memset(to, cuda_on_host::kPoison, bytes);
  auto& state = state_of(barrier);
  cuda_on_host::Block& block = *current->block;
  std::byte* const memory = block.shared() - kSharedBase;
  const CUtensorMap from = *map;
  block.deliveries.push_back([=, &state] {
    uint32_t address = first;
    int64_t at[4];
    for (at[3] = c3; at[3] < c3 + from.box[3]; ++at[3])
      for (at[2] = c2; at[2] < c2 + from.box[2]; ++at[2])
        for (at[1] = c1; at[1] < c1 + from.box[1]; ++at[1])
          for (at[0] = c0; at[0] < c0 + from.box[0]; ++at[0], address += 2) {
            const std::byte* source = from.data;
            bool inside = true;
            for (int d = 0; d < 4; ++d) {
              inside = inside && at[d] >= 0 && at[d] < static_cast<int64_t>(from.sizes[d]);
              source += at[d] * static_cast<int64_t>(from.strides[d]);
            }
            std::byte* target = memory + swizzled(address, from.swizzle);
            if (inside) std::memcpy(target, source, 2);
            else std::memset(target, 0, 2);
          }
    state.bytes -= bytes;
    end_phase_if_complete(state);
  });
}

inline void prefetch_map(const CUtensorMap*) {}

// Products of a warpgroup -------------------------------------------------------------------------

// Products are computed in wgmma_wait, one after the other, and read shared memory then. Until then
// the sums' registers are poisoned and must stay so; registers that hold a factor must not change.

inline uint64_t describe_matrix(const void* p, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1;
  return uint64_t(shared_address(p) >> 4 & 0x3FFF) | uint64_t(leading >> 4 & 0x3FFF) << 16 |
      uint64_t(stride >> 4 & 0x3FFF) << 32 | kSwizzle128 << 62;
}

inline uint64_t advance_descriptor(uint64_t matrix, uint32_t bytes) {
  return matrix >> 32 << 32 | (static_cast<uint32_t>(matrix) + bytes / 16);
}

// Reads element k of row r of an (M or N, 16) factor by its descriptor ("Asynchronous Warpgroup
// Level Matrix Shared Memory Layout" in the PTX manual). `along_k`: rows are contiguous.
class DescribedMatrix {
 public:
  DescribedMatrix(uint64_t descriptor, bool along_k)
      : along_k_(along_k), start_((descriptor & 0x3FFF) << 4),
        leading_((descriptor >> 16 & 0x3FFF) << 4), stride_((descriptor >> 32 & 0x3FFF) << 4),
        width_((const uint32_t[]){0, 128, 64, 32}[descriptor >> 62]) {
    if (descriptor >> 49 & 7)
      throw Error("a matrix descriptor with a base offset, which isn't modelled.");
  }
  uint16_t operator()(uint32_t r, uint32_t k) const {
    uint32_t offset;
    if (along_k_ && width_) offset = r % 8 * width_ + r / 8 * stride_ + 2 * k;
    else if (along_k_) offset = r % 8 * 16 + r / 8 * stride_ + k / 8 * leading_ + k % 8 * 2;
    else if (width_)
      offset =
          r % (width_ / 2) * 2 + r / (width_ / 2) * leading_ + k % 8 * width_ + k / 8 * stride_;
    else offset = r % 8 * 2 + r / 8 * stride_ + k % 8 * 16 + k / 8 * leading_;
    uint16_t bits;
    const uint32_t address = swizzled(start_ + offset, width_);
    std::memcpy(&bits, at_shared_address(address, 2, "a product reads shared memory"), 2);
    return bits;
  }

 private:
  bool along_k_;
  uint32_t start_, leading_, stride_, width_;
};

inline bool is_poisoned(const float* registers, size_t count) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(registers);
  return std::all_of(
      bytes, bytes + count * sizeof(float), [](int b) { return b == cuda_on_host::kPoison; });
}

template <class... Arrays>
void wgmma_begin(Arrays&... registers) {
  cuda_on_host::Lanes<int>("wgmma_begin", kAllLanes, 0);
  current->begun.clear();
  const auto note = [](const void* p, size_t bytes) {
    auto& values = current->begun[p].values;
    values.resize(bytes / sizeof(float));
    std::memcpy(values.data(), p, bytes);
  };
  (note(registers, sizeof registers), ...);
}

// Throws unless registers are part of an array passed to wgmma_begin, and unchanged since.
inline void check_begun(const void* p, size_t bytes) {
  const auto* from = static_cast<const std::byte*>(p);
  auto array = current->begun.upper_bound(p);
  if (array != current->begun.begin()) {
    const auto& [first, registers] = *--array;
    const size_t offset = from - static_cast<const std::byte*>(first);
    const auto* known = reinterpret_cast<const std::byte*>(registers.values.data());
    if (offset + bytes <= registers.values.size() * sizeof(float) &&
        std::memcmp(known + offset, from, bytes) == 0)
      return;
  }
  throw Error(
      "a product of registers that have changed since wgmma_begin, or weren't named to it.");
}

template <int rows>
void start_product(
    cuda_on_host::Product product, float (&d)[rows][4], const uint32_t* a_registers) {
  const unsigned lane = current->lane();
  product.columns = 8 * rows;
  if (threadIdx.y || threadIdx.z) throw Error("a product in a block of more than one dimension.");
  auto& sum = current->sums[&d[0][0]];
  if (sum.products == 0) {
    check_begun(d, sizeof d);
    sum.values.assign(&d[0][0], &d[0][0] + 4 * rows);
    std::memset(d, cuda_on_host::kPoison, sizeof d);
  } else if (sum.values.size() != 4 * rows) {
    throw Error("two products of different shapes under way in the same registers.");
  }
  ++sum.products;
  auto& products = current->warp().products;
  if (products.size() == current->products) products.push_back(product);
  auto& mine = products[current->products++];
  if (!(mine == product)) throw Error("lanes of a warp take part in different products.");
  ++mine.lanes;
  mine.d[lane] = &d[0][0];
  mine.a_registers[lane] = a_registers;
  if (!a_registers) return;
  check_begun(a_registers, sizeof mine.a_values[lane]);
  std::memcpy(mine.a_values[lane], a_registers, sizeof mine.a_values[lane]);
}

template <class Scalar, int rows>
void wgmma_ss(float (&d)[rows][4], uint64_t a, uint64_t b, bool add) {
  static_assert(rows <= 32);
  start_product(
      {.by_rows = true,
       .half = std::is_same_v<Scalar, __half>,
       .add = add,
       .columns = 0,
       .a = a,
       .b = b,
       .d = {},
       .a_registers = {},
       .a_values = {}},
      d, nullptr);
}

template <class Scalar, int rows>
void wgmma_rs(float (&d)[rows][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(rows <= 32);
  start_product(
      {.by_rows = false,
       .half = std::is_same_v<Scalar, __half>,
       .add = true,
       .columns = 0,
       .a = 0,
       .b = b,
       .d = {},
       .a_registers = {},
       .a_values = {}},
      d, a);
}

inline void wgmma_commit() {
  cuda_on_host::Lanes<int>("wgmma_commit", kAllLanes, 0);
  current->product_groups.push_back(current->products);
}

// Computes a warp's part of a product, for all of its lanes.
inline void compute(const cuda_on_host::Product& product) {
  const unsigned first_thread = current->number / 32 * 32,
                 first_row = current->number / 32 % 4 * 16;
  const unsigned N = product.columns;
  static float a[16][16], b[256][16];
  const DescribedMatrix a_matrix(product.a, true), b_matrix(product.b, product.by_rows);
  for (unsigned r = 0; r < 16; ++r)
    for (unsigned k = 0; k < 16; ++k) {
      uint16_t bits;
      if (product.by_rows) {
        bits = a_matrix(first_row + r, k);
      } else {
        const uint32_t pair = product.a_values[r % 8 * 4 + k % 8 / 2][r / 8 + k / 8 * 2];
        bits = k % 2 ? pair >> 16 : pair & 0xFFFF;
      }
      a[r][k] = widen_bits(bits, product.half);
    }
  for (unsigned n = 0; n < N; ++n)
    for (unsigned k = 0; k < 16; ++k) b[n][k] = widen_bits(b_matrix(n, k), product.half);
  cuda_on_host::Thread* const threads = current - current->number + first_thread;
  for (unsigned lane = 0; lane < 32; ++lane) {
    auto& sum = threads[lane].sums.at(product.d[lane]);
    for (unsigned i = 0; i < N / 2; ++i) {
      const float* row = a[lane / 4 + i % 4 / 2 * 8];
      const float* column = b[i / 4 * 8 + lane % 4 * 2 + i % 2];
      float d = product.add ? sum.values[i] : 0.0f;
      for (int k = 0; k < 16; k += kProductsAtATime) {
        double part = d;
        for (int j = k; j < k + kProductsAtATime; ++j)
          part += static_cast<double>(row[j]) * column[j];
        d = cut_off(part);
      }
      sum.values[i] = d;
    }
    if (!is_poisoned(product.d[lane], N / 2))
      throw Error("registers of a sum were written while a product was under way.");
    if (!product.by_rows &&
        std::memcmp(
            product.a_registers[lane], product.a_values[lane], sizeof product.a_values[lane]))
      throw Error("registers of a factor were written while a product was under way.");
    if (--sum.products == 0) {
      std::memcpy(product.d[lane], sum.values.data(), N / 2 * sizeof(float));
      threads[lane].sums.erase(product.d[lane]);
    }
  }
}

template <int groups, class... Arrays>
void wgmma_wait(Arrays&...) {
  cuda_on_host::Lanes<int>("wgmma_wait", kAllLanes, 0);
  auto& committed = current->product_groups;
  while (committed.size() > groups) {
    auto& warp = current->warp();
    for (; warp.computed < committed.front(); ++warp.computed) {
      if (warp.products[warp.computed].lanes != 32)
        throw Error("a product without all lanes of a warp.");
      compute(warp.products[warp.computed]);
    }
    committed.pop_front();
  }
}

// Registers between warpgroups --------------------------------------------------------------------

template <int registers>
void give_registers_back() {
  cuda_on_host::Lanes<int>("setmaxnreg", kAllLanes, 0);
  cuda_on_host::set_registers(registers, false);
}
template <int registers>
void take_registers() {
  cuda_on_host::Lanes<int>("setmaxnreg", kAllLanes, 0);
  cuda_on_host::set_registers(registers, true);
}

}  // namespace trifuse::cuda
