// Linear layers on a CPU: activation(x weight^T + bias), and gated ones, activation(x weight^T +
// bias) * (x up^T + up_bias).
//
// The weight is packed first (packed_operands.h), with one task for each 64 features; a weight that
// does not change is packed once. Unless there are many rows, it takes less time if each task packs
// the part that it reads. A task owns rows_per_task x columns_per_task elements of the result. It
// reads its rows of x and its panels of the weight, and accumulates in the result itself, or for
// 16-bit types in a float32 buffer. It adds bias and applies the activation to tiles still in a
// cache. A gated layer is two products of the same rows of x, computed in turns, panel by panel.
// Neither of them is written to memory.
//
// Few rows are multiplied by the weight as it is stored: by rows (unpacked_weight.h), or by
// columns, in which case it already is the product's operand. Then a task owns columns_per_task
// features of all rows, and reads that many rows or columns of the weight.
//
// Floor: M N K / (lanes x FMA pipes) cycles. Packing a weight takes N K loads and stores, 1 / M of
// the multiply-adds.

#include <ATen/Parallel.h>

#include <bit>

#include "cpu/kernels.h"
#include "cpu/linear_epilogue.h"
#include "cpu/packed_operands.h"
#include "cpu/unpacked_weight.h"

namespace trifuse::TRIFUSE_CAPABILITY {
namespace {

template <class Scalar>
using ElementOf = typename Compute<Scalar>::Element;

// M <= `most` rows of A by a strip of B, in one pass.
template <int most, class E, class Fetch>
void one_pass(
    int64_t M, int64_t K, const E* a, int64_t a_m, const E* strip, int64_t ldb, AccumulatorOf<E>* c,
    int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate, Fetch fetch) {
  if constexpr (most > 1)
    if (M < most) return one_pass<most - 1>(M, K, a, a_m, strip, ldb, c, ldc, accumulate, fetch);
  register_block<most, kRegisterVectors>(K, a, a_m, 1, strip, ldb, c, ldc, accumulate, fetch);
}

constexpr int64_t kFewRows = int64_t{2} * kRegisterRows;

// M <= kFewRows rows of A by a strip of B, in one pass or in two of the same height. fetch(pass,
// passes, k) is called for every k.
template <class E, class Fetch>
void few_passes(
    int64_t M, int64_t K, const E* a, int64_t a_m, const E* strip, int64_t ldb, AccumulatorOf<E>* c,
    int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate, const Fetch& fetch) {
  const int64_t passes = M <= kRegisterRows ? 1 : 2, most = (M + passes - 1) / passes;
  for (int64_t pass = 0; pass < passes; ++pass) {
    const int64_t m = pass * most;
    one_pass<kRegisterRows>(
        std::min(M - m, most), K, a + m * a_m, a_m, strip, ldb, c + m * ldc, ldc, accumulate,
        [&](int64_t k) TRIFUSE_INLINE { fetch(pass, passes, k); });
  }
}

// Prefetches the cache lines of a row of a strip.
template <class E>
TRIFUSE_INLINE inline void prefetch_strip_row(const E* row) {
  for (int64_t i = 0; i < kStripWidth<E>; i += 64 / sizeof(E)) __builtin_prefetch(row + i, 0, 2);
}

// few_passes with a strip that is read from memory.
template <class E>
void few_rows(
    int64_t M, int64_t K, const E* a, int64_t a_m, const E* strip, int64_t ldb, AccumulatorOf<E>* c,
    int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate) {
  constexpr int kRowsAhead = 32;  // 8 KiB of a packed B with AVX-512
  few_passes(
      M, K, a, a_m, strip, ldb, c, ldc, accumulate,
      [&](int64_t, int64_t, int64_t k)
          TRIFUSE_INLINE { prefetch_strip_row(strip + (k + kRowsAhead) * ldb); });
}

// few_passes with the strips of kTile columns of B. Meanwhile `next`, as much of B, is prefetched.
template <class E>
void few_rows_of_tile(
    int64_t M, int64_t K, const E* a, int64_t a_m, const E* b, int64_t ldb, const E* next,
    AccumulatorOf<E>* c, int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate) {
  for (int64_t n = 0; n < kTile; n += kStripWidth<E>)
    few_passes(
        M, K, a, a_m, b + n, ldb, c + n, ldc, accumulate,
        [&](int64_t pass, int64_t passes, int64_t k) TRIFUSE_INLINE {
          const int64_t row = (pass * K + k) >> (passes - 1);  // divides by 1 or 2
          prefetch_strip_row(next + row * ldb + n);
        });
}

// The bytes of a block that will be read soon: pieces of 2^`lines` cache lines, one every `pitch`
// bytes. If data is null, no block is fetched.
struct Ahead {
  const char* data = nullptr;
  int64_t pitch = 512, lines = 3;

  // Fetches a cache line into the L2 cache.
  TRIFUSE_INLINE void fetch(int64_t line) const {
    __builtin_prefetch(data + piece(line) + (line & ((1 << lines) - 1)) * 64, 0, 2);
  }
  // The part of the block from the piece of a line on.
  Ahead from(int64_t line) const { return {data ? data + piece(line) : nullptr, pitch, lines}; }

 private:
  TRIFUSE_INLINE int64_t piece(int64_t line) const {
    return (line >> lines) * pitch;
  }
};

// tile_gemm with a strip as B. Meanwhile, in the first `passes` passes, the part of the weight that
// is read next is prefetched. If rows_ahead, each pass also prefetches the next 512 bytes of its
// rows of A. If another core has just written them, reading a line from that core's cache takes as
// long as reading it from memory.
template <int passes, class E>
void rows_and_next(
    Ahead next, bool rows_ahead, int64_t M, int64_t K, const E* a, int64_t a_m, const E* strip,
    AccumulatorOf<E>* c, int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate) {
  constexpr int lines = kStripWidth<E> * sizeof(E) / 64;  // of a row of the strip
  // Two passes have the same height, so that both last as long as reading half a strip.
  const int64_t most = M <= kFewRows ? (M + 1) / 2 : kRegisterRows;
  int64_t m = 0;
  const auto run = [&]<bool of_weight, bool of_rows>(int pass) TRIFUSE_INLINE {
    const E* ahead = a + m * a_m + K;
    one_pass<kRegisterRows>(
        std::min(M - m, most), K, a + m * a_m, a_m, strip, kStripWidth<E>, c + m * ldc, ldc,
        accumulate, [&](int64_t k) TRIFUSE_INLINE {
          if constexpr (of_weight) {
            for (int i = 0; i < std::max(lines / passes, 1); ++i)
              next.fetch((pass * K + k) * lines / passes + i);
          }
          if constexpr (of_rows) {
            const int64_t row = std::min<int64_t>(k / 8, kRegisterRows - 1);
            __builtin_prefetch(reinterpret_cast<const char*>(ahead + row * a_m) + k % 8 * 64, 0, 2);
          }
        });
  };
  for (int pass = 0; next.data && pass < passes && m < M; ++pass) {
    if (rows_ahead) run.template operator()<true, true>(pass);
    else run.template operator()<true, false>(pass);
    m += most;
  }
  for (; rows_ahead && m < M; m += most) run.template operator()<false, true>(0);
  if (m < M)
    tile_gemm<E>(
        M - m, kStripWidth<E>, K, a + m * a_m, a_m, 1, strip, kStripWidth<E>, c + m * ldc, ldc,
        accumulate);
}

// tile_gemm with a panel's block as B, strip by strip. `few`: B is used for these rows only.
//
// With few rows, reading B takes most of the time. It is read fastest in few passes that prefetch:
// with AVX-512 on Zen 5, 8 rows of 4096 features read B at 62 GB/s, and at 33 GB/s by tile_gemm. A
// single pass prefetches the block that it reads. With AVX2 it leaves that to the hardware, which
// follows the narrow strips. If there are several passes, only the first reads a strip from memory,
// and the others from a cache. So all of them prefetch what is read next: the same part of `next`,
// a block of the weight, and, with rows_ahead, the next block of A's rows. Memory is then read
// throughout: on Zen 4, 8 rows of 384 float32 features take 0.85 of the time. Two passes in
// bfloat16 gain nothing.
template <class E>
void panel_gemm(
    int64_t M, int64_t N, int64_t K, const E* a, int64_t a_m, const E* block, AccumulatorOf<E>* c,
    int64_t ldc, Accumulate<AccumulatorOf<E>> accumulate, [[maybe_unused]] bool few,
    [[maybe_unused]] Ahead next, [[maybe_unused]] bool rows_ahead) {
  constexpr int64_t strip = kStripWidth<E>;
  for (int64_t n = 0; n < N; n += strip) {
    const E* b = block + n * K;
    if constexpr (kRegisterRows > 2) {
      if (n + strip <= N) {
        if (strip < kTile && M <= kRegisterRows) {
          one_pass<kRegisterRows>(M, K, a, a_m, b, strip, c + n, ldc, accumulate, FetchNothing{});
          continue;
        }
        if (strip == kTile && few && (M <= kRegisterRows || kPack<E> == 2 || !next.data)) {
          few_rows(M, K, a, a_m, b, strip, c, ldc, accumulate);
          continue;
        }
        const bool fetches_rows = rows_ahead && n == 0;
        if (next.data || fetches_rows) {
          const auto run =
              M > int64_t{3} * kRegisterRows ? rows_and_next<4, E> : rows_and_next<2, E>;
          run(next.from(n * K * static_cast<int64_t>(sizeof(E)) / 64), fetches_rows, M, K, a, a_m,
              b, c + n, ldc, accumulate);
          continue;
        }
      }
    }
    tile_gemm<E>(M, std::min(strip, N - n), K, a, a_m, 1, b, strip, c + n, ldc, accumulate);
  }
}

// A weight as a task reads it. Either it was packed beforehand, or the task packs it, a part at a
// time, into memory that stays in a cache.
template <class Scalar>
class Weight {
  using E = ElementOf<Scalar>;

 public:
  // A part that is packed has `depth` terms. The constructor takes memory of `bytes`.
  Weight(
      const LinearProblem& p, const void* weight, int64_t row, int64_t column, int64_t depth,
      Scratch& scratch)
      : weight_(static_cast<const Scalar*>(weight)), row_(row), column_(column), K_(p.K), N_(p.N),
        packed_(p.packed != nullptr), packer_(scratch),
        part_(scratch.take<E>(packed_ ? 0 : panel_size<E>(depth))) {}

  static int64_t bytes(const LinearProblem& p, int64_t depth) {
    return Packer<E>::bytes() + (p.packed ? 0 : Scratch::bytes<E>(panel_size<E>(depth)));
  }

  // Returns the block of the panel for columns from n on and of terms from k on.
  const E* block(int64_t n, int64_t k) const {
    if (packed_) return packed_panel(n) + panel_size<E>(k);
    packer_.block(
        weight_ + n * row_ + k * column_, column_, row_, std::min(K_ - k, kBlockDepth<E>),
        std::min(N_ - n, kTile), part_);
    return part_;
  }

  // Returns the panel for columns from n on.
  const E* panel(int64_t n) const {
    if (packed_) return packed_panel(n);
    packer_.panel(weight_ + n * row_, column_, row_, K_, std::min(N_ - n, kTile), part_);
    return part_;
  }

  // Returns the memory to prefetch for block (n, k): the packed block or, of a stored weight, the
  // rows or columns that the block is packed from. It has as many bytes as a packed block, so of
  // 16-bit numbers that are packed as float it includes those of the panel's next block.
  Ahead ahead(int64_t n, int64_t k) const {
    if (packed_) return {reinterpret_cast<const char*>(block(n, k))};
    const auto* data = reinterpret_cast<const char*>(weight_ + n * row_ + k * column_);
    constexpr int64_t size = sizeof(Scalar);
    if (column_ == 1)
      return {data, row_ * size, std::countr_zero(kBlockDepth<E> / kPack<E> * sizeof(E) / 64)};
    if (row_ == 1) return {data, column_ * size, std::countr_zero(kTile * sizeof(Scalar) / 64)};
    return {};
  }

 private:
  const E* packed_panel(int64_t n) const {
    return reinterpret_cast<const E*>(weight_) + n / kTile * panel_size<E>(K_);
  }

  const Scalar* weight_;  // (N, K), or its packed form
  int64_t row_, column_, K_, N_;
  bool packed_;
  Packer<E> packer_;
  E* part_;
};

template <class Scalar>
Weight<Scalar> weight_of(const LinearProblem& p, int64_t depth, Scratch& scratch) {
  const void* weight = p.packed ? p.packed : p.weight;
  return {p, weight, p.weight_row, p.weight_column, depth, scratch};
}

// The weight of the second product of a gated layer.
template <class Scalar>
Weight<Scalar> up_of(const LinearProblem& p, int64_t depth, Scratch& scratch) {
  return {p, p.up, p.up_row, p.up_column, depth, scratch};
}

// Returns where the columns of a thread's next task begin, after a task whose columns begin at n0.
// Assumes that consecutive tasks go to different threads. A result of N or more means that there is
// no next task.
int64_t columns_of_next_task(const LinearProblem& p, int64_t n0) {
  return n0 + p.columns_per_task * at::get_num_threads();
}

// The part of the result that a task owns: M rows from m0 on, and N columns from n0 on.
struct Part {
  int64_t m0, n0, M, N;

  Part(const LinearProblem& p, int64_t task) {
    const int64_t column_tasks = (p.N + p.columns_per_task - 1) / p.columns_per_task;
    m0 = task / column_tasks * p.rows_per_task;
    n0 = task % column_tasks * p.columns_per_task;
    M = std::min(p.M - m0, p.rows_per_task);
    N = std::min(p.N - n0, p.columns_per_task);
  }
};

// Runs a task with a packed weight, or with one that it packs itself.
template <class Scalar>
void run(const LinearProblem& p, int64_t task) {
  using E = ElementOf<Scalar>;
  using T = AccumulatorOf<E>;
  constexpr bool in_place = std::is_same_v<Scalar, T>;
  static thread_local Scratch scratch;
  const auto [m0, n0, M, N] = Part(p, task);
  const int64_t padded_N = round_up(N, kTile), buffer_size = left_block_size<E, Scalar>(M, p.x_row);
  const int64_t up_size = p.gated ? M * padded_N : 0;
  // Sums are stored as whole vectors, which may not fit the last panel of the result.
  const bool direct = in_place && !p.streams && N % Vectorized<T>::size() == 0;
  // Rows whose epilogue runs at once. Their sums stay in the L1 cache beside the weight's block
  // and, for 16-bit types, the rounded result.
  constexpr int64_t epilogue_rows = in_place ? 60 : 24;
  const int64_t rounded_size = !in_place && p.streams ? epilogue_rows * kTile : 0;
  scratch.reset(
      Scratch::bytes<E>(buffer_size) + Scratch::bytes<Scalar>(rounded_size) +
          Scratch::bytes<T>(direct ? 0 : M * padded_N) + Scratch::bytes<T>(up_size) +
          2 * Weight<Scalar>::bytes(p, kBlockDepth<E>),
      "a thread of linear");
  E* buffer = scratch.take<E>(buffer_size);
  Scalar* rounded = scratch.take<Scalar>(rounded_size);
  Scalar* out = static_cast<Scalar*>(p.out) + m0 * p.N + n0;
  const Sums<T> sums{
      direct ? reinterpret_cast<T*>(out) : scratch.take<T>(M * padded_N), direct ? p.N : padded_N,
      p.bias, n0};
  const Sums<T> up =
      p.gated ? Sums<T>{scratch.take<T>(up_size), padded_N, p.up_bias, n0} : Sums<T>{};
  const Scalar* x = static_cast<const Scalar*>(p.x) + m0 * p.x_row;
  const Weight<Scalar> weight = weight_of<Scalar>(p, kBlockDepth<E>, scratch),
                       up_weight = up_of<Scalar>(p, kBlockDepth<E>, scratch);
  const Weight<Scalar>& first_read = p.gated ? up_weight : weight;  // of each panel's blocks
  // On CPUs other than Intel's, with many rows, prefetching costs more than it gains.
  const bool prefetches = p.M <= 240 || is_intel();
  // The next block in this task, or the first block of this thread's next task, supposing that
  // threads take turns.
  const auto block_after = [&](int64_t n, int64_t k) -> Ahead {
    if (!prefetches) return {};
    if (n + kTile < N) return first_read.ahead(n0 + n + kTile, k);
    if (k + kBlockDepth<E> < p.K) return first_read.ahead(n0, k + kBlockDepth<E>);
    const int64_t next = columns_of_next_task(p, n0);
    return next < p.N ? first_read.ahead(next, 0) : Ahead{};
  };

  int64_t k = 0;
  do {  // runs once even if there are no terms, for the epilogue
    const int64_t depth = std::min(p.K - k, kBlockDepth<E>);
    const bool last = k + depth == p.K;
    const Operand<E> left =
        left_block<E>(x + k * p.x_column, p.x_row, p.x_column, M, depth, buffer);
    const bool x_in_place = left.data != buffer;
    for (int64_t n = 0; n < N; n += kTile) {
      const int64_t columns = std::min(N - n, kTile);
      // With fewer rows, or with 16-bit ones, prefetching them gains nothing.
      const bool rows_ahead =
          in_place && prefetches && M > 60 && x_in_place && !last && n + kTile >= N;
      const auto multiply = [&](int64_t m, int64_t rows, const E* b, Ahead next, Sums<T> to) {
        panel_gemm<E>(
            rows, columns, elements<E>(depth), left.data + m * left.ld, left.ld, b, to.data, to.ld,
            {k > 0}, M <= kFewRows, next, rows_ahead);
      };
      if (p.gated) multiply(0, M, up_weight.block(n0 + n, k), weight.ahead(n0 + n, k), up.at(0, n));
      const E* block = weight.block(n0 + n, k);
      const Ahead next = block_after(n, k);
      for (int64_t m = 0; m < M; m += epilogue_rows) {
        const int64_t rows = std::min(M - m, epilogue_rows);
        multiply(m, rows, block, m == 0 ? next : Ahead{}, sums.at(m, n));
        if (!last) continue;
        const Sums<T> tile = sums.at(m, n);
        Scalar* const to = out + m * p.N + n;
        apply_epilogue(
            p, tile, p.gated ? up.at(m, n) : up, rows, columns, p.streams ? rounded : to,
            p.streams ? kTile : p.N);
        for (int64_t r = 0; p.streams && r < rows; ++r) {
          const void* row = rounded + r * kTile;
          if constexpr (in_place) row = tile.data + r * tile.ld;
          stream_lines(row, columns * static_cast<int64_t>(sizeof(Scalar)), to + r * p.N);
        }
      }
    }
    k += kBlockDepth<E>;
  } while (k < p.K);
  if (p.streams) return fence_streams();
  if constexpr (in_place)
    if (!direct)
      for (int64_t m = 0; m < M; ++m) std::copy_n(sums.data + m * sums.ld, N, out + m * p.N);
}

// `run` on the matrix unit. A panel of the weight stays in the L2 cache while the task's rows of x
// are multiplied by it, 64 at a time. Their 64 x 64 sums stay in the L1 cache.
template <class Scalar>
void run_on_matrix_unit(const LinearProblem& p, int64_t task) {
  using E = ElementOf<Scalar>;
  using T = AccumulatorOf<E>;
  static thread_local Scratch scratch;
  const Part part(p, task);
  const int64_t m0 = part.m0, M = part.M, K = elements<E>(p.K);
  const int64_t tiles = (M + kTile - 1) / kTile;
  const int64_t left_size = left_rows_size<E>(kTile, p.K);
  const int64_t columns_size = p.x_row == 1 ? panel_size<E>(p.K) : 0;
  scratch.reset(
      Scratch::bytes<Operand<E>>(tiles) + tiles * Scratch::bytes<E>(left_size) +
          Scratch::bytes<E>(columns_size) + 2 * Scratch::bytes<T>(kTile * kTile) +
          2 * Weight<Scalar>::bytes(p, p.K),
      "a thread of linear");
  auto* const left = scratch.take<Operand<E>>(tiles);  // 64 rows of x each
  E* const columns_buffer = scratch.take<E>(columns_size);
  const auto rows_of = [&](int64_t tile) { return std::min(M - tile * kTile, kTile); };
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const Scalar* x = static_cast<const Scalar*>(p.x) + (m0 + tile * kTile) * p.x_row;
    E* const buffer = scratch.take<E>(left_size);
    if (p.x_row == 1 && p.x_column != 1) {
      copy_right_rows<E>(Rows<Scalar>{x, p.x_column, 1}, p.K, rows_of(tile), kTile, columns_buffer);
      transpose(columns_buffer, kTile, K, rows_of(tile), buffer, K);
      left[tile] = {buffer, K};
    } else {
      left[tile] = left_rows<E>(Rows<Scalar>{x, p.x_row, p.x_column}, rows_of(tile), p.K, buffer);
    }
  }
  T* const sums = scratch.take<T>(kTile * kTile);
  T* const up_sums = scratch.take<T>(kTile * kTile);
  const Weight<Scalar> weight = weight_of<Scalar>(p, p.K, scratch),
                       up_weight = up_of<Scalar>(p, p.K, scratch);
  [[maybe_unused]] const MatrixUnit unit;
  const int64_t last_n = part.n0 + part.N;
  for (int64_t n = part.n0; n < last_n; n += kTile) {
    const int64_t columns = std::min(last_n - n, kTile);
    const E* panel = weight.panel(n);
    const E* up_panel = p.gated ? up_weight.panel(n) : nullptr;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const auto multiply = [&](const E* of, FeatureVector bias, T* to) {
        if (K == 0) std::fill_n(to, kTile * kTile, T(0));
        tile_gemm<E>(
            rows_of(tile), columns, K, left[tile].data, left[tile].ld, 1, of, kTile, to, kTile,
            {false});
        return Sums<T>{to, kTile, bias, n};
      };
      const Sums<T> up = p.gated ? multiply(up_panel, p.up_bias, up_sums) : Sums<T>{};
      apply_epilogue(
          p, multiply(panel, p.bias, sums), up, rows_of(tile), columns,
          static_cast<Scalar*>(p.out) + (m0 + tile * kTile) * p.N + n, p.N);
    }
  }
}

// Runs a task of few rows, with a weight that is read as it is stored, by rows.
template <class Scalar>
void run_unpacked(const LinearProblem& p, int64_t task) {
  using E = ElementOf<Scalar>;
  using T = AccumulatorOf<E>;
  static thread_local Scratch scratch;
  const int64_t n0 = task * p.columns_per_task, K = elements<E>(p.K);
  const int64_t N = std::min(p.N - n0, p.columns_per_task);
  const int64_t ld = round_up(p.M, kStripRows), transposed_size = kUsesMatrixUnit<E> ? K * ld : 0,
                product_size = kUsesMatrixUnit<E> ? kStripRows * ld : 0;
  scratch.reset(
      Scratch::bytes<E>(left_rows_size<E>(p.M, p.K)) +
          Scratch::bytes<E>(left_rows_size<E>(kStripRows, p.K)) +
          2 * Scratch::bytes<T>(ld * kStripRows) + Scratch::bytes<E>(transposed_size) +
          Scratch::bytes<T>(product_size),
      "a thread of linear");
  E* x_buffer = scratch.take<E>(left_rows_size<E>(p.M, p.K));
  E* weight_buffer = scratch.take<E>(left_rows_size<E>(kStripRows, p.K));
  T* buffers[] = {scratch.take<T>(ld * kStripRows), scratch.take<T>(ld * kStripRows)};
  [[maybe_unused]] E* x_t = scratch.take<E>(transposed_size);   // [K][ld]
  [[maybe_unused]] T* product = scratch.take<T>(product_size);  // [16][ld]
  [[maybe_unused]] const MatrixUnit unit;
  const Operand<E> x = left_rows<E>(
      Rows<Scalar>{static_cast<const Scalar*>(p.x), p.x_row, p.x_column}, p.M, p.K, x_buffer);
  const Rows<Scalar> weight{static_cast<const Scalar*>(p.weight), p.weight_row, 1},
      up{static_cast<const Scalar*>(p.up), p.up_row, 1};
  if constexpr (kUsesMatrixUnit<E>) {
    transpose(x.data, x.ld, p.M, K, x_t, ld);
    for (int64_t k = 0; k < K; ++k) std::fill_n(x_t + k * ld + p.M, ld - p.M, E{});
  }
  Scalar* out = static_cast<Scalar*>(p.out);
  const int64_t next_task = columns_of_next_task(p, n0);
  for (int64_t n = n0; n < n0 + N; n += kStripRows) {
    const int64_t columns = std::min(n0 + N - n, kStripRows);
    const int64_t next_n = n + columns < n0 + N ? n + columns : next_task;
    // `next` is read after these rows of a weight.
    const auto multiply = [&](Rows<Scalar> rows, const Scalar* next, FeatureVector bias,
                              T* buffer) {
      const Operand<E> strip =
          left_rows<E>(Rows<Scalar>{rows.row(n), rows.row_stride, 1}, columns, p.K, weight_buffer);
      if constexpr (kUsesMatrixUnit<E>) {
        multiply_strip_on_matrix_unit(
            p.M, K, x_t, ld, strip.data, strip.ld, columns, next, product, buffer, kStripRows);
      } else {
        const Fetched fetched = fetched_meanwhile(strip.data, rows.row(n), next);
        for (int64_t m = 0; m < p.M; m += kRowsAtOnce)
          multiply_strip(
              std::min<int64_t>(p.M - m, kRowsAtOnce), K, x.data + m * x.ld, x.ld, strip.data,
              strip.ld, columns, fetched, buffer + m * kStripRows, kStripRows, false,
              elements<E>(kBlockDepth<E>));
      }
      return Sums<T>{buffer, kStripRows, bias, n};
    };
    const auto next_of = [&](Rows<Scalar> rows) {
      return next_n < p.N ? rows.row(next_n) : nullptr;
    };
    const Sums<T> factor = p.gated ? multiply(up, weight.row(n), p.up_bias, buffers[1]) : Sums<T>{};
    const Sums<T> sums = multiply(weight, next_of(p.gated ? up : weight), p.bias, buffers[0]);
    apply_epilogue(p, sums, factor, p.M, columns, out + n, p.N);
    if constexpr (std::is_same_v<Scalar, T>)
      for (int64_t m = 0; m < p.M; ++m)
        std::copy_n(sums.data + m * kStripRows, columns, out + m * p.N + n);
  }
}

// run_unpacked for a weight that is stored by columns. Each column is a row of the product's B,
// which is read in place, or converted block by block.
template <class Scalar>
void run_unpacked_columns(const LinearProblem& p, int64_t task) {
  using E = ElementOf<Scalar>;
  using T = AccumulatorOf<E>;
  constexpr int64_t block_size = panel_size<E>(kBlockDepth<E>);
  // One row is multiplied three times, and the first result is used. On Zen 4 a product of one row
  // is so fast that prefetches come in bursts, of which some are dropped: with one product, 768
  // rows of 2304 columns in float32 are read at 27 GB/s, with three at 40 GB/s.
  constexpr int64_t kRepeats = 3;
  static thread_local Scratch scratch;
  const int64_t n0 = task * p.columns_per_task;
  const int64_t N = std::min(p.N - n0, p.columns_per_task), ld = round_up(N, kTile);
  scratch.reset(
      Scratch::bytes<E>(left_rows_size<E>(p.M, p.K)) + Scratch::bytes<E>(block_size) +
          Scratch::bytes<T>(std::max(p.M, kRepeats) * ld),
      "a thread of linear");
  E* x_buffer = scratch.take<E>(left_rows_size<E>(p.M, p.K));
  E* block_buffer = scratch.take<E>(block_size);
  T* sums = scratch.take<T>(std::max(p.M, kRepeats) * ld);
  [[maybe_unused]] const MatrixUnit unit;
  const Operand<E> x = left_rows<E>(
      Rows<Scalar>{static_cast<const Scalar*>(p.x), p.x_row, p.x_column}, p.M, p.K, x_buffer);
  const Rows<Scalar> weight{static_cast<const Scalar*>(p.weight) + n0, p.weight_column, 1};
  for (int64_t k = 0; k < p.K; k += kBlockDepth<E>) {
    const int64_t depth = std::min(p.K - k, kBlockDepth<E>), K = elements<E>(depth);
    const E* a = x.data + elements<E>(k);
    for (int64_t n = 0; n < N; n += kTile) {
      const int64_t columns = std::min(N - n, kTile);
      T* c = sums + n;
      if constexpr (std::is_same_v<Scalar, E>) {
        if (columns == kTile) {
          const E* b = weight.row(k) + n;
          if (kRegisterRows > 2 && p.M <= kFewRows) {
            const bool alone = p.M == 1;
            const int64_t rows = alone ? kRepeats : p.M, row = alone ? 0 : x.ld;
            if constexpr (kStripWidth<E> == kTile) {
              few_rows(rows, K, a, row, b, weight.row_stride, c, ld, {k > 0});
            } else {
              const E* next = n + kTile < N ? b + kTile : weight.row(k + kBlockDepth<E>);
              few_rows_of_tile(rows, K, a, row, b, weight.row_stride, next, c, ld, {k > 0});
            }
            continue;
          }
          tile_gemm<E>(p.M, kTile, K, a, x.ld, 1, b, weight.row_stride, c, ld, {k > 0});
          continue;
        }
      }
      // Meanwhile the next block is prefetched.
      constexpr int64_t kRows = 8;
      const Rows<Scalar> block{weight.row(k) + n, weight.row_stride, 1};
      const Rows<Scalar> next{
          n + kTile < N ? block.row(0) + kTile : weight.row(k + kBlockDepth<E>), block.row_stride,
          1};
      for (int64_t r = 0; r < depth; r += kRows) {
        for (int64_t c = 0; c < kTile; c += 64 / static_cast<int64_t>(sizeof(Scalar)))
          prefetch_rows<kRows>(next, r, c);
        copy_right_rows<E>(
            Rows<Scalar>{block.row(r), block.row_stride, 1}, std::min(depth - r, kRows), columns,
            kTile, block_buffer + elements<E>(r) * kTile);
      }
      tile_gemm<E>(p.M, columns, K, a, x.ld, 1, block_buffer, kTile, c, ld, {k > 0});
    }
  }
  Scalar* out = static_cast<Scalar*>(p.out) + n0;
  apply_epilogue(p, Sums<T>{sums, ld, p.bias, n0}, Sums<T>{}, p.M, N, out, p.N);
  if constexpr (std::is_same_v<Scalar, T>)
    for (int64_t m = 0; m < p.M; ++m) std::copy_n(sums + m * ld, N, out + m * p.N);
}

template <class Scalar>
void pack(const LinearProblem& p, int64_t panel) {
  using E = ElementOf<Scalar>;
  static thread_local Scratch scratch;
  scratch.reset(Packer<E>::bytes(), "a thread that packs a weight");
  Packer<E>(scratch).panel(
      static_cast<const Scalar*>(p.weight) + panel * kTile * p.weight_row, p.weight_column,
      p.weight_row, p.K, std::min(p.N - panel * kTile, kTile),
      static_cast<E*>(p.packed) + panel * panel_size<E>(p.K));
}

template <class Scalar>
void unpack(const LinearProblem& p, int64_t panel) {
  using E = ElementOf<Scalar>;
  unpack_panel(
      static_cast<const E*>(p.packed) + panel * panel_size<E>(p.K), p.K,
      std::min(p.N - panel * kTile, kTile), static_cast<Scalar*>(p.out) + panel * kTile * p.K);
}

// Sums all 32-bit words, each times a factor that depends on its position, modulo 2^64. Data that
// differ in one word have different sums; other differences collide with a probability of about
// 2^-64.
//
// Four parts are read at the same time. The hardware prefetcher works within a page of memory, so
// it then follows four pages at a time.
uint64_t checksum(const void* data, int64_t words) {
  constexpr int kParts = 4;
  constexpr uint32_t kFirst = 0x7F4A7C15u, kStep = 0x9E3779B9u;
  const auto* word = static_cast<const uint32_t*>(data);
  const int64_t part = words / kParts;
  uint64_t sum = 0;
  const auto add = [&](int64_t i) {
    sum += uint64_t(word[i]) * (kFirst + static_cast<uint32_t>(i) * kStep);
  };
  for (int64_t i = 0; i < part; ++i)
    for (int p = 0; p < kParts; ++p) add(p * part + i);
  for (int64_t i = kParts * part; i < words; ++i) add(i);
  return sum;
}

int64_t panel_bytes(DType dtype, int64_t K) {
  return for_type(dtype, [&]<class Scalar>() -> int64_t {
    return panel_size<ElementOf<Scalar>>(K) * sizeof(ElementOf<Scalar>);
  });
}

void pack_any(const LinearProblem& p, int64_t panel) {
  for_type(p.dtype, [&]<class Scalar>() { pack<Scalar>(p, panel); });
}

void unpack_any(const LinearProblem& p, int64_t panel) {
  for_type(p.dtype, [&]<class Scalar>() { unpack<Scalar>(p, panel); });
}

void run_any(const LinearProblem& p, int64_t task) {
  for_type(p.dtype, [&]<class Scalar>() {
    if constexpr (kUsesMatrixUnit<ElementOf<Scalar>>) run_on_matrix_unit<Scalar>(p, task);
    else run<Scalar>(p, task);
  });
}

void run_unpacked_any(const LinearProblem& p, int64_t task) {
  for_type(p.dtype, [&]<class Scalar>() {
    if (p.weight_column == 1) run_unpacked<Scalar>(p, task);
    else run_unpacked_columns<Scalar>(p, task);
  });
}

}  // namespace

LinearKernel linear() {
  constexpr bool matrix_unit = kUsesMatrixUnit<ElementOf<c10::BFloat16>>;
  constexpr int64_t row_block = matrix_unit ? kTile : kRegisterRows;
  constexpr int64_t few_rows = matrix_unit ? 64 : 16;
  constexpr int64_t task_rows = matrix_unit ? 512 : 120;
  return {
      .panel = kTile,
      .row_block = row_block,
      .task_rows = task_rows,
      .few_rows = few_rows,
      .panel_bytes = panel_bytes,
      .pack = pack_any,
      .unpack = unpack_any,
      .run = run_any,
      .run_unpacked = run_unpacked_any,
      .checksum = checksum,
  };
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
