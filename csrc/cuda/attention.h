// Attention on a GPU: its launchers. What a call is, ../attention.h says; all pointers are the device's.

#pragma once

#include <cstdint>

#include "../attention.h"

namespace trifuse::cuda {

// As AttentionProblem, but:
// - the dtype is Float32, BFloat16 or Float16, and the accumulation type is float;
// - `seed` takes the place of dropout.seed, so that a graph may draw it anew;
// - the strides of dimensions of size 1 are 0;
// - grad_mask is in the mask's own dtype, contiguous, and grad_query_sum isn't needed.
struct Attention : AttentionProblem {
  const int64_t* seed = nullptr;
  int64_t total_q, total_k;  // tokens of query and key: Lq and Lk unless sequences are packed
};

// `stream` is a cudaStream_t. Throws std::runtime_error where a kernel can't be launched. A block takes
// up to 96 KiB of shared memory.
void attention_forward(const Attention& call, void* stream);

// Whether the kernels for GPUs of compute capability 9.0 serve a call, its backward if it has a grad_out:
// 16-bit types and a head_dim up to 256, in the backward up to 128, where query, key, value and grad_out
// begin at multiples of 16 bytes, their elements lie side by side and their other strides are multiples
// of 16 bytes. attention_forward and attention_backward ask. A block takes up to 204 KiB of shared memory.
bool is_for_hopper(const Attention& call);
void attention_forward_hopper(const Attention& call, void* stream);

// `workspace` is that many bytes of the device's memory, aligned to 16, and needn't be initialised.
int64_t attention_backward_workspace(const Attention& call);
void attention_backward(const Attention& call, void* workspace, void* stream);

}  // namespace trifuse::cuda
