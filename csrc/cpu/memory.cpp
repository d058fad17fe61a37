#include "cpu/memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace trifuse {
namespace {

// Failures on request, for tests ------------------------------------------------------------------

std::atomic<bool> counting{false};
std::atomic<int64_t> counted{0}, first_failure{0}, last_failure{0};

bool should_fail() {
  if (!counting.load(std::memory_order_relaxed)) return false;
  const int64_t number = ++counted;
  return number >= first_failure && number <= last_failure;
}

// Counts the allocations of torch's own allocator, and makes those fail that a test selected.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(!should_fail(), "can't allocate memory: ", bytes, " bytes, as a test asked");
    return torch_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return torch_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    torch_->copy_data(to, from, bytes);
  }
  void use(bool counts) { c10::SetCPUAllocator(counts ? this : torch_); }

 private:
  c10::Allocator* const torch_ = c10::GetCPUAllocator();
};

// Cached memory -----------------------------------------------------------------------------------

// Tensors of kLarge bytes and more are cached. Blocks of up to kPage / 2 bytes have a multiple of
// kStep, larger ones a multiple of kPage.
constexpr size_t kPage = size_t(1) << 21, kLarge = size_t(1) << 17, kStep = size_t(1) << 14;

size_t cache_limit() {
  const char* asked = std::getenv("TRIFUSE_CPU_CACHE_MIB");
  return (asked ? std::strtoull(asked, nullptr, 10) : 256) << 20;
}

struct MemoryBlock {
  void* data;
  size_t bytes;
  MemoryBlock *older[2], *newer[2];  // neighbours in two lists while the block is kept
};

// Kept blocks in the order in which they were freed, linked by older[which] and newer[which].
template <int which>
struct BlockList {
  MemoryBlock *oldest = nullptr, *newest = nullptr;

  void add(MemoryBlock* block) {
    block->older[which] = newest;
    block->newer[which] = nullptr;
    (newest ? newest->newer[which] : oldest) = block;
    newest = block;
  }
  void remove(MemoryBlock* block) {
    MemoryBlock *const older = block->older[which], *const newer = block->newer[which];
    (older ? older->newer[which] : oldest) = newer;
    (newer ? newer->older[which] : newest) = older;
  }
};

void* from_system(int64_t bytes, int64_t alignment) {
  if (should_fail()) return nullptr;
  const auto size = static_cast<size_t>(bytes), boundary = static_cast<size_t>(alignment);
  return boundary <= alignof(std::max_align_t)
      ? std::malloc(std::max<size_t>(size, 1))
      : std::aligned_alloc(boundary, (size + boundary - 1) / boundary * boundary);
}

// The freed blocks that are kept. The cache neither allocates nor frees while it holds its lock.
class BlockCache {
 public:
  static BlockCache& get() {
    static BlockCache* cache = new BlockCache;  // outlives every tensor
    return *cache;
  }

  // Returns a block for `bytes` bytes, or null if there is none: the smallest that fits and is not
  // much too large. Among equals it takes the last one freed, which may still be in a cache.
  MemoryBlock* take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    MemoryBlock* best = nullptr;
    for (MemoryBlock* block = of_size(bytes).newest; block; block = block->older[1]) {
      if (block->bytes >= bytes && block->bytes <= bytes + bytes / 4 &&
          (!best || block->bytes < best->bytes))
        best = block;
      if (best && best->bytes == bytes) break;
    }
    if (best) remove(best);
    return best;
  }

  void add(MemoryBlock* block) {
    MemoryBlock* dropped = nullptr;
    {
      const std::lock_guard lock(mutex_);
      all_.add(block);
      of_size(block->bytes).add(block);
      bytes_ += block->bytes;
      while (bytes_ > limit_) dropped = drop(all_.oldest, dropped);
    }
    free_all(dropped);
  }

  // Frees all blocks. Returns false if there were none.
  bool clear() {
    MemoryBlock* dropped = nullptr;
    {
      const std::lock_guard lock(mutex_);
      while (all_.oldest) dropped = drop(all_.oldest, dropped);
    }
    free_all(dropped);
    return dropped != nullptr;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  // Returns the list of the blocks of a size or, from kPage on, of all sizes.
  BlockList<1>& of_size(size_t bytes) { return by_size_[bytes < kPage ? bytes / kStep : 0]; }

  void remove(MemoryBlock* block) {
    all_.remove(block);
    of_size(block->bytes).remove(block);
    bytes_ -= block->bytes;
  }
  // Removes a block, and puts it at the head of the list of blocks to be freed.
  MemoryBlock* drop(MemoryBlock* block, MemoryBlock* dropped) {
    remove(block);
    block->older[0] = dropped;
    return block;
  }
  static void free_all(MemoryBlock* block) {
    while (block) {
      std::free(block->data);
      std::free(std::exchange(block, block->older[0]));
    }
  }

  const size_t limit_ = cache_limit();
  std::mutex mutex_;
  BlockList<0> all_;
  BlockList<1> by_size_[kPage / kStep];
  size_t bytes_ = 0;
};

// A fork copies the lock's state but, of the threads, only the forking one. If another thread held
// the lock at that moment, no thread of the child would ever release it.
// NOLINTNEXTLINE(bugprone-throwing-static-initialization): it returns errors, and throws none.
[[maybe_unused]] const int at_fork = pthread_atfork(
    [] { BlockCache::get().mutex().lock(); }, [] { BlockCache::get().mutex().unlock(); },
    [] { BlockCache::get().mutex().unlock(); });

// An allocator for torch that returns such blocks.
class CachingAllocator final : public c10::Allocator {
 public:
  explicit CachingAllocator(const char* purpose) : purpose_(purpose) {}

  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(bytes <= size_t(INT64_MAX) - kPage, "can't allocate ", bytes, " bytes");
    const size_t step = bytes <= kPage / 2 ? kStep : kPage;
    const size_t rounded = (std::max<size_t>(bytes, 1) + step - 1) / step * step;
    MemoryBlock* block = BlockCache::get().take(rounded);
    if (!block) block = make(rounded);
    return {block->data, block, free, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  MemoryBlock* make(size_t bytes) const {
    std::unique_ptr<MemoryBlock, Free> block(
        static_cast<MemoryBlock*>(
            trifuse::allocate(sizeof(MemoryBlock), alignof(MemoryBlock), purpose_)));
    block->bytes = bytes;
    const bool pages = bytes >= kPage;
    block->data = trifuse::allocate(static_cast<int64_t>(bytes), pages ? kPage : 64, purpose_);
#ifdef __linux__
    if (pages) madvise(block->data, bytes, MADV_HUGEPAGE);
#endif
    return block.release();
  }
  static void free(void* block) { BlockCache::get().add(static_cast<MemoryBlock*>(block)); }

  const char* const purpose_;
};

CachingAllocator& result_allocator() {
  static auto* allocator = new CachingAllocator("a result");
  return *allocator;
}

CachingAllocator& workspace_allocator() {
  static auto* allocator = new CachingAllocator("the workspace of a call");
  return *allocator;
}

at::Tensor empty_small(at::IntArrayRef sizes, at::ScalarType dtype) {
  try {
    return at::empty(sizes, at::TensorOptions(dtype));
  } catch (const c10::Error&) {
    if (!BlockCache::get().clear()) throw;
  }
  return at::empty(sizes, at::TensorOptions(dtype));
}

// Returns a tensor that comes from the cache if it is large.
at::Tensor empty_in(CachingAllocator& allocator, at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  if (bytes < kLarge) return empty_small(sizes, dtype);
  at::Tensor result = at::detail::empty_generic(
      sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())
    result.fill_(c10::isFloatingType(dtype) ? std::numeric_limits<double>::quiet_NaN() : 127.0);
  return result;
}

}  // namespace

void* allocate(int64_t bytes, int64_t alignment, const char* purpose) {
  void* data = from_system(bytes, alignment);
  if (!data) {
    BlockCache::get().clear();
    data = from_system(bytes, alignment);
  }
  // Gives other threads time to start waiting for this one, which a test needs.
  if (!data && counting) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  // Begins like torch's own message, which programs match to retry with a smaller batch.
  TORCH_CHECK(
      data, "DefaultCPUAllocator: can't allocate memory: trifuse tried to allocate ", bytes,
      " bytes for ", purpose);
  return data;
}

void fail_allocations(int64_t first, int64_t count) {
  static auto* torch = new CountingAllocator;  // never freed, because tensors may point to it
  torch->use(first > 0);
  if (first > 0) counted = 0;
  first_failure = first;
  last_failure = first + count - 1;
  counting = first > 0;
}

int64_t counted_allocations() { return counted; }

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return empty_in(result_allocator(), sizes, c10::typeMetaToScalarType(options.dtype()));
}

at::Tensor workspace(int64_t bytes) { return empty_in(workspace_allocator(), {bytes}, at::kByte); }

}  // namespace trifuse
