// The gradients of attention's tables that an index reads: dS, summed by column.
//
// Pairs of one tile read any columns, and several pairs may read the same column. So a tile's dS
// and columns are written to shared memory, and each number of a table belongs to one thread, which
// adds to it in the order of the pairs. There are no atomics, and results are reproducible bit for
// bit.
//
// - row tables: a block owns the tables of 64 queries of one head of one sequence (32 in float32),
//   and loops over the keys that they attend to; or those of 32 keys (16) for one query head, and
//   loops over the queries. A thread adds one row's dS to its table in memory, which is initially
//   0. For each tile of pairs the block reads q, dO, k, v, the index, and the data needed to
//   recompute dS.
// - table: a block owns a share of the tiles of all heads and sequences that share a table. It
//   first adds up dS over heads and sequences, because they read the same columns. Then all its
//   threads go through the tile, and each adds its own columns to the block's part, n float64
//   numbers in memory. Another kernel adds up the parts, a thread for each number of the gradient.
//
// Floor: 2 · pairs · (E + Ev) operations of the tensor cores (float32: of the FMA pipes), for each
// of the three tables. For each pair of a sum over heads and sequences, the table kernel's threads
// each compare a column once.

#include "cuda/attention.h"
#include "cuda/attention_backward.cuh"
#include "cuda/attention_configurations.cuh"
#include "cuda/attention_grad_scores.cuh"
#include "cuda/attention_launch.cuh"
#include "cuda/attention_pairs.cuh"
#include "cuda/attention_softmax.cuh"

namespace trifuse::cuda {
namespace {

// A pair's dS and its column, or -1 if there is nothing to add.
struct alignas(8) Term {
  float number;
  int column;
};

// Stores the terms of a block's tile, with the pairs of one query next to each other or, with
// kByKey, in the order of queries, so that each thread that owns a row reads a different bank.
// Overwrites the tiles from which dS was computed.
template <class Scalar, bool kByKey>
__device__ __forceinline__ Term* store_terms(
    const float (&sums)[WideShape<Scalar>::N / 8][4], const Attention& p,
    const PairColumns& columns, int first, int column) {
  using Shape = WideShape<Scalar>;
  constexpr int N = Shape::N;
  Term* const terms = reinterpret_cast<Term*>(shared_memory());
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * warp() + fragment_row(e), j = fragment_column(n, e);
      // A pair that takes no part has a dS of 0, and may be outside the index.
      const float number = sums[n][e];
      const int read = number != 0 ? columns.of(p, first + i, column + j) : -1;
      terms[kByKey ? i * N + j : j * Shape::kRows + i] = {number, read};
    }
  __syncthreads();
  return terms;
}

// Adds terms to a thread's own columns of a table in memory. Consecutive terms of one column are
// added up first, which saves waiting for memory.
template <class Sum>
class ColumnSums {
 public:
  __device__ __forceinline__ explicit ColumnSums(Sum* table) : table_(table) {}
  __device__ __forceinline__ void add(const Term& term) {
    if (term.column != column_) {
      end();
      column_ = term.column;
      sum_ = 0;
    }
    sum_ += term.number;
  }
  __device__ __forceinline__ void end() {
    if (column_ >= 0) table_[column_] += sum_;
  }

 private:
  Sum* table_;
  Sum sum_ = 0;
  int column_ = -1;
};

template <class Scalar>
constexpr size_t kSharedTiles = 2 * (WideShape<Scalar>::kRows + WideShape<Scalar>::N) *
    sizeof(Scalar);  // bytes for each element of a row
static_assert(
    kSharedTiles<float> * 64 >= WideShape<float>::kRows * WideShape<float>::N * sizeof(Term));
static_assert(
    kSharedTiles<__half> * 64 >= WideShape<__half>::kRows * WideShape<__half>::N * sizeof(Term));

// Tables of every row ----------------------------------------------------------------------------

// A block owns the tables of some queries or, with kByKey, of some keys.
template <class Scalar, bool kByKey>
__global__
__launch_bounds__(32 * WideShape<Scalar>::kWarps) void attention_backward_row_tables_kernel(
    const __grid_constant__ Attention p, const QueryVectors vectors, int pitch) {
  using Shape = WideShape<Scalar>;
  constexpr int N = Shape::N;
  constexpr int kOwn = kByKey ? N : Shape::kRows, kOther = kByKey ? Shape::kRows : N;
  const BlockIndex index(kByKey ? p.Lk : p.Lq, kOwn, p.heads);
  const Head head(p, index.b, index.h);
  const int own = index.block * kOwn;
  if (own >= (kByKey ? head.keys : head.queries)) return;

  const GradientTiles<Scalar> tiles(pitch);
  const auto scale = Scale::of<Masks::OneAndTables>(p);
  const uint64_t seed = dropout_seed(p);
  const PairColumns columns(p, head);
  const Tensor4& grad = kByKey ? p.grad_key_bias : p.grad_query_bias;
  const int64_t row = (kByKey ? head.first_key : head.first_query) + own + threadIdx.x;
  float* const table = static_cast<float*>(grad.data) + head.batch * grad.stride[0] +
      head.h * grad.stride[1] + row * grad.stride[2];
  const Range range = visible_to_block<kOther, kByKey>(head, own, kOwn);
  for (int other = range.first; other < range.last; other += kOther) {
    const int first = kByKey ? other : own, column = kByKey ? own : other;
    float sums[N / 8][4] = {};
    if (!add_grad_scores<Scalar, Masks::OneAndTables>(
            sums, tiles, p, vectors, scale, head, seed, first, column))
      continue;
    const Term* terms = store_terms<Scalar, kByKey>(sums, p, columns, first, column);
    if (threadIdx.x < kOwn) {
      ColumnSums<float> of_row(table);
      for (int i = 0; i < kOther; ++i) of_row.add(terms[i * kOwn + threadIdx.x]);
      of_row.end();
    }
  }
}

// A table that all rows share --------------------------------------------------------------------

// How the gradient is divided among blocks. A group is up to `chunk` of the heads and sequences
// that share a table; a share is up to `per_share` of the groups of all tiles.
struct TableShares {
  bool batch, heads;  // whether each sequence, and each head, has its own table
  int64_t row_blocks, column_blocks;
  int64_t terms, chunk, groups;
  int64_t per_share, shares;
  int64_t size;  // elements of the gradient
};

// A block owns a share of the sums of one table.
template <class Scalar>
__global__ __launch_bounds__(32 * WideShape<Scalar>::kWarps) void attention_backward_table_kernel(
    const __grid_constant__ Attention p, const QueryVectors vectors,
    const __grid_constant__ TableShares how, double* parts, int pitch) {
  using Shape = WideShape<Scalar>;
  constexpr int N = Shape::N, kThreads = 32 * Shape::kWarps;
  // The block's index: heads fastest, then sequences, and the share last.
  int64_t index = blockIdx.x;
  const int own_head = how.heads ? static_cast<int>(take_digit(index, p.heads)) : 0;
  const int own_batch = how.batch ? static_cast<int>(take_digit(index, p.batch)) : 0;
  const int64_t share = index, all = how.row_blocks * how.column_blocks * how.groups;

  // A thread owns every kThreads-th column.
  double* const part = parts + blockIdx.x * p.columns;
  for (int64_t c = threadIdx.x; c < p.columns; c += kThreads) part[c] = 0;
  const GradientTiles<Scalar> tiles(pitch);
  const auto scale = Scale::of<Masks::OneAndTables>(p);
  const uint64_t seed = dropout_seed(p);
  for (int64_t at = share * how.per_share; at < min((share + 1) * how.per_share, all); ++at) {
    int64_t rest = at;
    const int64_t begin = take_digit(rest, how.groups) * how.chunk;
    const int first = static_cast<int>(take_digit(rest, how.row_blocks)) * Shape::kRows;
    const int column = static_cast<int>(rest) * N;
    float sums[N / 8][4] = {};
    RunTotals<Scalar> totals(tiles.end());
    bool some = false;
    int b = own_batch, h = own_head;
    for (int64_t term = begin; term < min(begin + how.chunk, how.terms); ++term) {
      if ((term - begin) % kTermsOfRun == 0) totals.end_runs(sums);
      // The term's index: heads fastest, then sequences.
      int64_t of_term = term;
      if (!how.heads) h = static_cast<int>(take_digit(of_term, p.heads));
      if (!how.batch) b = static_cast<int>(of_term);
      some |= add_grad_scores<Scalar, Masks::OneAndTables>(
          sums, tiles, p, vectors, scale, Head(p, b, h), seed, first, column);
    }
    if (!some) continue;
    totals.add_to(sums);
    // All terms of a group read the same columns.
    const PairColumns columns(p, Head(p, b, h));
    const Term* terms = store_terms<Scalar, false>(sums, p, columns, first, column);
    ColumnSums<double> own(part);
#pragma unroll 4
    for (int i = 0; i < Shape::kRows * N; ++i)
      if (const Term term = terms[i];
          term.column >= 0 && static_cast<unsigned>(term.column) % kThreads == threadIdx.x)
        own.add(term);
    own.end();
  }
}

// A thread adds up the shares of one element.
__global__ __launch_bounds__(kSumThreads) void attention_backward_table_sum_kernel(
    const double* parts, int64_t shares, int64_t size, float* grad) {
  const int64_t at = int64_t(blockIdx.x) * kSumThreads + threadIdx.x;
  if (at >= size) return;
  double sum = 0;
  for (int64_t share = 0; share < shares; ++share) sum += parts[share * size + at];
  grad[at] = static_cast<float>(sum);
}

// Launchers ---------------------------------------------------------------------------------------

constexpr int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

TableShares table_shares(const Attention& p) {
  TableShares how{};
  const bool tensor_core = p.dtype != DType::Float32;
  const int64_t rows = tensor_core ? WideShape<__half>::kRows : WideShape<float>::kRows;
  const int64_t N = tensor_core ? WideShape<__half>::N : WideShape<float>::N;
  how.batch = p.grad_relative_bias.batch;
  how.heads = p.grad_relative_bias.heads;
  how.row_blocks = divide_up(p.Lq, rows);
  how.column_blocks = divide_up(p.Lk, N);
  const int64_t tables = (how.batch ? p.batch : 1) * (how.heads ? p.heads : 1);
  const int64_t tiles = how.row_blocks * how.column_blocks;
  how.size = tables * p.columns;
  how.terms = p.batch * p.heads / tables;
  // Sequences with separate diagonals read different columns at the same place.
  const bool apart = p.cu_seqlens_q && p.lower_right && p.index_by_distance;
  how.chunk =
      apart ? 1 : divide_up(how.terms, std::max<int64_t>(kBlocksOfSum / (tiles * tables), 1));
  how.groups = divide_up(how.terms, how.chunk);
  how.per_share = divide_up(tiles * how.groups, std::max<int64_t>(kBlocksOfSum / tables, 1));
  how.shares = divide_up(tiles * how.groups, how.per_share);
  return how;
}

template <class Scalar>
void launch_table(
    const Attention& p, const QueryVectors& vectors, double* parts, int pitch,
    cudaStream_t stream) {
  const TableShares how = table_shares(p);
  const LaunchPlan plan = attention_plan(
      "attention_backward_table", p, how.size / p.columns * how.shares, WideShape<Scalar>::kWarps,
      kSharedTiles<Scalar> * pitch + kSharedRunTotals<Scalar>);
  launch(plan, stream, attention_backward_table_kernel<Scalar>, p, vectors, how, parts, pitch);
  const LaunchPlan sum = attention_plan(
      "attention_backward_table_sum", p, divide_up(how.size, kSumThreads), kSumThreads / 32, 0);
  launch(
      sum, stream, attention_backward_table_sum_kernel, parts, how.shares, how.size,
      p.grad_relative_bias.data);
}

template <class Scalar, bool kByKey>
void launch_row_tables(
    const Attention& p, const QueryVectors& vectors, int pitch, cudaStream_t stream) {
  using Shape = WideShape<Scalar>;
  const int64_t blocks =
      blocks_for(p, kByKey ? p.Lk : p.Lq, kByKey ? Shape::N : Shape::kRows, p.heads, false);
  if (blocks == 0) return;
  const LaunchPlan plan = attention_plan(
      "attention_backward_row_tables", p, blocks, Shape::kWarps, kSharedTiles<Scalar> * pitch);
  launch(plan, stream, attention_backward_row_tables_kernel<Scalar, kByKey>, p, vectors, pitch);
}

}  // namespace

int64_t attention_backward_table_doubles(const Attention& p) {
  if (!p.relative_index || !p.grad_relative_bias.data) return 0;
  const TableShares how = table_shares(p);
  return how.shares * how.size;
}

void attention_backward_tables(
    const Attention& p, const QueryVectors& vectors, double* parts, int pitch, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const auto run = [&]<class Scalar>() {
    if (p.grad_relative_bias.data) launch_table<Scalar>(p, vectors, parts, pitch, on);
    if (p.grad_query_bias.data) launch_row_tables<Scalar, false>(p, vectors, pitch, on);
    if (p.grad_key_bias.data) launch_row_tables<Scalar, true>(p, vectors, pitch, on);
  };
  if (p.dtype == DType::Float32) run.template operator()<float>();
  else if (p.dtype == DType::BFloat16) run.template operator()<__nv_bfloat16>();
  else run.template operator()<__half>();
}

}  // namespace trifuse::cuda
