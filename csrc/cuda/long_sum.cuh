// Sums of many numbers.
//
// A chain of n additions can be wrong by n/2 roundings of what it comes to, and is wrong by about a
// quarter of n where all its terms are equal. So a few numbers at a time, a run, are added up by
// themselves, and runs so that what rounding takes off one of them is counted with the next.

#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace trifuse::cuda {

// Adds what a run has come to to the total of the runs before it, and begins the next with what the
// total could not take: the sum of both is exact (Knuth, "The Art of Computer Programming", 4.2.2). An
// infinity leaves nothing.
template <class T>
__device__ __forceinline__ void end_run(T& run, T& total) {
  static_assert(std::is_floating_point_v<T>);
  const T sum = total + run, added = sum - total;
  const T rest = (total - (sum - added)) + (run - added);
  total = sum;
  run = rest - rest == T(0) ? rest : T(0);
}

}  // namespace trifuse::cuda
