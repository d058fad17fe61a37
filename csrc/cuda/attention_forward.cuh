// Shared by the two attention forward kernels: rescaling sums and writing results.

#pragma once

#include "cuda/attention_tile.cuh"

namespace trifuse::cuda {

// Fills a block's share of the packed tokens past the last sequence: out is 0, logsumexp is -inf.
template <class Scalar>
__device__ __forceinline__ void store_unused_tokens(
    const Attention& p, const Place& place, int rows) {
  const int64_t first = p.cu_seqlens_q[place.b] + place.block * rows;
  const int64_t step = int64_t(place.blocks) * rows;
  store_zeros<Scalar>({p.out, 0, place.h, 0, p.Ev}, first, p.total_q, rows, step);
  float* lse = static_cast<float*>(p.logsumexp.data) + place.h * p.logsumexp.stride[1];
  for (int64_t row = first; row < p.total_q; row += step)
    for (int i = threadIdx.x; i < rows && row + i < p.total_q; i += blockDim.x)
      lse[(row + i) * p.logsumexp.stride[2]] = -kInfinity;
}

template <int C>
__device__ __forceinline__ void multiply_by(float (&sums)[C / 8][4], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < C / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] *= factor[e / 2];
}

// Writes a warp's rows [row, row + 16) of out and logsumexp. `room` is as in store_rows.
template <int D, class Scalar>
__device__ __forceinline__ void store_results(
    const Attention& p, const Head& head, const Scale& scale, int row, const float (&acc)[D / 8][4],
    Softmax<Scalar>& softmax, const Reached<D>& reached, const Tile<Scalar>& room) {
  softmax.finish();
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    factor[r] = static_cast<float>(p.dropout.scale) / softmax.sum[r];
    float logsumexp =
        fmaf(log2f(softmax.sum[r]), kLn2, softmax.peak[r] * static_cast<float>(scale.unit));
    if (softmax.peak[r] != -kInfinity && !finite(logsumexp)) factor[r] = logsumexp = kNan;
    const int query = row + row_of(2 * r);
    if (lane() % 4 == 0 && query < head.queries) {
      float* lse = static_cast<float*>(p.logsumexp.data) + head.batch * p.logsumexp.stride[0] +
          head.h * p.logsumexp.stride[1] + (head.first_query + query) * p.logsumexp.stride[2];
      *lse = logsumexp;
    }
  }
  store_rows<D>(
      acc, factor, reached, room, head.query_rows<Scalar>(p.out, p.Ev), row, head.queries, 0);
}

}  // namespace trifuse::cuda
