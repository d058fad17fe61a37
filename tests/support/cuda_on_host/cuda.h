// Stands in for the toolkit's driver header: tensor maps, as far as csrc/cuda uses them.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "cuda_runtime.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_INVALID_CONTEXT = 201 };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE,
  CU_TENSOR_MAP_SWIZZLE_32B,
  CU_TENSOR_MAP_SWIZZLE_64B,
  CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

struct alignas(128) CUtensorMap {
  const std::byte* data;
  uint32_t rank, swizzle;  // chunks of 16 bytes are permuted within `swizzle` bytes; 0: not at all
  uint64_t sizes[5], strides[5];  // strides in bytes; innermost first
  uint32_t box[5];
};

// Whether the thread has a context. Making a map resets it, so code has to ensure one for each map.
inline thread_local bool has_context = false;

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) {
  has_context = true;
  return cudaSuccess;
}

// For elements of two bytes. Checks only what the documentation requires.
inline CUresult cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* sizes,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
    CUtensorMapInterleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill) {
  if (!std::exchange(has_context, false)) return CUDA_ERROR_INVALID_CONTEXT;
  bool ok =
      rank >= 1 && rank <= 5 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && 2 * box[0] % 16 == 0;
  std::memset(static_cast<void*>(map), cuda_on_host::kPoison, sizeof *map);
  map->data = static_cast<const std::byte*>(data);
  map->rank = rank;
  map->swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle;
  map->strides[0] = 2;
  for (cuuint32_t d = 0; d < rank; ++d) {
    ok = ok && sizes[d] > 0 && sizes[d] <= uint64_t(1) << 32 && box[d] > 0 && box[d] <= 256 &&
        steps[d] == 1;
    map->sizes[d] = sizes[d];
    map->box[d] = box[d];
    if (d == 0) continue;
    ok = ok && strides[d - 1] % 16 == 0 && strides[d - 1] > 0 && strides[d - 1] < uint64_t(1) << 40;
    map->strides[d] = strides[d - 1];
  }
  ok = ok && (map->swizzle == 0 || 2 * box[0] <= map->swizzle);
  return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Lookup of the driver's functions, of which only one is modelled.
#define CUDART_VERSION 13000
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess,
  cudaDriverEntryPointSymbolNotFound
};
constexpr unsigned long long cudaEnableDefault = 0;

inline cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(cuTensorMapEncodeTiled) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
