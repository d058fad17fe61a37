// dropout_add_layer_norm forward on a GPU.
//
// A warp or a block owns a row, depending on the width and the kind of call, and a block has one to
// four rows. It reads the row of x and of the residual once, and writes out, and the sum if it is
// requested, once. Between the passes of the two-pass variance the sum stays in registers. A block
// loads its rows while other blocks on its multiprocessor compute. A grid as large as the device,
// whose warps load their next row while they compute, would be slower. The last of its few rounds
// has too few rows for all warps, and warps that are ahead can't take rows from others.
//
// Rows of more than 8192 columns have a separate kernel that keeps the sum in shared memory. If
// a row does not fit there, each of the three passes reads it and draws its mask again. The same
// kernel serves float64 and widths that are not a multiple of 8, an element at a time.
//
// Floor: the bytes of x, residual, out and sum at the copy rate. In addition, the kernels issue
// about 17 instructions per element, 9 more with dropout, and 150 per thread.

#include "cuda/dropout_add_layer_norm_row.cuh"

namespace trifuse::cuda {
namespace {

// Writes eight columns of the sum to `s`, rounded if the call returns them rounded. Returns their
// total.
template <class Scalar, bool kAligned, int kCalls, class T = Accumulator<Scalar>>
__device__ __forceinline__ T sum_eight(
    T (&s)[8], const DropoutAddLayerNorm& p, const RowSum<Scalar, kAligned, kCalls>& source,
    const typename RowSum<Scalar, kAligned, kCalls>::Loaded& loaded, int64_t column,
    uint64_t seed) {
  source.add_up(s, loaded, column, source.keep(column, seed));
  if (p.sum && !(kCalls == kAnyCalls && p.sum.wide)) {
#pragma unroll
    for (int j = 0; j < 8; ++j) s[j] = rounded<Scalar>(s[j]);
  }
  T total = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) total += s[j];
  return total;
}

// Sums of a pass over the deviations from `about`.
template <class T>
struct Deviations {
  T sums[2] = {};  // of the deviations, and of their squares

  // Turns the values in `s` into deviations and adds them.
  template <bool kAligned>
  __device__ __forceinline__ void add(T (&s)[8], T about, int64_t count) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      s[j] = kAligned || j < count ? s[j] - about : T(0);
      sums[0] += s[j];
      sums[1] += s[j] * s[j];
    }
  }
};

// The mean of a row in two parts, about + shift, and the reciprocal of its standard deviation.
template <class T>
struct Statistics {
  T about, shift, rstd;
};

// `about` is a mean with the rounding error of a long sum. The mean of the deviations from it is a
// small number, which is that error. So a large offset costs no precision of the variance.
template <int kThreads, class T>
__device__ __forceinline__ Statistics<T> statistics_of(
    const DropoutAddLayerNorm& p, T about, Deviations<T>& deviations, T one_over_N, T* scratch) {
  block_sum<kThreads>(deviations.sums, scratch);
  const T shift = p.rms_norm ? T(0) : deviations.sums[0] * one_over_N;
  const T variance = deviations.sums[1] * one_over_N - shift * shift;
  // The variance of equal numbers may come out slightly below 0. NaN stays.
  const T rstd = T(1) / sqrt((variance < 0 ? T(0) : variance) + static_cast<T>(p.eps));
  return {about, shift, rstd};
}

// Eight columns of weight and bias.
template <class T>
struct Features {
  T weight[8], bias[8];

  template <class Scalar, bool kAligned, int kCalls>
  __device__ __forceinline__ void load(const DropoutAddLayerNorm& p, int64_t column) {
    const int64_t count = p.N - column;
#pragma unroll
    for (int j = 0; j < 8; ++j) weight[j] = 1, bias[j] = 0;
    if (has<kCalls>(p.bias)) load_features<kAligned, Scalar, kCalls>(bias, p.bias, column, count);
    if (has<kCalls>(p.weight))
      load_features<kAligned, Scalar, kCalls>(weight, p.weight, column, count);
  }
};

// The same for a usual call, as loaded from memory. It takes half as many registers, or the same
// number if they are wide.
template <class Scalar, int kCalls>
struct LoadedFeatures {
  using T = Accumulator<Scalar>;
  Eight<std::conditional_t<(kCalls & kWithWideVectors) != 0, T, Scalar>, false> weight, bias;

  __device__ __forceinline__ void load(const DropoutAddLayerNorm& p, int64_t column) {
    weight.template load<true>(p.weight.data, false, column, 8);
    bias.template load<true>(p.bias.data, false, column, 8);
  }
  __device__ __forceinline__ void get(Features<T>& features) const {
    weight.get(features.weight);
    bias.get(features.bias);
  }
};

// Normalises the deviations from `about` in `s`, and writes them to `out`, a row.
template <class Scalar, bool kAligned, class T>
__device__ __forceinline__ void store_normalised(
    void* out, int64_t column, int64_t count, T (&s)[8], const Statistics<T>& statistics,
    const Features<T>& features) {
  const T offset = -statistics.shift * statistics.rstd;
#pragma unroll
  for (int j = 0; j < 8; ++j)
    s[j] = (s[j] * statistics.rstd + offset) * features.weight[j] + features.bias[j];
  store_eight_as<Scalar, kAligned>(static_cast<Scalar*>(out) + column, s, count);
}

template <class T>
__device__ __forceinline__ void store_statistics(
    const DropoutAddLayerNorm& p, uint32_t row, const Statistics<T>& statistics) {
  static_cast<T*>(p.mean)[row] = statistics.about + statistics.shift;
  static_cast<T*>(p.rstd)[row] = statistics.rstd;
}

// Numbers in shared memory for sums over a row: three per warp, rounded up to a multiple of four.
template <int kThreads>
constexpr int kScratch = (3 * kThreads / 32 + 3) / 4 * 4;

// Whether a thread that holds G groups of eight columns loads weight and bias together with the
// row. For two groups of wide vectors it has too few registers.
template <int G, int kCalls>
constexpr bool kEarlyFeatures = kCalls != kAnyCalls && (G == 1 || !(kCalls & kWithWideVectors));
// Resident threads per multiprocessor. They leave 64 registers each for two groups, and for one 40,
// or 48 with wide vectors.
template <int G, int kCalls>
constexpr int kResidentThreads = G == 2 ? 1024
    : kCalls & kWithWideVectors         ? 1280
                                        : 1536;
template <int kThreads, int G, int kCalls>
constexpr int kResidentBlocks = kResidentThreads<G, kCalls> / block_of(kThreads);
// Wide rows: 768 resident threads leave 80 registers each.
template <int kThreads>
constexpr int kResidentWideBlocks = 768 / block_of(kThreads);

// Aligned rows of up to 8 * G * kThreads columns, in registers.
template <class Scalar, int kThreads, int G, int kCalls>
__global__
__launch_bounds__(block_of(kThreads), kResidentBlocks<kThreads, G, kCalls>) void forward_kernel(
    const __grid_constant__ DropoutAddLayerNorm p) {
  using T = Accumulator<Scalar>;
  using Row = RowSum<Scalar, true, kCalls>;
  using Team = Team<kThreads>;
  constexpr bool kEarly = kEarlyFeatures<G, kCalls>;
  const int64_t row = Team::first_row();
  if (row >= p.rows) return;
  T* const scratch = reinterpret_cast<T*>(shared_memory());
  const int N = static_cast<int>(p.N), first_column = 8 * Team::thread();
  const auto column = [&](int g) { return first_column + 8 * kThreads * g; };

  const Row source(p, row);
  typename Row::Loaded loaded[G];
  LoadedFeatures<Scalar, kCalls> loaded_features[G];
#pragma unroll
  for (int g = 0; g < G; ++g)
    if (column(g) < N) source.load(loaded[g], column(g));
#pragma unroll
  for (int g = 0; kEarly && g < G; ++g)
    if (column(g) < N) loaded_features[g].load(p, column(g));

  const uint64_t seed = drops<kCalls>(p) ? *p.seed : 0;
  const T one_over_N = T(1) / static_cast<T>(p.N);
  void* const sum = p.sum ? p.sum.row(row) : nullptr;
  T s[G][8], total[1] = {};
#pragma unroll
  for (int g = 0; g < G; ++g) {
    if (column(g) >= N) continue;
    total[0] += sum_eight(s[g], p, source, loaded[g], column(g), seed);
    if (sum) store_eight<Scalar, true, kCalls>(sum, p.sum, column(g), s[g], 8);
  }
  block_sum<kThreads>(total, scratch);
  const T about = p.rms_norm ? T(0) : total[0] * one_over_N;
  Deviations<T> deviations;
#pragma unroll
  for (int g = 0; g < G; ++g)
    if (column(g) < N) deviations.template add<true>(s[g], about, 8);
  const auto statistics =
      statistics_of<kThreads>(p, about, deviations, one_over_N, scratch + Team::kWarps);
  void* const out = p.out.row(row);
#pragma unroll
  for (int g = 0; g < G; ++g) {
    if (column(g) >= N) continue;
    Features<T> features;
    if (kEarly) loaded_features[g].get(features);
    else features.template load<Scalar, true, kCalls>(p, column(g));
    store_normalised<Scalar, true>(out, column(g), 8, s[g], statistics, features);
  }
  if (Team::thread() == 0) store_statistics(p, row, statistics);
}

// Rows of any width; a thread takes eight columns at a time.
template <class Scalar, bool kAligned, int kThreads>
__global__
__launch_bounds__(block_of(kThreads), kResidentWideBlocks<kThreads>) void forward_wide_kernel(
    const __grid_constant__ DropoutAddLayerNorm p, bool in_shared_memory) {
  using T = Accumulator<Scalar>;
  using Row = RowSum<Scalar, kAligned, kAnyCalls>;
  using Team = Team<kThreads>;
  T* const scratch = reinterpret_cast<T*>(shared_memory());
  const int eights = static_cast<int>((p.N + 7) / 8);
  SharedEights<T> sums(scratch + kScratch<kThreads> + threadIdx.x / kThreads * 8 * eights, eights);
  const uint64_t seed = p.threshold ? *p.seed : 0;
  const T one_over_N = T(1) / static_cast<T>(p.N);
  for (int64_t row = Team::first_row(); row < p.rows; row += Team::step()) {
    const Row source(p, row);
    void* const sum = p.sum ? p.sum.row(row) : nullptr;
    T total[1] = {}, about = 0;
    Deviations<T> deviations;
    Statistics<T> statistics{};
    // One loop for the three passes, so that their common code is compiled once.
    for (int pass = 0; pass < 3; ++pass) {
      for (int64_t c = 8 * Team::thread(); c < p.N; c += 8 * kThreads) {
        T s[8];
        if (pass == 0 || !in_shared_memory) {
          typename Row::Loaded loaded;
          source.load(loaded, c);
          const T eight = sum_eight(s, p, source, loaded, c, seed);
          if (pass == 0) {
            total[0] += eight;
            if (sum) store_eight<Scalar, kAligned, kAnyCalls>(sum, p.sum, c, s, p.N - c);
            if (in_shared_memory) sums.put(static_cast<int>(c / 8), s);
          }
        } else {
          sums.get(static_cast<int>(c / 8), s);  // written by this same thread
        }
        if (pass == 0) continue;
        deviations.template add<kAligned>(s, about, p.N - c);
        if (pass == 1) continue;
        Features<T> features;
        features.template load<Scalar, kAligned, kAnyCalls>(p, c);
        store_normalised<Scalar, kAligned>(p.out.row(row), c, p.N - c, s, statistics, features);
      }
      if (pass == 0) {
        block_sum<kThreads>(total, scratch);
        if (!p.rms_norm) about = total[0] * one_over_N;
      }
      if (pass == 1)
        statistics =
            statistics_of<kThreads>(p, about, deviations, one_over_N, scratch + Team::kWarps);
    }
    if (Team::thread() == 0) store_statistics(p, row, statistics);
  }
}

template <class Scalar, int kThreads, int G, int kCalls>
void launch_forward(const DropoutAddLayerNorm& p, cudaStream_t stream) {
  using Team = Team<kThreads>;
  const LaunchPlan plan{
      .kernel = "dropout_add_layer_norm_forward",
      .sizes = {{"rows", p.rows}, {"N", p.N}},
      .grid = blocks_for(p.rows, Team::kRows, 0x7FFFFFFF),
      .block = Team::kBlock,
      .shared = kScratch<kThreads> * sizeof(Accumulator<Scalar>),
  };
  launch(plan, stream, forward_kernel<Scalar, kThreads, G, kCalls>, p);
}

template <class Scalar, int kThreads, int G>
void launch_usual_forward(const DropoutAddLayerNorm& p, cudaStream_t stream) {
  constexpr int kWide = kUsualCalls | kWithWideVectors;
  if (p.weight.wide && p.threshold)
    launch_forward<Scalar, kThreads, G, kWide | kWithDropout>(p, stream);
  else if (p.weight.wide) launch_forward<Scalar, kThreads, G, kWide>(p, stream);
  else if (p.threshold) launch_forward<Scalar, kThreads, G, kUsualCalls | kWithDropout>(p, stream);
  else launch_forward<Scalar, kThreads, G, kUsualCalls>(p, stream);
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
      .grid = blocks_for(p.rows, Team::kRows, 0x7FFFFFFF),
      .block = Team::kBlock,
      .shared = in_shared_memory ? all : scratch,
  };
  launch(plan, stream, forward_wide_kernel<Scalar, kAligned, kThreads>, p, in_shared_memory);
}

template <class Scalar>
void launch_for_width(const DropoutAddLayerNorm& p, cudaStream_t stream) {
  // float64 is for checking the other types.
  if (std::is_same_v<Scalar, double> || p.N % 8 != 0) {
    if (p.N <= 1024) return launch_forward_wide<Scalar, false, 32>(p, stream);
    return launch_forward_wide<Scalar, false, kWideThreads>(p, stream);
  }
  if constexpr (!std::is_same_v<Scalar, double>) {
    if constexpr (sizeof(Scalar) == 2) {
      if (is_usual(p) && p.bias && p.bias.wide == p.weight.wide) {
        if (p.N <= 256) return launch_usual_forward<Scalar, 32, 1>(p, stream);
        if (p.N <= 512) return launch_usual_forward<Scalar, 64, 1>(p, stream);
        if (p.N <= 1024) return launch_usual_forward<Scalar, 128, 1>(p, stream);
        if (p.N <= 2048) return launch_usual_forward<Scalar, 128, 2>(p, stream);
        if (p.N <= 4096) return launch_usual_forward<Scalar, 256, 2>(p, stream);
        return launch_usual_forward<Scalar, 512, 2>(p, stream);
      }
    }
    if (p.N <= 512) return launch_forward<Scalar, 32, 2, kAnyCalls>(p, stream);
    if (p.N <= 2048) return launch_forward<Scalar, 128, 2, kAnyCalls>(p, stream);
    if (p.N <= 8192) return launch_forward<Scalar, 512, 2, kAnyCalls>(p, stream);
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
