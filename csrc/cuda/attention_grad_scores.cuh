// The gradients of attention's scores, dS. Shared by the kernels that add them up: those for keys,
// queries, masks and biases.

#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/attention.h"
#include "cuda/attention_backward.cuh"
#include "cuda/attention_configurations.cuh"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_pairs.cuh"
#include "cuda/attention_softmax.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/long_sum.cuh"

namespace trifuse::cuda {

// Turns a warp's tile of scores (products of q and k) into the weights that dropout keeps, not yet
// scaled up, and products (of dO and v) into dS. Both are 0 for pairs that take no part. kSlope: dS
// is that of the scores before a cap, not after it.
template <int N, bool kByKey, class Scalar, Masks kMasks, bool kSlope = true>
__device__ __forceinline__ void weights_and_gradients(
    float (&scores)[N / 8][4], float (&products)[N / 8][4], const Attention& p, const Scale& scale,
    const Head& head, const TileVectors<N, kByKey>& per_query, const Pairs<N>& pairs, uint64_t seed,
    int row, int column) {
  if (scale.scores_in_nats) {
    if (kSlope && p.softcap > 0)
      return make_capped<N, kByKey, Scalar, kMasks>(
          scores, products, p, scale, head, per_query, pairs, row, column,
          [&](float (&numbers)[N / 8][4], float factor) {
            apply_dropout<N>(numbers, Kept<N, kByKey>(p, head, seed, row, column), factor);
          });
    scale_and_add_mask<N, kByKey, Scalar, kMasks, !kSlope>(
        scores, p, scale, head, pairs, row, column);
    if constexpr (kTensorCore<Scalar>) subtract_shifts<N>(scores, per_query);
  }
  make_weights<N, Scalar>(scores, scale, per_query, pairs);
  if (p.dropout.threshold) {
    const Kept<N, kByKey> kept(p, head, seed, row, column);
    apply_dropout<N>(products, kept, static_cast<float>(p.dropout.scale));
    make_gradients<N>(products, scores, per_query, pairs);
    apply_dropout<N>(scores, kept, 1);
  } else {
    make_gradients<N>(products, scores, per_query, pairs);
  }
}

// A block's tiles of the rows from which a tile of dS is computed.
template <class Scalar>
struct GradientTiles {
  using Shape = WideShape<Scalar>;
  Tile<Scalar> query, grad_out, key, value;

  __device__ __forceinline__ explicit GradientTiles(int pitch)
      : query{reinterpret_cast<Scalar*>(shared_memory()), pitch},
        grad_out(query.from(Shape::kRows)), key(grad_out.from(Shape::kRows)),
        value(key.from(Shape::N)) {}
  __device__ __forceinline__ void* end() const { return value.from(Shape::N).data; }
};

// Adds dS of the queries from `first` on and the keys from `column` on to a block's sums. Returns,
// the same in all threads, whether there may be anything to add.
template <class Scalar, Masks kMasks>
__device__ __forceinline__ bool add_grad_scores(
    float (&sums)[WideShape<Scalar>::N / 8][4], const GradientTiles<Scalar>& tiles,
    const Attention& p, const QueryVectors& vectors, const Scale& scale, const Head& head,
    uint64_t seed, int first, int column) {
  using Shape = WideShape<Scalar>;
  constexpr int N = Shape::N;
  const int row = first + 16 * warp();
  const Range range = visible_to_block<N, false>(head, first, Shape::kRows);
  if (column < range.first || column >= range.last) return false;
  const ThreadRanges<false> ranges(head, row);
  const Pairs<N> pairs = find_pairs<N, false, kMasks>(p, head, ranges, row, column);
  if (!__syncthreads_or(pairs.any)) return false;  // after it, the previous term's tiles are free
  load_tile(
      tiles.query, head.query_rows<const Scalar>(p.query, p.E), first, Shape::kRows, head.queries);
  load_tile(
      tiles.grad_out, head.query_rows<const Scalar>(p.grad_out, p.Ev), first, Shape::kRows,
      head.queries);
  load_tile(tiles.key, head.key_rows<const Scalar>(p.key, p.E), column, N, head.keys);
  load_tile(tiles.value, head.key_rows<const Scalar>(p.value, p.Ev), column, N, head.keys);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  if (!pairs.any) return true;
  const PaddedDims dims(p);
  const TileVectors<N, false> per_query(vectors, head, row, column);
  float weights[N / 8][4] = {}, grad_scores[N / 8][4] = {};
  multiply_rows<N>(weights, tiles.query.from(16 * warp()), tiles.key, dims.E);
  multiply_rows<N>(grad_scores, tiles.grad_out.from(16 * warp()), tiles.value, dims.Ev);
  weights_and_gradients<N, false, Scalar, kMasks, false>(
      weights, grad_scores, p, scale, head, per_query, pairs, seed, row, column);
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] += grad_scores[n][e];
  return true;
}

// Sums of many terms ------------------------------------------------------------------------------

// Terms per run of a sum over heads, sequences or blocks of queries.
constexpr int kTermsOfRun = 16;

// A thread's part of a tile, summed over the earlier runs. It is in registers or, in float32, where
// products need the registers, in kSharedRunTotals bytes of shared memory.
template <class Scalar>
constexpr size_t kSharedRunTotals =
    kTensorCore<Scalar> ? 0 : WideShape<Scalar>::kRows * WideShape<Scalar>::N * sizeof(float);

template <class Scalar>
class RunTotals {
 public:
  static constexpr int N = WideShape<Scalar>::N;

  __device__ __forceinline__ explicit RunTotals(void* shared) {
    if constexpr (!kTensorCore<Scalar>) own_ = static_cast<float*>(shared) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) (*this)[i] = 0;
  }
  __device__ __forceinline__ void end_runs(float (&sums)[N / 8][4]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) end_run(sums[i / 4][i % 4], (*this)[i]);
  }
  __device__ __forceinline__ void add_to(float (&sums)[N / 8][4]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i / 4][i % 4] += (*this)[i];
  }

 private:
  __device__ __forceinline__ float& operator[](int i) {
    if constexpr (kTensorCore<Scalar>) return own_[i];
    else return own_[i * 32 * WideShape<Scalar>::kWarps];
  }

  std::conditional_t<kTensorCore<Scalar>, float[N / 2], float*> own_;
};

// Removes the lowest digit of a mixed-radix number and returns it.
__device__ __forceinline__ int64_t take_digit(int64_t& number, int64_t base) {
  const int64_t digit = number % base;
  number /= base;
  return digit;
}

// A sum over broadcast dimensions is divided until there are about this many blocks. That is enough
// for any GPU, and it bounds the memory for the shares.
constexpr int64_t kBlocksOfSum = 512;

// Threads of a block that adds up shares, one element of the result each.
constexpr int kSumThreads = 256;

}  // namespace trifuse::cuda
