// The gradient of a linear layer's bias on a CPU, and the gradient of ReLU after the layer.
//
// A task of `run` owns kRows rows of kColumns columns. It reads grad once, and out if there is one,
// and writes grad_y and the sums of its columns (long_sum.h). A task of `reduce` owns as many
// columns and adds up the sums of all blocks of rows in order, so that the result is the same for
// any number of threads.
//
// Floor: the bytes of grad, out and grad_y at the machine's copy rate.

#include <c10/util/BFloat16.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/long_sum.h"
#include "cpu/row.h"

namespace trifuse::CPU_CAPABILITY {
namespace {

constexpr int64_t kRows = BiasGradientProblem::kRows, kColumns = BiasGradientProblem::kColumns;

// Adds `count` rows, of `columns` columns from `column` on, to the sums of the columns, and writes
// their part of grad_y.
template <int count, class Scalar>
void add_rows(
    const BiasGradientProblem& p, int64_t row, int64_t column, int64_t columns, float* sums) {
  using Row = Strip<float>;
  const auto zero = Vectorized<float>(0);
  const Scalar* grad = static_cast<const Scalar*>(p.grad) + row * p.grad_row + column;
  const Scalar* out = nullptr;
  Scalar* grad_y = nullptr;
  if (p.out) {
    out = static_cast<const Scalar*>(p.out) + row * p.out_row + column;
    grad_y = static_cast<Scalar*>(p.grad_y) + row * p.N + column;
  }
  for_strips(columns, [&](int64_t c, auto width) TRIFUSE_INLINE {
    auto sum = Row::load(sums + c);
    for (int r = 0; r < count; ++r) {
      auto g = Row::load(grad + r * p.grad_row + c, width);
      if (out) {
        const auto y = Row::load(out + r * p.out_row + c, width);
        for (int i = 0; i < Row::kVecs; ++i)  // a NaN passes its gradient on, as torch's does
          g.v[i] = Vectorized<float>::blendv(g.v[i], zero, y.v[i] <= zero);
        g.store(grad_y + r * p.N + c, width, p.stream);
      }
      sum = sum + g;
    }
    sum.store(sums + c);
  });
}

template <class Scalar>
void run(const BiasGradientProblem& p, int64_t task) {
  const int64_t block = task / p.groups(), column = task % p.groups() * kColumns;
  const int64_t first = block * kRows, last = std::min(p.M, first + kRows);
  const int64_t columns = std::min(kColumns, p.N - column);
  alignas(64) float sums[kColumns] = {};
  double totals[kColumns] = {};
  for (int64_t m = first; m < last; m += kRun) {
    const int64_t end = std::min(m + kRun, last);
    int64_t row = m;
    for (; row + 4 <= end; row += 4) add_rows<4, Scalar>(p, row, column, columns, sums);
    for (; row < end; ++row) add_rows<1, Scalar>(p, row, column, columns, sums);
    end_run(sums, totals, columns);
  }
  if (p.stream) fence_streams();
  std::copy_n(totals, columns, p.sums + block * p.N + column);
}

template <class Scalar>
void reduce(const BiasGradientProblem& p, int64_t group) {
  const int64_t column = group * kColumns, columns = std::min(kColumns, p.N - column);
  double totals[kColumns] = {};
  for (int64_t block = 0; block < p.blocks(); ++block)
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
