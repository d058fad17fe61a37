// Launches of the attention kernels: the choice of a kernel by type and head dimension, and grids.

#pragma once

#include <stdexcept>
#include <string>

#include "cuda/attention.h"
#include "cuda/attention_configurations.cuh"
#include "cuda/dtype.cuh"
#include "cuda/launch.h"

namespace trifuse::cuda {

// Calls run<D>() with the padded head dimension.
template <class Run>
inline void for_head_dim(const AttentionProblem& p, const Run& run) {
  const int64_t head_dim = p.E > p.Ev ? p.E : p.Ev;
  if (head_dim <= 64) run.template operator()<64>();
  else if (head_dim <= 128) run.template operator()<128>();
  else if (head_dim <= 256) run.template operator()<256>();
  else throw std::runtime_error("attention: head_dim " + std::to_string(head_dim) + " is over 256");
}

// Calls run<Scalar, D, kMasks>() with a call's type, and with the D and the masks of the kernels
// that serve it.
template <class Run>
inline void for_kernel(const AttentionProblem& p, const Run& run) {
  const auto run_with_type = [&]<int D, Masks kMasks>() {
    switch (p.dtype) {
      case DType::Float32: return run.template operator()<float, D, kMasks>();
      case DType::BFloat16: return run.template operator()<__nv_bfloat16, D, kMasks>();
      case DType::Float16: return run.template operator()<__half, D, kMasks>();
      case DType::Float64: throw std::runtime_error("attention: no CUDA kernel for float64");
    }
  };
  for_head_dim(p, [&]<int D>() {
    if (p.relative_index) run_with_type.template operator()<kWidest, Masks::OneAndTables>();
    else if (p.relative_bias.data) run_with_type.template operator()<kWidest, kMasksOf<kWidest>>();
    else run_with_type.template operator()<D, kMasksOf<D>>();
  });
}

inline LaunchPlan attention_plan(
    const char* kernel, const Attention& p, int64_t blocks, int warps, size_t shared) {
  if (blocks > 0x7FFFFFFF)
    throw std::runtime_error(
        std::string(kernel) + ": " + std::to_string(blocks) + " blocks, and 2^31 - 1 is the most");
  return {
      .kernel = kernel,
      .sizes =
          {{"B", p.batch},
           {"H", p.heads},
           {"Hkv", p.kv_heads},
           {"Lq", p.Lq},
           {"Lk", p.Lk},
           {"E", p.E},
           {"Ev", p.Ev}},
      .grid = static_cast<unsigned>(blocks),
      .block = static_cast<unsigned>(32 * warps),
      .shared = shared,
  };
}

// Returns the number of blocks: one for every `rows` rows of each head. With `tail`, packed calls
// get the blocks of one more sequence, for the tokens past the last sequence.
inline int64_t blocks_for(const Attention& p, int64_t length, int rows, int64_t heads, bool tail) {
  return (length + rows - 1) / rows * heads * (p.batch + (tail && p.cu_seqlens_q != nullptr));
}

}  // namespace trifuse::cuda
