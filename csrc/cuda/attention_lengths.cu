// Checks the values of key_lengths, cu_seqlens and relative_index on the device, before the kernels
// that use them as indices. torch's own operations would take about twenty launches for it.
//
// - lengths: a thread owns a sequence, and reads its length or boundaries.
// - index: a thread owns some of an index's numbers, and reads each once.
//
// A failed assertion ends the process's work on the device.
//
// Floor: one launch and 8 to 32 bytes per sequence. For an index, another launch and its bytes.

#include <algorithm>
#include <cassert>

#include "cuda/attention.h"
#include "cuda/launch.h"

namespace trifuse::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void attention_lengths_kernel(const LengthLimits limits, const Lengths lengths) {
  const int64_t b = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (b >= lengths.batch) return;
  if (lengths.key_lengths) {
    const int64_t length = lengths.key_lengths[b];
    assert(length >= 0 && length <= limits.keys && "key_lengths: expected lengths in [0, Lk]");
  }
  if (lengths.cu_seqlens_q) {
    const int64_t begin = lengths.cu_seqlens_q[b], end = lengths.cu_seqlens_q[b + 1];
    assert(
        (b > 0 || begin == 0) && begin <= end && end <= limits.total_q &&
        end - begin <= limits.queries &&
        "cu_seqlens_q: expected 0 first, no decrease, no step over max_seqlen_q, the last at most "
        "the number of queries");
  }
  if (lengths.cu_seqlens_k) {
    const int64_t begin = lengths.cu_seqlens_k[b], end = lengths.cu_seqlens_k[b + 1];
    assert(
        (b > 0 || begin == 0) && begin <= end && end <= limits.total_k &&
        end - begin <= limits.keys &&
        "cu_seqlens_k: expected 0 first, no decrease, no step over max_seqlen_k, the last at most "
        "the number of keys");
  }
}

__global__ void attention_index_kernel(const GivenIndex index) {
  const int64_t count = index.size[0] * index.size[1];
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += int64_t(gridDim.x) * kThreads) {
    const int64_t at = i / index.size[1] * index.stride[0] + i % index.size[1] * index.stride[1];
    const int64_t number = index.wide ? static_cast<const int64_t*>(index.data)[at]
                                      : static_cast<const int32_t*>(index.data)[at];
    assert(
        number >= 0 && number < index.limit &&
        "relative_index: expected numbers from 0 on, below the tables' number of columns");
  }
}

}  // namespace

void check_lengths(const LengthLimits& limits, const Lengths& lengths, void* stream) {
  if (lengths.batch == 0) return;
  const LaunchPlan plan{
      .kernel = "attention_lengths",
      .sizes = {{"B", lengths.batch}},
      .grid = static_cast<unsigned>((lengths.batch + kThreads - 1) / kThreads),
      .block = kThreads,
  };
  launch(plan, static_cast<cudaStream_t>(stream), attention_lengths_kernel, limits, lengths);
}

void check_index(const GivenIndex& index, void* stream) {
  constexpr int64_t kMostBlocks = 1024;  // enough for any GPU
  const int64_t blocks = (index.size[0] * index.size[1] + kThreads - 1) / kThreads;
  if (blocks == 0) return;
  const LaunchPlan plan{
      .kernel = "attention_index",
      .sizes = {{"rows", index.size[0]}, {"columns", index.size[1]}},
      .grid = static_cast<unsigned>(std::min(blocks, kMostBlocks)),
      .block = kThreads,
  };
  launch(plan, static_cast<cudaStream_t>(stream), attention_index_kernel, index);
}

}  // namespace trifuse::cuda
