// The CPU kernels: the entry points of each, and a table of them per instruction set.

#pragma once

#include <cstdint>

#include "attention.h"
#include "cpu/activation.h"
#include "cpu/bias_gradient.h"
#include "cpu/capability.h"
#include "cpu/crew.h"
#include "cpu/embedding_sum.h"
#include "cpu/failure.h"
#include "cpu/linear.h"
#include "cpu/lstm.h"
#include "cpu/rotary.h"
#include "dropout_add_layer_norm.h"

namespace trifuse {

// A kernel splits its work into tasks that may run in any number of threads. Tasks must be started
// in order; results do not depend on how many run at once.
//
// The tasks of attention's forward, in the order of sequences and heads. With few queries, a task
// computes all queries of some heads, otherwise a block of queries of one head.
//
// A task of few queries may be split by chunks of keys: the caller then sets p.key_chunks to
// `chunks`, provides p.chunk_sums and p.chunks_done, and runs count · chunks tasks. Results have
// the same bits.
struct AttentionTasks {
  int64_t count;
  int64_t related;          // number of neighbouring tasks that a thread should run together
  int64_t chunks = 1;       // number that a task may be split into
  int64_t chunk_bytes = 0;  // of p.chunk_sums, for each chunk
};

struct AttentionForward {
  AttentionTasks (*tasks)(const AttentionProblem&);
  void (*run)(const AttentionProblem&, int64_t first_task, int64_t last_task);
};

// Attention backward: several tasks add to the same block of queries, one after the other.
// `progress` (B, H, query_blocks), initially -1, holds the last chunk of keys that was added;
// Failure ends the wait for a task that has thrown.
//
// relative_bias_sums (table_groups, H, key_chunks, Lq + chunk_keys), initially 0, receive the sums
// of dS over each chunk's pairs of query i and key j in the sequences of a group, at j - (first key
// of the chunk) + Lq - 1 - i. With an index they are (table_groups, H, key_chunks, n): sums by
// column.
struct AttentionBackward {
  int64_t (*tasks)(const AttentionProblem&);
  int64_t (*chunk_keys)(const AttentionProblem&);
  int64_t (*key_chunks)(const AttentionProblem&);
  int64_t (*query_blocks)(const AttentionProblem&);
  int64_t (*table_groups)(const AttentionProblem&);
  void (*run)(const AttentionProblem&, int64_t task, int32_t* progress, const Failure&);
};

// One task for each block of rows.
struct DropoutAddLayerNormForward {
  void (*run)(const DropoutAddLayerNormProblem&, int64_t block);
};

// `run` has one task for each block of rows too. Then `reduce`, with one task for each strip of 64
// columns, adds up the blocks' rows of grad_weight, grad_bias and grad_x_bias into their first
// rows.
struct DropoutAddLayerNormBackward {
  void (*run)(const DropoutAddLayerNormProblem&, int64_t block);
  void (*reduce)(const DropoutAddLayerNormProblem&, int64_t strip);
};

// One task for each kDropoutBlock elements.
constexpr int64_t kDropoutBlock = 1 << 15;
struct DropoutKernel {
  void (*run)(const DropoutProblem&, int64_t block);
};

// One task for each kEmbeddingBlock tokens.
constexpr int64_t kEmbeddingBlock = 64;
struct EmbeddingSumKernel {
  void (*run)(const EmbeddingSumProblem&, int64_t block);
};

// RotaryProblem::tasks() tasks.
struct RotaryKernel {
  void (*run)(const RotaryProblem&, int64_t task);
};

// ActivationProblem::tasks() tasks each.
struct ActivationKernel {
  void (*forward)(const ActivationProblem&, int64_t task);
  void (*backward)(const ActivationProblem&, int64_t task);
};

// `run` has one task for each of BiasGradientProblem::blocks() x groups(), those of a block next to
// each other; `reduce` one for each group.
struct BiasGradientKernel {
  void (*run)(const BiasGradientProblem&, int64_t task);
  void (*reduce)(const BiasGradientProblem&, int64_t group);
};

// `pack` has one task for each `panel` output features and writes panel_bytes in each; `unpack` is
// its inverse. `run` has one task for each rows_per_task x columns_per_task of the result:
// columns_per_task is a multiple of `panel`, rows_per_task about `task_rows`, in whole blocks of
// `row_block`. Without a packed weight, each task packs its own panels. `run_unpacked`, faster
// below `few_rows` rows, multiplies by the weight as it is stored, and has one task for
// columns_per_task of all rows. `checksum`, over 32-bit words, shows that a packed weight has
// changed since.
struct LinearKernel {
  int64_t panel;
  int64_t row_block, task_rows;
  int64_t few_rows;
  int64_t (*panel_bytes)(DType, int64_t K);
  void (*pack)(const LinearProblem&, int64_t panel);
  void (*unpack)(const LinearProblem&, int64_t panel);
  void (*run)(const LinearProblem&, int64_t task);
  void (*run_unpacked)(const LinearProblem&, int64_t task);
  uint64_t (*checksum)(const void* data, int64_t words);
};

// A whole LSTM, GRU or RNN. All threads of a crew call `run` at once, each with its index. It works
// in `workspace` bytes of memory, enough for `threads` threads.
struct LstmForward {
  bool bfloat16;  // whether a problem may be in bfloat16
  int64_t (*workspace)(const LstmProblem&, int64_t threads);
  void (*run)(const LstmProblem&, void* workspace, int64_t threads, const Crew&, int64_t index);
};

struct LstmBackward {
  int64_t (*workspace)(const LstmProblem&, int64_t threads);
  void (*run)(const LstmProblem&, void* workspace, int64_t threads, const Crew&, int64_t index);
};

// An instruction set's building blocks, for tests and benchmarks.
struct Probe {
  // Floating-point operations per second of one thread's tile_gemm on tiles in its L1 cache.
  double (*matrix_rate)(bool bfloat16, double seconds);
  void (*exp2)(const float* x, float* y, int64_t n);
  void (*sigmoid)(const float* x, float* y, int64_t n);
  void (*tanh)(const float* x, float* y, int64_t n);
};

struct Kernels {
  AttentionForward attention_forward;
  AttentionBackward attention_backward;
  DropoutAddLayerNormForward dropout_add_layer_norm_forward;
  DropoutAddLayerNormBackward dropout_add_layer_norm_backward;
  DropoutKernel dropout;
  EmbeddingSumKernel embedding_sum;
  RotaryKernel rotary;
  ActivationKernel activation;
  BiasGradientKernel bias_gradient;
  LinearKernel linear;
  LstmForward lstm_forward;
  LstmBackward lstm_backward;
  Probe probe;
};

// Returns an instruction set's kernels.
const Kernels& kernels_of(Capability);

// Returns the kernels for problems of a type. Without a type: the kernels whose members serve every
// type.
inline const Kernels& kernels(DType dtype) { return kernels_of(capability(dtype)); }
inline const Kernels& kernels() { return kernels_of(capability()); }

}  // namespace trifuse

#ifdef TRIFUSE_CAPABILITY  // in the sources that are compiled for each instruction set

// The entry points of the instruction set's kernels, each defined in a *_kernel.cpp.
namespace trifuse::TRIFUSE_CAPABILITY {
AttentionForward attention_forward();
AttentionBackward attention_backward();
DropoutAddLayerNormForward dropout_add_layer_norm_forward();
DropoutAddLayerNormBackward dropout_add_layer_norm_backward();
LinearKernel linear();
LstmForward lstm_forward();
LstmBackward lstm_backward();
Probe probe();
}  // namespace trifuse::TRIFUSE_CAPABILITY

// Entry points of kernels that use no instructions for bfloat16. They are compiled once for each of
// ATen's vector types, and their namespace is the type's name. AVX512_BF16 and AMX_BF16 have
// AVX512's vectors, and so share its kernels.
namespace trifuse::CPU_CAPABILITY {
DropoutKernel dropout();
EmbeddingSumKernel embedding_sum();
RotaryKernel rotary();
ActivationKernel activation();
BiasGradientKernel bias_gradient();
}  // namespace trifuse::CPU_CAPABILITY

#endif
