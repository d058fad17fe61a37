// Dropout on a CPU.
//
// A task owns a block of consecutive elements and reads and writes each once. 64 elements share a
// word of dropout bits, which takes 42 vector instructions.
//
// Floor: the bytes of x and out at the machine's copy rate.

#include "cpu/kernels.h"
#include "cpu/philox.h"
#include "cpu/row.h"

namespace trifuse::CPU_CAPABILITY {
namespace {

// Drops `count` elements from `first` on. They are consecutive in a row of Philox's plane 0, from
// element `place` of the whole on.
template <class Scalar>
void run_part(const DropoutProblem& p, int64_t first, int64_t count, int64_t place) {
  using T = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;
  const auto scale = Strip<T>::full(static_cast<T>(p.dropout.scale));
  const Scalar* x = static_cast<const Scalar*>(p.x) + first;
  Scalar* out = static_cast<Scalar*>(p.out) + first;
  for_strips(count, [&](int64_t c, auto count) TRIFUSE_INLINE {
    const uint64_t kept =
        dropout_row(p.dropout.seed, 0, place / kLongRow, place % kLongRow + c, p.dropout.threshold);
    (Strip<T>::load(x + c, count) * scale).keep(kept).store(out + c, count);
  });
}

template <class Scalar>
void run(const DropoutProblem& p, int64_t block) {
  const int64_t first = block * kDropoutBlock, last = std::min(p.count, first + kDropoutBlock);
  const Place& place = p.dropout.place;
  if (!place.block) return run_part<Scalar>(p, first, last - first, first);
  for (int64_t i = first; i < last;) {
    const int64_t at = place.unit(i), rest = i % place.block;
    const int64_t run_ends = rest < place.fold ? std::min(place.fold, place.block) : place.block;
    const int64_t count = std::min({last - i, run_ends - rest, kLongRow - at % kLongRow});
    run_part<Scalar>(p, i, count, at);
    i += count;
  }
}

void run_any(const DropoutProblem& p, int64_t block) {
  switch (p.dtype) {
    case DType::Float32: return run<float>(p, block);
    case DType::BFloat16: return run<c10::BFloat16>(p, block);
    case DType::Float16: return run<c10::Half>(p, block);
    case DType::Float64: return run<double>(p, block);
  }
}

}  // namespace

DropoutKernel dropout() { return {run_any}; }

}  // namespace trifuse::CPU_CAPABILITY
