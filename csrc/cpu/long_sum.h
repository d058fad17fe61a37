// Sums of many numbers, one for each of many columns.
//
// A chain of n additions can be wrong by n/2 roundings of what it comes to, and is wrong by about as
// many where all its terms are equal. So runs of kRun numbers are added up in the type of the terms,
// and runs in double. Where a run ends follows from the place of a number among all of them, never from
// threads.

#pragma once

#include <cstdint>

namespace trifuse::TRIFUSE_CAPABILITY {

constexpr int64_t kRun = 32;

// Whether a run ends with this number.
constexpr bool ends_run(int64_t index) { return (index + 1) % kRun == 0; }

// Adds the sums of a run to those of the runs before it, and begins the next.
template <class T>
inline void end_run(T* run, double* total, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) {
    total[c] += static_cast<double>(run[c]);
    run[c] = T(0);
  }
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
