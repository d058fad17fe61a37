// The sum of rows of several embedding tables, for each token of a batch.

#pragma once

#include <array>
#include <cstdint>

#include "dtype.h"

namespace trifuse {

// BERT has three: words, kinds of segments and positions.
constexpr int64_t kMostTables = 4;

struct EmbeddingTable {
  const void* data;    // (rows, N)
  int64_t row_stride;  // in elements
  const int64_t* ids;  // (B, L), each below the number of rows
  int64_t id_stride[2];
};

struct EmbeddingSumProblem {
  DType dtype;  // of the tables and of out
  int64_t B, L, N;
  int64_t tables;  // at least 1
  std::array<EmbeddingTable, kMostTables> table;
  void* out;  // (B, L, N), contiguous
};

}  // namespace trifuse
