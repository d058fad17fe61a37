// Long sums, one for each column.
//
// The error of a chain of n additions can reach n/2 roundings of its result, and comes near that if
// all terms are equal. So runs of kRun numbers are added up in the type of the terms, and the sums
// of the runs in double. Runs end at fixed positions, for any number of threads.

#pragma once

#include <cstdint>

namespace trifuse::TRIFUSE_CAPABILITY {

constexpr int64_t kRun = 32;

// Returns whether a run ends with number `index`.
constexpr bool ends_run(int64_t index) { return (index + 1) % kRun == 0; }

// Adds the sums of a run to the totals and clears them for the next run.
template <class T>
inline void end_run(T* run, double* total, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) {
    total[c] += static_cast<double>(run[c]);
    run[c] = T(0);
  }
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
