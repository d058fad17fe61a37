// Tiles of the attention kernels: rows of a tensor, copied to shared memory.
//
// A block keeps its own rows there permanently. The other side streams through two stages, N rows
// of keys (or queries) at a time.

#pragma once

#include "cuda/attention.h"
#include "cuda/dtype.cuh"
#include "cuda/ptx.cuh"

namespace trifuse::cuda {

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// The head dims of q and k, and of v and dO, as products read them: multiples of 16.
struct PaddedDims {
  int E, Ev;

  __device__ __forceinline__ explicit PaddedDims(const Attention& p)
      : E(static_cast<int>(round_up(p.E, 16))), Ev(static_cast<int>(round_up(p.Ev, 16))) {}
};

// A tensor's rows of one head of one sequence.
template <class Scalar>
struct HeadRows {
  Scalar* data;
  int64_t stride, column_stride;
  int columns;
  bool aligned;  // 16 bytes can be moved at once

  __device__ HeadRows(const Tensor4& t, int64_t batch, int head, int64_t first, int64_t columns)
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
    float (&values)[16 / sizeof(Scalar)], const HeadRows<const Scalar>& from, int row, int column) {
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

// Starts a thread's copy of 16 bytes of a row. The first `count` elements, 0 to 8, are copied, and
// the others become 0.
template <class Scalar>
__device__ __forceinline__ void copy_chunk(
    Scalar* to, const HeadRows<const Scalar>& from, int64_t row, int column, int count) {
  const Scalar* source = from.data;
  if (count > 0) source += row * from.stride + column * from.column_stride;
  if (from.aligned) {
    cp_async(to, source, count * int(sizeof(Scalar)));
  } else {
#pragma unroll 1
    for (int j = 0; j < Tile<Scalar>::kChunk; ++j)
      to[j] = j < count ? source[j * from.column_stride] : narrow<Scalar>(0);
  }
}

// Loads rows [first, first + rows), by all threads of a block. Rows from `length` on are zeros,
// and so are columns past the end, up to the multiple of 16 that products read. The tile is
// complete after cp_async_wait and a barrier.
template <class Scalar>
__device__ __forceinline__ void load_tile(
    const Tile<Scalar>& to, const HeadRows<const Scalar>& from, int first, int rows, int length) {
  constexpr int kChunk = Tile<Scalar>::kChunk;
  const int chunks = to.pitch / kChunk, used = static_cast<int>(round_up(from.columns, 16));
  for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
    const int row = i / chunks, column = i % chunks * kChunk;
    if (column >= used) continue;
    const int count = first + row < length ? min(max(from.columns - column, 0), kChunk) : 0;
    copy_chunk(to.chunk(row, column), from, first + row, column, count);
  }
}

// The rows that stream past a block's own rows: those of q or k, from which scores are computed,
// and those of dO or v. Each of two stages holds a tile of N rows of both.
template <class Scalar, int N>
struct StreamedRows {
  HeadRows<const Scalar> score_rows, output_rows;
  int length;
  Tile<Scalar> stages;

  __device__ __forceinline__ Tile<Scalar> of_scores(int stage) const {
    return stages.from(2 * stage * N);
  }
  __device__ __forceinline__ Tile<Scalar> of_outputs(int stage) const {
    return stages.from((2 * stage + 1) * N);
  }
  __device__ __forceinline__ void load(int first, int stage) const {
    load_tile(of_scores(stage), score_rows, first, N, length);
    load_tile(of_outputs(stage), output_rows, first, N, length);
  }
};

}  // namespace trifuse::cuda
