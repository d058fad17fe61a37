// dropout_add_layer_norm forward on a CPU.
//
// A task owns a block of rows. For each row it reads x and the residual once, and writes out, and
// the sum if it is requested, once. Between the passes, three of LayerNorm and two of RMSNorm, a
// row's sum stays in the L1 or L2 cache.
//
// Floor: the bytes of x, residual, out and sum at the machine's copy rate. The arithmetic overlaps
// with these accesses: about 12 vector instructions per vector, and 42 for the dropout of 64
// elements.

#include <cmath>

#include "cpu/dropout_add_layer_norm_row.h"
#include "cpu/kernels.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

template <class Scalar, class Sum, class T = Accumulator<Scalar>>
void run(const DropoutAddLayerNormProblem& p, int64_t block) {
  using Row = Strip<T>;
  const int64_t width = round_up(p.N, kStrip);
  const T* weight = static_cast<const T*>(p.weight);
  const T* bias = static_cast<const T*>(p.bias);
  thread_local Scratch scratch;
  scratch.reset(Scratch::bytes<T>(width), "a thread of dropout_add_layer_norm");
  T* sum = scratch.take<T>(width);

  const int64_t first = block * p.rows_per_block;
  const int64_t last = std::min(first + p.rows_per_block, p.rows);
  RowSum<Scalar, Sum> source(p, first);
  for (int64_t row = first; row < last; ++row) {
    Sum* returned = p.sum ? p.sum.row<Sum>(row) : nullptr;
    Scalar* out = p.out.row<Scalar>(row);
    auto total = Row::full(0), squares = Row::full(0);
    for_strips(p.N, [&](int64_t c, auto count) TRIFUSE_INLINE {
      if (!p.stream) prefetch_strip<true>(out + c);
      uint64_t word;
      auto s = source.strip(c, count, word);
      if (returned) {
        s.store(returned + c, count, p.stream);
        if constexpr (!std::is_same_v<Sum, T>) s = s.template rounded<Sum>();
      }
      if (p.rms_norm) squares = multiply_add(s, s, squares);
      else total = total + s;
      s.store(sum + c);
    });

    // `rough_mean` is the mean with the error of a long sum. The mean of the deviations from it is
    // a small number that corrects this error, so a large offset in the row costs no digits of the
    // variance.
    const T rough_mean = p.rms_norm ? T(0) : total.total() / static_cast<T>(p.N);
    const RowSum<Scalar, Sum> next(p, std::min(row + 1, last - 1));
    auto deviations = Row::full(0);
    if (!p.rms_norm) {
      std::fill(sum + p.N, sum + width, rough_mean);
      for (int64_t c = 0; c < width; c += kStrip) {
        next.prefetch(c);
        const auto d = Row::load(sum + c) - Row::full(rough_mean);
        deviations = deviations + d;
        squares = multiply_add(d, d, squares);
      }
    }
    const double correction = p.rms_norm ? 0.0 : deviations.total() / static_cast<double>(p.N);
    const double variance = squares.total() / static_cast<double>(p.N) - correction * correction;
    const double rstd = 1 / std::sqrt(std::max(variance, 0.0) + p.eps);
    static_cast<T*>(p.mean)[row] = static_cast<T>(rough_mean + correction);
    static_cast<T*>(p.rstd)[row] = static_cast<T>(rstd);

    const auto factor = Row::full(static_cast<T>(rstd));
    const auto offset = Row::full(static_cast<T>(-correction * rstd));
    for_strips(p.N, [&](int64_t c, auto count) TRIFUSE_INLINE {
      if (p.rms_norm) next.prefetch(c);
      auto y = multiply_add(Row::load(sum + c) - Row::full(rough_mean), factor, offset);
      if (weight) y = y * Row::load(weight + c, count);
      if (bias) y = y + Row::load(bias + c, count);
      y.store(out + c, count, p.stream);
    });
    source = next;
  }
  if (p.stream) fence_streams();
}

void run_any(const DropoutAddLayerNormProblem& p, int64_t block) {
  for_types(p, [&]<class Scalar, class Sum>() { run<Scalar, Sum>(p, block); });
}

}  // namespace

DropoutAddLayerNormForward dropout_add_layer_norm_forward() { return {run_any}; }

}  // namespace trifuse::TRIFUSE_CAPABILITY
