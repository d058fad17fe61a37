// dropout_add_layer_norm backward on a CPU.
//
// A task owns a block of rows. Of each it reads grad_out and what the sum is made of once (or the
// sum itself, where the forward returned it), and writes grad_x and grad_residual once. The gradients
// of weight, bias and x_bias add up over the block in the cache and leave it once; a second kernel
// adds up the blocks in order, each of its tasks a strip of columns.
//
// Floor: the bytes of grad_out, x, residual, grad_x and grad_residual at the machine's copy rate.

#include "cpu/dropout_add_layer_norm_row.h"
#include "cpu/kernels.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

template <class T>
T* block_row(void* blocks, int64_t block, int64_t N) {
  return blocks ? static_cast<T*>(blocks) + block * N : nullptr;
}

// sums[c .. c + 64) += s.
template <class T>
void add_to(T* sums, int64_t c, const Strip<T>& s) {
  (Strip<T>::load(sums + c) + s).store(sums + c);
}

template <class Scalar, class Sum, class T = Accumulator<Scalar>>
void run(const DropoutAddLayerNormProblem& p, int64_t block) {
  using Row = Strip<T>;
  const int64_t width = round_up(p.N, kStrip);
  const T* weight = static_cast<const T*>(p.weight);
  thread_local Scratch scratch;
  scratch.reset(5 * Scratch::bytes<T>(width) + Scratch::bytes<uint64_t>(width / kStrip));
  T* normalised = scratch.take<T>(width);  // at first the sum
  T* weighted = scratch.take<T>(width);    // w dy
  T* grad_weight = scratch.take<T>(width);
  T* grad_bias = scratch.take<T>(width);
  T* grad_x_bias = scratch.take<T>(width);
  uint64_t* kept = scratch.take<uint64_t>(width / kStrip);
  for (T* sums : {grad_weight, grad_bias, grad_x_bias}) std::fill_n(sums, width, T(0));

  const int64_t first = block * p.rows_per_block;
  for (int64_t row = first; row < std::min(first + p.rows_per_block, p.rows); ++row) {
    if (p.x) sum_row<Scalar, Sum>(p, row, normalised, kept);
    const Sum* sum = p.x ? nullptr : p.sum.row<const Sum>(row);
    const Scalar* dy = p.grad_out.row<const Scalar>(row);
    const T mean = static_cast<const T*>(p.mean)[row], rstd = static_cast<const T*>(p.rstd)[row];
    auto g_total = Row::full(0), gn_total = Row::full(0);
    for (int64_t c = 0; c < p.N; c += kStrip) {
      const int64_t n = p.N - c;
      const auto s = sum ? Row::load(sum + c, n) : Row::load(normalised + c);
      const auto normal = (s - Row::full(mean)) * Row::full(rstd);
      const auto grad = Row::load(dy + c, n);
      const auto g = weight ? grad * Row::load(weight + c, n) : grad;
      if (p.grad_weight) add_to(grad_weight, c, grad * normal);
      if (p.grad_bias) add_to(grad_bias, c, grad);
      g_total = g_total + g;
      gn_total = multiply_add(g, normal, gn_total);
      normal.store(normalised + c);
      g.store(weighted + c);
    }
    const T g_mean = p.rms_norm ? T(0) : g_total.total() / static_cast<T>(p.N);
    const T gn_mean = gn_total.total() / static_cast<T>(p.N);

    const Sum* ds = p.grad_sum ? p.grad_sum.row<const Sum>(row) : nullptr;
    Scalar* dx = p.grad_x ? p.grad_x.row<Scalar>(row) : nullptr;
    Sum* dr = p.grad_residual ? p.grad_residual.row<Sum>(row) : nullptr;
    for (int64_t c = 0; c < p.N; c += kStrip) {
      const int64_t n = p.N - c;
      auto grad = multiply_add(
          Row::load(normalised + c), Row::full(-gn_mean), Row::load(weighted + c) - Row::full(g_mean));
      grad = grad * Row::full(rstd);
      if (ds) grad = grad + Row::load(ds + c, n);
      if (dr) grad.store(dr + c, n);
      if (p.dropout.threshold) {
        if (!p.x) kept[c / kStrip] = dropout_row(p.dropout.seed, 0, row, c, p.dropout.threshold);
        grad = (grad * Row::full(static_cast<T>(p.dropout.scale))).keep(kept[c / kStrip]);
      }
      if (p.grad_x_bias) add_to(grad_x_bias, c, grad);
      if (dx) grad.store(dx + c, n);
    }
  }
  if (p.grad_weight) std::copy_n(grad_weight, p.N, block_row<T>(p.grad_weight, block, p.N));
  if (p.grad_bias) std::copy_n(grad_bias, p.N, block_row<T>(p.grad_bias, block, p.N));
  if (p.grad_x_bias) std::copy_n(grad_x_bias, p.N, block_row<T>(p.grad_x_bias, block, p.N));
}

void run_any(const DropoutAddLayerNormProblem& p, int64_t block) {
  for_types(p, [&]<class Scalar, class Sum>() { run<Scalar, Sum>(p, block); });
}

template <class T>
void reduce(const DropoutAddLayerNormProblem& p, int64_t strip) {
  const int64_t c = strip * kStrip, n = p.N - c;
  for (void* blocks : {p.grad_weight, p.grad_bias, p.grad_x_bias}) {
    if (!blocks) continue;
    auto sum = Strip<T>::load(block_row<T>(blocks, 0, p.N) + c, n);
    for (int64_t b = 1; b < p.blocks; ++b)
      sum = sum + Strip<T>::load(block_row<T>(blocks, b, p.N) + c, n);
    sum.store(block_row<T>(blocks, 0, p.N) + c, n);
  }
}

void reduce_any(const DropoutAddLayerNormProblem& p, int64_t strip) {
  p.dtype == DType::Float64 ? reduce<double>(p, strip) : reduce<float>(p, strip);
}

}  // namespace

DropoutAddLayerNormBackward dropout_add_layer_norm_backward() { return {run_any, reduce_any}; }

}  // namespace trifuse::TRIFUSE_CAPABILITY
