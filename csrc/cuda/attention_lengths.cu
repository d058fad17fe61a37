// Checks the values of key_lengths and cu_seqlens on the device, before the kernels that index by
// them. torch's own operations would take some twenty launches for it.
//
// A thread owns a sequence: it reads the sequence's length or boundaries, and a failed assertion
// ends the process's work on the device.
//
// Floor: one launch; 8 to 32 bytes a sequence.

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

}  // namespace trifuse::cuda
