// Checks the arguments of operators and converts them to those of kernels.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "dropout.h"
#include "dtype.h"
#include "feature_vector.h"

namespace trifuse {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using OptionalLimit = std::optional<double>;

// Infinity means no limit.
inline double limit(OptionalLimit value) {
  return value.value_or(std::numeric_limits<double>::infinity());
}

inline DType kernel_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return DType::Float32;
    case at::kBFloat16: return DType::BFloat16;
    case at::kHalf: return DType::Float16;
    case at::kDouble: return DType::Float64;
    default: TORCH_CHECK_TYPE(false, "no kernel for ", dtype);
  }
}

inline at::ScalarType accumulation_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// More elements than any memory can hold, though an expanded view may have more. Below this limit,
// kernels count bytes without overflow.
constexpr int64_t kMostElements = int64_t(1) << 48;

// Checks that a tensor's storage covers all its elements, because storage can be resized under a
// tensor.
inline void check_memory(const char* name, const Tensor& t) {
  const int64_t count = t.numel();
  if (count == 0) return;
  TORCH_CHECK_VALUE(
      count <= kMostElements, name, ": expected at most 2^48 elements; got shape ", t.sizes());
  int64_t last = t.storage_offset();
  if (t.is_contiguous()) {
    last += count - 1;
  } else {
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  }
  const size_t needed = static_cast<size_t>(last + 1) * t.element_size(),
               has = t.storage().nbytes();
  TORCH_CHECK_VALUE(
      needed <= has, name, ": expected storage of at least ", needed, " bytes, for shape ",
      t.sizes(), " and strides ", t.strides(), "; got ", has, " bytes (was it resized?)");
}

// Checks a tensor's shape and storage. A backward receives its forward's inputs and results, but
// `t.data = other` may have replaced any of them in between.
inline void check_shape(const char* name, const Tensor& t, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(
      t.sizes() == sizes, name, ": expected shape ", sizes, "; got ", t.sizes(),
      " (was its data exchanged between forward and backward?)");
  check_memory(name, t);
}
inline void check_shape(const char* name, const OptionalTensor& t, at::IntArrayRef sizes) {
  if (t) check_shape(name, *t, sizes);
}

// Returns a tensor whose last dimension is contiguous: the same one if it is so.
inline Tensor with_contiguous_last(const Tensor& t) {
  return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

// Keeps alive the tensors that a problem points into.
using Held = std::vector<Tensor>;

// Describes a vector (N,) to the kernels of a problem of `dtype`: in place, or a copy in the
// accumulation type. A copy costs more than its conversion where one thread writes it and others
// read it.
inline FeatureVector feature_vector(const OptionalTensor& t, at::ScalarType dtype, Held& held) {
  if (!t) return {};
  const at::ScalarType wide = accumulation_type(dtype);
  const bool in_place = t->scalar_type() == dtype && t->is_contiguous();
  held.push_back(in_place ? *t : t->to(wide).contiguous());
  return {held.back().const_data_ptr(), held.back().scalar_type() == wide};
}

// Checks a tensor's type and device.
inline void check_type(const char* name, const Tensor& t, at::ScalarType type, const Tensor& like) {
  TORCH_CHECK_TYPE(t.scalar_type() == type, name, ": expected ", type, "; got ", t.scalar_type());
  TORCH_CHECK_VALUE(
      t.device() == like.device(), name, ": expected a tensor on ", like.device(), "; got ",
      t.device());
}

// Checks `count` integers of 32 or 64 bits.
inline void check_integers(
    const char* name, const OptionalTensor& t, int64_t count, const Tensor& like) {
  if (!t) return;
  check_shape(name, *t, {count});
  check_type(name, *t, t->scalar_type() == at::kInt ? at::kInt : at::kLong, like);
}

// Checks a seed: one integer of 64 bits, which the numbers of a Place may follow.
inline void check_seed(const OptionalTensor& seed, const Tensor& like) {
  if (!seed) return;
  TORCH_CHECK_VALUE(
      seed->numel() == 1 || (seed->numel() == kSeedAndPlace && seed->is_contiguous()),
      "seed: expected one number, or ", kSeedAndPlace, " contiguous ones; got shape ",
      seed->sizes());
  check_memory("seed", *seed);
  check_type("seed", *seed, at::kLong, like);
}

// Returns the dropout parameters without the seed.
inline Dropout kernel_dropout(double dropout_p) {
  Dropout dropout;
  // Python's round(p · 65536): both round halves to even. Only p = 1 may drop all 65536 values.
  const double most = dropout_p < 1 ? 65535 : 65536;
  dropout.threshold = static_cast<uint32_t>(std::min(std::nearbyint(dropout_p * 65536), most));
  dropout.scale = dropout_p < 1 ? 65536.0 / (65536.0 - dropout.threshold) : 0.0;
  return dropout;
}

inline Dropout kernel_dropout(double dropout_p, const OptionalTensor& seed) {
  if (!seed) return {};
  Dropout dropout = kernel_dropout(dropout_p);
  if (!dropout.threshold) return dropout;
  const int64_t* numbers = seed->const_data_ptr<int64_t>();
  dropout.seed = static_cast<uint64_t>(numbers[0]);
  if (seed->numel() == kSeedAndPlace) {
    dropout.place = Place::read(numbers);
    TORCH_CHECK_VALUE(
        dropout.place.block > 0 && dropout.place.column % 8 == 0,
        "seed: expected a block of at least 1 and a column that 8 divides; got ",
        dropout.place.block, " and ", dropout.place.column);
  }
  return dropout;
}

}  // namespace trifuse
