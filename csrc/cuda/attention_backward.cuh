// Shared by the attention backward kernels: numbers per query, and the steps between products.

#pragma once

#include "cuda/attention.h"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_pairs.cuh"
#include "cuda/attention_softmax.cuh"
#include "cuda/attention_tile.cuh"

namespace trifuse::cuda {

// Three numbers for each query, contiguous (B, H, Lq), or (H, total) if sequences are packed. A
// weight is 2^((score - shift) · exponent - rest), with Scale's exponent. shift is the logsumexp in
// units of a score, or the row's maximum if the logsumexp is coarse; in 16-bit types, unless scores
// are in nats, it is 0, and rest holds all of the logsumexp. delta is ∑ dO O - dlse.
struct QueryVectors {
  float *shift, *rest, *delta;
};

// Computes attention_backward's gradients of queries, keys and values if is_for_hopper.
void attention_backward_hopper(const Attention& call, const QueryVectors& vectors, void* stream);

// Computes attention_backward's gradients of the tables that an index reads, if the call needs
// them. `parts` has attention_backward_table_doubles(call) numbers, which need not be initialised;
// tiles have rows of `pitch` elements.
int64_t attention_backward_table_doubles(const Attention& call);
void attention_backward_tables(
    const Attention& call, const QueryVectors& vectors, double* parts, int pitch, void* stream);

// Zeros a block's share of the packed tokens past the last sequence.
template <class Scalar>
__device__ __forceinline__ void store_unused_keys(
    const Attention& p, const BlockIndex& index, int rows) {
  const UnusedTokens unused(p.cu_seqlens_k, p.total_k, index, rows);
  store_zeros<Scalar>({p.grad_key, 0, index.h, 0, p.E}, unused);
  store_zeros<Scalar>({p.grad_value, 0, index.h, 0, p.Ev}, unused);
}
template <class Scalar>
__device__ __forceinline__ void store_unused_queries(
    const Attention& p, const BlockIndex& index, int rows) {
  const UnusedTokens unused(p.cu_seqlens_q, p.total_q, index, rows);
  store_zeros<Scalar>({p.grad_query, 0, index.h, 0, p.E}, unused);
}

// QueryVectors for the queries of a thread's tile: by row or, with kByKey, where queries are
// columns, by column.
template <int N, bool kByKey>
class TileVectors {
 public:
  __device__ __forceinline__
  TileVectors(const QueryVectors& vectors, const Head& head, int row, int column) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int query = kByKey ? column + fragment_column(i / 2, i % 2) : row + fragment_row(2 * i);
      const bool inside = query < head.queries;
      shift_[i] = inside ? vectors.shift[head.first_row + query] : 0.0f;
      rest_[i] = inside ? vectors.rest[head.first_row + query] : 0.0f;
      delta_[i] = inside ? vectors.delta[head.first_row + query] : 0.0f;
    }
  }
  __device__ __forceinline__ float shift(int n, int e) const { return shift_[index(n, e)]; }
  __device__ __forceinline__ float rest(int n, int e) const { return rest_[index(n, e)]; }
  __device__ __forceinline__ float delta(int n, int e) const { return delta_[index(n, e)]; }

 private:
  __device__ static constexpr int index(int n, int e) { return kByKey ? 2 * n + e % 2 : e / 2; }
  static constexpr int kCount = kByKey ? N / 4 : 2;
  float shift_[kCount], rest_[kCount], delta_[kCount];
};

template <int N>
__device__ __forceinline__ void leave_out(float (&numbers)[N / 8][4], const Pairs<N>& pairs) {
  if (pairs.full) return;
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!pairs.test(n, e)) numbers[n][e] = 0;
}

// Clears a warp's sums for keys past the lengths, from row `first` on. Their weights are 0, but the
// other factor may be NaN.
template <int C>
__device__ __forceinline__ void clear_rows(float (&sums)[C / 8][4], int first) {
#pragma unroll
  for (int n = 0; n < C / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (fragment_row(e) >= first) sums[n][e] = 0;
}

// Subtracts each query's shift from scores in nats, in 16-bit types.
template <int N, class Vectors>
__device__ __forceinline__ void subtract_shifts(
    float (&scores)[N / 8][4], const Vectors& per_query) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[n][e] -= per_query.shift(n, e);
}

// Turns scores into weights, before dropout.
template <int N, class Scalar, class Vectors>
__device__ __forceinline__ void make_weights(
    float (&scores)[N / 8][4], const Scale& scale, const Vectors& per_query,
    const Pairs<N>& pairs) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float score = kTensorCore<Scalar> ? scores[n][e] : scores[n][e] - per_query.shift(n, e);
      scores[n][e] = power_of_2<Scalar>(fmaf(score, scale.exponent, -per_query.rest(n, e)));
    }
  leave_out<N>(scores, pairs);
}

// Applies dropout: multiplies kept numbers by `factor`, and sets the others to 0.
template <int N, class Kept>
__device__ __forceinline__ void apply_dropout(
    float (&numbers)[N / 8][4], const Kept& kept, float factor) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) numbers[n][e] = kept.test(n, e) ? numbers[n][e] * factor : 0.0f;
}

// Turns products of dO and v, after dropout, into dS.
template <int N, class Vectors>
__device__ __forceinline__ void make_gradients(
    float (&products)[N / 8][4], const float (&weights)[N / 8][4], const Vectors& per_query,
    const Pairs<N>& pairs) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      products[n][e] = weights[n][e] * (products[n][e] - per_query.delta(n, e));
  leave_out<N>(products, pairs);
}

// Turns scores that are not capped yet, and products of dO and v, into weights and dS of the scores
// before the cap. dropout(numbers, factor) applies dropout. The products are multiplied by the
// slopes before the first weight is computed, because an array of slopes would take too many
// registers. With Masks::All the call may have no cap.
template <
    int N, bool kByKey, class Scalar, Masks kMasks, class Vectors, class TilePairs, class Dropout>
__device__ __forceinline__ void make_capped(
    float (&scores)[N / 8][4], float (&products)[N / 8][4], const Attention& p, const Scale& scale,
    const Head& head, const Vectors& per_query, TilePairs& pairs, int row, int column,
    const Dropout& dropout) {
  if (p.dropout.threshold) dropout(products, static_cast<float>(p.dropout.scale));
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) products[n][e] -= per_query.delta(n, e);
  float factor = scale.product;
  if (kMasks != Masks::All || p.softcap > 0) {
    const Cap cap(p, scale);
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] = cap(scores[n][e]);
        products[n][e] *= fmaf(-scores[n][e], scores[n][e], 1.0f);
      }
    factor = static_cast<float>(p.softcap);
  }
  multiply_and_add_mask<N, kByKey, Scalar, kMasks>(scores, factor, p, head, pairs, row, column);
  if constexpr (kTensorCore<Scalar>) subtract_shifts<N>(scores, per_query);
  make_weights<N, Scalar>(scores, scale, per_query, pairs);
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) products[n][e] *= scores[n][e];
  leave_out<N>(products, pairs);
  if (p.dropout.threshold) dropout(scores, 1.0f);
}

}  // namespace trifuse::cuda
