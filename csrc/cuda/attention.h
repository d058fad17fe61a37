// Launchers of attention on a GPU. ../attention.h describes a call; pointers are to device memory.

#pragma once

#include <cstdint>

#include "../attention.h"

namespace trifuse::cuda {

// The gradient of the relative bias: float32 (B, H, columns), contiguous, B and H full or 1.
struct RelativeBiasGradient {
  float* data = nullptr;  // null if it is not needed, or if there are no pairs
  bool batch, heads;      // whether B and H are full
  // A column is a distance, and `zero` is the column of distance 0; or an index selects the pairs
  // that read it.
  int64_t columns, zero;
};

// As AttentionProblem, with these differences:
// - the dtype is Float32, BFloat16 or Float16, and the accumulation type is float;
// - `seed` replaces dropout.seed, so that a replayed graph can draw a new one;
// - the strides of dimensions of size 1 are 0;
// - a relative bias without another mask is `mask`, a float32 mask, and relative_bias is null,
//   unless there is an index;
// - grad_mask is contiguous, in the mask's own dtype, and grad_query_sum is not needed.
struct Attention : AttentionProblem {
  const int64_t* seed = nullptr;
  bool placed = false;            // whether a Place follows the seed; it replaces dropout.place
  int64_t total_q, total_k;       // lengths of query and key in memory: Lq and Lk unless packed
  bool mask_by_distance = false;  // whether `mask` is the relative bias
  RelativeBiasGradient grad_relative_bias;
};

// The lengths of a call's B sequences, each null if the call has none: key_lengths (B,), or
// boundaries (B + 1,) of packed queries and keys.
struct Lengths {
  int64_t batch;
  const int64_t *key_lengths, *cu_seqlens_q, *cu_seqlens_k;
};

// The upper limits of the lengths: queries and keys of one sequence, and tokens of all packed
// sequences.
struct LengthLimits {
  int64_t queries, keys, total_q, total_k;
};

// Makes the device assert that lengths are within their limits. `stream` is a cudaStream_t.
void check_lengths(const LengthLimits& limits, const Lengths& lengths, void* stream);

// An index as the caller passed it: (rows, columns) by strides, or one row of distances. Its
// numbers must be in [0, limit).
struct GivenIndex {
  const void* data;
  bool wide;  // int64, not int32
  int64_t size[2], stride[2];
  int64_t limit;
};

// Makes the device assert that an index's numbers are within their limit.
void check_index(const GivenIndex& index, void* stream);

// `stream` is a cudaStream_t. Throws std::runtime_error if a kernel cannot be launched. A block
// takes up to 96 KiB of shared memory. `workspace` has attention_forward_workspace(call) bytes of
// device memory, which may be 0, aligned to 16; it need not be initialised.
int64_t attention_forward_workspace(const Attention& call);
void attention_forward(const Attention& call, void* workspace, void* stream);

// Returns whether the kernel for few queries beside many keys serves a call: 16-bit types, at most
// 16 rows (queries times the query heads of a key head), more than 128 keys; no dropout, no tables
// that an index reads; a mask or relative bias with one query per sequence, with one query head per
// key head, or the same for all rows; key and value aligned as for Hopper's kernels below. Of
// packed sequences the upper bounds count, Lq and Lk, as the lengths are in device memory.
// attention_forward checks this first. A block takes up to 72 KiB of shared memory.
bool is_for_decoding(const Attention& call);
int64_t attention_decoding_workspace(const Attention& call);
void attention_decoding(const Attention& call, void* workspace, void* stream);

// Returns whether the kernels for compute capability 9.0 serve a call, or its backward if grad_out
// is set: 16-bit types; a head_dim up to 256, or 128 in the backward; query, key, value and
// grad_out aligned to 16 bytes and contiguous in their last dimension, with other strides that are
// multiples of 16 bytes. attention_forward and attention_backward check this. A block takes up to
// 204 KiB of shared memory.
bool is_for_hopper(const Attention& call);
void attention_forward_hopper(const Attention& call, void* stream);

// `workspace` has attention_backward_workspace(call) bytes of device memory, aligned to 16; it need
// not be initialised. A block takes up to 98 KiB of shared memory.
int64_t attention_backward_workspace(const Attention& call);
void attention_backward(const Attention& call, void* workspace, void* stream);

}  // namespace trifuse::cuda
