// dropout_add_layer_norm forward on a GPU.
//
// A warp owns a row of up to 256 columns, a block a wider one. It reads those of x and the residual once
// and writes out, and the sum if that is wanted, once; between the passes of the two-pass variance the
// sum stays in registers up to 2048 columns, then in shared memory: so several blocks fit beside one
// another, and some load while others store. A row too wide for that is read and drawn again in each of
// the three passes. Widths that are no multiple of 8 go by the same kernel as the wide ones, an element
// at a time.
//
// Floor: the bytes of x, residual, out and sum at the copy rate. Some 15 instructions an element stand
// beside them, and 12 more with dropout.

#include "cuda/dropout_add_layer_norm_row.cuh"

namespace trifuse::cuda {
namespace {

// Eight columns of the sum in `s`, as it is returned if it is, and their total.
template <class Scalar, bool kAligned, class T = Accumulator<Scalar>>
__device__ __forceinline__ T sum_eight(
    T (&s)[8], const DropoutAddLayerNorm& p, const RowSum<Scalar, kAligned>& source,
    const typename RowSum<Scalar, kAligned>::Loaded& loaded, int64_t column, uint64_t seed) {
  source.add_up(s, loaded, column, source.keep(column, seed));
  if (p.sum && !p.sum.wide) {
#pragma unroll
    for (int j = 0; j < 8; ++j) s[j] = rounded<Scalar>(s[j]);
  }
  T total = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) total += s[j];
  return total;
}

template <class Scalar, bool kAligned, class T = Accumulator<Scalar>>
__device__ __forceinline__ void store_sum(
    const DropoutAddLayerNorm& p, uint32_t row, int64_t column, const T (&s)[8]) {
  if (p.sum) store_eight<Scalar, kAligned>(p.sum, row, column, s, p.N - column);
}

// What a pass over the deviations from `about` adds up.
template <class T>
struct Deviations {
  T sums[2] = {};  // of the deviations, and of their squares

  template <bool kAligned>
  __device__ __forceinline__ void add(const T (&s)[8], T about, int64_t count) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const T d = kAligned || j < count ? s[j] - about : T(0);
      sums[0] += d;
      sums[1] += d * d;
    }
  }
};

// The mean of a row in two parts and the reciprocal of its standard deviation.
template <class T>
struct Statistics {
  T about, shift, rstd;
};

// The deviations are from a mean, `about`, that has the error of a long sum; their own mean, a small
// number, is that error. So a large offset costs the variance nothing.
template <int kThreads, class T>
__device__ __forceinline__ Statistics<T> statistics_of(
    const DropoutAddLayerNorm& p, T about, Deviations<T>& deviations, T* scratch) {
  block_sum<kThreads>(deviations.sums, scratch);
  const T N = static_cast<T>(p.N);
  const T shift = p.rms_norm ? T(0) : deviations.sums[0] / N;
  const T variance = deviations.sums[1] / N - shift * shift;
  // Of equal numbers nothing is left, or less than nothing. NaN stays.
  const T rstd = T(1) / sqrt((variance < 0 ? T(0) : variance) + static_cast<T>(p.eps));
  return {about, shift, rstd};
}

template <class Scalar, bool kAligned, class T>
__device__ __forceinline__ void store_normalised(
    const DropoutAddLayerNorm& p, uint32_t row, int64_t column, T (&s)[8],
    const Statistics<T>& statistics) {
  const int64_t count = p.N - column;
  const T offset = -statistics.shift * statistics.rstd;
#pragma unroll
  for (int j = 0; j < 8; ++j) s[j] = (s[j] - statistics.about) * statistics.rstd + offset;
  T values[8];
  if (p.weight) {
    load_features<kAligned, Scalar>(values, p.weight, column, count);
#pragma unroll
    for (int j = 0; j < 8; ++j) s[j] *= values[j];
  }
  if (p.bias) {
    load_features<kAligned, Scalar>(values, p.bias, column, count);
#pragma unroll
    for (int j = 0; j < 8; ++j) s[j] += values[j];
  }
  store_eight<Scalar, kAligned>(p.out, row, column, s, count);
}

template <class T>
__device__ __forceinline__ void store_statistics(
    const DropoutAddLayerNorm& p, uint32_t row, const Statistics<T>& statistics) {
  static_cast<T*>(p.mean)[row] = statistics.about + statistics.shift;
  static_cast<T*>(p.rstd)[row] = statistics.rstd;
}

// Numbers of shared memory for sums over a row: three for each warp, in whole units of 16 bytes.
template <int kThreads>
constexpr int kScratch = (3 * kThreads / 32 + 3) / 4 * 4;

// Aligned rows of up to 8 * kThreads columns, in registers.
template <class Scalar, int kThreads>
__global__ __launch_bounds__(Team<kThreads>::kBlock, kResidentThreads / Team<kThreads>::kBlock) void
forward_kernel(const __grid_constant__ DropoutAddLayerNorm p) {
  using T = Accumulator<Scalar>;
  using Row = RowSum<Scalar, true>;
  using Team = Team<kThreads>;
  T* const scratch = reinterpret_cast<T*>(shared_memory());
  const uint64_t seed = p.threshold ? *p.seed : 0;
  const int64_t column = 8 * Team::thread();
  const bool any = column < p.N;
  Team::for_rows(p.rows, [&](uint32_t row) {
    T s[8], total[1] = {};
    if (any) {
      const Row source(p, row);
      typename Row::Loaded loaded;
      source.load(loaded, column);
      total[0] = sum_eight(s, p, source, loaded, column, seed);
      store_sum<Scalar, true>(p, row, column, s);
    }
    block_sum<kThreads>(total, scratch);
    const T about = p.rms_norm ? T(0) : total[0] / static_cast<T>(p.N);
    Deviations<T> deviations;
    if (any) deviations.template add<true>(s, about, 8);
    const auto statistics =
        statistics_of<kThreads>(p, about, deviations, scratch + Team::kWarps);
    if (any) store_normalised<Scalar, true>(p, row, column, s, statistics);
    if (Team::thread() == 0) store_statistics(p, row, statistics);
  });
}

// Rows of any width, eight columns of a thread at a time.
template <class Scalar, bool kAligned, int kThreads>
__global__ __launch_bounds__(Team<kThreads>::kBlock) void forward_wide_kernel(
    const __grid_constant__ DropoutAddLayerNorm p, bool in_shared_memory) {
  using T = Accumulator<Scalar>;
  using Row = RowSum<Scalar, kAligned>;
  using Team = Team<kThreads>;
  T* const scratch = reinterpret_cast<T*>(shared_memory());
  const int eights = static_cast<int>((p.N + 7) / 8);
  SharedEights<T> sums(scratch + kScratch<kThreads> + threadIdx.x / kThreads * 8 * eights, eights);
  const uint64_t seed = p.threshold ? *p.seed : 0;
  Team::for_rows(p.rows, [&](uint32_t row) {
    const Row source(p, row);
    T total[1] = {}, about = 0;
    Deviations<T> deviations;
    Statistics<T> statistics{};
    // One loop for the three passes, so that what they share is compiled once.
    for (int pass = 0; pass < 3; ++pass) {
      for (int64_t c = 8 * Team::thread(); c < p.N; c += 8 * kThreads) {
        T s[8];
        if (pass == 0 || !in_shared_memory) {
          typename Row::Loaded loaded;
          source.load(loaded, c);
          const T eight = sum_eight(s, p, source, loaded, c, seed);
          if (pass == 0) {
            total[0] += eight;
            store_sum<Scalar, kAligned>(p, row, c, s);
            if (in_shared_memory) sums.put(static_cast<int>(c / 8), s);
          }
        } else {
          sums.get(static_cast<int>(c / 8), s);  // what this same thread left there
        }
        if (pass == 1) deviations.template add<kAligned>(s, about, p.N - c);
        if (pass == 2) store_normalised<Scalar, kAligned>(p, row, c, s, statistics);
      }
      if (pass == 0) {
        block_sum<kThreads>(total, scratch);
        if (!p.rms_norm) about = total[0] / static_cast<T>(p.N);
      }
      if (pass == 1)
        statistics = statistics_of<kThreads>(p, about, deviations, scratch + Team::kWarps);
    }
    if (Team::thread() == 0) store_statistics(p, row, statistics);
  });
}

template <class Scalar, int kThreads>
void launch_forward(const DropoutAddLayerNorm& p, cudaStream_t stream) {
  using Team = Team<kThreads>;
  const LaunchPlan plan{
      .kernel = "dropout_add_layer_norm_forward",
      .sizes = {{"rows", p.rows}, {"N", p.N}},
      .grid = blocks_for(p.rows, Team::kRows),
      .block = Team::kBlock,
      .shared = kScratch<kThreads> * sizeof(Accumulator<Scalar>),
  };
  launch(plan, stream, forward_kernel<Scalar, kThreads>, p);
}

template <class Scalar, bool kAligned, int kThreads>
void launch_forward_wide(const DropoutAddLayerNorm& p, cudaStream_t stream) {
  using T = Accumulator<Scalar>;
  using Team = Team<kThreads>;
  const size_t scratch = kScratch<kThreads> * sizeof(T);
  const size_t all = scratch + Team::kRows * ((p.N + 7) / 8 * 8) * sizeof(T);
  const bool in_shared_memory = all <= shared_memory_limit();
  const LaunchPlan plan{
      .kernel = "dropout_add_layer_norm_forward_wide",
      .sizes = {{"rows", p.rows}, {"N", p.N}},
      .grid = blocks_for(p.rows, Team::kRows),
      .block = Team::kBlock,
      .shared = in_shared_memory ? all : scratch,
  };
  launch(plan, stream, forward_wide_kernel<Scalar, kAligned, kThreads>, p, in_shared_memory);
}

template <class Scalar>
void launch_for_width(const DropoutAddLayerNorm& p, cudaStream_t stream) {
  // float64 is there to check the others by.
  if (std::is_same_v<Scalar, double> || p.N % 8 != 0) {
    if (p.N <= 1024) return launch_forward_wide<Scalar, false, 32>(p, stream);
    return launch_forward_wide<Scalar, false, kWideThreads>(p, stream);
  }
  if constexpr (!std::is_same_v<Scalar, double>) {
    if (p.N <= 256) return launch_forward<Scalar, 32>(p, stream);
    if (p.N <= 1024) return launch_forward<Scalar, 128>(p, stream);
    if (p.N <= 2048) return launch_forward<Scalar, 256>(p, stream);
    launch_forward_wide<Scalar, true, kWideThreads>(p, stream);
  }
}

}  // namespace

void dropout_add_layer_norm_forward(const DropoutAddLayerNorm& p, void* stream) {
  if (p.rows == 0) return;
  for_type(p.dtype, [&]<class Scalar>() {
    launch_for_width<Scalar>(p, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace trifuse::cuda
