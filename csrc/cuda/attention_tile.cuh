// Shared by the attention kernels: tiles in shared memory, their products, and which query-key
// pairs take part.
//
// A warp owns 16 of its block's rows: queries, or keys in the kernel that sums over queries. The
// other side streams through two stages of shared memory, N columns at a time. A thread holds its
// fragment of a 16 x N tile as the tensor cores lay it out: rows lane / 4 and lane / 4 + 8, and in
// every eight columns the two from 2 (lane % 4) on. float32 products are ordinary fused
// multiply-adds, one term after the other and rounded as in eager torch, on the same layout, so the
// code between two products is the same for all types.

#pragma once

#include "cuda/attention.h"
#include "cuda/dtype.cuh"
#include "cuda/launch.h"
#include "cuda/philox.cuh"
#include "cuda/warp.cuh"

namespace trifuse::cuda {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_huge_valf(), kNan = __builtin_nanf("");
constexpr float kLowest = -3.40282347e38f;  // the lowest finite number

template <class Scalar>
constexpr bool kTensorCore = sizeof(Scalar) == 2;

__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp() { return threadIdx.x / 32; }
constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
__device__ __forceinline__ bool finite(float x) { return fabsf(x) < kInfinity; }

// Row and column of element f[n][e] of a thread's fragment f of a 16 x N tile.
__device__ __forceinline__ int row_of(int e) { return lane() / 4 + e / 2 * 8; }
__device__ __forceinline__ int column_of(int n, int e) { return 8 * n + lane() % 4 * 2 + e % 2; }

// Tiles -------------------------------------------------------------------------------------------

// A tensor's rows of one head of one sequence.
template <class Scalar>
struct Rows {
  Scalar* data;
  int64_t stride, column_stride;
  int columns;
  bool aligned;  // 16 bytes can be moved at once

  __device__ Rows(const Tensor4& t, int64_t batch, int head, int64_t first, int64_t columns)
      : data(
            static_cast<Scalar*>(t.data) + batch * t.stride[0] + head * t.stride[1] +
            first * t.stride[2]),
        stride(t.stride[2]), column_stride(t.stride[3]), columns(static_cast<int>(columns)) {
    const int64_t chunk = 16 / sizeof(Scalar);
    aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % chunk == 0 &&
        (column_stride == 1 || columns == 1);
  }
};

// Loads 16 bytes of a row from global memory; zeros past the row's end.
template <class Scalar>
__device__ __forceinline__ void load_chunk(
    float (&values)[16 / sizeof(Scalar)], const Rows<const Scalar>& from, int row, int column) {
  constexpr int kChunk = 16 / sizeof(Scalar);
  const Scalar* source = from.data + row * from.stride + column * from.column_stride;
  Scalar chunk[kChunk];
  if (from.aligned && column + kChunk <= from.columns) {
    const uint4 bytes = *reinterpret_cast<const uint4*>(source);
    memcpy(chunk, &bytes, 16);
  } else {
#pragma unroll
    for (int j = 0; j < kChunk; ++j)
      chunk[j] = column + j < from.columns ? source[j * from.column_stride] : narrow<Scalar>(0);
  }
#pragma unroll
  for (int j = 0; j < kChunk; ++j) values[j] = widen(chunk[j]);
}

// A tile in shared memory. Its chunks of 16 bytes are swizzled within a row, so that the chunks of
// eight neighbouring rows at the same column lie in different banks.
template <class Scalar>
struct Tile {
  static constexpr int kChunk = 16 / sizeof(Scalar);  // elements
  Scalar* data;
  int pitch;  // elements of a row: a multiple of eight chunks

  __device__ __forceinline__ Scalar* chunk(int row, int column) const {
    return data + row * pitch + ((column / kChunk) ^ (row % 8)) * kChunk;
  }
  __device__ __forceinline__ Tile from(int row) const { return {data + row * pitch, pitch}; }
};

// Loads rows [first, first + rows), by all threads of a block. Rows from `length` on are zeros, and
// so are columns past the end, up to the multiple of 16 that products read. The tile has arrived
// after cp_async_wait and a barrier.
template <class Scalar>
__device__ __forceinline__ void load_tile(
    const Tile<Scalar>& to, const Rows<const Scalar>& from, int first, int rows, int length) {
  constexpr int kChunk = Tile<Scalar>::kChunk;
  const int chunks = to.pitch / kChunk, used = static_cast<int>(round_up(from.columns, 16));
  for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
    const int row = i / chunks, column = i % chunks * kChunk;
    if (column >= used) continue;
    const int count = first + row < length ? min(max(from.columns - column, 0), kChunk) : 0;
    const Scalar* source = from.data;
    if (count > 0) source += (first + row) * from.stride + column * from.column_stride;
    Scalar* target = to.chunk(row, column);
    if (from.aligned) {
      cp_async(target, source, count * int(sizeof(Scalar)));
    } else {
#pragma unroll 1
      for (int j = 0; j < kChunk; ++j)
        target[j] = j < count ? source[j * from.column_stride] : narrow<Scalar>(0);
    }
  }
}

template <class Scalar>
constexpr float kLargest = -kLowest;
template <>
inline constexpr float kLargest<__half> = 65504;
template <>
inline constexpr float kLargest<__nv_bfloat16> = 3.38953139e38f;

// A pass treats a tile's numbers in one of three ways; see attention_forward.cu.
enum class Mode {
  Hope,   // nothing: assumes that all are finite
  Count,  // replaces NaN and Inf by 1, and finite numbers by 0
  Clean,  // replaces ±Inf by the largest finite numbers, which keep a score of -inf very low, and
          // NaN by 0
};

// Applies Count or Clean to all numbers of a tile, by the first `threads` threads of a block.
// Padding that no product reads may hold anything.
template <class Scalar>
__device__ __forceinline__ void clean_numbers(Scalar* data, int count, int threads, Mode mode) {
  for (int i = threadIdx.x; i < count; i += threads) {
    const float x = widen(data[i]);
    if (mode == Mode::Count) data[i] = narrow<Scalar>(finite(x) ? 0.0f : 1.0f);
    else if (!finite(x)) data[i] = narrow<Scalar>(x == x ? copysignf(kLargest<Scalar>, x) : 0.0f);
  }
}

// As clean_numbers, by all threads of a block. Needs a barrier before and after.
template <class Scalar>
__device__ __forceinline__ void clean_tile(const Tile<Scalar>& tile, int rows, Mode mode) {
  clean_numbers(tile.data, rows * tile.pitch, blockDim.x, mode);
}

// Products ----------------------------------------------------------------------------------------

template <int C>
__device__ __forceinline__ void set_to_zero(float (&sums)[C / 8][4]) {
#pragma unroll
  for (int n = 0; n < C / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[n][e] = 0;
}

template <class Scalar>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t result;
  if constexpr (std::is_same_v<Scalar, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&result, &pair, 4);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&result, &pair, 4);
  }
  return result;
}

// c (16, N) += a bᵀ, with a (16, depth) and b (N, depth); `depth` is a multiple of 16.
template <int N, class Scalar>
__device__ __forceinline__ void multiply_rows(
    float (&c)[N / 8][4], const Tile<Scalar>& a, const Tile<Scalar>& b, int depth) {
  if constexpr (kTensorCore<Scalar>) {
#pragma unroll 4
    for (int k = 0; k < depth; k += 16) {
      uint32_t row[4];
      ldmatrix(row, a.chunk(lane() % 16, k + lane() / 16 * 8));
#pragma unroll
      for (int n = 0; n < N / 8; n += 2) {
        uint32_t m[4];
        ldmatrix(m, b.chunk(8 * n + lane() / 16 * 8 + lane() % 8, k + lane() / 8 % 2 * 8));
        mma<Scalar>(c[n], row, {m[0], m[1]});
        mma<Scalar>(c[n + 1], row, {m[2], m[3]});
      }
    }
  } else {
#pragma unroll 2
    for (int k = 0; k < depth; k += 4) {
      float4 row[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row[r] = *reinterpret_cast<const float4*>(a.chunk(row_of(2 * r), k));
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 x = *reinterpret_cast<const float4*>(b.chunk(column_of(n, i), k));
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float& sum = c[n][2 * r + i];
            sum = fmaf(row[r].x, x.x, sum);
            sum = fmaf(row[r].y, x.y, sum);
            sum = fmaf(row[r].z, x.z, sum);
            sum = fmaf(row[r].w, x.w, sum);
          }
        }
    }
  }
}

// acc (16, C) += weights (16, N) times columns [first, min(first + C, columns)) of b (N, columns);
// `columns` is a multiple of 16. sum_column gives the column of an element of acc.
template <int N, int C, class Scalar>
__device__ __forceinline__ void multiply_weights(
    float (&acc)[C / 8][4], const float (&weights)[N / 8][4], const Tile<Scalar>& b, int first,
    int columns) {
  if constexpr (kTensorCore<Scalar>) {
#pragma unroll
    for (int k = 0; k < N / 16; ++k) {
      uint32_t row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        row[i] =
            pack<Scalar>(weights[2 * k + i / 2][i % 2 * 2], weights[2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
      for (int j = 0; j < C / 16; ++j) {
        if (first + 16 * j >= columns) break;
        uint32_t m[4];
        ldmatrix_transposed(m, b.chunk(16 * k + lane() % 16, first + 16 * j + lane() / 16 * 8));
        mma<Scalar>(acc[2 * j], row, {m[0], m[1]});
        mma<Scalar>(acc[2 * j + 1], row, {m[2], m[3]});
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float w[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        w[r] = __shfl_sync(kAllLanes, weights[k / 8][2 * r + k % 2], k % 8 / 2, 4);
#pragma unroll
      for (int j = 0; j < C / 16; ++j) {
        if (first + 16 * j >= columns) break;
        const float4 x =
            *reinterpret_cast<const float4*>(b.chunk(k, first + 16 * j + lane() % 4 * 4));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          acc[2 * j][2 * r] = fmaf(w[r], x.x, acc[2 * j][2 * r]);
          acc[2 * j][2 * r + 1] = fmaf(w[r], x.y, acc[2 * j][2 * r + 1]);
          acc[2 * j + 1][2 * r] = fmaf(w[r], x.z, acc[2 * j + 1][2 * r]);
          acc[2 * j + 1][2 * r + 1] = fmaf(w[r], x.w, acc[2 * j + 1][2 * r + 1]);
        }
      }
    }
  }
}

template <class Scalar>
__device__ __forceinline__ int sum_column(int n, int e) {
  if constexpr (kTensorCore<Scalar>) return column_of(n, e);
  else return n / 2 * 16 + lane() % 4 * 4 + n % 2 * 2 + e % 2;
}

// One bit for each of a thread's sums: whether a NaN or Inf reached it. Made from the sums of a
// pass in Mode::Count.
template <int C>
struct Reached {
  uint32_t bits[C / 64] = {};

  Reached() = default;
  __device__ __forceinline__ explicit Reached(const float (&count)[C / 8][4]) {
#pragma unroll
    for (int n = 0; n < C / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) bits[n / 8] |= uint32_t(count[n][e] > 0) << (n % 8 * 4 + e);
  }
  __device__ __forceinline__ bool test(int n, int e) const {
    return bits[n / 8] >> (n % 8 * 4 + e) & 1;
  }
};

template <int C>
__device__ __forceinline__ bool any_non_finite(const float (&sums)[C / 8][4]) {
  bool found = false;
#pragma unroll
  for (int n = 0; n < C / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) found |= !finite(sums[n][e]);
  return found;
}

// Writes a warp's rows [first, min(first + 16, length)), columns [first_column, first_column + C):
// sums times a factor for each of the thread's two rows. ±Inf, and sums that a NaN or Inf reached,
// become NaN. The rows are staged in `room`, 16 rows of shared memory that only this warp uses.
template <int C, class Scalar>
__device__ __forceinline__ void store_rows(
    const float (&sums)[C / 8][4], const float (&factor)[2], const Reached<C>& reached,
    const Tile<Scalar>& room, const Rows<Scalar>& to, int first, int length, int first_column) {
  constexpr int kChunk = Tile<Scalar>::kChunk;
#pragma unroll
  for (int n = 0; n < C / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x = sums[n][e] * factor[e / 2];
      if (fabsf(x) == kInfinity || reached.test(n, e)) x = kNan;
      const int column = sum_column<Scalar>(n, e);
      room.chunk(row_of(e), column)[column % kChunk] = narrow<Scalar>(x);
    }
  __syncwarp();
  for (int i = lane(); i < 16 * C / kChunk; i += 32) {
    const int row = i / (C / kChunk), column = i % (C / kChunk) * kChunk;
    const int count = to.columns - first_column - column;
    if (first + row >= length || count <= 0) continue;
    const Scalar* source = room.chunk(row, column);
    Scalar* target =
        to.data + (first + row) * to.stride + (first_column + column) * to.column_stride;
    if (to.aligned && count >= kChunk) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
    } else {
      for (int j = 0; j < min(count, kChunk); ++j) target[j * to.column_stride] = source[j];
    }
  }
}

// Zeros packed tokens that belong to no sequence: of rows [first, length), `rows` in every `step`.
template <class Scalar>
__device__ __forceinline__ void store_zeros(
    const Rows<Scalar>& to, int64_t first, int64_t length, int rows, int64_t step) {
  for (; first < length; first += step)
    for (int i = threadIdx.x; i < rows * to.columns; i += blockDim.x)
      if (const int64_t row = first + i / to.columns; row < length)
        to.data[row * to.stride + i % to.columns * to.column_stride] = narrow<Scalar>(0);
}

// Sequences and heads -----------------------------------------------------------------------------

// One query head of one sequence.
struct Head {
  int b, h, kv_head;
  int64_t batch;                   // index into the tensors: 0 if sequences are packed
  int64_t first_query, first_key;  // tokens at which the sequence begins
  int queries, keys;               // lengths; keys end at key_lengths
  int stored;                      // length of the keys in memory
  int64_t diagonal;                // query i is aligned with key i + diagonal
  int64_t row;                     // index of its first query in (B, H, Lq); packed: (H, total)
  int64_t mask;                    // offset of its mask

  __device__ Head(const Attention& p, int b, int h) : b(b), h(h) {
    const bool packed = p.cu_seqlens_q != nullptr;
    kv_head = h / static_cast<int>(p.heads / p.kv_heads);
    batch = packed ? 0 : b;
    first_query = packed ? p.cu_seqlens_q[b] : 0;
    first_key = packed ? p.cu_seqlens_k[b] : 0;
    queries = static_cast<int>(packed ? p.cu_seqlens_q[b + 1] - first_query : p.Lq);
    keys = stored = static_cast<int>(packed ? p.cu_seqlens_k[b + 1] - first_key : p.Lk);
    diagonal = p.lower_right ? stored - queries : 0;
    if (p.key_lengths) keys = min(static_cast<int>(p.key_lengths[b]), stored);
    row = (batch * p.heads + h) * p.total_q + first_query;
    mask = b * p.mask.stride[0] + h * p.mask.stride[1];
  }

  template <class Scalar>
  __device__ Rows<Scalar> query_rows(const Tensor4& t, int64_t columns) const {
    return {t, batch, h, first_query, columns};
  }
  template <class Scalar>
  __device__ Rows<Scalar> key_rows(const Tensor4& t, int64_t columns) const {
    return {t, batch, kv_head, first_key, columns};
  }
};

// A thread block owns block `block` of the `blocks` blocks of rows of head h of sequence b. With
// packed sequences, b is p.batch in the blocks for tokens past the last sequence.
struct Place {
  int block, blocks, h, b;

  __device__ Place(int64_t length, int rows, int64_t heads) {
    blocks = static_cast<int>((length + rows - 1) / rows);
    block = blockIdx.x % blocks;
    h = static_cast<int>(blockIdx.x / blocks % heads);
    b = static_cast<int>(blockIdx.x / blocks / heads);
  }
};

// Pairs -------------------------------------------------------------------------------------------

constexpr bool has_float_mask(const AttentionProblem& p) {
  return p.mask_kind == MaskKind::Float32 || p.mask_kind == MaskKind::QueryType;
}
// Returns whether scores may be so large that their product with log2 e overflows, or that it or a
// logsumexp is too coarse to compute weights from.
constexpr bool has_large_scores(const AttentionProblem& p) {
  return has_float_mask(p) || p.scale > 0x1p20 || p.scale < -0x1p20;
}
// Returns whether a mask or window may leave pairs out. Their rows are loaded, unlike rows past the
// lengths, which are zeros in a tile.
constexpr bool is_selective(const AttentionProblem& p) {
  return p.mask_kind != MaskKind::None || p.window_left >= 0 || p.window_right >= 0;
}

// The units of a score. Usually a score is the bare product of query and key, and `exponent`
// carries the scale. A score is in natural units with a float mask, whose numbers may be anything;
// with a large scale; and with a scale so small, or not above 0, that a logsumexp in units of a
// product would overflow.
struct Scale {
  bool natural;
  float product;   // if natural: score = (query · key) product + mask
  float exponent;  // a weight is 2^((score - peak) exponent)
  double unit;     // one unit of a score, in natural units

  __device__ explicit Scale(const AttentionProblem& p)
      : natural(has_large_scores(p) || !(p.scale >= 0x1p-122)),
        product(static_cast<float>(p.scale)),
        exponent(static_cast<float>((natural ? 1.0 : p.scale) * 1.4426950408889634)),
        unit(natural ? 1.0 : p.scale) {}
};

// The columns [first, last) that a row sees by its position.
struct Span {
  int first, last;

  // `at` is the row's position among the columns. `before` and `behind` bound the window; -1: none.
  __device__ Span(int64_t at, int64_t before, int64_t behind, int count) {
    first = static_cast<int>(before >= 0 ? min(max(at - before, int64_t(0)), int64_t(count)) : 0);
    last = static_cast<int>(
        behind >= 0 ? min(max(at + behind + 1, int64_t(0)), int64_t(count)) : count);
  }
};
__device__ __forceinline__ Span keys_of(const Attention& p, const Head& head, int query) {
  return {query + head.diagonal, p.window_left, p.window_right, head.keys};
}
__device__ __forceinline__ Span queries_of(const Attention& p, const Head& head, int key) {
  return {key - head.diagonal, p.window_right, p.window_left, head.queries};
}

// kByKey: rows are keys and columns are queries.
template <bool kByKey>
__device__ __forceinline__ Span span_of(const Attention& p, const Head& head, int row) {
  if constexpr (kByKey) return queries_of(p, head, row);
  else return keys_of(p, head, row);
}

// Returns the columns that some row of a block sees by position, from a multiple of N on.
template <int N, bool kByKey>
__device__ __forceinline__ Span visible(const Attention& p, const Head& head, int first, int rows) {
  const int count = kByKey ? head.keys : head.queries;
  Span result = span_of<kByKey>(p, head, first);
  result.last = first < count ? span_of<kByKey>(p, head, min(first + rows, count) - 1).last : 0;
  result.first = result.first / N * N;
  return result;
}

// The pairs of a warp's 16 x N tile that take part.
template <int N>
struct Pairs {
  using Bits = std::conditional_t<
      N == 128, unsigned __int128, std::conditional_t<N == 64, uint64_t, uint32_t>>;
  Bits row[2];     // the thread's two rows, shifted so that its own columns are at constant bits
  bool any, full;  // whether any pair, or every pair, of the whole tile takes part

  __device__ __forceinline__ bool test(int n, int e) const {
    return row[e / 2] >> (8 * n + e % 2) & 1;
  }
};

template <int N>
constexpr typename Pairs<N>::Bits low_bits(int count) {
  using Bits = typename Pairs<N>::Bits;
  constexpr int kBits = 8 * sizeof(Bits);
  return count <= 0 ? 0 : count >= kBits ? ~Bits(0) : (Bits(1) << count) - 1;
}

// Returns whether the mask lets a pair take part. `out` is the bit pattern that leaves a pair out.
template <class Raw>
__device__ __forceinline__ bool keeps(const Raw* at, Raw out) {
  return __ldg(at) != out;
}

// Reads the mask of rows [row, row + 16) and columns [column, column + N) into bits of the thread's
// two rows. A lane has loads for `kAhead` queries in flight.
template <int N, bool kByKey, int kAhead, class Raw>
__device__ __forceinline__ void look_at_mask(
    typename Pairs<N>::Bits (&bits)[2], const Attention& p, const Head& head, int row, int column,
    Raw out) {
  using Bits = typename Pairs<N>::Bits;
  const Raw* mask = static_cast<const Raw*>(p.mask.data) + head.mask;
  const int64_t query_stride = p.mask.stride[2], key_stride = p.mask.stride[3];
  if constexpr (kByKey) {
    // A lane reads one key's mask for every second query; the lane 16 away reads the other ones.
    const int key = row + lane() % 16, half = lane() / 16;
    Bits mine = 0;
    if (query_stride == 0) {
      mine = key < head.keys && keeps(mask + key * key_stride, out) ? ~Bits(0) : 0;
    } else {
#pragma unroll kAhead
      for (int i = 0; i < N / 2; ++i) {
        const int query = column + 2 * i + half;
        const bool kept = query < head.queries && key < head.keys &&
            keeps(mask + query * query_stride + key * key_stride, out);
        mine |= Bits(kept) << (2 * i + half);
      }
      mine |= __shfl_xor_sync(kAllLanes, mine, 16);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) bits[r] = __shfl_sync(kAllLanes, mine, row_of(2 * r));
  } else {
    // A lane reads one or two keys' mask for one query after the other.
    const int rows = query_stride == 0 ? 1 : 16;
    bits[0] = bits[1] = 0;
#pragma unroll kAhead
    for (int r = 0; r < rows; ++r) {
      const int query = row + r;
      Bits word = 0;
#pragma unroll
      for (int part = 0; part < N; part += 32) {
        const int key = column + part + lane();
        const bool kept = lane() < N && (rows == 1 || query < head.queries) && key < head.keys &&
            keeps(mask + query * query_stride + key * key_stride, out);
        word |= Bits(__ballot_sync(kAllLanes, kept)) << part;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (rows == 1 || r == row_of(2 * i)) bits[i] = word;
    }
  }
}

// Returns which pairs of rows [row, row + 16) and columns [column, column + N) take part. `spans`
// are the columns that the thread's two rows see by position.
template <int N, bool kByKey, int kAhead = 4>
__device__ __forceinline__ Pairs<N> look(
    const Attention& p, const Head& head, const Span (&spans)[2], int row, int column) {
  using Bits = typename Pairs<N>::Bits;
  Pairs<N> pairs;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool inside = row + row_of(2 * r) < (kByKey ? head.keys : head.queries);
    pairs.row[r] = inside
        ? low_bits<N>(min(spans[r].last - column, N)) & ~low_bits<N>(spans[r].first - column)
        : 0;
  }
  if (p.mask_kind != MaskKind::None && __any_sync(kAllLanes, (pairs.row[0] | pairs.row[1]) != 0)) {
    Bits kept[2];
    const bool bfloat16 = p.dtype == DType::BFloat16;
    if (p.mask_kind == MaskKind::Bool)
      look_at_mask<N, kByKey, kAhead, uint8_t>(kept, p, head, row, column, 0);
    else if (p.mask_kind == MaskKind::Float32 || p.dtype == DType::Float32)
      look_at_mask<N, kByKey, kAhead, uint32_t>(kept, p, head, row, column, 0xFF800000);
    else
      look_at_mask<N, kByKey, kAhead, uint16_t>(
          kept, p, head, row, column, bfloat16 ? 0xFF80 : 0xFC00);
    pairs.row[0] &= kept[0];
    pairs.row[1] &= kept[1];
  }
  const Bits all = low_bits<N>(N);
  pairs.any = __any_sync(kAllLanes, (pairs.row[0] | pairs.row[1]) != 0);
  pairs.full = __all_sync(kAllLanes, pairs.row[0] == all && pairs.row[1] == all);
#pragma unroll
  for (int r = 0; r < 2; ++r) pairs.row[r] >>= lane() % 4 * 2;
  return pairs;
}

// Turns products into natural scores: times the scale, plus the float mask where pairs take part.
template <int N, bool kByKey, class Scalar>
__device__ __forceinline__ void scale_and_add_mask(
    float (&scores)[N / 8][4], const Attention& p, const Scale& scale, const Head& head,
    const Pairs<N>& pairs, int row, int column) {
  const int64_t row_stride = p.mask.stride[kByKey ? 3 : 2],
                column_stride = p.mask.stride[kByKey ? 2 : 3];
  const int64_t offset =
      head.mask + (row + row_of(0)) * row_stride + (column + column_of(0, 0)) * column_stride;
  const auto add = [&]<class M>(const M* mask) {
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t at = offset + e / 2 * 8 * row_stride + (8 * n + e % 2) * column_stride;
        const float bias = mask && pairs.test(n, e) ? widen(mask[at]) : 0.0f;
        scores[n][e] = fmaf(scores[n][e], scale.product, bias);
      }
  };
  if (p.mask_kind == MaskKind::QueryType) add(static_cast<const Scalar*>(p.mask.data));
  else add(p.mask_kind == MaskKind::Float32 ? static_cast<const float*>(p.mask.data) : nullptr);
}

// The weights of a warp's tile that dropout keeps.
template <int N, bool kByKey>
class Dropped {
 public:
  // The tile begins at a multiple of 8 keys. A lane draws one byte for a query and eight keys, and
  // packs its bytes into a word; shuffles then bring each thread the bits of its own pairs.
  __device__ __forceinline__
  Dropped(const Attention& p, const Head& head, uint64_t seed, int row, int column) {
    constexpr int kDraws = 16 * N / 8;
    constexpr int kQueries = kByKey ? N : 16;
    const uint32_t plane = static_cast<uint32_t>(head.b * p.heads + head.h);
    const int first_query = kByKey ? column : row, first_key = kByKey ? row : column;
    uint32_t drawn = 0;
#pragma unroll
    for (int i = 0; i < kDraws; i += 32) {
      const int draw = i + lane();
      const int query = first_query + draw % kQueries, group = first_key / 8 + draw / kQueries;
      drawn |= dropout_keep(seed, plane, query, group, p.dropout.threshold) << i / 4;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int from = kByKey ? i / 2 * 8 + lane() % 4 * 2 + i % 2 : i / 2 * 16 + row_of(i % 2 * 2);
      word_[i] = __shfl_sync(kAllLanes, drawn, from) >> (kByKey ? lane() / 4 : lane() % 4 * 2);
    }
  }
  __device__ __forceinline__ bool keeps(int n, int e) const {
    if constexpr (kByKey) {
      const int draw = e / 2 * N + 8 * n;
      return word_[draw % 32 / 8 * 2 + e % 2] >> draw / 32 * 8 & 1;
    } else {
      return word_[n % 2 * 2 + e / 2] >> (n / 2 * 8 + e % 2) & 1;
    }
  }

 private:
  static constexpr int kWords = kByKey ? 8 : 4;
  uint32_t word_[kWords];
};

// Calls compute(column, stage, pairs) in each warp for the tiles of `span`, N columns each, in
// which the warp has pairs; look(column) returns them. issue(column, stage) starts the block's load
// of a tile; it is called one tile ahead, and only for tiles in which some warp has a pair. All
// threads call prepare(stage) once a tile has arrived. One barrier per tile. On return no thread
// uses the stages.
template <int N, class Look, class Issue, class Prepare, class Compute>
__device__ __forceinline__ void for_tiles(
    const Span& span, const Look& look, const Issue& issue, const Prepare& prepare,
    const Compute& compute) {
  Pairs<N> pairs, next_pairs;
  int column = span.first - N, stage = 0;
  for (bool loaded = false;; loaded = true) {
    if (loaded) cp_async_wait<0>();
    int next = column;
    bool some;
    do {
      next += N;
      some = false;
      if (next < span.last) {
        next_pairs = look(next);
        some = next_pairs.any;
      }
      some = __syncthreads_or(some);
    } while (!some && next < span.last);
    if (some) {
      issue(next, stage ^ 1);
      cp_async_commit();
    }
    if (loaded) {
      prepare(stage);
      if (pairs.any) compute(column, stage, pairs);
    }
    if (!some) break;
    column = next;
    pairs = next_pairs;
    stage ^= 1;
  }
  cp_async_wait<0>();
  __syncthreads();
}

// Returns 2^x: for 16-bit types by the special function unit, to 2 units in the last place; for
// float32 by a series on the FMA pipes, to 1. Results below the smallest normal number are 0.
template <class Scalar>
__device__ __forceinline__ float power_of_2(float x) {
  if constexpr (kTensorCore<Scalar>) return exp2_approximate(x);
  if (x < -126) return 0;
  const float whole = rintf(x), rest = x - whole;
  constexpr float kSeries[] = {
      // (ln 2)^k / k!
      1.5252733804e-5f, 1.5403530393e-4f, 1.3333558146e-3f, 9.6181291076e-3f,
      5.5504108665e-2f, 2.4022650696e-1f, 6.9314718056e-1f, 1};
  float result = kSeries[0];
#pragma unroll
  for (int k = 1; k < 8; ++k) result = fmaf(result, rest, kSeries[k]);
  return __uint_as_float(
      __float_as_uint(result) + (static_cast<unsigned>(static_cast<int>(whole)) << 23));
}

// The running softmax of the thread's two rows (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018). The four lanes that share a row each hold a part of its sum.
template <class Scalar>
struct Softmax {
  // Subtracted from a row's scores: their running maximum or, for 16-bit types, an earlier one as
  // long as weights stay within 2^kSlack, which saves rescaling the sums. It is -inf for a row
  // without a pair so far, and otherwise at least kLowest, even if all scores are -inf.
  float peak[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0, 0};
  static constexpr float kSlack = 8;

  // Turns a tile's scores into weights, 0 for pairs that take no part. `shrink` is the factor by
  // which the caller has to rescale its earlier sums.
  template <int N>
  __device__ __forceinline__ void take(
      float (&scores)[N / 8][4], const Pairs<N>& pairs, const Scale& scale, float (&shrink)[2]) {
    if (!pairs.full) {
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!pairs.test(n, e)) scores[n][e] = -kInfinity;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = pairs.row[r] ? fmaxf(peak[r], kLowest) : peak[r];
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
        top = fmaxf(top, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      top = warp_max<4>(top);
      const float before = peak[r];
      if (!kTensorCore<Scalar> || (top - before) * scale.exponent > kSlack) peak[r] = top;
      // For a row that has summed nothing so far, any finite base will do. kLowest will not where
      // the scale multiplies it first: the product may overflow.
      const bool nothing =
          peak[r] <= (kTensorCore<Scalar> && !scale.natural ? kLowest : -kInfinity);
      const float base = nothing ? 0.0f : peak[r];
      shrink[r] = power_of_2<Scalar>((before - base) * scale.exponent);
      // Natural scores may be too large to multiply before the subtraction. For 16-bit types, the
      // others are multiplied first: one FMA does both.
      if (kTensorCore<Scalar> && scale.natural) {
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) scores[n][2 * r + i] -= base;
      }
      const float offset = scale.natural ? 0.0f : -base * scale.exponent;
      float total = 0;
#pragma unroll
      for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& p = scores[n][2 * r + i];
          p = power_of_2<Scalar>(
              kTensorCore<Scalar> ? fmaf(p, scale.exponent, offset) : (p - base) * scale.exponent);
          total += p;
        }
      sum[r] = fmaf(sum[r], shrink[r], total);
    }
  }

  // Adds up the four lanes' parts. Sets 1 for a row without a pair, NaN if all scores are -inf.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] = warp_sum<4>(sum[r]);
      if (sum[r] == 0) sum[r] = peak[r] == -kInfinity ? 1.0f : kNan;
    }
  }
};

// Calls run<D>() with the padded head dimension.
template <class Run>
inline void for_head_dim(const AttentionProblem& p, const Run& run) {
  const int64_t head_dim = p.E > p.Ev ? p.E : p.Ev;
  if (head_dim <= 64) run.template operator()<64>();
  else if (head_dim <= 128) run.template operator()<128>();
  else if (head_dim <= 256) run.template operator()<256>();
  else throw std::runtime_error("attention: head_dim " + std::to_string(head_dim) + " is over 256");
}

// Calls run<Scalar, D>() with a call's type and padded head dimension.
template <class Run>
inline void for_kernel(const AttentionProblem& p, const Run& run) {
  for_head_dim(p, [&]<int D>() {
    switch (p.dtype) {
      case DType::Float32: return run.template operator()<float, D>();
      case DType::BFloat16: return run.template operator()<__nv_bfloat16, D>();
      case DType::Float16: return run.template operator()<__half, D>();
      case DType::Float64: throw std::runtime_error("attention: no CUDA kernel for float64");
    }
  });
}

inline LaunchPlan attention_plan(
    const char* kernel, const Attention& p, int64_t blocks, int warps, size_t shared) {
  if (blocks > 0x7FFFFFFF)
    throw std::runtime_error(
        std::string(kernel) + ": " + std::to_string(blocks) + " blocks, and 2^31 - 1 is the most");
  return {
      .kernel = kernel,
      .sizes =
          {{"B", p.batch},
           {"H", p.heads},
           {"Hkv", p.kv_heads},
           {"Lq", p.Lq},
           {"Lk", p.Lk},
           {"E", p.E},
           {"Ev", p.Ev}},
      .grid = static_cast<unsigned>(blocks),
      .block = static_cast<unsigned>(32 * warps),
      .shared = shared,
  };
}

// Returns the number of blocks: one for every `rows` rows of each head. With `tail`, packed
// sequences get as many again as one more sequence would, for the tokens past the last one.
inline int64_t blocks_for(const Attention& p, int64_t length, int rows, int64_t heads, bool tail) {
  return (length + rows - 1) / rows * heads * (p.batch + (tail && p.cu_seqlens_q != nullptr));
}

}  // namespace trifuse::cuda
