// Sums of many numbers.
//
// A chain of n additions can be wrong by n/2 times the rounding error of its result, and by about
// n/4 times it if all terms are equal. So a few numbers at a time, a run, are summed separately,
// and the rounding error of adding a run to the total is added to the next run.

#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace trifuse::cuda {

// Adds a run to the total of the runs before it, and starts the next run from the rounding error,
// so that total + run does not change (Knuth, "The Art of Computer Programming", 4.2.2). If the
// total becomes infinite, the next run starts from 0.
template <class T>
__device__ __forceinline__ void end_run(T& run, T& total) {
  static_assert(std::is_floating_point_v<T>);
  const T sum = total + run, added = sum - total;
  const T rest = (total - (sum - added)) + (run - added);
  total = sum;
  run = rest - rest == T(0) ? rest : T(0);
}

}  // namespace trifuse::cuda
