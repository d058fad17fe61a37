// dropout_add_layer_norm backward on a CPU.
//
// A task owns a block of rows. For each row it reads grad_out and the terms of the sum once (or the
// sum itself, if the forward returned it), and writes grad_x and grad_residual once. The gradients
// of weight, bias and x_bias are summed in the cache, over runs of the block's rows (long_sum.h),
// and written once. A second kernel adds up the blocks in order; its tasks own strips of columns.
//
// Floor: the bytes of grad_out, x, residual, grad_x and grad_residual at the machine's copy rate.
// Arithmetic adds about 25 instructions a vector, and 42 for the dropout of 64 elements.

#include "cpu/dropout_add_layer_norm_row.h"
#include "cpu/kernels.h"
#include "cpu/long_sum.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

template <class T>
T* block_row(void* blocks, int64_t block, int64_t N) {
  return static_cast<T*>(blocks) + block * N;
}

// A block's sums of the gradients of weight, bias and x_bias: `width` columns each, in scratch
// memory. With many rows, `sums` are those of a run, and `totals` those of the finished runs.
template <class T>
struct ColumnSums {
  const int64_t width;
  const bool many_rows;
  T* sums[3];              // null if a gradient is not needed
  double* totals[3] = {};  // null without many rows

  static int64_t bytes(int64_t width, bool many_rows) {
    return 3 * (Scratch::bytes<T>(width) + (many_rows ? Scratch::bytes<double>(width) : 0));
  }

  ColumnSums(const DropoutAddLayerNormProblem& p, int64_t width, bool many_rows, Scratch& scratch)
      : width(width), many_rows(many_rows) {
    const void* const grads[3] = {p.grad_weight, p.grad_bias, p.grad_x_bias};
    for (int v = 0; v < 3; ++v)
      sums[v] = grads[v] ? std::fill_n(scratch.take<T>(width), width, T(0)) - width : nullptr;
    if (many_rows)
      for (double*& total : totals)
        total = std::fill_n(scratch.take<double>(width), width, 0.0) - width;
  }

  void end_runs() {
    for (int v = 0; v < 3; ++v)
      if (sums[v]) end_run(sums[v], totals[v], width);
  }

  // Writes the sums to the block's rows of the three gradients.
  void store(const DropoutAddLayerNormProblem& p, int64_t block) const {
    void* const blocks[3] = {p.grad_weight, p.grad_bias, p.grad_x_bias};
    for (int v = 0; v < 3; ++v) {
      if (!sums[v]) continue;
      T* row = block_row<T>(blocks[v], block, p.N);
      if (many_rows)
        std::transform(
            totals[v], totals[v] + p.N, row, [](double sum) { return static_cast<T>(sum); });
      else std::copy_n(sums[v], p.N, row);
    }
  }
};

template <class Scalar, class Sum, class T = Accumulator<Scalar>>
void run(const DropoutAddLayerNormProblem& p, int64_t block) {
  using Row = Strip<T>;
  const int64_t width = round_up(p.N, kStrip);
  const bool many_rows = p.rows_per_block > kRun;
  thread_local Scratch scratch;
  scratch.reset(
      Scratch::bytes<T>(width) + Scratch::bytes<uint64_t>(width / kStrip) +
          ColumnSums<T>::bytes(width, many_rows) + Vectors<Scalar>::bytes(p),
      "a thread of dropout_add_layer_norm's backward");
  T* normalised = scratch.take<T>(width);
  uint64_t* kept = scratch.take<uint64_t>(width / kStrip);
  ColumnSums<T> sums(p, width, many_rows, scratch);
  const Vectors<Scalar> vectors(p, scratch);
  const auto [grad_weight, grad_bias, grad_x_bias] = sums.sums;
  const auto add_to = [](T* to, const Row& s) TRIFUSE_INLINE {
    const auto added = Row::load(to) + s;
    added.store(to);
  };

  const int64_t first = block * p.rows_per_block;
  const int64_t last = std::min(first + p.rows_per_block, p.rows);
  RowSum<Scalar, Sum> source(p, vectors.x_bias, first);
  const Scalar* dy = p.grad_out.row<const Scalar>(first);
  for (int64_t row = first; row < last; ++row) {
    const auto mean = Row::full(static_cast<const T*>(p.mean)[row]);
    const auto rstd = Row::full(static_cast<const T*>(p.rstd)[row]);
    const Sum* ds = p.grad_sum ? p.grad_sum.row<const Sum>(row) : nullptr;
    Scalar* dx = p.grad_x ? p.grad_x.row<Scalar>(row) : nullptr;
    Sum* dr = p.grad_residual ? p.grad_residual.row<Sum>(row) : nullptr;
    auto g_total = Row::full(0), gn_total = Row::full(0);
    for_strips(p.N, [&](int64_t c, auto count) TRIFUSE_INLINE {
      if (dx && !p.stream) prefetch_strip<true>(dx + c);
      if (dr && !p.stream) prefetch_strip<true>(dr + c);
      const uint64_t word = kept[c / kStrip] = source.kept(c);
      const auto normal = (source.strip(c, count, word) - mean) * rstd;
      normal.store(normalised + c);
      const auto grad = Row::load(dy + c, count);
      if (grad_weight) add_to(grad_weight + c, grad * normal);
      if (grad_bias) add_to(grad_bias + c, grad);
      const auto g = vectors.weight ? grad * Row::load(vectors.weight + c, count) : grad;
      g_total = g_total + g;
      gn_total = multiply_add(g, normal, gn_total);
    });
    const T count = static_cast<T>(p.N);
    const auto g_mean = Row::full(p.rms_norm ? T(0) : g_total.total() / count);
    const auto gn_mean = Row::full(-gn_total.total() / count);

    const RowSum<Scalar, Sum> next(p, vectors.x_bias, std::min(row + 1, last - 1));
    const Scalar* next_dy = p.grad_out.row<const Scalar>(std::min(row + 1, last - 1));
    for_strips(p.N, [&](int64_t c, auto count) TRIFUSE_INLINE {
      next.prefetch(c);
      prefetch_strip(next_dy + c);
      auto g = Row::load(dy + c, count);
      if (vectors.weight) g = g * Row::load(vectors.weight + c, count);
      auto grad = multiply_add(Row::load(normalised + c), gn_mean, g - g_mean) * rstd;
      if (ds) grad = grad + Row::load(ds + c, count);
      if (dr) grad.store(dr + c, count, p.stream);
      if (p.dropout.threshold) grad = source.drop(grad, kept[c / kStrip]);
      if (grad_x_bias) add_to(grad_x_bias + c, grad);
      if (dx) grad.store(dx + c, count, p.stream);
    });
    source = next;
    dy = next_dy;
    if (many_rows && (ends_run(row - first) || row + 1 == last)) sums.end_runs();
  }
  if (p.stream) fence_streams();
  sums.store(p, block);
}

void run_any(const DropoutAddLayerNormProblem& p, int64_t block) {
  for_types(p, [&]<class Scalar, class Sum>() { run<Scalar, Sum>(p, block); });
}

// Adds up a strip of all blocks, sixteen blocks at a time, into the first block's row.
template <class T>
void reduce(const DropoutAddLayerNormProblem& p, int64_t strip) {
  constexpr int64_t kTogether = 16;
  const int64_t first = strip * kStrip;
  for (void* blocks : {p.grad_weight, p.grad_bias, p.grad_x_bias}) {
    if (!blocks) continue;
    for_strips(
        std::min(p.N - first, kStrip), [&](int64_t, auto count) TRIFUSE_INLINE {
          auto total = Strip<T>::full(0);
          for (int64_t b = 0; b < p.blocks; b += kTogether) {
            auto sum = Strip<T>::full(0);
            for (int64_t k = b; k < std::min(b + kTogether, p.blocks); ++k)
              sum = sum + Strip<T>::load(block_row<T>(blocks, k, p.N) + first, count);
            total = total + sum;
          }
          total.store(block_row<T>(blocks, 0, p.N) + first, count);
        });
  }
}

void reduce_any(const DropoutAddLayerNormProblem& p, int64_t strip) {
  p.dtype == DType::Float64 ? reduce<double>(p, strip) : reduce<float>(p, strip);
}

}  // namespace

DropoutAddLayerNormBackward dropout_add_layer_norm_backward() { return {run_any, reduce_any}; }

}  // namespace trifuse::TRIFUSE_CAPABILITY
