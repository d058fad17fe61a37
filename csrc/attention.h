// One attention call as plain pointers, sizes and strides, for the kernels of any device.
//
// Names and rules are those of pytorch_ext/reference/attention.py. Strides count elements, in the
// order of the shape given beside each pointer; 0 where a dimension is broadcast.

#pragma once

#include <cstdint>

#include "dropout.h"
#include "dtype.h"

namespace trifuse {

// A bound of a window that leaves out no pair, and the largest offset of a diagonal. Bounds are at
// most kMostBound away from 0. So sums of a bound, an offset and a position do not overflow, and
// kNoBound stays beyond any key.
constexpr int64_t kNoBound = int64_t(1) << 62, kMostOffset = int64_t(1) << 61,
                  kMostBound = int64_t(1) << 60;

enum class MaskKind { None, Bool, Float32, QueryType };

struct Tensor4 {
  void* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};
};

struct AttentionProblem {
  DType dtype;    // of query, key, value, out and their gradients
  int64_t batch;  // B: number of sequences, padded or packed
  int64_t heads, kv_heads;
  int64_t Lq, Lk;  // padded lengths, or upper bounds of the packed ones
  int64_t E, Ev;

  Tensor4 query;  // (B, H, Lq, E); packed: (1, H, total, E)
  Tensor4 key;    // (B, Hkv, Lk, E)
  Tensor4 value;  // (B, Hkv, Lk, Ev)
  Tensor4 mask;   // (B, H, Lq, Lk), broadcast by strides
  MaskKind mask_kind = MaskKind::None;
  // A float mask that depends only on the distance j - i, in the accumulation type, or null. It is
  // viewed as (B, H, Lq, Lk) with strides 1 in i and -1 in j, so that one table holds every
  // distance. With lower_right, distances count from the lower right diagonal: query i reads row i
  // + Lk - Lq.
  Tensor4 relative_bias;
  // The column of the tables that a pair reads: (Lq, Lk) by strides, or null. With lower_right and
  // an index by distance, query i reads row i + Lk - Lq. All numbers are in [0, columns). With an
  // index, relative_bias is (B, H, n) by its strides 0, 1 and 3, and there may be tables for every
  // query and key. All are in the accumulation type.
  const int32_t* relative_index = nullptr;
  int64_t index_stride[2] = {0, 0};
  bool index_by_distance = false;
  int64_t columns = 0;                    // n
  Tensor4 query_bias;                     // (B, H, Lq, n); packed: (1, H, total, n); or null
  Tensor4 key_bias;                       // (B, H, Lk, n)
  const int64_t* key_lengths = nullptr;   // (B,)
  const int64_t* diagonal = nullptr;      // (B,): added to every query's place, or null
  const int64_t* cu_seqlens_q = nullptr;  // (B + 1,), both or neither
  const int64_t* cu_seqlens_k = nullptr;

  double scale;
  double softcap;                     // c; 0: scores are not capped
  int64_t window_left, window_right;  // around a query's place; a negative bound excludes it
  bool lower_right;                   // a query's place is i + Lk - Lq, not i
  Dropout dropout;

  int64_t threads = 1;  // on a CPU, those that share the work
  // On a CPU, if tasks are split by chunks of keys: see AttentionTasks.
  int64_t key_chunks = 1;          // tasks that each is split into
  char* chunk_sums = nullptr;      // (count, key_chunks, chunk_bytes)
  int32_t* chunks_done = nullptr;  // (count,): how many of a task's chunks are done

  Tensor4 out;        // (B, H, Lq, Ev)
  Tensor4 logsumexp;  // (B, H, Lq), float32, or float64 for Float64: the accumulation type

  // Backward only.
  Tensor4 grad_out;        // (B, H, Lq, Ev)
  Tensor4 grad_logsumexp;  // (B, H, Lq), accumulation type, or null
  Tensor4 grad_query;      // like query
  Tensor4 grad_key;        // like key
  Tensor4 grad_value;      // like value
  Tensor4 grad_query_sum;  // like query, accumulation type: sum over chunks of keys
  Tensor4 grad_mask;       // the mask's own shape by strides, or null
  // On a CPU, sums of the gradient of relative_bias, or null: see AttentionBackward.
  double* relative_bias_sums;
  // On a CPU, whether all sequences share one table and one gradient of it. A stride of 0 does not
  // show this, because an expanded table has a gradient for each sequence. False for packed
  // sequences whose distances count from the lower right diagonal: in one sum they would have many
  // places.
  bool one_table;
  Tensor4 grad_query_bias;  // like query_bias, accumulation type, zero before; or null
  Tensor4 grad_key_bias;    // like key_bias
  // Whether grad_mask is in float64 instead of the accumulation type. Each element of a broadcast
  // mask's gradient is a sum over heads or more, with too many terms for float32.
  bool grad_mask_in_double;

  // Returns the offset that `diagonal` adds to the places of a sequence's queries.
  constexpr int64_t offset(int64_t b) const {
    const int64_t given = diagonal ? diagonal[b] : 0;
    return given < -kMostOffset ? -kMostOffset : given > kMostOffset ? kMostOffset : given;
  }
};

}  // namespace trifuse
