// Tensor maps: descriptions of tensors for the copy engine of Hopper GPUs (TMA).

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/launch.h"
#include "dtype.h"

namespace trifuse::cuda {

// A four-dimensional tensor of 16-bit numbers, contiguous in its last dimension. Strides count
// elements; the stride of a dimension of size 1 is ignored.
struct MappedTensor {
  DType dtype;
  void* data;
  int64_t size[4], stride[4];
};

// Returns whether a tensor can be mapped: cuTensorMapEncodeTiled's rules, and 32-bit coordinates.
inline bool has_tensor_map(const MappedTensor& t) {
  bool ok = (t.dtype == DType::BFloat16 || t.dtype == DType::Float16) &&
      reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  for (int d = 0; d < 4; ++d) {
    ok = ok && t.size[d] > 0 && t.size[d] < int64_t(1) << 31;
    if (t.size[d] == 1) continue;
    if (d == 3) ok = ok && t.stride[d] == 1;
    else ok = ok && t.stride[d] > 0 && t.stride[d] % 8 == 0 && t.stride[d] < int64_t(1) << 39;
  }
  return ok;
}

// Looks up cuTensorMapEncodeTiled in the installed driver, so that nothing links to the driver.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  check(
      cudaGetDriverEntryPointByVersion(
          "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
      "cudaGetDriverEntryPointByVersion");
#else
  check(
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
      "cudaGetDriverEntryPoint");
#endif
  if (found != cudaDriverEntryPointSuccess || !function)
    throw std::runtime_error(
        "the CUDA driver has no cuTensorMapEncodeTiled: it is older than 12.0");
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// Makes a map for copies of boxes (1, 1, rows, 64) of the tensor; each row takes 128 bytes of
// shared memory, swizzled.
inline CUtensorMap make_tensor_map(const MappedTensor& t, int rows) {
  static const auto encode = tensor_map_encoder();
  // The driver needs a current context; a thread that has not used the runtime yet has none.
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaSetDevice(device), "cudaSetDevice");
  CUtensorMap map;
  cuuint64_t sizes[4], strides[4];  // innermost first
  for (int d = 0; d < 4; ++d) {
    sizes[d] = t.size[3 - d];
    strides[d] = t.size[3 - d] == 1 ? 16 : 2 * t.stride[3 - d];  // bytes
  }
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult error = encode(
      &map,
      t.dtype == DType::BFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, t.data, sizes, strides + 1, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    std::string sizes_by_strides;
    for (int d = 0; d < 4; ++d)
      sizes_by_strides += std::to_string(t.size[d]) + " by " + std::to_string(t.stride[d]) + ", ";
    throw std::runtime_error(
        "cuTensorMapEncodeTiled (" + sizes_by_strides + std::to_string(rows) +
        " rows at a time): CUDA driver error " + std::to_string(error));
  }
  return map;
}

}  // namespace trifuse::cuda
