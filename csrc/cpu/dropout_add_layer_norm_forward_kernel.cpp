// dropout_add_layer_norm forward on a CPU.
//
// A task owns a block of rows. For each row it reads x and the residual once, and writes out, and
// the sum if it is requested, once. The first pass over a row adds up its moments, the second
// normalises. Between the two the row stays in the L1 or L2 cache.
//
// Floor: the bytes of x, residual, out and sum at the machine's copy rate. The arithmetic overlaps
// with these accesses: about 10 vector instructions per vector, and 42 for the dropout of 64
// elements.

#include <cmath>

#include "cpu/dropout_add_layer_norm_row.h"
#include "cpu/kernels.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

// So many columns are added up in the accumulation type, and the sums of such runs in double.
constexpr int64_t kRunColumns = 16 * kStrip;

// Returns the strip with 0 after the first `count` columns.
template <class T, class Count>
TRIFUSE_INLINE inline Strip<T> first_of(const Strip<T>& s, Count count) {
  if constexpr (std::is_same_v<Count, Whole>) return s;
  else return s.keep(low_bits(count));
}

// Returns a strip of a row's sum as the norm takes it: rounded if the sum is `returned`.
template <class Sum, class T>
TRIFUSE_INLINE inline Strip<T> as_returned(const Strip<T>& s, bool returned) {
  if constexpr (!std::is_same_v<Sum, T>)
    if (returned) return s.template rounded<Sum>();
  return s;
}

template <class Scalar, class Sum, class T>
TRIFUSE_INLINE inline T sum_of_first_strip(
    const RowSum<Scalar, Sum, T>& source, int64_t N, uint64_t word, bool returned) {
  T total = 0;
  for_strips(std::min(N, kStrip), [&](int64_t c, auto count) TRIFUSE_INLINE {
    total = as_returned<Sum>(source.strip(c, count, word), returned).total();
  });
  return total;
}

template <class Scalar, class Sum, class T = Accumulator<Scalar>>
void run(const DropoutAddLayerNormProblem& p, int64_t block) {
  using Row = Strip<T>;
  const int64_t N = p.N, width = round_up(N, kStrip);
  const bool stream = p.stream, rms_norm = p.rms_norm;
  const T per_first_column = T(1) / static_cast<T>(std::min(N, kStrip));
  const double per_column = 1 / static_cast<double>(N);
  thread_local Scratch scratch;
  scratch.reset(
      Scratch::bytes<T>(width) + Vectors<Scalar>::bytes(p), "a thread of dropout_add_layer_norm");
  T* sum = scratch.take<T>(width);
  const auto [weight, bias, x_bias] = Vectors<Scalar>(p, scratch);

  const int64_t first = block * p.rows_per_block;
  const int64_t last = std::min(first + p.rows_per_block, p.rows);
  RowSum<Scalar, Sum> source(p, x_bias, first);
  for (int64_t row = first; row < last; ++row) {
    Sum* returned = p.sum ? p.sum.row<Sum>(row) : nullptr;
    Scalar* out = p.out.row<Scalar>(row);
    const RowSum<Scalar, Sum> next(p, x_bias, std::min(row + 1, last - 1));
    // The sums are those of the differences from the mean of the first strip. It is near the row's,
    // so that a large offset costs no digits of the variance.
    const uint64_t first_word = source.kept(0);
    T origin =
        rms_norm ? T(0) : sum_of_first_strip(source, N, first_word, returned) * per_first_column;
    double correction, variance;  // the mean minus origin, and that of the squared deviations
    for (bool again = false;; again = true) {
      double total = 0, squares = 0;
      for (int64_t begin = 0; begin < N; begin += kRunColumns) {
        auto run_total = Row::full(0), run_squares = Row::full(0);
        for_strips(
            std::min(N - begin, kRunColumns),
            [&](int64_t i, auto count) TRIFUSE_INLINE {
              const int64_t c = begin + i;
              if (!stream) prefetch_strip<true>(out + c);
              auto s = source.strip(c, count, source.drops && c ? source.kept(c) : first_word);
              if (returned) s.store(returned + c, count, stream);
              s = as_returned<Sum>(s, returned);
              if (!rms_norm) {
                s = first_of(s - Row::full(origin), count);
                run_total = run_total + s;
              }
              run_squares = multiply_add(s, s, run_squares);
              s.store(sum + c);
            });
        total += run_total.total();
        squares += run_squares.total();
      }
      correction = total * per_column;
      variance = squares * per_column - correction * correction;
      // If the first strip's mean is further from the row's than a standard deviation, the variance
      // is the small difference of two large sums. Then they are made again, from the row's mean.
      if (again || !(correction * correction > variance)) break;
      origin += static_cast<T>(correction);
    }
    const double rstd = 1 / std::sqrt(std::max(variance, 0.0) + p.eps);
    static_cast<T*>(p.mean)[row] = static_cast<T>(origin + correction);
    static_cast<T*>(p.rstd)[row] = static_cast<T>(rstd);

    const auto factor = Row::full(static_cast<T>(rstd));
    const auto offset = Row::full(static_cast<T>(-correction * rstd));
    for_strips(N, [&](int64_t c, auto count) TRIFUSE_INLINE {
      next.prefetch(c);
      auto y = multiply_add(Row::load(sum + c), factor, offset);
      if (weight) y = y * Row::load(weight + c, count);
      if (bias) y = y + Row::load(bias + c, count);
      y.store(out + c, count, stream);
    });
    source = next;
  }
  if (stream) fence_streams();
}

void run_any(const DropoutAddLayerNormProblem& p, int64_t block) {
  for_types(p, [&]<class Scalar, class Sum>() { run<Scalar, Sum>(p, block); });
}

}  // namespace

DropoutAddLayerNormForward dropout_add_layer_norm_forward() { return {run_any}; }

}  // namespace trifuse::TRIFUSE_CAPABILITY
