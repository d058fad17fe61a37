// Shared by the attention forward kernels: writing results.

#pragma once

#include "cuda/attention.h"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_pairs.cuh"
#include "cuda/attention_passes.cuh"
#include "cuda/attention_softmax.cuh"
#include "cuda/attention_tile.cuh"

namespace trifuse::cuda {

// Fills a block's share of the packed tokens past the last sequence: out is 0, logsumexp is -inf.
template <class Scalar>
__device__ __forceinline__ void store_unused_tokens(
    const Attention& p, const BlockIndex& index, int rows) {
  const UnusedTokens unused(p.cu_seqlens_q, p.total_q, index, rows);
  store_zeros<Scalar>({p.out, 0, index.h, 0, p.Ev}, unused);
  float* lse = static_cast<float*>(p.logsumexp.data) + index.h * p.logsumexp.stride[1];
  for (int64_t row = unused.first; row < p.total_q; row += unused.step)
    for (int i = threadIdx.x; i < rows && row + i < p.total_q; i += blockDim.x)
      lse[(row + i) * p.logsumexp.stride[2]] = -kInfinity;
}

// A row whose weights have been added up: `factor` multiplies its weighted sum of values. `row_sum`
// is the sum of the weights, as Softmax::finish leaves it.
struct FinishedRow {
  float factor, logsumexp;

  __device__ __forceinline__
  FinishedRow(const Attention& p, const Scale& scale, float row_max, float row_sum)
      : factor(static_cast<float>(p.dropout.scale) / row_sum),
        logsumexp(fmaf(log2f(row_sum), kLn2, row_max * static_cast<float>(scale.unit))) {
    if (row_max != -kInfinity && !finite(logsumexp)) factor = logsumexp = kNan;
  }

  // `token` is the row's place among the tokens of its sequence or, packed, of all.
  __device__ __forceinline__ void store_logsumexp(
      const Attention& p, int64_t batch, int h, int64_t token) const {
    static_cast<float*>(p.logsumexp.data)
        [batch * p.logsumexp.stride[0] + h * p.logsumexp.stride[1] +
         token * p.logsumexp.stride[2]] = logsumexp;
  }
};

// Writes a warp's rows [row, row + 16) of out and logsumexp. `staging` is as in store_rows.
template <int D, class Scalar>
__device__ __forceinline__ void store_results(
    const Attention& p, const Head& head, const Scale& scale, int row, const float (&acc)[D / 8][4],
    Softmax<Scalar>& softmax, const ReachedSums<D>& reached, const Tile<Scalar>& staging) {
  softmax.finish();
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const FinishedRow finished(p, scale, softmax.row_max[r], softmax.row_sum[r]);
    factor[r] = finished.factor;
    const int query = row + fragment_row(2 * r);
    if (lane() % 4 == 0 && query < head.queries)
      finished.store_logsumexp(p, head.batch, head.h, head.first_query + query);
  }
  store_rows<D>(
      acc, factor, reached, staging, head.query_rows<Scalar>(p.out, p.Ev), row, head.queries, 0);
}

}  // namespace trifuse::cuda
