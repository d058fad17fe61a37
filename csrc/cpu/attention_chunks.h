// Chunks of keys in attention's forward, shared by its two kernels.
//
// Keys are taken in chunks of kChunkKeys, counted from key 0 of a sequence. Each chunk has a
// running softmax of its own, and the chunks are joined in ascending order. So threads can share
// the keys of a few queries, and results have the same bits whether they do or one task takes all
// chunks, for any number of queries and however far the keys are padded.
//
//   joined (max, sum, out) with chunk (max', sum', out'):  M = larger(max, max')
//     a = 2^((max - M) · factor),  b = 2^((max' - M) · factor)
//     (M,  sum · a + sum' · b,  out · a + out' · b)
//
// A row without a key in the chunk has (-inf, 0, 0), so a = 1 and b = 0, and joining it changes
// nothing.

#pragma once

#include <algorithm>

#include "cpu/attention_tile.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// A multiple of kTile. Shorter chunks would let more threads share the keys of short sequences, but
// the output is read and written once more for each.
constexpr int64_t kChunkKeys = 512;

inline int64_t chunk_of(int64_t key) { return key / kChunkKeys; }

// The sums of the chunks so far.
template <class E>
class JoinedChunks {
  using T = AccumulatorOf<E>;

 public:
  Softmax<E> softmax;
  T* const out;  // [rows][ld]: the sums of weights · values

  JoinedChunks(T factor, T* out) : softmax(factor), out(out) {}

  bool empty() const { return empty_; }

  // Joins the next chunk. Reads whole vectors of the three arrays, and of rows [rows][ld] of
  // chunk_out.
  void add(
      const T* row_max, const T* row_sum, const T* chunk_out, int64_t rows, int64_t columns,
      int64_t ld) {
    using Vec = Vectorized<T>;
    if (empty_) {
      std::copy_n(row_max, rows, softmax.row_max);
      std::copy_n(row_sum, rows, softmax.row_sum);
      for (int64_t r = 0; r < rows; ++r) std::copy_n(chunk_out + r * ld, columns, out + r * ld);
      empty_ = false;
      return;
    }
    alignas(64) T earlier[kTile], later[kTile];
    softmax.join(row_max, row_sum, rows, earlier, later);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = r * ld; c < r * ld + columns; c += Vec::size())
        at::vec::fmadd(
            Vec::loadu(out + c), Vec(earlier[r]), Vec::loadu(chunk_out + c) * Vec(later[r]))
            .store(out + c);
  }

 private:
  bool empty_ = true;
};

}  // namespace trifuse::TRIFUSE_CAPABILITY
