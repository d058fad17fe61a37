// The scores of the attention kernels and their running softmax.

#pragma once

#include "cuda/attention.h"
#include "cuda/attention_fragments.cuh"
#include "cuda/attention_pairs.cuh"
#include "cuda/attention_passes.cuh"
#include "cuda/dtype.cuh"
#include "cuda/ptx.cuh"
#include "cuda/warp.cuh"

namespace trifuse::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kLowest = -kLargest<float>;  // the lowest finite number

constexpr bool has_float_mask(const AttentionProblem& p) {
  return p.mask_kind == MaskKind::Float32 || p.mask_kind == MaskKind::QueryType ||
      p.relative_bias.data;
}
// Returns whether scores may be so large that their product with log2 e overflows, or that this
// product or a logsumexp is too coarse to compute weights from it.
constexpr bool has_large_scores(const AttentionProblem& p) {
  return has_float_mask(p) || p.scale > 0x1p20 || p.scale < -0x1p20;
}

// As above, for a call whose kernel reads kMasks.
template <Masks kMasks>
constexpr bool may_have_large_scores(const AttentionProblem& p) {
  return reads_tables(kMasks) || has_large_scores(p);
}

// Returns whether scores are in nats (Scale).
constexpr bool has_scores_in_nats(const AttentionProblem& p) {
  return has_large_scores(p) || p.softcap > 0 || !(p.scale >= 0x1p-122);
}

// The units of a score. Usually a score is the bare product of query and key, and `exponent`
// includes the scale. A score is in nats with a float mask or tables, whose numbers are arbitrary;
// with a large scale; with a cap; and with a scale that is not above 0, or so small that a
// logsumexp in units of a product would overflow.
struct Scale {
  bool scores_in_nats;
  float product;   // if scores_in_nats: score = cap((query · key) product) + masks
  float exponent;  // a weight is 2^((score - row_max) exponent)
  double unit;     // one unit of a score, in nats

  __device__ explicit Scale(const AttentionProblem& p)
      : scores_in_nats(has_scores_in_nats(p)), product(static_cast<float>(p.scale)),
        exponent(static_cast<float>((scores_in_nats ? 1.0 : p.scale) * 1.4426950408889634)),
        unit(scores_in_nats ? 1.0 : p.scale) {}

  // The scale in a kernel that reads kMasks.
  template <Masks kMasks>
  __device__ static Scale of(const AttentionProblem& p) {
    Scale scale(p);
    if constexpr (reads_tables(kMasks)) {
      scale.scores_in_nats = true;
      scale.exponent = kLog2e;
      scale.unit = 1;
    }
    return scale;
  }
};

// Returns tanh(score / c) of capped scores. Scores are scaled before they are divided, because the
// quotient of scale and cap may underflow. tanh.approx does not suffice, because a logsumexp has
// the precision of float32.
struct Cap {
  float product, inverse;

  __device__ __forceinline__ Cap(const Attention& p, const Scale& scale)
      : product(scale.product), inverse(1.0f / static_cast<float>(p.softcap)) {}
  __device__ __forceinline__ float operator()(float query_key) const {
    return tanhf(query_key * product * inverse);
  }
};

// Multiplies scores and, where pairs take part, adds the float mask, and a relative bias beside a
// mask or the numbers that an index reads from tables. With Masks::All, which removes the pairs
// that tables leave out, TilePairs is not const.
template <int N, bool kByKey, class Scalar, Masks kMasks, class TilePairs>
__device__ __forceinline__ void multiply_and_add_mask(
    float (&scores)[N / 8][4], float factor, const Attention& p, const Head& head, TilePairs& pairs,
    int row, int column) {
  // Not unrolled, so that the code of the mask also adds the bias, in the same registers.
  bool bias = false;
#pragma unroll 1
  do {
    const HeadMask<kMasks> mask(p, head, bias);
    const int64_t row_stride = kByKey ? mask.key_stride : mask.query_stride,
                  column_stride = kByKey ? mask.query_stride : mask.key_stride;
    const int64_t offset = mask.offset + (row + fragment_row(0)) * row_stride +
        (column + fragment_column(0, 0)) * column_stride;
    const auto add = [&]<class M>(const M* data) {
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int64_t at = offset + e / 2 * 8 * row_stride + (8 * n + e % 2) * column_stride;
          const float number = data && pairs.test(n, e) ? widen(data[at]) : 0.0f;
          scores[n][e] = fmaf(scores[n][e], bias ? 1.0f : factor, number);
        }
    };
    if (mask.kind == MaskKind::QueryType) add(static_cast<const Scalar*>(mask.data));
    else add(mask.kind == MaskKind::Float32 ? static_cast<const float*>(mask.data) : nullptr);
    bias = kMasks >= Masks::Two && !bias && p.relative_bias.data && !has_tables<kMasks>(p);
  } while (bias);
  if constexpr (reads_tables(kMasks)) {
    if (!has_tables<kMasks>(p)) return;
    constexpr bool kRemoves = kMasks == Masks::All;
    const HeadTables tables(p, head);
    if constexpr (kRemoves) pairs.keep_own();
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!pairs.test(n, e)) continue;
        const int own_row = row + fragment_row(e), own_column = column + fragment_column(n, e);
        bool keeps = true;
        tables.read(
            p, kByKey ? own_column : own_row, kByKey ? own_row : own_column, [&](float number) {
              scores[n][e] += number;
              keeps &= !kRemoves || __float_as_uint(number) != kMinusInfinity;
            });
        if constexpr (kRemoves)
          if (!keeps) pairs.remove(n, e);
      }
  }
}

// Turns products into scores in nats: scaled, with kMayCap capped, plus the float masks.
template <
    int N, bool kByKey, class Scalar, Masks kMasks = Masks::One, bool kMayCap = false,
    class TilePairs>
__device__ __forceinline__ void scale_and_add_mask(
    float (&scores)[N / 8][4], const Attention& p, const Scale& scale, const Head& head,
    TilePairs& pairs, int row, int column) {
  float factor = scale.product;
  if (kMayCap && p.softcap > 0) {
    const Cap cap(p, scale);
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = cap(scores[n][e]);
    factor = static_cast<float>(p.softcap);
  }
  multiply_and_add_mask<N, kByKey, Scalar, kMasks>(scores, factor, p, head, pairs, row, column);
}

// Returns 2^x. For 16-bit types the special function unit computes it, within 2 units in the last
// place; for float32 a series on the FMA pipes, within 1. Results below the smallest normal number
// are 0.
template <class Scalar>
__device__ __forceinline__ float power_of_2(float x) {
  if constexpr (kTensorCore<Scalar>) return exp2_approximate(x);
  if (x < -126) return 0;
  const float whole = rintf(x), rest = x - whole;
  constexpr float kSeries[] = {
      // (ln 2)^k / k!
      1.5252733804e-5f, 1.5403530393e-4f, 1.3333558146e-3f, 9.6181291076e-3f,
      5.5504108665e-2f, 2.4022650696e-1f, 6.9314718056e-1f, 1};
  float result = kSeries[0];
#pragma unroll
  for (int k = 1; k < 8; ++k) result = fmaf(result, rest, kSeries[k]);
  return __uint_as_float(
      __float_as_uint(result) + (static_cast<unsigned>(static_cast<int>(whole)) << 23));
}

// Returns the sum of a row's weights to divide by: 1 for a row without a pair, NaN if all scores
// are -inf.
__device__ __forceinline__ float finished_sum(float row_max, float row_sum) {
  if (row_sum == 0) return row_max == -kInfinity ? 1.0f : kNan;
  return row_sum;
}

// Sets the scores of pairs that take no part to -inf. `lowest` is a lower bound of each row's
// maximum: kLowest if the row has a pair, even if all its scores are -inf.
template <int N>
__device__ __forceinline__ void leave_out(
    float (&scores)[N / 8][4], const Pairs<N>& pairs, float (&lowest)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) lowest[r] = pairs.row[r] ? kLowest : -kInfinity;
  if (pairs.full) return;
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (!pairs.test(n, e)) scores[n][e] = -kInfinity;
}

// The running softmax of the thread's two rows (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). The four lanes that share a row each hold a part of its sum.
template <class Scalar>
struct Softmax {
  // The number subtracted from a row's scores. It is their running maximum or, for 16-bit types, an
  // earlier maximum as long as weights stay within 2^kSlack, which saves rescaling the sums. It is
  // -inf for a row without a pair so far, and otherwise at least kLowest, even if all scores are
  // -inf.
  float row_max[2] = {-kInfinity, -kInfinity};
  float row_sum[2] = {0, 0};
  static constexpr float kSlack = 8;

  // Turns a tile's scores into weights, 0 for pairs that take no part. `rescale` is the factor by
  // which the caller has to rescale its earlier sums. Returns, the same in all lanes, whether it
  // may differ from 1.
  template <int N>
  __device__ __forceinline__ bool take(
      float (&scores)[N / 8][4], const Pairs<N>& pairs, const Scale& scale, float (&rescale)[2]) {
    float lowest[2];
    leave_out<N>(scores, pairs, lowest);
    return take<N>(scores, lowest, scale, rescale);
  }

  // As above; `lowest` comes from leave_out, or is kLowest for full rows.
  template <int N>
  __device__ __forceinline__ bool take(
      float (&scores)[N / 8][4], const float (&lowest)[2], const Scale& scale,
      float (&rescale)[2]) {
    float largest[2];
    bool raises = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = lowest[r];
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
        largest[r] = fmaxf(largest[r], fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      raises |= (largest[r] - row_max[r]) * scale.exponent > kSlack;
      rescale[r] = 1;
    }
    // Few tiles raise a maximum by more than the slack. The others exchange nothing between lanes.
    const bool rescales = !kTensorCore<Scalar> || __any_sync(kAllLanes, raises);
    if (rescales) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float new_max = warp_max<4>(fmaxf(row_max[r], largest[r]));
        const float old_max = row_max[r];
        if (!kTensorCore<Scalar> || (new_max - old_max) * scale.exponent > kSlack)
          row_max[r] = new_max;
        rescale[r] = power_of_2<Scalar>((old_max - base(scale, r)) * scale.exponent);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = this->base(scale, r);
      // Scores in nats may be too large to multiply before the subtraction. For 16-bit types, the
      // others are multiplied first: one FMA does both.
      if (kTensorCore<Scalar> && scale.scores_in_nats) {
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) scores[n][2 * r + i] -= base;
      }
      const float offset = scale.scores_in_nats ? 0.0f : -base * scale.exponent;
      float tile_sum = 0;
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& p = scores[n][2 * r + i];
          p = power_of_2<Scalar>(
              kTensorCore<Scalar> ? fmaf(p, scale.exponent, offset) : (p - base) * scale.exponent);
          tile_sum += p;
        }
      row_sum[r] = fmaf(row_sum[r], rescale[r], tile_sum);
    }
    return rescales;
  }

  // Adds up the four lanes' parts, for finished_sum.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] = finished_sum(row_max[r], warp_sum<4>(row_sum[r]));
  }

 private:
  // Returns the number that is subtracted from a row's scores. For a row that has summed nothing so
  // far, any finite number will do, except kLowest if the scale multiplies it first, because the
  // product may overflow.
  __device__ __forceinline__ float base(const Scale& scale, int r) const {
    const bool nothing =
        row_max[r] <= (kTensorCore<Scalar> && !scale.scores_in_nats ? kLowest : -kInfinity);
    return nothing ? 0.0f : row_max[r];
  }
};

}  // namespace trifuse::cuda
