// These rules decide when results are stored past the caches.

#pragma once

#include <cstdint>

#include "cpu/capability.h"

namespace trifuse {

// Returns whether rows fill whole lines of 64 bytes. Only such rows are stored past the caches:
// with other stores in between, Zen 4 takes twice as long as without any that pass them.
inline bool fills_lines(int64_t row_bytes) { return row_bytes % 64 == 0; }

// Returns whether a result is too large to stay in a cache until it is read. Then a store past the
// caches saves reading each line before it is written.
inline bool exceeds_caches(int64_t bytes) { return bytes >= int64_t{8} << 20; }

// Returns whether to store a result past the caches that a linear layer reads: that of an
// activation or, within a layer that is one op, that of a norm.
//
// All threads of the linear layer read the result. So when the next call writes the same memory,
// half of its lines or more must first be taken from other cores' caches. On Zen 4 that takes 28 ns
// a line between cores that share no cache and 7 ns between others. A store past the caches takes 3
// to 5 ns, and reading the line from memory 3 ns instead of 2. Attention and norms, which read the
// other results, lose more by that than is gained. On Intel's CPUs, whose cores share a cache, it
// was not measured.
inline bool is_read_by_all_cores(int64_t bytes, int64_t threads) {
  constexpr int64_t smallest = int64_t{1} << 15;
  return threads > 1 && bytes >= smallest && !is_intel();
}

// Returns whether to store `rows` rows past the caches that the products of a linear layer read.
inline bool streams_to_products(int64_t rows, int64_t row_bytes, int64_t threads) {
  const int64_t bytes = rows * row_bytes;
  return fills_lines(row_bytes) && (exceeds_caches(bytes) || is_read_by_all_cores(bytes, threads));
}

}  // namespace trifuse
