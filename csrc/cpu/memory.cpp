#include "cpu/memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace trifuse {
namespace {

constexpr size_t kLarge = size_t(1) << 20, kPage = size_t(1) << 21;

size_t cache_limit() {
  const char* asked = std::getenv("TRIFUSE_CPU_CACHE_MIB");
  return (asked ? std::strtoull(asked, nullptr, 10) : 256) << 20;
}

class Recycler final : public c10::Allocator {
 public:
  static Recycler& get() {
    static Recycler* recycler = new Recycler;  // outlives every tensor
    return *recycler;
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* data = take((std::max<size_t>(bytes, 1) + kPage - 1) / kPage * kPage);
    return {data, data, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) { get().give_back(data); };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
  };

  void* take(size_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      // The smallest that fits and is not much too large; of equals the last freed, which may
      // still be in a cache.
      auto best = free_.rend();
      for (auto it = free_.rbegin(); it != free_.rend(); ++it)
        if (it->bytes >= bytes && it->bytes <= bytes + bytes / 4 &&
            (best == free_.rend() || it->bytes < best->bytes))
          best = it;
      if (best != free_.rend()) {
        void* data = best->data;
        kept_ -= best->bytes;
        free_.erase(std::next(best).base());
        return data;
      }
    }
    void* data = std::aligned_alloc(kPage, bytes);
    if (!data) throw std::bad_alloc();
#ifdef __linux__
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
    const std::lock_guard lock(mutex_);
    bytes_[data] = bytes;
    return data;
  }

  void give_back(void* data) {
    const std::lock_guard lock(mutex_);
    const size_t bytes = bytes_.at(data);
    free_.push_back({data, bytes});
    kept_ += bytes;
    while (kept_ > limit_) {  // the longest unused goes first
      kept_ -= free_.front().bytes;
      bytes_.erase(free_.front().data);
      std::free(free_.front().data);
      free_.erase(free_.begin());
    }
  }

  const size_t limit_ = cache_limit();
  std::mutex mutex_;
  std::unordered_map<void*, size_t> bytes_;  // of every block, in use or free
  std::vector<Block> free_;                  // in the order they were freed
  size_t kept_ = 0;                          // bytes of free_
};

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  if (bytes < kLarge) return at::empty(sizes, options);
  at::Tensor result = at::detail::empty_generic(
      sizes, &Recycler::get(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())
    result.fill_(c10::isFloatingType(dtype) ? std::numeric_limits<double>::quiet_NaN() : 127.0);
  return result;
}

}  // namespace trifuse
