// Rotary position embeddings (Su et al., "RoFormer", 2021) of the heads of queries or keys.

#pragma once

#include <cstdint>

#include "dtype.h"

namespace trifuse {

// The first R features of each head are rotated in pairs (x1, x2), by cosines (c1, c2) and sines
// (s1, s2) of the head's position:
//
//   out1 = x1 c1 - x2 s1,  out2 = x2 c2 + x1 s2
//
// The derivative, `transposed`:  out1 = x1 c1 + x2 s2,  out2 = x2 c2 - x1 s1
//
// Features i and i + R/2 are a pair or, interleaved, 2 i and 2 i + 1. The cosines are arranged as
// the features; or there is one `per_pair`, c1 = c2 and s1 = s2.
//
// The features from R on are copied. Heads are numbered in three dimensions, the outermost first in
// memory: for example sequence, token and head. Strides are in elements, features are contiguous.
struct RotaryProblem {
  static constexpr int kDims = 3;

  DType dtype;            // of x and out: float32, bfloat16 or float64
  bool wide_positions;    // whether cos and sin are float32 beside bfloat16
  bool products_rounded;  // to bfloat16, before they are added
  bool interleaved, per_pair;
  bool transposed;
  int64_t E, R;  // features of a head; those that are rotated, an even number
  int64_t size[kDims];
  const void* x;          // size + (E)
  void* out;              // as x, and may be x
  const void *cos, *sin;  // size + (R, or R/2 per pair); a stride is 0 where they are broadcast
  int64_t x_stride[kDims], out_stride[kDims], cos_stride[kDims], sin_stride[kDims];

  int64_t tasks() const { return size[0] * size[1]; }
  double operations() const { return 16.0 * static_cast<double>(size[0] * size[1] * size[2] * E); }
};

}  // namespace trifuse
