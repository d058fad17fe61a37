// Attention forward on a CPU for few queries: a step of decoding, a short sentence.
//
// A task owns the queries of up to kFewRows rows (32, or 16 on the matrix unit): those of one
// sequence and of some heads that share a key head, (h, i) in order. It reads their keys and values
// once, 64 keys at a time, for all rows together.
//
// If there are too few such tasks for the threads, each is split into one for each chunk of keys
// (attention_chunks.h). The task that finishes last joins the chunks' sums, which take about
// kFewRows / kChunkKeys of the size of keys and values.
//
// A tile of scores is stored by rows, with vectors along the keys, because a vector of queries
// would be nearly empty. The other kernel (attention_forward_kernel.cpp) takes as long for one
// query as for a vector of queries.
//
//             standard tile, 64 queries                 this tile, R rows
//             q0 q1 q2 ... q63                          k0 k1 k2 ... k63
//         k0  [ one vector ]                      h0 q0 [ one vector ]
//         k1  [            ]                      h0 q1 [            ]
//        ...                                      h1 q0 [            ]
//
// For one or two rows, keys are transposed: in registers, where E fills whole vectors. For more
// rows, single numbers of the keys are multiplied by short vectors of queries, and then the scores
// are transposed, of which there are fewer; with_row_vectors has the exceptions. The matrix unit
// works in this way for any number of rows. Every sum has the same terms in the same order as in
// the other kernel, so results have the same bits.
//
// Floor: keys and values are read once, at the rate of the cache or memory that holds them. In
// addition, a key takes E / lanes steps of the transposition (about 4 instructions each), or E
// multiply-adds of short vectors, and each row takes (E + Ev) / lanes multiply-adds for it.

#pragma once

#include <atomic>
#include <bit>
#include <cstring>

#include "cpu/attention_chunks.h"
#include "cpu/attention_output.h"
#include "cpu/attention_tile.h"

namespace trifuse::TRIFUSE_CAPABILITY {

// The most queries of a call for this kernel, and the most rows of a task. On the matrix unit a
// register has 16 rows, and buffers of rows are padded to that number.
template <class E>
constexpr int64_t kFewQueries = kUsesMatrixUnit<E> ? 16 : 8;
template <class E>
constexpr int64_t kFewRows = kUsesMatrixUnit<E> ? 16 : 32;

// The least number of tasks that a thread runs together, if there are enough tasks.
constexpr int64_t kFewTasks = 4;

template <class E>
constexpr bool kHasFewQueries = sizeof(E) == sizeof(float);

template <class E>
inline bool has_few_queries(const AttentionProblem& p) {
  return kHasFewQueries<E> && 0 < p.Lq && p.Lq <= kFewQueries<E> && p.heads > 0 && p.kv_heads > 0;
}

// Returns the number of chunks that a task of few queries may be split into.
inline int64_t chunks_of_task(const AttentionProblem& p) {
  return p.Lk > 0 ? chunk_of(p.Lk - 1) + 1 : 1;
}

// How the heads that share a key head are distributed over tasks: as evenly as possible, in tasks
// of kFewRows rows, or of fewer if there would be too few tasks for the threads.
template <class E>
struct Group {
  int64_t size;        // heads that share a key head
  int64_t task_heads;  // heads of a task; the last task of a group may have fewer
  int64_t tasks;

  explicit Group(const AttentionProblem& p) : size(p.heads / p.kv_heads) {
    const int64_t wanted = 2 * p.threads;
    for (int64_t rows = kFewRows<E>; rows >= kFewQueries<E>; rows /= 2) {
      distribute(rows / p.Lq);
      if (p.batch * p.kv_heads * tasks * chunks_of_task(p) >= wanted) break;
    }
  }

 private:
  void distribute(int64_t most_heads) {
    tasks = (size + most_heads - 1) / most_heads;
    task_heads = (size + tasks - 1) / tasks;
    tasks = (size + task_heads - 1) / task_heads;
  }
};

// The sums of one chunk of keys of a task that is split: (row_max, row_sum, out) of its rows.
template <class E>
struct ChunkSums {
  static constexpr int64_t kRows = round_up(kFewRows<E>, 16);  // whole vectors are read

  uint64_t* seen;            // bit r: row r has a key in the chunk
  float *row_max, *row_sum;  // [rows]
  float* out;                // [rows][Ev], rows of whole vectors

  ChunkSums(const AttentionProblem& p, int64_t task)
      : seen(reinterpret_cast<uint64_t*>(p.chunk_sums + task * bytes(p))),
        row_max(reinterpret_cast<float*>(seen + 8)), row_sum(row_max + kRows),
        out(row_sum + kRows) {}

  static int64_t bytes(const AttentionProblem& p) {
    return 64 + Scratch::bytes<float>(kRows * 2) +
        Scratch::bytes<float>(kFewRows<E> * padded<E>(p.Ev));
  }
};

// Transposes a square of keys, of at most one vector's length in both directions, into squares of
// `transposed`, whose rows are kTile apart. Writes zeros past the last key.
template <class E>
inline void transpose_keys(
    const E* keys, int64_t ld, int64_t count, int64_t columns, E* transposed) {
  constexpr int64_t L = Vectorized<float>::size();
  if (count == L && columns == L) {
    transpose_square(
        reinterpret_cast<const float*>(keys), ld, reinterpret_cast<float*>(transposed), kTile);
    return;
  }
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t j = 0; j < L; ++j) transposed[c * kTile + j] = j < count ? keys[j * ld + c] : E{};
}

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)

// As few_products, for R rows whose columns fill whole vectors. Keys are transposed in registers
// and multiplied at once. Two vectors of keys at a time make enough independent sums. Keys that do
// not fill two vectors are left out. Returns the number of the others.
template <int R, class E, class Between>
inline int64_t products_in_registers(
    Operand<E> query, Operand<E> key, int64_t keys, int64_t columns, float* scores,
    const Between& between) {
  using Vec = Vectorized<float>;
  constexpr int64_t L = Vec::size(), kGroups = 2;
  int64_t j = 0;
  for (; j + kGroups * L <= keys; j += kGroups * L) {
    const auto group = [&](int64_t g) {
      return TransposedRows(
          reinterpret_cast<const float*>(key.data + (j + g * L) * key.ld), key.ld);
    };
    const TransposedRows rows[kGroups] = {group(0), group(1)};
    Vec sum[kGroups][R];
#pragma GCC unroll 2
    for (int64_t g = 0; g < kGroups; ++g)
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) sum[g][r] = Vec(0.0f);
    for (int64_t first = 0; first < columns; first += L)
#pragma GCC unroll 4
      for (int64_t c = first; c < first + L; c += 4)
#pragma GCC unroll 2
        for (int64_t g = 0; g < kGroups; ++g) {
          if (c - first == g * (L / kGroups)) between(j + g * L, first);
          rows[g].for_columns(c, [&](int64_t i, Vec column) TRIFUSE_INLINE {
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r)
              sum[g][r] = Element<E>::multiply_add(
                  Element<E>::broadcast(query.data + r * query.ld + c + i),
                  std::bit_cast<typename Element<E>::Vector>(column), sum[g][r]);
          });
        }
#pragma GCC unroll 2
    for (int64_t g = 0; g < kGroups; ++g)
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) sum[g][r].store(scores + r * kTile + j + g * L);
  }
  return j;
}

#endif

// scores[r][j] = query r · key j for all keys of a tile; 0 up to the next whole vector. transposed
// (columns, 64) is scratch memory. Calls between(row, column) before each square of keys.
template <class E, class Between>
inline void few_products(
    Operand<E> query, int64_t rows, Operand<E> key, int64_t keys, int64_t columns, E* transposed,
    float* scores, const Between& between) {
  constexpr int64_t L = Vectorized<float>::size();
  int64_t done = 0;
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if (columns % L == 0) {
    if (rows == 1) done = products_in_registers<1>(query, key, keys, columns, scores, between);
    else if (rows == 2) done = products_in_registers<2>(query, key, keys, columns, scores, between);
  }
  if (done == keys) return;
#endif
  for (int64_t j = done; j < keys; j += L)
    for (int64_t c = 0; c < columns; c += L) {
      between(j, c);
      transpose_keys(
          key.data + j * key.ld + c, key.ld, std::min(L, keys - j), std::min(L, columns - c),
          transposed + c * kTile + j);
    }
  tile_gemm<E>(
      rows, round_up(keys, L) - done, columns, query.data, query.ld, 1, transposed + done, kTile,
      scores + done, kTile);
}

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)

template <int64_t lanes>
struct RowLanes;
template <>
struct RowLanes<4> {
  using Vector = __m128;
};
template <>
struct RowLanes<8> {
  using Vector = __m256;
};
#ifdef CPU_CAPABILITY_AVX512
template <>
struct RowLanes<16> {
  using Vector = __m512;
};
#endif

// sum + *key · query, where a vector holds an element of several queries.
inline __m128 add_product(__m128 sum, const float* key, __m128 query) {
  return _mm_fmadd_ps(_mm_set1_ps(*key), query, sum);
}
inline __m256 add_product(__m256 sum, const float* key, __m256 query) {
  return _mm256_fmadd_ps(_mm256_set1_ps(*key), query, sum);
}
#ifdef CPU_CAPABILITY_AVX512
inline __m512 add_product(__m512 sum, const float* key, __m512 query) {
  return _mm512_fmadd_ps(_mm512_set1_ps(*key), query, sum);
}
#endif
#ifdef __AVX512BF16__
inline __m128 add_product(__m128 sum, const BFloat16Pair* key, __m128 query) {
  return _mm_dpbf16_ps(
      sum, (__m128bh)_mm_set1_epi32(std::bit_cast<int32_t>(*key)), (__m128bh)query);
}
inline __m256 add_product(__m256 sum, const BFloat16Pair* key, __m256 query) {
  return _mm256_dpbf16_ps(
      sum, (__m256bh)_mm256_set1_epi32(std::bit_cast<int32_t>(*key)), (__m256bh)query);
}
inline __m512 add_product(__m512 sum, const BFloat16Pair* key, __m512 query) {
  return _mm512_dpbf16_ps(
      sum, (__m512bh)_mm512_set1_epi32(std::bit_cast<int32_t>(*key)), (__m512bh)query);
}
#endif

// The product for up to V · lanes rows. A register block has as many sums as a whole vector has
// lanes.
template <class E, int64_t lanes, int64_t V = 1>
struct RowVectors {
  using Vector = typename RowLanes<lanes>::Vector;
  static constexpr int64_t L = Vectorized<float>::size(), kRows = V * lanes, kKeys = L / V;

  // As few_products, but writes kRows rows of scores. query_t (columns, kRows) holds the queries,
  // and 0 past the last row. product (64, kRows) is scratch memory.
  template <class Between>
  static void multiply(
      const E* query_t, Operand<E> key, int64_t keys, int64_t columns, float* product,
      float* scores, const Between& between) {
    int64_t k = 0;
    const auto multiply_some = [&]<int64_t K>(const auto& fetch) TRIFUSE_INLINE {
      for (; keys - k >= K; k += K)
        block<K>(query_t, {key.data + k * key.ld, key.ld}, columns, product + k * kRows, fetch);
    };
    // The blocks that share a square of keys fetch its columns in turn.
    multiply_some.template operator()<kKeys>([&](int64_t c) TRIFUSE_INLINE {
      if (c / L % V == k / kKeys % V) between(k / L * L, c);
    });
    const auto nothing = [](int64_t) {};
    if constexpr (kKeys > 4) multiply_some.template operator()<4>(nothing);
    multiply_some.template operator()<1>(nothing);
    std::fill_n(product + keys * kRows, (round_up(keys, L) - keys) * kRows, 0.0f);
    for (int64_t j = 0; j < keys; j += L)
      for (int64_t r = 0; r < kRows; r += lanes)
        transpose_square<lanes>(product + j * kRows + r, kRows, scores + r * kTile + j, kTile);
  }

 private:
  // The products of K keys. Calls fetch(c) before each L columns.
  template <int64_t K, class Fetch>
  TRIFUSE_INLINE static void block(
      const E* query_t, Operand<E> key, int64_t columns, float* product, const Fetch& fetch) {
    Vector sum[K][V] = {};
    // Every fourth key: there are too few registers for the address of each.
    const E* fourth[(K + 3) / 4];
#pragma GCC unroll 4
    for (int64_t k = 0; k < (K + 3) / 4; ++k) {
      fourth[k] = key.data + 4 * k * key.ld;
      asm("" : "+r"(fourth[k]));
    }
    for (int64_t first = 0; first < columns; first += L) {
      fetch(first);
      const int64_t last = std::min(first + L, columns);
      for (int64_t c = first; c < last; ++c) {
        Vector query[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
          std::memcpy(&query[v], query_t + c * kRows + v * lanes, sizeof(Vector));
#pragma GCC unroll 16
        for (int64_t k = 0; k < K; ++k)
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v)
            sum[k][v] = add_product(sum[k][v], fourth[k / 4] + k % 4 * key.ld + c, query[v]);
      }
    }
#pragma GCC unroll 16
    for (int64_t k = 0; k < K; ++k)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v)
        std::memcpy(product + k * kRows + v * lanes, &sum[k][v], sizeof(Vector));
  }
};

// Calls use(RowVectors) with vectors for `rows` rows, and returns true if these save time. For one
// or two rows, transposing keys takes less. Keys that are far apart lie in few sets of the L1
// cache.
template <class E, class Use>
inline bool with_row_vectors(int64_t rows, int64_t key_ld, const Use& use) {
  constexpr int64_t kFarApart = 256;
  if (rows <= 2 || key_ld > kFarApart) return false;
#ifdef __AVX512BF16__
  if (kPack<E> == 2 && splits_pairs.load(std::memory_order_relaxed)) return false;
#endif
  if (rows <= 4) use(RowVectors<E, 4>());
  else if (rows <= 8) use(RowVectors<E, 8>());
#ifdef CPU_CAPABILITY_AVX512
  else if (rows <= 16) use(RowVectors<E, 16>());
  else use(RowVectors<E, 16, 2>());
#else
  else if (rows <= 16) use(RowVectors<E, 8, 2>());
  else use(RowVectors<E, 8, 4>());
#endif
  return true;
}

#else

template <class E, class Use>
inline bool with_row_vectors(int64_t, int64_t, const Use&) {
  return false;
}

#endif

// As few_products, on the matrix unit. query_t (E / 2, 16) holds the rows, padded with 0 to 16.
// product (32, 16) is scratch memory. More rows of scores may be written.
template <class E, class Between>
inline void few_products_by_keys(
    const E* query_t, int64_t rows, Operand<E> key, int64_t keys, int64_t columns, float* product,
    float* scores, const Between& between) {
  using Vec = Vectorized<float>;
  constexpr int64_t L = Vec::size(), kRows = kFewRows<E>;
  constexpr int64_t kGathered = 4;  // up to this many rows, gathering beats transposing
  const auto step = Vectorized<int32_t>::arange(0, kRows);
  for (int64_t j = 0; j < keys; j += 2 * L) {
    const int64_t count = std::min(2 * L, keys - j), padded_count = round_up(count, L);
    for (int64_t i = 0; i < padded_count; i += L)
      for (int64_t c = 0; c < columns; c += L) between(j + i, c);
    tile_gemm<E>(
        count, kRows, columns, key.data + j * key.ld, key.ld, 1, query_t, kRows, product, kRows);
    std::fill_n(product + count * kRows, (padded_count - count) * kRows, 0.0f);
    for (int64_t i = 0; i < padded_count; i += L) {
      const float* square = product + i * kRows;
      if (rows > kGathered) {
        transpose_square(square, kRows, scores + j + i, kTile);
        continue;
      }
      for (int64_t r = 0; r < rows; ++r)
        at::vec::gather<sizeof(float)>(square + r, step).store(scores + r * kTile + j + i);
    }
  }
}

#ifdef __AVX512BF16__

// Rounds n weights, whole vectors, to values of bfloat16.
inline void round_weights(const float* weights, float* rounded, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    const auto half = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(weights + i));
    _mm512_storeu_ps(rounded + i, lower_values(_mm512_cvtepu16_epi32(half)));
  }
}

#endif
#ifdef __AMX_BF16__

// OneRow computes one row, a step of decoding, with the bits that the matrix unit gives for 16
// rows. few_products_by_keys would compute 16 columns and keep one; this product has one column.
// Vectors multiply weights by values as they are stored, because laying the values out in pairs
// would take longer.
//
// Floor for 64 keys and E = Ev = 64: 8 register products take 128 cycles; 512 vector instructions
// for the values take 256 cycles; a chain of 64 additions for the sum of weights takes 256 cycles.
struct OneRow {
  // Returns whether OneRow can be used: the unit works, and whole registers and vectors are read in
  // place.
  static bool serves(const AttentionProblem& p, int64_t rows) {
    return rows == 1 && p.E % 32 == 0 && p.Ev % 32 == 0 && p.key.stride[3] == 1 &&
        p.key.stride[2] % 2 == 0 && p.value.stride[3] == 1 && matrix_unit_works();
  }

  // scores[j] = query · key j; 0 up to the next whole vector. buffer holds 16 keys.
  static void products(
      const BFloat16Pair* query, Operand<BFloat16Pair> key, int64_t keys, int64_t columns,
      BFloat16Pair* buffer, float* scores) {
    const int64_t whole = keys / kUnitRows, rest = keys % kUnitRows;
    multiply_by_column(whole, columns, {key.data, key.ld}, query, scores);
    if (rest == 0) return;
    const int64_t j = whole * kUnitRows;
    const PairRows last = missing_rows({key.data + j * key.ld, key.ld}, rest, columns, buffer);
    multiply_by_column(1, columns, last, query, scores + j);
    std::fill_n(scores + keys, kUnitRows - rest, 0.0f);
  }

  // Adds weights · values to out, and returns the sum of the weights, in the order of by_rows. The
  // chain of its additions overlaps with the products.
  static float add(
      const float* weights, Rows<c10::BFloat16> values, int64_t keys, int64_t columns, float* out) {
    alignas(64) float rounded[kTile];
    round_weights(weights, rounded, round_up(keys, 16));
    float sum = 0;
    add_row_product(
        keys, columns, rounded, reinterpret_cast<const uint16_t*>(values.data), values.row_stride,
        out, [&](int64_t j) TRIFUSE_INLINE { sum += weights[j]; });
    return sum;
  }
};

#elif defined(__AVX512BF16__)

// Multiplies weights by values as they are stored, with the bits of the product of pairs. Laying
// the values out in pairs would take longer for one or two rows, and for more rows if register
// blocks split pairs again.
struct ValuesInPlace {
  static bool serves(const AttentionProblem& p, int64_t rows) {
    return p.Ev > 0 && p.Ev % 32 == 0 && p.value.stride[3] == 1 &&
        (rows <= 2 || splits_pairs.load(std::memory_order_relaxed));
  }

  // out (rows x columns) = out · rescale + weights · values; sum[r] = the sum of row r's weights,
  // key by key. The chain of its additions overlaps with the products.
  static void add(
      int64_t rows, const float* weights, Rows<c10::BFloat16> values, int64_t keys, int64_t columns,
      const float* rescale, float* out, int64_t ld, float* sum) {
    int64_t r = 0;
    const auto block = [&]<int R>() {
      alignas(64) float rounded[R * kTile];
      for (int i = 0; i < R; ++i)
        round_weights(weights + (r + i) * kTile, rounded + i * kTile, round_up(keys, 16));
      const auto add_columns = [&]<int NR>(int64_t c, auto&& beside) {
        add_block<R, NR>(
            rounded, values.data + c, values.row_stride, keys, rescale + r, out + r * ld + c, ld,
            beside);
      };
      float total[R] = {};
      const auto add_weights = [&](int64_t j) TRIFUSE_INLINE {
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) total[i] += weights[(r + i) * kTile + j];
      };
      const auto nothing = [](int64_t) {};
      if (columns >= 64) add_columns.template operator()<2>(0, add_weights);
      else add_columns.template operator()<1>(0, add_weights);
      int64_t c = 64;
      for (; c + 64 <= columns; c += 64) add_columns.template operator()<2>(c, nothing);
      if (c < columns) add_columns.template operator()<1>(c, nothing);
      std::copy_n(total, R, sum + r);
      r += R;
    };
    while (r + 4 <= rows) block.template operator()<4>();
    if (r + 2 <= rows) block.template operator()<2>();
    if (r < rows) block.template operator()<1>();
  }

 private:
  // 32 NR columns of R rows. A word of values holds two columns, which are split into a vector of
  // even columns and one of odd columns. Calls beside(j) for each key j in order.
  template <int R, int NR, class Beside>
  static void add_block(
      const float* weights, const c10::BFloat16* values, int64_t values_ld, int64_t keys,
      const float* rescale, float* out, int64_t ld, const Beside& beside) {
    __m512 sum[R][2 * NR];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int n = 0; n < 2 * NR; ++n) sum[r][n] = _mm512_setzero_ps();
    const auto add_key = [&](const float* weight,
                             const c10::BFloat16* row) TRIFUSE_INLINE {
#pragma GCC unroll 2
      for (int n = 0; n < NR; ++n) {
        const __m512i words = _mm512_loadu_si512(row + 32 * n);
        const __m512 even = lower_values(words), odd = upper_values(words);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512 factor = _mm512_set1_ps(weight[r * kTile]);
          sum[r][2 * n] = _mm512_fmadd_ps(factor, even, sum[r][2 * n]);
          sum[r][2 * n + 1] = _mm512_fmadd_ps(factor, odd, sum[r][2 * n + 1]);
        }
      }
    };
    {
      const NoSubnormals mode;
      // The order within a pair: its upper key first.
      int64_t j = 0;
      for (; j + 1 < keys; j += 2, weights += 2, values += 2 * values_ld) {
        beside(j);
        add_key(weights + 1, values + values_ld);
        beside(j + 1);
        add_key(weights, values);
      }
      if (j < keys) {
        beside(j);
        add_key(weights, values);
      }
    }
    const auto update = [](float* to, __m512 scale, __m512 sums) TRIFUSE_INLINE {
      _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), scale, sums));
    };
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512 scale = _mm512_set1_ps(rescale[r]);
#pragma GCC unroll 2
      for (int n = 0; n < NR; ++n) {
        const Columns sums(sum[r][2 * n], sum[r][2 * n + 1]);
        update(out + r * ld + 32 * n, scale, sums.first);
        update(out + r * ld + 32 * n + 16, scale, sums.last);
      }
    }
  }
};

#endif

// The mask of a tile, by rows: queries [0, Lq) of some heads from h0 on.
template <class E>
struct FewMask {
  uint64_t bits[kFewRows<E>];                   // bit j of word r: row r attends to key j
  alignas(64) float bias[kFewRows<E> * kTile];  // [r][j]: as TileMask's, if there is any
  int64_t keys;  // number of keys up to the last one attended to, or one more
  bool full;     // whether all rows attend to all keys

  // Reads the masks of keys [j, j + kTile), head by head, into `head`.
  template <class Scalar>
  void read(
      const AttentionProblem& p, const Sequence& s, int64_t h0, int64_t rows, int64_t j,
      TileMask<float>& head) {
    const int64_t columns = std::min(kTile, s.keys - j);
    keys = 0;
    full = true;
    for (int64_t r = 0; r < rows; r += s.Lq) {
      const Cover cover = head.template read<Scalar>(p, s, h0 + r / s.Lq, 0, s.Lq, j, columns);
      full &= cover == Cover::Full;
      if (cover != Cover::Empty) keys = std::max(keys, head.keys);
      for (int64_t i = 0; i < s.Lq; ++i) {
        uint64_t& row = bits[r + i];
        row = cover == Cover::Full ? low_bits(columns) : 0;
        if (cover == Cover::Partial)
          for (int64_t c = 0; c < columns; ++c) row |= (head.bits[c] >> i & 1) << c;
        if (has_bias(p))
          for (int64_t c = 0; c < kTile; ++c)
            bias[(r + i) * kTile + c] = c < columns ? head.bias[c * kTile + i] : 0.0f;
      }
    }
  }
};

// Sets the weights of keys [j, j + kTile) that dropout drops to 0.
inline void drop_few_weights(
    const AttentionProblem& p, const Sequence& s, int64_t h0, int64_t rows, int64_t j,
    float* weights) {
  using Vec = Vectorized<float>;
  const Dropout& draw = p.dropout;
  for (int64_t r = 0; r < rows; ++r) {
    const uint64_t plane = draw.place.unit(s.index * p.heads + h0 + r / s.Lq);
    const uint64_t kept = dropout_row(
        draw.seed, plane, draw.place.row + r % s.Lq, draw.place.column + j, draw.threshold);
    for (int64_t l = 0; l < kTile; l += Vec::size()) {
      float* row = weights + r * kTile + l;
      select(kept >> l, Vec::loadu(row), Vec(0.0f)).store(row);
    }
  }
}

// If p.key_chunks > 1, a task is split into that many: task % p.key_chunks is its chunk of keys.
template <class Scalar>
void run_few_queries(const AttentionProblem& p, int64_t split_task) {
  using E = typename Compute<Scalar>::Element;
  const bool split = p.key_chunks > 1;
  const int64_t task = split_task / p.key_chunks;
  const Group<E> group(p);
  constexpr int64_t kRows = kFewRows<E>;
  const int64_t kv_head = task / group.tasks % p.kv_heads;
  const int64_t first = task % group.tasks * group.task_heads, h0 = kv_head * group.size + first;
  const Sequence s(p, task / group.tasks / p.kv_heads);
  const int64_t rows = std::min(group.task_heads, group.size - first) * s.Lq;
  if (rows == 0) return;
  const int64_t out_ld = padded<E>(p.Ev);
  const int64_t out_rows = kUsesMatrixUnit<E> ? kRows : rows;  // that products are added to
  const Scale<float> scale(p);
  const bool ahead = reads_memory<Scalar>(p) && (kUsesMatrixUnit<E> || fetches_rows_ahead());

  // On the matrix unit and for vectors of rows the queries are transposed, otherwise the keys of a
  // tile.
  const int64_t query_ld = elements<E>(p.E),
                transposed_size = query_ld * (kUsesMatrixUnit<E> ? kRows : kTile),
                product_size = kRows * (kUsesMatrixUnit<E> ? 2 * kRows : kTile);

  thread_local Scratch scratch;
  scratch.reset(
      Scratch::bytes<TileMask<float>>(1) + Scratch::bytes<FewMask<E>>(1) +
          Scratch::bytes<E>(left_rows_size<E>(kRows, p.E)) +
          Scratch::bytes<E>(left_rows_size<E>(kTile, p.E)) +
          Scratch::bytes<E>(right_rows_size<E>(kTile, p.Ev)) + Scratch::bytes<E>(kRows * kTile) +
          Scratch::bytes<float>(kRows * kTile) + 2 * Scratch::bytes<float>(kRows * out_ld) +
          Scratch::bytes<E>(transposed_size) + Scratch::bytes<float>(product_size),
      "a thread of attention");
  TileMask<float>& head_mask = *scratch.take<TileMask<float>>(1);
  FewMask<E>& mask = *scratch.take<FewMask<E>>(1);
  E* query_buffer = scratch.take<E>(left_rows_size<E>(kRows, p.E));    // [rows][E]
  E* key_buffer = scratch.take<E>(left_rows_size<E>(kTile, p.E));      // [64][E]
  E* value_buffer = scratch.take<E>(right_rows_size<E>(kTile, p.Ev));  // [64][Ev]
  E* weight_buffer = scratch.take<E>(kRows * kTile);                   // [rows][64 / pack]
  float* scores = scratch.take<float>(kRows * kTile);                  // [rows][keys]
  float* out = scratch.take<float>(kRows * out_ld);                    // [rows][Ev]
  float* joined_out = scratch.take<float>(kRows * out_ld);             // [rows][Ev]

  for (int64_t r = 0; r < rows; r += s.Lq) {
    E* const copy = query_buffer + r * query_ld;
    const Operand<E> head =
        left_rows<E>(s.query_rows<Scalar>(p.query, h0 + r / s.Lq, 0), s.Lq, p.E, copy, scale.sign);
    if (head.data != copy)
      for (int64_t i = 0; i < s.Lq; ++i)
        std::copy_n(head.data + i * head.ld, query_ld, copy + i * query_ld);
  }
  E* transposed = scratch.take<E>(transposed_size);    // queries [E][rows], or keys [E][64]
  float* product = scratch.take<float>(product_size);  // [keys][rows]
  const auto transpose_queries = [&](int64_t width) {
    for (int64_t k = 0; k < query_ld; ++k)
      for (int64_t r = 0; r < width; ++r)
        transposed[k * width + r] = r < rows ? query_buffer[r * query_ld + k] : E{};
  };
#ifdef __AMX_BF16__
  const bool one_row = OneRow::serves(p, rows);
#else
  constexpr bool one_row = false;
#endif
  if constexpr (kUsesMatrixUnit<E>) {
    if (!one_row) transpose_queries(kRows);
    std::fill_n(weight_buffer, kRows * kTile / 2, E{});
  } else {
    const int64_t key_ld =
        left_rows<E>(s.key_rows<Scalar>(p.key, kv_head, 0), 0, p.E, key_buffer).ld;
    with_row_vectors<E>(rows, key_ld, [&]<class V>(V) { transpose_queries(V::kRows); });
  }
  Softmax<E> softmax(scale.exponent);
  std::fill_n(out, out_rows * out_ld, 0.0f);

  JoinedChunks<E> joined(scale.exponent, joined_out);
  const auto end_chunk = [&] {
    joined.add(softmax.row_max, softmax.row_sum, out, rows, p.Ev, out_ld);
    softmax.restart();
    std::fill_n(out, out_rows * out_ld, 0.0f);
  };

  uint64_t seen = 0;  // bit r: row r has a key
  auto visible = s.visible(0, s.Lq);
  if (split) {
    const int64_t first = split_task % p.key_chunks * kChunkKeys;
    visible = {std::max(visible.first, first), std::min(visible.last, first + kChunkKeys)};
  }
  const int64_t first_key = visible.first / kTile * kTile;
  for (int64_t j = first_key; j < visible.last; j += kTile) {
    if (j % kChunkKeys == 0 && j > first_key) end_chunk();
    mask.template read<Scalar>(p, s, h0, rows, j, head_mask);
    for (int64_t r = 0; r < rows; ++r) seen |= uint64_t(mask.bits[r] != 0) << r;
    const int64_t keys = mask.keys;
    if (keys == 0) continue;

    const auto key_rows = s.key_rows<Scalar>(p.key, kv_head, j);
    const auto values = s.key_rows<Scalar>(p.value, kv_head, j);
    const auto key = left_rows<E>(key_rows, keys, p.E, key_buffer);
    // While a square of keys is transposed, the same square of this tile's values and of the next
    // tile's keys is prefetched. For one row on the matrix unit, the computation is so short
    // compared with the loads that prefetching gains nothing.
    constexpr int L = Vectorized<float>::size();
    const bool next_tile = visible.last - j >= 2 * kTile;
    const auto fetch = [&](int64_t row, int64_t column) TRIFUSE_INLINE {
      if (next_tile) prefetch_rows<L>(key_rows, kTile + row, column * kPack<E>);
      if (row + L <= keys) prefetch_rows<L>(values, row, column * kPack<E>);
    };
    const auto multiply = [&](const auto& between) TRIFUSE_INLINE {
#ifdef __AMX_BF16__
      if (one_row) return OneRow::products(query_buffer, key, keys, query_ld, key_buffer, scores);
#endif
      if constexpr (kUsesMatrixUnit<E>) {
        few_products_by_keys(transposed, rows, key, keys, query_ld, product, scores, between);
      } else {
        const auto by_vectors = [&]<class V>(V) TRIFUSE_INLINE {
          V::multiply(transposed, key, keys, query_ld, product, scores, between);
        };
        if (!with_row_vectors<E>(rows, key.ld, by_vectors))
          few_products<E>(
              {query_buffer, query_ld}, rows, key, keys, query_ld, transposed, scores, between);
      }
    };
    if (ahead) multiply(fetch);
    else multiply([](int64_t, int64_t) {});
    finish_scores(p, mask.bias, scale, rows, round_up(keys, Vectorized<float>::size()), scores);
    const bool finite = mask.full || all_finite(values, keys, p.Ev);
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    const bool in_place = finite && ValuesInPlace::serves(p, rows);
#else
    const bool in_place = finite && one_row;
#endif
    const bool sum_later = in_place && !p.dropout.threshold;
    softmax.by_rows(scores, mask.bits, rows, keys, !sum_later);

    if (p.dropout.threshold) drop_few_weights(p, s, h0, rows, j, scores);

#ifdef __AMX_BF16__
    if (in_place) {
      if (softmax.rescales) scale_rows(1, p.Ev, softmax.rescale, out, out_ld);
      const float sum = OneRow::add(scores, values, keys, p.Ev, out);
      if (sum_later) softmax.add_sum(0, sum);
      continue;
    }
#elif defined(__AVX512BF16__)
    if (in_place) {
      alignas(64) float sum[kRows];
      ValuesInPlace::add(rows, scores, values, keys, p.Ev, softmax.rescale, out, out_ld, sum);
      for (int64_t r = 0; r < rows && sum_later; ++r) softmax.add_sum(r, sum[r]);
      continue;
    }
#endif
    const auto value = right_rows(values, keys, p.Ev, value_buffer, !finite);
    const auto weight = pair_columns(scores, rows, keys, weight_buffer);
    if constexpr (kUsesMatrixUnit<E>) {  // 16 rows at once; those past `rows` stay 0
      if (softmax.rescales) scale_rows(rows, p.Ev, softmax.rescale, out, out_ld);
      tile_gemm(
          kRows, p.Ev, elements<E>(keys), weight.data, weight.ld, 1, value.data, value.ld, out,
          out_ld, {true});
    } else {
      tile_gemm(
          rows, p.Ev, elements<E>(keys), weight.data, weight.ld, 1, value.data, value.ld, out,
          out_ld, {true, softmax.rescale});
    }
    if (!finite)
      spread_nan(values, keys, p.Ev, out, out_ld, [&](int64_t k) {
        uint64_t reached = 0;
        for (int64_t r = 0; r < rows; ++r) reached |= (mask.bits[r] >> k & 1) << r;
        return reached;
      });
  }
  if (split) {
    const ChunkSums<E> own(p, split_task);
    *own.seen = seen;
    std::copy_n(softmax.row_max, ChunkSums<E>::kRows, own.row_max);
    std::copy_n(softmax.row_sum, ChunkSums<E>::kRows, own.row_sum);
    std::copy_n(out, rows * out_ld, own.out);
    std::atomic_ref<int32_t> done(p.chunks_done[task]);
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < p.key_chunks) return;
    seen = 0;
    for (int64_t c = 0; c < p.key_chunks; ++c) {
      const ChunkSums<E> sums(p, task * p.key_chunks + c);
      seen |= *sums.seen;
      joined.add(sums.row_max, sums.row_sum, sums.out, rows, p.Ev, out_ld);
    }
  } else if (!joined.empty()) {
    end_chunk();
  }
  const bool one_chunk = joined.empty();
  write_rows<Scalar>(
      p, s, one_chunk ? softmax : joined.softmax, scale, seen, rows, one_chunk ? out : joined_out,
      out_ld, [&](int64_t r) { return HeadAndQuery{h0 + r / s.Lq, r % s.Lq}; });
}

}  // namespace trifuse::TRIFUSE_CAPABILITY
