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

template <class Scalar>
void run(const DropoutProblem& p, int64_t block) {
  using T = std::conditional_t<std::is_same_v<Scalar, double>, double, float>;
  const auto scale = Strip<T>::full(static_cast<T>(p.dropout.scale));
  const int64_t first = block * kDropoutBlock;
  const Scalar* x = static_cast<const Scalar*>(p.x) + first;
  Scalar* out = static_cast<Scalar*>(p.out) + first;
  for_strips(
      std::min(p.count - first, kDropoutBlock),
      [&](int64_t c, auto count) TRIFUSE_INLINE {
        const uint64_t kept = dropout_row(
            p.dropout.seed, 0, first / kLongRow, first % kLongRow + c, p.dropout.threshold);
        (Strip<T>::load(x + c, count) * scale).keep(kept).store(out + c, count);
      });
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
