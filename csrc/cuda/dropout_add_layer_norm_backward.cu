// dropout_add_layer_norm backward on a GPU.
//
// A grid about as large as the device walks over the rows. A team of threads, a warp or more, owns
// a row. It reads the row of grad_out, x and the residual (or the sum that the forward returned)
// once, ahead of time. It reads grad_sum once, and writes grad_x and grad_residual once. The
// gradients of weight, bias and x_bias are added up over a run of rows, where every thread has its
// own columns, in registers in the usual calls, otherwise in shared memory. Runs are added up in
// the workspace, and the teams of a block are added up in order. A second kernel adds up the blocks
// in order. They are few and large, so that it has little to read. There are no atomics, so results
// are reproducible bit for bit on one kind of device.
//
// Rows of more than 8192 columns (4096 if the width is no multiple of 8, or in float64) are cut
// into chunks, each with its own blocks. A kernel before them then reads the rows once more, for
// the two means that the chunks of a row share.
//
// Floor: the bytes of grad_out, grad_sum, x, residual, grad_x and grad_residual at the copy rate.
// In addition, the kernel issues about 33 instructions per element, and 9 more with dropout.

#include "cuda/dropout_add_layer_norm_row.cuh"
#include "cuda/long_sum.cuh"

namespace trifuse::cuda {
namespace {

// Groups of eight columns that a thread holds in registers, of this row and of the next.
template <bool kAligned>
constexpr int kGroups = kAligned ? 2 : 1;
// Resident threads per multiprocessor: they leave 128 registers each.
constexpr int kResidentThreads = 512;
template <int kThreads>
constexpr int kResidentBlocks = kResidentThreads / block_of(kThreads);
// Rows of a team that are added up as one run. Each run except the first costs a block one more
// read and write of its sums in the workspace, in the L2 cache. That is 8 bytes per column and
// vector, while the rows of a run are at least 192 bytes in 16 bits.
constexpr uint32_t kRun = 32;

// How the backward of a call is split among blocks.
struct Split {
  int threads;      // per team
  int64_t columns;  // per chunk
  int64_t chunks, blocks_per_chunk;
  int totals;  // per block, in the workspace: of each of its teams, or of all
};

template <class T>
struct Workspace {
  // (blocks_per_chunk, totals, N) each, for the gradients of weight, bias and x_bias; null if not
  // needed. At the end, a block's first total is that of all its teams.
  T* block_sums[3];
  int64_t block_stride;  // totals * N
  T* statistics;  // (rows, 2): the means of g and of g n over a row; null with a single chunk
};

// g = weight · grad_out and n, the normalised sum, of eight columns.
template <class Scalar, bool kAligned, int kCalls>
struct Group {
  using T = Accumulator<Scalar>;
  using Row = RowSum<Scalar, kAligned, kCalls>;

  // Eight columns as loaded from memory.
  struct Loaded {
    typename Row::Loaded sum;
    Eight<Scalar, false> grad_out;
  };
  static __device__ __forceinline__ void load(
      Loaded& loaded, const DropoutAddLayerNorm& p, uint32_t row, int64_t column) {
    Row(p, row).load(loaded.sum, column);
    loaded.grad_out.template load<kAligned>(p.grad_out.row(row), false, column, p.N - column);
  }

  T g[8], n[8];
  uint32_t keep;

  // Computes n, and stores grad_out in place of g.
  __device__ __forceinline__ void normalise(
      const Row& source, const Loaded& loaded, int64_t column, uint64_t seed, T mean, T rstd) {
    keep = source.keep(column, seed);
    source.add_up(n, loaded.sum, column, keep);
#pragma unroll
    for (int j = 0; j < 8; ++j) n[j] = (n[j] - mean) * rstd;
    loaded.grad_out.get(g);
  }
  __device__ __forceinline__ void weigh(const DropoutAddLayerNorm& p, int64_t column) {
    if (!has<kCalls>(p.weight)) return;
    T weight[8];
    load_features<kAligned, Scalar, kAnyCalls>(weight, p.weight, column, p.N - column);
#pragma unroll
    for (int j = 0; j < 8; ++j) g[j] *= weight[j];
  }

  // Past the end of a row grad_out is 0, and so is g.
  __device__ __forceinline__ void add_to(T (&totals)[2]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      totals[0] += g[j];
      totals[1] += g[j] * n[j];
    }
  }

  // Computes the gradient of the sum from the row's means of g and of g n.
  __device__ __forceinline__ void gradient(
      T (&grad)[8], const DropoutAddLayerNorm& p, int64_t row, int64_t column, const T (&means)[2],
      T rstd) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) grad[j] = (g[j] - means[0] - n[j] * means[1]) * rstd;
    if (kCalls == kAnyCalls && p.grad_sum) {
      Eight<Scalar> eight;
      T grad_sum[8];
      eight.template load<kAligned>(p.grad_sum.row(row), p.grad_sum.wide, column, p.N - column);
      eight.get(grad_sum);
#pragma unroll
      for (int j = 0; j < 8; ++j) grad[j] += grad_sum[j];
    }
  }
};

// For rows of several chunks: a block reads a row and writes the means of g and of g n.
template <class Scalar, bool kAligned>
__global__ __launch_bounds__(kWideThreads) void backward_statistics_kernel(
    const __grid_constant__ DropoutAddLayerNorm p, Accumulator<Scalar>* statistics) {
  using T = Accumulator<Scalar>;
  using Group = Group<Scalar, kAligned, kAnyCalls>;
  using Team = Team<kWideThreads>;
  T* const scratch = reinterpret_cast<T*>(shared_memory());
  const uint64_t seed = p.threshold ? *p.seed : 0;
  int parity = 0;
  for (int64_t row = Team::first_row(); row < p.rows; row += Team::step()) {
    const typename Group::Row source(p, row);
    const T mean = static_cast<const T*>(p.mean)[row], rstd = static_cast<const T*>(p.rstd)[row];
    T totals[2] = {};
    for (int64_t c = 8 * threadIdx.x; c < p.N; c += 8 * kWideThreads) {
      typename Group::Loaded loaded;
      Group::load(loaded, p, row, c);
      Group group;
      group.normalise(source, loaded, c, seed, mean, rstd);
      group.weigh(p, c);
      group.add_to(totals);
    }
    // The next row uses the other half of `scratch`: some threads may still read this one.
    block_sum<kWideThreads>(totals, scratch + parity * 2 * Team::kWarps);
    parity ^= 1;
    if (threadIdx.x > 0) continue;
    statistics[2 * row] = totals[0] / static_cast<T>(p.N);
    statistics[2 * row + 1] = totals[1] / static_cast<T>(p.N);
  }
}

// Loads eight numbers that this thread wrote, so it does not use the read-only cache.
template <bool kAligned, class T>
__device__ __forceinline__ void load_own_eight(T (&values)[8], const T* from, int64_t count) {
  if constexpr (kAligned) {
    uint4 pieces[8 * sizeof(T) / 16];
#pragma unroll
    for (int i = 0; i < int(8 * sizeof(T) / 16); ++i)
      pieces[i] = reinterpret_cast<const uint4*>(from)[i];
    memcpy(values, pieces, sizeof values);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = j < count ? from[j] : T(0);
  }
}

// Adds a run of eight sums to their totals in memory, where only this thread reads and writes them,
// and starts the next run from the rounding error.
template <bool kAligned, class T>
__device__ __forceinline__ void end_run_of_eight(
    T (&run)[8], T* totals, bool has_total, int64_t count) {
  T total[8];
  if (has_total) {
    load_own_eight<kAligned>(total, totals, count);
#pragma unroll
    for (int j = 0; j < 8; ++j) end_run(run[j], total[j]);
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      total[j] = run[j];
      run[j] = 0;
    }
  }
  store_eight_as<T, kAligned>(totals, total, count);
}

// A block's sums of the gradients of weight, bias and x_bias over a run of rows, in shared memory.
// Every thread has its own columns.
template <class Scalar, bool kAligned, int kThreads>
struct BlockSums {
  using T = Accumulator<Scalar>;
  using Teams = Team<kThreads>;
  static constexpr int G = kGroups<kAligned>, kEights = G * Teams::kBlock;
  static constexpr int kSize = 3 * 8 * kEights;  // numbers in all
  T* memory;

  // Returns the sums of the gradient of weight (v = 0), bias or x_bias.
  __device__ __forceinline__ SharedEights<T> operator[](int v) const {
    return SharedEights<T>(memory + v * 8 * kEights, kEights);
  }
  // Return the slot and the first column of a thread's group g of eight columns.
  __device__ static __forceinline__ int slot(int g) { return g * Teams::kBlock + threadIdx.x; }
  __device__ static __forceinline__ int64_t column(int64_t first_column, int g) {
    return first_column + 8 * kThreads * g;
  }

  __device__ __forceinline__ void clear() const {
    for (int v = 0; v < 3; ++v)
      for (int g = 0; g < G; ++g) (*this)[v].put(slot(g), {});
  }

  // Ends the teams' runs. The teams of a block have the same columns: the first adds up the sums of
  // all, in order, adds them to the block's total in the workspace, and starts the next run from
  // the rounding error. `has_total`: whether the block has ended a run before.
  __device__ __forceinline__ void end_runs(
      const DropoutAddLayerNorm& p, const Workspace<T>& workspace, int64_t first_column,
      bool has_total) const {
    if (Teams::kRows > 1) __syncthreads();
    for (int v = 0; v < 3 && threadIdx.x < kThreads; ++v) {
      SharedEights<T> sums = (*this)[v];
      for (int g = 0; g < G; ++g) {
        const int64_t first = column(first_column, g);
        if (!workspace.block_sums[v] || first >= p.N) continue;
        T* const totals = workspace.block_sums[v] + blockIdx.x * p.N + first;
        T run[8];
        sums.get(slot(g), run);
        for (int team = 1; team < Teams::kRows; ++team) {
          const int team_slot = slot(g) + team * kThreads;
          T team_run[8];
          sums.get(team_slot, team_run);
          sums.put(team_slot, {});
#pragma unroll
          for (int j = 0; j < 8; ++j) run[j] += team_run[j];
        }
        end_run_of_eight<kAligned>(run, totals, has_total, p.N - first);
        sums.put(slot(g), run);
      }
    }
    if (Teams::kRows > 1) __syncthreads();
  }
};

// Any call: a block's teams hold their sums in shared memory, and the next row in registers.
template <class Scalar, bool kAligned, int kThreads>
__global__ __launch_bounds__(block_of(kThreads), kResidentBlocks<kThreads>) void backward_kernel(
    const __grid_constant__ DropoutAddLayerNorm p,
    const __grid_constant__ Workspace<Accumulator<Scalar>> workspace) {
  using T = Accumulator<Scalar>;
  using Team = Team<kThreads>;
  using Group = Group<Scalar, kAligned, kAnyCalls>;
  using Sums = BlockSums<Scalar, kAligned, kThreads>;
  constexpr int G = kGroups<kAligned>;
  const Sums sums{reinterpret_cast<T*>(shared_memory())};
  T* const scratch = sums.memory + Sums::kSize;
  sums.clear();
  const uint64_t seed = drops<kAnyCalls>(p) ? *p.seed : 0;
  const T one_over_N = T(1) / static_cast<T>(p.N);
  const int64_t first_column = int64_t(blockIdx.y) * 8 * G * kThreads + 8 * Team::thread();
  const auto column = [&](int g) { return Sums::column(first_column, g); };
  int parity = 0;

  const T* const statistics = workspace.statistics;
  typename Group::Loaded loaded[G];
  T mean = 0, rstd = 0, loaded_means[2] = {};
  const auto load_row = [&](int64_t row) {
    if (row >= p.rows) return;
    mean = static_cast<const T*>(p.mean)[row];
    rstd = static_cast<const T*>(p.rstd)[row];
    for (int i = 0; statistics && i < 2; ++i) loaded_means[i] = statistics[2 * row + i];
#pragma unroll
    for (int g = 0; g < G; ++g)
      if (column(g) < p.N) Group::load(loaded[g], p, row, column(g));
  };
  load_row(Team::first_row());
  const auto process_row = [&](int64_t row) {
    const typename Group::Row source(p, row);
    Group groups[G];
    T means[2] = {};
    const T scale = rstd, row_means[2] = {loaded_means[0], loaded_means[1]};
#pragma unroll
    for (int g = 0; g < G; ++g)
      if (column(g) < p.N) groups[g].normalise(source, loaded[g], column(g), seed, mean, rstd);
    // All loads are issued at once, because waiting for one load waits for all earlier ones.
    load_row(row + Team::step());
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (column(g) >= p.N) continue;
      Group& group = groups[g];
      T products[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) products[j] = group.g[j] * group.n[j];
      if (workspace.block_sums[0]) sums[0].add(Sums::slot(g), products);
      if (workspace.block_sums[1]) sums[1].add(Sums::slot(g), group.g);
      group.weigh(p, column(g));
      group.add_to(means);
    }
    if (statistics) {
      means[0] = row_means[0];
      means[1] = row_means[1];
    } else {
      // The next row uses the other half of `scratch`: some threads may still read this one.
      block_sum<kThreads>(means, scratch + parity * 2 * Team::kWarps);
      parity ^= 1;
      means[0] *= one_over_N;
      means[1] *= one_over_N;
    }
    if (p.rms_norm) means[0] = 0;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (column(g) >= p.N) continue;
      const Group& group = groups[g];
      const int64_t count = p.N - column(g);
      T grad[8];
      group.gradient(grad, p, row, column(g), means, scale);
      if (p.grad_residual)
        store_eight<Scalar, kAligned, kAnyCalls>(
            p.grad_residual.row(row), p.grad_residual, column(g), grad, count);
      source.drop(grad, group.keep);
      if (workspace.block_sums[2]) sums[2].add(Sums::slot(g), grad);
      if (p.grad_x)
        store_eight_as<Scalar, kAligned>(
            static_cast<Scalar*>(p.grad_x.row(row)) + column(g), grad, count);
    }
  };

  // All teams of a block end their runs together. In the last run some teams may have one row
  // fewer.
  const uint32_t rows = p.rows, step = Team::step();
  const uint32_t last = (rows - 1 - blockIdx.x * Team::kRows) / step;
  for (uint32_t i = 0; i <= last; ++i) {
    const int64_t row = Team::first_row() + int64_t(i) * step;
    if (Team::kRows == 1 || row < p.rows) process_row(static_cast<uint32_t>(row));
    if (i % kRun == kRun - 1 || i == last) sums.end_runs(p, workspace, first_column, i >= kRun);
  }
}

// The usual calls: each team of a block walks over its own rows, and kRowsAhead of them are being
// copied to shared memory. Every thread reads only what it copied itself, so that no thread waits
// for the copies of another. That leaves the registers for the sums over rows, which would
// otherwise be read from and written to shared memory for each row.
constexpr int kRowsAhead = 2;
constexpr int usual_block_of(int team) { return std::max(team, 512); }
template <int kThreads>
constexpr int kUsualBlock = usual_block_of(kThreads);
template <int kThreads>
constexpr int kResidentUsualBlocks = kResidentThreads / kUsualBlock<kThreads>;

template <class Scalar, int kThreads>
struct UsualBlock {
  using T = Accumulator<Scalar>;
  using Teams = Team<kThreads, kUsualBlock<kThreads>>;
  static constexpr int G = kGroups<true>;
  // Shared memory: rows as loaded, (kRowsAhead, G, 3, kBlock) pieces of 16 bytes, later the teams'
  // sums; and two scratches per team for sums over a row.
  static constexpr int kRowPieces = 3 * G * Teams::kBlock;
  static constexpr int kScratch = 2 * Teams::kWarps;  // numbers
  static constexpr size_t kShared =
      kRowsAhead * kRowPieces * sizeof(uint4) + 2 * Teams::kRows * kScratch * sizeof(T);
  static_assert(2 * G * Teams::kBlock * 8 * sizeof(T) <= kRowsAhead * kRowPieces * sizeof(uint4));
};

template <class Scalar, int kThreads, int kCalls>
__global__
__launch_bounds__(kUsualBlock<kThreads>, kResidentUsualBlocks<kThreads>) void backward_usual_kernel(
    const __grid_constant__ DropoutAddLayerNorm p,
    const __grid_constant__ Workspace<Accumulator<Scalar>> workspace) {
  using T = Accumulator<Scalar>;
  using Block = UsualBlock<Scalar, kThreads>;
  using Team = typename Block::Teams;
  using Group = Group<Scalar, true, kCalls>;
  constexpr int G = Block::G, kBlock = Team::kBlock;
  uint4* const rows = reinterpret_cast<uint4*>(shared_memory());
  const int team = threadIdx.x / kThreads;
  T* const scratch =
      reinterpret_cast<T*>(rows + kRowsAhead * Block::kRowPieces) + 2 * team * Block::kScratch;
  const uint64_t seed = drops<kCalls>(p) ? *p.seed : 0;
  const T one_over_N = T(1) / static_cast<T>(p.N);
  const int N = static_cast<int>(p.N), first_column = 8 * Team::thread();
  const auto column = [&](int g) { return first_column + 8 * kThreads * g; };

  const auto copy_row = [&](int64_t row, int slot) {
    if (row < p.rows) {
      const auto* const x = static_cast<const Scalar*>(p.x.row(row));
      const auto* const residual = static_cast<const Scalar*>(p.residual.row(row));
      const auto* const grad_out = static_cast<const Scalar*>(p.grad_out.row(row));
      uint4* const to = rows + slot * Block::kRowPieces + threadIdx.x;
#pragma unroll
      for (int g = 0; g < G; ++g) {
        if (column(g) >= N) continue;
        cp_async(to + 3 * g * kBlock, x + column(g));
        cp_async(to + (3 * g + 1) * kBlock, residual + column(g));
        cp_async(to + (3 * g + 2) * kBlock, grad_out + column(g));
      }
    }
    cp_async_commit();
  };
  T next_mean = 0, next_rstd = 0;
  const auto load_statistics = [&](int64_t row) {
    if (row >= p.rows) return;
    next_mean = static_cast<const T*>(p.mean)[row];
    next_rstd = static_cast<const T*>(p.rstd)[row];
  };

  T sums[2][G][8] = {};  // of the gradients of weight and bias
  // Where the team's totals lie in the workspace.
  const auto total = [&](int v, int g) {
    return workspace.block_sums[v] + (int64_t(blockIdx.x) * Team::kRows + team) * N + column(g);
  };
  int64_t row = Team::first_row();
  load_statistics(row);
#pragma unroll
  for (int i = 0; i < kRowsAhead; ++i) copy_row(row + i * Team::step(), i);
  uint32_t done = 0;  // rows
  for (; row < p.rows; row += Team::step(), ++done) {
    if (done > 0 && done % kRun == 0) {
#pragma unroll
      for (int v = 0; v < 2; ++v)
#pragma unroll
        for (int g = 0; g < G; ++g)
          if (workspace.block_sums[v] && column(g) < N)
            end_run_of_eight<true>(sums[v][g], total(v, g), done > kRun, 8);
    }
    const typename Group::Row source(p, row);
    const T mean = next_mean, rstd = next_rstd;
    load_statistics(row + Team::step());
    cp_async_wait<kRowsAhead - 1>();
    const int slot = done % kRowsAhead;
    typename Group::Loaded loaded[G];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      const uint4* const from = rows + slot * Block::kRowPieces + 3 * g * kBlock + threadIdx.x;
      loaded[g].sum.x.take(from[0]);
      loaded[g].sum.residual_or_sum.take(from[kBlock]);
      loaded[g].grad_out.take(from[2 * kBlock]);
    }
    copy_row(row + kRowsAhead * Team::step(), slot);
    Group groups[G];
    T means[2] = {};
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (column(g) >= N) continue;
      Group& group = groups[g];
      group.normalise(source, loaded[g], column(g), seed, mean, rstd);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sums[0][g][j] += group.g[j] * group.n[j];
        sums[1][g][j] += group.g[j];
      }
      group.weigh(p, column(g));
      group.add_to(means);
    }
    // The next row uses the other scratch: some threads may still read this one.
    block_sum<kThreads, kBlock>(means, scratch + done % 2 * Block::kScratch);
    means[0] = p.rms_norm ? T(0) : means[0] * one_over_N;
    means[1] *= one_over_N;
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (column(g) >= N) continue;
      T grad[8];
      groups[g].gradient(grad, p, row, column(g), means, rstd);
      if (p.grad_residual)
        store_eight_as<Scalar, true>(
            static_cast<Scalar*>(p.grad_residual.row(row)) + column(g), grad, 8);
      source.drop(grad, groups[g].keep);
      if (p.grad_x)
        store_eight_as<Scalar, true>(static_cast<Scalar*>(p.grad_x.row(row)) + column(g), grad, 8);
    }
  }

  // The teams' sums, added up in order, are the block's. They lie where rows were; all have
  // arrived.
  SharedEights<T> all(rows, 2 * G * kBlock);
  __syncthreads();
#pragma unroll
  for (int v = 0; v < 2; ++v)
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (workspace.block_sums[v] && column(g) < N && done > kRun) {
        T earlier[8];
        load_own_eight<true>(earlier, total(v, g), 8);
#pragma unroll
        for (int j = 0; j < 8; ++j) sums[v][g][j] += earlier[j];
      }
      all.put((v * G + g) * kBlock + threadIdx.x, sums[v][g]);
    }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * G * kThreads; i += kBlock) {
    const int v = i / (G * kThreads), group = i % (G * kThreads);
    if (!workspace.block_sums[v] || 8 * group >= N) continue;
    const int first = i / kThreads * kBlock + i % kThreads;
    T sum[8];
    all.get(first, sum);
    for (int other = 1; other < Team::kRows; ++other) {
      T addend[8];
      all.get(first + other * kThreads, addend);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += addend[j];
    }
    T* const to = workspace.block_sums[v] + int64_t(blockIdx.x) * Team::kRows * N + 8 * group;
    store_eight_as<T, true>(to, sum, 8);
  }
}

// A block owns 32 columns of one of the vectors. Each of its 32 warps adds up every 32nd block's
// sums, eight of them as a run. The loads of a run are issued together, because one after the
// other, each would wait for the L2 cache. Floor: the bytes of the blocks' sums, from the L2 cache.
constexpr int kSumWarps = 32, kSumRun = 8;
template <class Scalar>
__global__ __launch_bounds__(32 * kSumWarps) void backward_sum_kernel(
    const __grid_constant__ DropoutAddLayerNorm p,
    const __grid_constant__ Workspace<Accumulator<Scalar>> workspace, int64_t blocks_per_chunk) {
  using T = Accumulator<Scalar>;
  const int v = blockIdx.y;
  const Vector grad = v == 0 ? p.grad_weight : v == 1 ? p.grad_bias : p.grad_x_bias;
  const T* const block_sums =
      v == 0 ? workspace.block_sums[0] : workspace.block_sums[v == 1 ? 1 : 2];
  if (!grad) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = int64_t(blockIdx.x) * 32 + lane;
  T sum = 0, run = 0;
  if (column < p.N)
    for (int64_t first = warp; first < blocks_per_chunk; first += kSumRun * kSumWarps) {
      T terms[kSumRun];
#pragma unroll
      for (int i = 0; i < kSumRun; ++i) {
        const int64_t block = first + i * kSumWarps;
        terms[i] =
            block < blocks_per_chunk ? block_sums[block * workspace.block_stride + column] : T(0);
      }
#pragma unroll
      for (int i = 0; i < kSumRun; ++i) run += terms[i];
      end_run(run, sum);
    }
  sum += run;
  T* const sums = reinterpret_cast<T*>(shared_memory());  // (kSumWarps, 32)
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0 || column >= p.N) return;
  for (int other = 1; other < kSumWarps; ++other) sum += sums[32 * other + lane];
  if (grad.wide) static_cast<T*>(grad.data)[column] = sum;
  else static_cast<Scalar*>(grad.data)[column] = narrow<Scalar>(sum);
}

// float64 is for checking the other types; it is processed an element at a time, like widths that
// are not a multiple of 8.
bool is_aligned(const DropoutAddLayerNorm& p) { return p.N % 8 == 0 && p.dtype != DType::Float64; }

bool is_usual_backward(const DropoutAddLayerNorm& p) {
  return is_usual(p) && !p.grad_sum && !p.grad_x_bias;
}

Split split_of(const DropoutAddLayerNorm& p) {
  Split split;
  const int groups = is_aligned(p) ? kGroups<true> : kGroups<false>;
  split.threads = is_aligned(p) && !is_usual_backward(p) ? 128 : 32;
  while (split.threads < 512 && 8 * groups * split.threads < p.N)
    split.threads *= is_usual_backward(p) ? 2 : 512 / split.threads;
  split.columns = 8 * groups * split.threads;
  split.chunks = std::max<int64_t>((p.N + split.columns - 1) / split.columns, 1);
  // A block's sums are written and read once more, which pays off if it has a few rows. In the
  // usual calls, a run of a team ends in its own total, because other teams of its block may have
  // ended theirs already.
  const bool usual = is_usual_backward(p);
  const int block_threads = usual ? usual_block_of(split.threads) : block_of(split.threads);
  const int teams = block_threads / split.threads;
  const int least_rows = usual ? std::max(teams, 4) : 4 * teams;
  split.totals = usual ? teams : 1;
  const int64_t resident = int64_t(kResidentThreads / block_threads) * multiprocessors();
  const int64_t most_blocks = std::max<int64_t>(resident / split.chunks, 1);
  split.blocks_per_chunk = std::min((p.rows + least_rows - 1) / least_rows, most_blocks);
  return split;
}

template <class T>
Workspace<T> lay_out(const DropoutAddLayerNorm& p, const Split& split, void* memory, T** end) {
  T* next = static_cast<T*>(memory);
  const auto allocate = [&](bool needed, int64_t count) {
    T* const memory = needed ? next : nullptr;
    if (needed) next += (count + 3) / 4 * 4;
    return memory;
  };
  Workspace<T> workspace;
  workspace.block_stride = split.totals * p.N;
  int v = 0;
  for (const bool needed : {bool(p.grad_weight), bool(p.grad_bias), bool(p.grad_x_bias)})
    workspace.block_sums[v++] = allocate(needed, split.blocks_per_chunk * workspace.block_stride);
  workspace.statistics = allocate(split.chunks > 1, 2 * p.rows);
  *end = next;
  return workspace;
}

template <class Scalar, bool kAligned, int kThreads>
void launch_backward(
    const DropoutAddLayerNorm& p, const Split& split,
    const Workspace<Accumulator<Scalar>>& workspace, cudaStream_t stream) {
  using Team = Team<kThreads>;
  const LaunchPlan plan{
      .kernel = "dropout_add_layer_norm_backward",
      .sizes = {{"rows", p.rows}, {"N", p.N}},
      .grid = dim3(split.blocks_per_chunk, split.chunks),
      .block = Team::kBlock,
      .shared = (3 * 8 * kGroups<kAligned> * Team::kBlock + 4 * Team::kWarps) *
          sizeof(Accumulator<Scalar>),
  };
  launch(plan, stream, backward_kernel<Scalar, kAligned, kThreads>, p, workspace);
}

template <class Scalar, int kThreads>
void launch_usual_backward(
    const DropoutAddLayerNorm& p, const Split& split,
    const Workspace<Accumulator<Scalar>>& workspace, cudaStream_t stream) {
  const LaunchPlan plan{
      .kernel = "dropout_add_layer_norm_backward_usual",
      .sizes = {{"rows", p.rows}, {"N", p.N}},
      .grid = static_cast<unsigned>(split.blocks_per_chunk),
      .block = kUsualBlock<kThreads>,
      .shared = UsualBlock<Scalar, kThreads>::kShared,
  };
  constexpr int kDropout = kUsualCalls | kWithDropout;
  if (p.threshold)
    launch(plan, stream, backward_usual_kernel<Scalar, kThreads, kDropout>, p, workspace);
  else launch(plan, stream, backward_usual_kernel<Scalar, kThreads, kUsualCalls>, p, workspace);
}

template <class Scalar, bool kAligned>
void launch_statistics(
    const DropoutAddLayerNorm& p, Accumulator<Scalar>* statistics, cudaStream_t stream) {
  const LaunchPlan plan{
      .kernel = "dropout_add_layer_norm_backward_statistics",
      .sizes = {{"rows", p.rows}, {"N", p.N}},
      .grid = blocks_for(p.rows, 1, 0x7FFFFFFF),
      .block = kWideThreads,
      .shared = 4 * Team<kWideThreads>::kWarps * sizeof(Accumulator<Scalar>),
  };
  launch(plan, stream, backward_statistics_kernel<Scalar, kAligned>, p, statistics);
}

template <class Scalar>
void launch_for_width(
    const DropoutAddLayerNorm& p, const Split& split,
    const Workspace<Accumulator<Scalar>>& workspace, cudaStream_t stream) {
  if (!is_aligned(p)) {
    if (workspace.statistics) launch_statistics<Scalar, false>(p, workspace.statistics, stream);
    if (split.threads == 32) return launch_backward<Scalar, false, 32>(p, split, workspace, stream);
    return launch_backward<Scalar, false, 512>(p, split, workspace, stream);
  }
  if constexpr (!std::is_same_v<Scalar, double>) {
    if (workspace.statistics) launch_statistics<Scalar, true>(p, workspace.statistics, stream);
    if constexpr (sizeof(Scalar) == 2) {
      if (is_usual_backward(p)) {
        switch (split.threads) {
          case 32: return launch_usual_backward<Scalar, 32>(p, split, workspace, stream);
          case 64: return launch_usual_backward<Scalar, 64>(p, split, workspace, stream);
          case 128: return launch_usual_backward<Scalar, 128>(p, split, workspace, stream);
          case 256: return launch_usual_backward<Scalar, 256>(p, split, workspace, stream);
          default: return launch_usual_backward<Scalar, 512>(p, split, workspace, stream);
        }
      }
    }
    if (split.threads == 128)
      return launch_backward<Scalar, true, 128>(p, split, workspace, stream);
    launch_backward<Scalar, true, 512>(p, split, workspace, stream);
  }
}

template <class Scalar>
void launch_sum(
    const DropoutAddLayerNorm& p, const Split& split,
    const Workspace<Accumulator<Scalar>>& workspace, cudaStream_t stream) {
  const LaunchPlan plan{
      .kernel = "dropout_add_layer_norm_backward_sum",
      .sizes = {{"blocks", split.blocks_per_chunk}, {"N", p.N}},
      .grid = dim3((p.N + 31) / 32, 3),
      .block = 32 * kSumWarps,
      .shared = 32 * kSumWarps * sizeof(Accumulator<Scalar>),
  };
  launch(plan, stream, backward_sum_kernel<Scalar>, p, workspace, split.blocks_per_chunk);
}

}  // namespace

int64_t dropout_add_layer_norm_backward_workspace(const DropoutAddLayerNorm& p) {
  int64_t bytes = 0;
  for_type(p.dtype, [&]<class Scalar>() {
    using T = Accumulator<Scalar>;
    T* end;
    lay_out<T>(p, split_of(p), nullptr, &end);
    bytes = reinterpret_cast<uintptr_t>(end);
  });
  return bytes;
}

void dropout_add_layer_norm_backward(const DropoutAddLayerNorm& p, void* memory, void* stream) {
  if (p.N == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const Split split = split_of(p);
  for_type(p.dtype, [&]<class Scalar>() {
    using T = Accumulator<Scalar>;
    T* end;
    const Workspace<T> workspace = lay_out<T>(p, split, memory, &end);
    if (p.rows > 0) launch_for_width<Scalar>(p, split, workspace, cuda_stream);
    if (p.grad_weight || p.grad_bias || p.grad_x_bias)
      launch_sum<Scalar>(p, split, workspace, cuda_stream);
  });
}

}  // namespace trifuse::cuda
