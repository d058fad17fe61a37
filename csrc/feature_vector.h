// A vector with one value for each feature: a bias, or the weight of a norm.

#pragma once

namespace trifuse {

struct FeatureVector {
  const void* data = nullptr;  // (N,), contiguous; or null
  bool wide = true;            // in the accumulation type, not in the problem's dtype

  explicit operator bool() const { return data != nullptr; }
};

}  // namespace trifuse
