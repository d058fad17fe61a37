// The gradient of a linear layer's bias on a CPU, and the gradient of ReLU after the layer.
//
// A task of `run` owns kBiasGradientRows rows of kBiasGradientColumns columns. It reads grad once,
// and out if there is one, and writes grad_y and the sums of its columns (long_sum.h). A task of
// `reduce` owns as many columns and adds up the sums of all blocks of rows in order, so that the
// result is the same for any number of threads.
//
// Floor: the bytes of grad, out and grad_y at the machine's copy rate.

#include <c10/util/BFloat16.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/long_sum.h"
#include "cpu/row.h"

namespace trifuse::CPU_CAPABILITY {
namespace {

constexpr int64_t kRows = kBiasGradientRows, kColumns = kBiasGradientColumns;

// The rows of a problem from `row` on, and their columns from `column` on.
template <class Scalar>
struct Rows {
  const Scalar *grad, *out;
  Scalar* grad_y;
  int64_t grad_row, out_row, N;
  bool stream;

  Rows(const BiasGradientProblem& p, int64_t row, int64_t column)
      : grad(static_cast<const Scalar*>(p.grad) + row * p.grad_row + column),
        out(p.out ? static_cast<const Scalar*>(p.out) + row * p.out_row + column : nullptr),
        grad_y(p.out ? static_cast<Scalar*>(p.grad_y) + row * p.N + column : nullptr),
        grad_row(p.grad_row), out_row(p.out_row), N(p.N), stream(p.stream) {}
};

// Adds `count` rows to the sums of their columns, and writes their part of grad_y.
template <int count, class Scalar>
void add_rows(const Rows<Scalar>& rows, int64_t columns, float* sums) {
  using Row = Strip<float>;
  const auto zero = Vectorized<float>(0);
  for_strips(columns, [&](int64_t c, auto width) TRIFUSE_INLINE {
    auto sum = Row::load(sums + c);
    for (int r = 0; r < count; ++r) {
      auto g = Row::load(rows.grad + r * rows.grad_row + c, width);
      if (rows.out) {
        const auto y = Row::load(rows.out + r * rows.out_row + c, width);
        for (int i = 0; i < Row::kVecs; ++i)  // a NaN passes its gradient on, as torch's does
          g.v[i] = Vectorized<float>::blendv(g.v[i], zero, y.v[i] <= zero);
        g.store(rows.grad_y + r * rows.N + c, width, rows.stream);
      }
      sum = sum + g;
    }
    sum.store(sums + c);
  });
}

template <class Scalar>
void run(const BiasGradientProblem& p, int64_t task) {
  const int64_t groups = (p.N + kColumns - 1) / kColumns;
  const int64_t block = task / groups, column = task % groups * kColumns;
  const int64_t first = block * kRows, last = std::min(p.M, first + kRows);
  const int64_t columns = std::min(kColumns, p.N - column);
  alignas(64) float sums[kColumns] = {};
  double totals[kColumns] = {};
  for (int64_t m = first; m < last; m += kRun) {
    const int64_t end = std::min(m + kRun, last);
    int64_t row = m;
    for (; row + 4 <= end; row += 4) add_rows<4>(Rows<Scalar>(p, row, column), columns, sums);
    for (; row < end; ++row) add_rows<1>(Rows<Scalar>(p, row, column), columns, sums);
    end_run(sums, totals, columns);
  }
  if (p.stream) fence_streams();
  std::copy_n(totals, columns, p.sums + block * p.N + column);
}

template <class Scalar>
void reduce(const BiasGradientProblem& p, int64_t group) {
  const int64_t column = group * kColumns, columns = std::min(kColumns, p.N - column);
  double totals[kColumns] = {};
  for (int64_t block = 0; block * kRows < p.M; ++block)
    for (int64_t c = 0; c < columns; ++c) totals[c] += p.sums[block * p.N + column + c];
  std::transform(
      totals, totals + columns, static_cast<Scalar*>(p.grad_bias) + column,
      [](double sum) { return static_cast<Scalar>(static_cast<float>(sum)); });
}

void run_any(const BiasGradientProblem& p, int64_t task) {
  p.dtype == DType::BFloat16 ? run<c10::BFloat16>(p, task) : run<float>(p, task);
}

void reduce_any(const BiasGradientProblem& p, int64_t group) {
  p.dtype == DType::BFloat16 ? reduce<c10::BFloat16>(p, group) : reduce<float>(p, group);
}

}  // namespace

BiasGradientKernel bias_gradient() { return {run_any, reduce_any}; }

}  // namespace trifuse::CPU_CAPABILITY
